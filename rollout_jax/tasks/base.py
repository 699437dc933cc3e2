"""What a task is, and the cut between the prompts that train and those that are held out.

A task is a function of its config section alone. It is built anew in every process that needs it (the run, each verifier's
worker, a resumed run), so the same section must always give the same prompts.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from rollout_jax.types import ConfigError, Verdict

TRAIN, HELDOUT = 'train', 'heldout'


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One problem. `demonstration` is a whole answer worth imitating, up to the end token."""

  text: str
  answer: str  # a right answer in short, to be read by people; '' if there is none to show
  demonstration: str | None = None
  problem: Any = None  # what `verify` needs beyond the answer


class Task(NamedTuple):
  """prompt(split, index) -> Prompt, by random access; verify(prompt, text) -> Verdict, pure, may raise.

  No problem is on both sides. Lengths are those of the longest prompt and demonstration, in characters of `alphabet`, or
  in UTF-8 bytes where the task has none.
  """

  size: int  # train prompts
  heldout: int  # held-out prompts
  prompt: Callable[[str, int], Prompt]
  verify: Callable[[Prompt, str], Verdict]
  alphabet: str | None
  prompt_length: int
  answer_length: int


def side(problem: str, share: float) -> str:
  """The side of a problem: a hash of its text puts `share` of all problems on the held-out side, whatever the seed."""
  digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
  return HELDOUT if int.from_bytes(digest, 'big') < share * 2**64 else TRAIN


def check_range(name: str, value: float, low: float, high: float) -> None:
  """Raises ConfigError unless low <= value <= high."""
  if not low <= value <= high:
    raise ConfigError(f'{name} must be from {low} to {high}, but is {value}.')
