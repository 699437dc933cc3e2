"""Random keys by name (law 1): folds of named facts, never splits whose order matters.

A key is raw threefry data, uint32[2], so that keys are ordinary arrays in states, rows and checkpoints. `row_keys`
makes the keys of many rows on the host by the same hash in numpy: admitting a row costs no call to the device.
"""

import functools
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from rollout_jax.types import Array, Request

IMPLEMENTATION = 'threefry2x32'
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


def wrap(key: Array):
  """The typed key that jax.random's functions take, of raw key data uint32[2]."""
  return jax.random.wrap_key_data(key, impl=IMPLEMENTATION)


def named(seed: int | Array, *names: int | str | Array) -> Array:
  """The key uint32[2] of these names: words, or numbers below 2**32. Numbers, seed included, may be traced."""
  key = jax.random.key(seed, impl=IMPLEMENTATION)
  for name in names:
    key = jax.random.fold_in(key, number(name))
  return jax.random.key_data(key)


def number(name: int | str | Array):
  """The number that is folded in for a name."""
  if isinstance(name, str):
    return np.uint32(zlib.crc32(name.encode()))
  return np.uint32(name) if isinstance(name, int) else name


def row_key(seed: int | Array, prompt: int | Array, rollout: int | Array, visit: int | Array) -> Array:
  """The key uint32[2] of one row."""
  return named(seed, 'row', prompt, rollout, visit)


def draw_key(key: Array, position: int | Array) -> Array:
  """The key uint32[2] of the draw of the token at this position of the row."""
  return jax.random.key_data(jax.random.fold_in(wrap(key), position))


def row_keys(seed: int, requests: Sequence[Request]) -> np.ndarray:
  """`row_key` of every request as a numpy array uint32[J, 2], without touching a device."""
  name_J3 = np.array([(r.prompt, r.rollout, r.visit) for r in requests], np.uint32).reshape(-1, 3)
  key_J2 = np.broadcast_to(_row_root(seed), (len(name_J3), 2))
  for column_J in name_J3.T:
    key_J2 = _fold_in(key_J2, column_J)
  return key_J2


@functools.cache
def _row_root(seed: int) -> np.ndarray:
  return _fold_in(np.array([[0, seed]], np.uint32), np.array([number('row')]))


def _fold_in(key_J2: np.ndarray, number_J: np.ndarray) -> np.ndarray:
  """jax.random.fold_in of threefry keys: the 20-round hash of the block (0, number)."""
  schedule = (key_J2[:, 0], key_J2[:, 1], key_J2[:, 0] ^ key_J2[:, 1] ^ PARITY)
  x, y = schedule[0], number_J + schedule[1]
  for i in range(5):
    for rotation in ROTATIONS[i % 2]:
      x = x + y
      y = (y << np.uint32(rotation) | y >> np.uint32(32 - rotation)) ^ x
    x = x + schedule[(i + 1) % 3]
    y = y + schedule[(i + 2) % 3] + np.uint32(i + 1)
  return np.stack([x, y], axis=1)
