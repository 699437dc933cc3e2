"""Which groups carry a signal: one rule for the filter on the device and for the schedulers on the host."""

import jax
import jax.numpy as jnp
import numpy as np

SLACK = 1e-3  # rollouts; float32 and float64 round low * n differently, whole numbers of rollouts are far apart


def informative(correct_PG, stat_PG, low: float = 0.0, high: float = 1.0):
  """True for groups whose pass rate among the counted rows lies strictly between low and high, bool [P].

  Arrays of numpy or JAX or nested lists. A group with no counted row is not informative.
  """
  xp = jnp if isinstance(correct_PG, jax.Array) else np
  stat_PG = xp.asarray(stat_PG)
  counted_P = stat_PG.sum(axis=1)
  passed_P = (xp.asarray(correct_PG) * stat_PG).sum(axis=1)
  return (passed_P > low * counted_P + SLACK) & (passed_P < high * counted_P - SLACK)
