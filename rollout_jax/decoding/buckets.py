"""The ladder of shapes that the decoder is compiled for: what is finished costs nothing (law 8).

A decode forward costs what its static shape costs. So when few rows are left they move together into half of the slots,
and caches are only as long as the longest live row needs. Every size comes from a short ladder, so the number of programs
is bounded; some room at each change keeps the engine from going to and fro between two sizes.
"""

from collections.abc import Sequence
from typing import NamedTuple

ROOM = 8  # rows move into fewer slots when an eighth of these would stay free


class Bucket(NamedTuple):
  """A shape of the decoder: S slots, with caches of `length` tokens."""

  slots: int
  length: int


class Ladder(NamedTuple):
  """All sizes there are, each ascending."""

  slots: tuple[int, ...]
  lengths: tuple[int, ...]

  def holding(self, rows: int, tokens: int) -> Bucket:
    """The smallest bucket with slots for so many rows, of so many tokens; the largest there is if none is enough."""
    return Bucket(_at_least(self.slots, rows), _at_least(self.lengths, tokens))

  def fit(self, now: Bucket, rows: int, tokens: int, ahead: int) -> Bucket:
    """The bucket to go on with.

    `rows` are under way or wait, the longest live one has `tokens`, and at most `ahead` more come to each before the
    next look. Grows as soon as it must, and shrinks only with room to spare.
    """
    slots, length = self.holding(rows, tokens + ahead)
    if slots < now.slots:
      slots = min(_at_least(self.slots, -(-rows * ROOM // (ROOM - 1))), now.slots)
    if length < now.length:
      length = min(_at_least(self.lengths, tokens + 2 * ahead), now.length)
    return Bucket(slots, length)

  def shrinks_at(self, slots: int) -> int:
    """With so many rows or fewer, `fit` leaves a bucket of `slots` for a smaller one; 0 if there is none."""
    smaller = [size for size in self.slots if size < slots]
    return smaller[-1] * (ROOM - 1) // ROOM if smaller else 0


def ladder(*, slots: int, halvings: int, length: int, length_step: int, shards: int = 1) -> Ladder:
  """`slots`, slots / 2, ... (at most `halvings` times) and `length_step`, 2 * length_step, ... up to `length` tokens.

  Slots are halved as long as they stay a multiple of `shards`, the devices that they are cut over. A `length_step` of 0
  gives whole caches only.
  """
  sizes = [slots]
  while len(sizes) <= halvings and sizes[0] > 1 and sizes[0] % (2 * shards) == 0:
    sizes.insert(0, sizes[0] // 2)
  steps = range(length_step, length, length_step) if length_step else ()
  return Ladder(tuple(sizes), (*steps, length))


def _at_least(sizes: Sequence[int], size: int) -> int:
  return next((each for each in sizes if each >= size), sizes[-1])
