"""A table of Beta posteriors, one per prompt: what is known of each prompt's pass rate."""

import flax.struct
import jax.numpy as jnp

from rollout_jax.types import Array


@flax.struct.dataclass
class Beta:
  """Beta(success, failure) of every prompt, prior counts included."""

  success_N: Array  # float32
  failure_N: Array  # float32


def prior_table(size: int, prior: float) -> Beta:
  """Beta(prior, prior) for every prompt."""
  return Beta(jnp.full((size,), prior, jnp.float32), jnp.full((size,), prior, jnp.float32))


def mean(table: Beta) -> Array:
  """Expected pass rate of every prompt, [N]."""
  return table.success_N / (table.success_N + table.failure_N)


def observe(table: Beta, prompt_P: Array, success_P: Array, failure_P: Array, *, decay: float, prior: float) -> Beta:
  """The table after these numbers of right and wrong rows.

  An observed prompt's counts first move towards the prior, decay * count + (1 - decay) * prior (MoPPS, arXiv
  2507.04632); once, also if the prompt stands in the batch more than once. A prompt of -1, or without a row, writes
  nothing; every other entry keeps its bits.
  """
  size = table.success_N.shape[0]
  # A negative index would count from the end of the table.
  index_P = jnp.where((prompt_P >= 0) & (success_P + failure_P > 0), prompt_P, size)
  seen_N = jnp.zeros((size,), bool).at[index_P].set(True, mode='drop')

  def add(count_N: Array, new_P: Array) -> Array:
    new_N = jnp.zeros((size,), jnp.float32).at[index_P].add(new_P, mode='drop')
    return jnp.where(seen_N, decay * count_N + (1 - decay) * prior + new_N, count_N)

  return Beta(add(table.success_N, success_P), add(table.failure_N, failure_P))
