"""The ladder of the decoder's shapes: never too small for its rows, bounded, and steady."""

import itertools

import numpy as np
import pytest

from rollout_jax.decoding.buckets import Bucket, ladder


@pytest.mark.parametrize(
  'sizes, slots, lengths',
  [
    (dict(slots=64, halvings=3, length=160, length_step=64), (8, 16, 32, 64), (64, 128, 160)),
    (dict(slots=64, halvings=0, length=160, length_step=0), (64,), (160,)),
    (dict(slots=64, halvings=9, length=64, length_step=64), (1, 2, 4, 8, 16, 32, 64), (64,)),
    (dict(slots=24, halvings=9, length=8, length_step=0), (3, 6, 12, 24), (8,)),
    (dict(slots=64, halvings=9, length=8, length_step=0, shards=16), (16, 32, 64), (8,)),
  ],
)
def test_sizes_halve_as_long_as_the_devices_divide_them(sizes, slots, lengths):
  assert ladder(**sizes) == (slots, lengths)


def test_a_bucket_holds_its_rows_and_what_may_come_to_them():
  steps = ladder(slots=64, halvings=3, length=160, length_step=32)
  rng = np.random.default_rng(0)
  now = Bucket(64, 160)
  for rows, tokens in zip(rng.integers(0, 100, 500), rng.integers(1, 161, 500), strict=True):
    now = steps.fit(now, int(rows), int(tokens), 8)
    assert now.slots >= min(rows, 64) and now.length >= min(tokens + 8, 160)
    assert now.slots in steps.slots and now.length in steps.lengths


def test_a_bucket_changes_once_where_its_need_wavers():
  steps = ladder(slots=64, halvings=3, length=160, length_step=32)
  now, changes = Bucket(64, 160), 0
  for rows, tokens in itertools.islice(itertools.cycle([(28, 80), (31, 88), (29, 84), (32, 86)]), 40):
    changes += steps.fit(now, rows, tokens, 8) != now
    now = steps.fit(now, rows, tokens, 8)
  assert now == (32, 96) and changes <= 2


@pytest.mark.parametrize('slots', [8, 16, 32, 64])
def test_the_device_ends_a_chunk_exactly_where_the_host_would_move_the_rows(slots):
  steps = ladder(slots=64, halvings=3, length=160, length_step=0)
  moves = [rows for rows in range(slots + 1) if steps.fit(Bucket(slots, 160), rows, 1, 1).slots < slots]
  assert moves == list(range(steps.shrinks_at(slots) + 1)) if slots > 8 else not moves
