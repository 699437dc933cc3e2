"""Filters: what is left out of the loss and of the group statistics. They only multiply `keep` and `stat`.

drop_degenerate   DAPO's dynamic sampling as a mask (arXiv 2503.14476, section 3.2). The refill until P groups are
                  informative is a scheduler's (`schedulers/dynamic.py`); both use the rule of `signal.informative`, on
                  raw correctness: a shaped reward would revive groups that are all right.
limit_staleness   AReaL's bound on the age of a sample (arXiv 2505.24298), as a mask after the fact.

Config: `transforms=(..., 'drop_degenerate', ...)`, sections `drop_degenerate` and `limit_staleness`.
"""

import jax.numpy as jnp

from rollout_jax import masked
from rollout_jax.signal import informative
from rollout_jax.transforms.chain import stateless
from rollout_jax.types import Array, ConfigError, Correctness, Outcome, Phase, Report, RolloutBatch, Spec, Transform


def drop_degenerate(*, low: float = 0.0, high: float = 1.0) -> Transform:
  """Keeps a group only if its pass rate over the counted rows lies strictly between `low` and `high`.

  Reports numbers of groups per batch: kept, too hard and too easy.
  """
  if not low < high:
    raise ConfigError(f'drop_degenerate needs low < high, but low is {low} and high is {high}: no group would be kept.')

  def group_size(group: int) -> int:
    if group < 2:
      raise ValueError('the one row of a group is always all right or all wrong, so every group would be dropped')
    return group

  def update(batch: RolloutBatch, **extra) -> tuple[RolloutBatch, Report]:
    correct_PG = (batch.verdict_PG == Outcome.CORRECT).astype(jnp.float32)
    kept_P = informative(correct_PG, batch.stat_PG, low, high)
    counted_P = jnp.any(batch.stat_PG > 0, axis=1)
    hard_P = masked.mean(correct_PG, batch.stat_PG, axis=1) < (low + high) / 2
    report = {
      'filter/kept_groups': masked.count(kept_P),
      'filter/hard_groups': masked.count(counted_P & ~kept_P & hard_P),
      'filter/easy_groups': masked.count(counted_P & ~kept_P & ~hard_P),
    }
    return only(batch, jnp.broadcast_to(kept_P[:, None], batch.stat_PG.shape)), report

  return stateless(
    update,
    Spec(
      name='drop_degenerate',
      phase=Phase.FILTER,
      reads=frozenset({'verdict_PG', 'stat_PG'}),
      writes=frozenset({'keep_PGT', 'stat_PG'}),
      group_size=group_size,
      correctness=Correctness.EMPIRICAL,
    ),
  )


def limit_staleness(*, limit: int = 4) -> Transform:
  """Leaves out rows whose oldest token is more than `limit` policy versions older than the policy being trained."""
  if limit < 0:
    raise ConfigError(f'limit_staleness.limit is a number of versions, 0 or more, but is {limit}.')

  def update(batch: RolloutBatch, *, version: Array, **extra) -> tuple[RolloutBatch, Report]:
    sampled_PGT = batch.version_PGT >= 0
    oldest_PG = jnp.min(jnp.where(sampled_PGT, batch.version_PGT, version), axis=2)
    lag_PG = version - oldest_PG
    fresh_PG = lag_PG <= limit
    report = {
      'staleness/lag': masked.average(lag_PG, batch.exists_PG),
      'staleness/dropped_rows': masked.count(batch.exists_PG & ~fresh_PG),
    }
    return only(batch, fresh_PG), report

  return stateless(
    update,
    Spec(
      name='limit_staleness',
      phase=Phase.FILTER,
      reads=frozenset({'version_PGT', 'exists_PG'}),
      writes=frozenset({'keep_PGT', 'stat_PG'}),
      correctness=Correctness.EMPIRICAL,
    ),
  )


def only(batch: RolloutBatch, row_PG: Array) -> RolloutBatch:
  """The batch without the other rows: out of the loss and out of the statistics."""
  row_PG = row_PG.astype(jnp.float32)
  return batch.replace(keep_PGT=batch.keep_PGT * row_PG[:, :, None], stat_PG=batch.stat_PG * row_PG)
