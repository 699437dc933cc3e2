"""The policy's network, its cache, and the tokenizers."""
