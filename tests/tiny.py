"""The one small shape that tests share, so that a program is compiled once for the whole suite."""

P = 4  # prompts in a batch
G = 4  # rollouts per prompt
T = 48  # tokens of a row
PROMPT = 16  # prefill bucket
SLOTS = 8

MODEL = dict(vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, head_width=8, feed_forward=64)
