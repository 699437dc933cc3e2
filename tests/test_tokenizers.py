import numpy as np
import pytest

from rollout_jax.models import tokenizers
from rollout_jax.types import ConfigError

ALPHABET = '0123456789+-*/=: \n#'
FAMILY = {'characters': tokenizers.characters(ALPHABET), 'byte': tokenizers.byte()}


@pytest.fixture(params=FAMILY)
def tokenizer(request):
  return FAMILY[request.param]


def test_decoding_inverts_encoding(tokenizer):
  for text in ('', '8 19 18:9=', ALPHABET, '12\n3'):
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.decode(np.asarray(tokenizer.encode('7*6'), np.int32)) == '7*6'


def test_special_ids_are_dropped_and_never_encoded(tokenizer):
  special = {tokenizer.pad, *tokenizer.end_tokens}
  ids = tokenizer.encode(ALPHABET)
  assert not special & set(ids)
  assert tokenizer.decode([tokenizer.pad, *ids, *tokenizer.end_tokens, tokenizer.pad]) == ALPHABET


def test_vocabulary_holds_every_id_and_is_a_multiple_of_eight(tokenizer):
  assert tokenizer.vocab_size % 8 == 0
  assert all(0 <= i < tokenizer.vocab_size for i in [*tokenizer.encode(ALPHABET), tokenizer.pad, *tokenizer.end_tokens])


def test_every_id_of_the_vocabulary_decodes_and_one_without_meaning_shows(tokenizer):
  texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
  assert texts[tokenizer.vocab_size - 1] == '\ufffd'


def test_bytes_take_any_text_and_broken_utf8_decodes():
  tokenizer = tokenizers.byte()
  assert tokenizer.decode(tokenizer.encode('∫ x² dx → 漢字 \0')) == '∫ x² dx → 漢字 \0'
  assert tokenizer.decode(tokenizer.encode('²')[:1] + tokenizer.encode('a')) == '\ufffda'
  assert tokenizer.vocab_size == 264


def test_ids_do_not_depend_on_the_order_of_the_alphabet():
  one, other = tokenizers.characters('cab'), tokenizers.characters('abcabc')
  assert one.encode('abc') == other.encode('abc') == [2, 3, 4]
  assert one.vocab_size == other.vocab_size == 8


def test_unknown_character_is_named():
  with pytest.raises(ConfigError, match=r"'é' \(U\+00E9\) of '1\+é' is not in the alphabet '\+1'"):
    tokenizers.characters('1+').encode('1+é')
  with pytest.raises(ConfigError, match='empty alphabet'):
    tokenizers.characters('')
