"""The one way from device to host, counted.

A JAX transfer guard stops implicit copies to the device; it does not see every copy back (on CPU, none). So every
array that the host reads goes through one object, and a test holds that nobody else fetches.
"""

import collections
from typing import Any

import jax
import numpy as np


class Fetcher:
  """Copies trees of arrays to the host and counts the calls by what they were for: `fetcher('status', status)`."""

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()

  def __call__(self, what: str, tree: Any) -> Any:
    """The tree with numpy arrays of its own (a donated buffer cannot change them), after one wait for all leaves."""
    self.counts[what] += 1
    with jax.transfer_guard_device_to_host('allow'):
      return jax.tree.map(np.array, jax.device_get(tree))

  def wait(self, tree: Any) -> None:
    """Returns when the arrays are computed; nothing is copied and nothing counted."""
    jax.block_until_ready(tree)
