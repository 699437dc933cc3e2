"""Where sequences of several lengths go in rows of one length: padding is work that nobody reads."""

from collections.abc import Sequence


def first_fit(lengths: Sequence[int], room: int) -> list[tuple[int, int]]:
  """The row and start of each sequence: the first row of `room` tokens with space left, the longest sequence first."""
  used: list[int] = []
  places = [(0, 0)] * len(lengths)
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    row = next((r for r, taken in enumerate(used) if taken + lengths[i] <= room), len(used))
    if row == len(used):
      used.append(0)
    places[i] = row, used[row]
    used[row] += lengths[i]
  return places
