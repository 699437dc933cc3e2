"""Text to ids and back: one id per character of a task's alphabet, or one per byte.

Id 0 is padding, id 1 ends a text, texts start at 2. The vocabulary is rounded up to a multiple of 8, so that a mesh can
cut it; ids without a meaning are decoded as U+FFFD: a policy may sample them, and no verifier should overlook it.
"""

import dataclasses
from collections.abc import Callable, Sequence

from rollout_jax.types import ConfigError

PAD, END, FIRST = 0, 1, 2
UNKNOWN = '\ufffd'


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """encode(text) -> ids, without an end token; decode(ids) -> text, special ids dropped."""

  encode: Callable[[str], list[int]]
  decode: Callable[[Sequence[int]], str]
  vocab_size: int
  pad: int = PAD
  end_tokens: tuple[int, ...] = (END,)


def characters(alphabet: str) -> Tokenizer:
  """A tokenizer of the characters in `alphabet`; neither order nor repetition in it matters."""
  if not alphabet:
    raise ConfigError('a character tokenizer wants the characters of its task, got an empty alphabet.')
  letters = sorted(set(alphabet))
  ids = {letter: FIRST + i for i, letter in enumerate(letters)}
  texts = dict.fromkeys((PAD, END), '') | {i: letter for letter, i in ids.items()}

  def encode(text: str) -> list[int]:
    strange = sorted(set(text) - ids.keys())
    if strange:
      raise ConfigError(
        f'character {strange[0]!r} (U+{ord(strange[0]):04X}) of {_short(text)} is not in the alphabet '
        f'{"".join(letters)!r}. Change the text, or give the task an alphabet that holds it (or none: bytes).'
      )
    return [ids[letter] for letter in text]

  return Tokenizer(encode, lambda row: ''.join(texts.get(int(i), UNKNOWN) for i in row), _round(FIRST + len(letters)))


def byte() -> Tokenizer:
  """A tokenizer of UTF-8 bytes: takes any text; bytes that are no UTF-8 are decoded as U+FFFD."""

  def decode(row: Sequence[int]) -> str:
    known = (int(i) - FIRST for i in row if int(i) not in (PAD, END))
    return b''.join(bytes([i]) if i < 256 else UNKNOWN.encode() for i in known).decode(errors='replace')

  return Tokenizer(lambda text: [FIRST + i for i in text.encode()], decode, _round(FIRST + 256))


def _round(size: int) -> int:
  return -(-size // 8) * 8


def _short(text: str) -> str:
  return repr(text if len(text) <= 60 else text[:57] + '...')
