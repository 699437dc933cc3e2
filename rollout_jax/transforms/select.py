"""Selectors: which rows of a group are trained, as a gather of static size.

pods   Max-variance down-sampling (PODS, arXiv 2504.13818): roll out G, train on the m rows whose rewards vary most. The
       advantages are those of the subset (authors: eps 1e-4). Left out: the paper's baselines, random and max-reward.

Config: `transforms=(..., 'pods', ...)`, section `pods`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rollout_jax import masked
from rollout_jax.transforms.chain import stateless
from rollout_jax.types import Array, ConfigError, Correctness, Phase, Report, RolloutBatch, Spec, Transform


def pods(*, m: int = 4) -> Transform:
  """Shrinks every group to its m rows of largest reward variance; rows outside the statistics are taken last.

  Reports the variance of the counted rewards in a group before and after, averaged over groups.
  """
  if m < 2:
    raise ConfigError(f'pods.m is the number of rows that a group keeps and must be at least 2, but is {m}.')

  def group_size(group: int) -> int:
    if m > group:
      raise ValueError(f'pods.m={m} rows cannot be chosen from {group}: lower pods.m or roll out larger groups')
    return m

  def update(batch: RolloutBatch, **extra) -> tuple[RolloutBatch, Report]:
    chosen_PG = jax.vmap(max_variance, (0, 0, 0, None))(batch.reward_PG, batch.stat_PG, batch.rollout_PG, m)
    report = {
      'pods/variance_before': variance(batch.reward_PG, batch.stat_PG),
      'pods/variance_after': variance(batch.reward_PG, batch.stat_PG * chosen_PG),
    }
    return take(batch, chosen_PG, m), report

  return stateless(
    update,
    Spec(
      name='pods',
      phase=Phase.SELECT,
      reads=frozenset({'reward_PG', 'stat_PG', 'rollout_PG'}),
      group_size=group_size,
      correctness=Correctness.EMPIRICAL,
    ),
  )


def max_variance(reward_G: Array, stat_G: Array, rollout_G: Array, size: int) -> Array:
  """Marks `size` rows, bool [G]: counted ones whose rewards have the largest population variance, then uncounted ones.

  The best subset is always the i largest and size - i smallest rewards for some i. Ties go to all-largest, then to the
  smallest i; between equal rewards the rollout number decides, so that the order of a group does not matter.
  """
  count = jnp.sum(stat_G > 0)
  taken = jnp.minimum(count, size)
  # Sums of centred rewards: sums of raw ones would cancel.
  centred_G = jnp.where(stat_G > 0, reward_G - masked.mean(reward_G, stat_G), 0.0)
  order_G = jnp.lexsort((rollout_G, centred_G, stat_G <= 0))
  top_I = jnp.array([size, *range(size)])
  possible_I = top_I <= taken

  def chosen_sum(x_G: Array) -> Array:
    sums = jnp.pad(jnp.cumsum(x_G[order_G]), (1, 0))
    return sums[jnp.maximum(taken - top_I, 0)] + sums[count] - sums[jnp.maximum(count - top_I, 0)]

  whole = jnp.maximum(taken, 1)
  variance_I = chosen_sum(centred_G**2) / whole - (chosen_sum(centred_G) / whole) ** 2
  top = top_I[jnp.argmax(jnp.where(possible_I, variance_I, -jnp.inf))]
  rank_G = jnp.argsort(order_G)
  counted_G = (rank_G < taken - top) | ((rank_G >= count - top) & (rank_G < count))
  return counted_G | ((rank_G >= count) & (rank_G < count + size - taken))


def variance(reward_PG: Array, where_PG: Array):
  """Population variance of the rewards inside a group, as a Mean over groups with a counted row."""
  variance_P = masked.std(reward_PG, where_PG, axis=1, ddof=0) ** 2
  return masked.average(variance_P, jnp.any(where_PG > 0, axis=1))


def take(batch: RolloutBatch, chosen_PG: Array, size: int) -> RolloutBatch:
  """The batch with only the chosen rows, `size` in each group, in the order in which they stood.

  `original_PG` keeps all its columns, those of the chosen rows first: a denominator frozen before the first filter
  still counts the rows that left.
  """
  order_PG = jnp.argsort(~chosen_PG, axis=1, stable=True)
  columns = {}
  for field in dataclasses.fields(batch):
    x, axes = getattr(batch, field.name), field.name.rsplit('_', 1)[1]
    if x is not None and axes.startswith('PG'):
      index = order_PG if field.name == 'original_PG' else order_PG[:, :size]
      columns[field.name] = jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
  return batch.replace(**columns)
