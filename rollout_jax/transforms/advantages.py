"""Group-relative advantages: one formula whose options are the published estimators.

                       scope     ddof  eps   leave_one_out   config
  GRPO   2402.03300    'group'   1     1e-6  False           the defaults
  GRPO as in TRL       'group'   1     1e-4  False
  LitePPO              'batch'   1     1e-6  False           the group's mean, the batch's deviation
  Dr.GRPO 2503.20783   'none'                False           with aggregation mode 'constant_length'
  RLOO   2402.14740    'none'                True

Left out of GRPO: the KL to the reference, which is a part of the loss (`losses/kl.py`).

Config: `transforms=(..., 'group_advantage', ...)`, section `group_advantage`.
"""

import jax.numpy as jnp

from rollout_jax import masked
from rollout_jax.transforms.chain import stateless
from rollout_jax.types import Array, ConfigError, Phase, Report, RolloutBatch, Spec, Transform

SCOPES = ('group', 'batch', 'none')
SINGLETONS = ('zero', 'raw')


def group_advantage(
  *, scope: str = 'group', ddof: int = 1, eps: float = 1e-6, singleton: str = 'zero', leave_one_out: bool = False
) -> Transform:
  """Writes (reward - baseline) / (deviation + eps) of each row to all of its tokens, over the rows in the statistics.

  The baseline is the mean of the group, or with `leave_one_out` of its other rows. The deviation is that of the
  rewards in `scope` with n - `ddof`; scope 'none' does not divide. A group whose counted rewards are all equal gets
  exactly 0. A group with one counted row gets 0, or with singleton='raw' its reward. Rows outside the statistics get
  0.
  """
  if scope not in SCOPES:
    raise ConfigError(f'group_advantage.scope must be one of {SCOPES}, but is {scope!r}.')
  if singleton not in SINGLETONS:
    raise ConfigError(f'group_advantage.singleton must be one of {SINGLETONS}, but is {singleton!r}.')
  if ddof not in (0, 1):
    raise ConfigError(f'group_advantage.ddof must be 0 (population) or 1 (unbiased), but is {ddof}.')

  def group_size(group: int) -> int:
    if group < 2 and singleton == 'zero':
      raise ValueError(
        "a group of one row has no baseline: roll out larger groups or set group_advantage.singleton='raw'"
      )
    return group

  def update(batch: RolloutBatch, **extra) -> tuple[RolloutBatch, Report]:
    reward_PG, stat_PG = batch.reward_PG, batch.stat_PG
    advantage_PG = centred(reward_PG, stat_PG, leave_one_out)
    if scope != 'none':
      axis = 1 if scope == 'group' else None
      advantage_PG /= masked.std(reward_PG, stat_PG, axis=axis, ddof=ddof, keepdims=True) + eps
    if singleton == 'raw':
      alone_P1 = jnp.sum(stat_PG, axis=1, keepdims=True) == 1
      advantage_PG = jnp.where(alone_P1, reward_PG * stat_PG, advantage_PG)
    zero_P = jnp.all(advantage_PG == 0, axis=1)
    report = {
      'advantage/reward_mean': masked.average(reward_PG, stat_PG),
      'advantage/reward_std': masked.single(masked.std(reward_PG, stat_PG)),
      'advantage/abs': masked.average(jnp.abs(advantage_PG), stat_PG),
      'advantage/zero_groups': masked.average(zero_P, jnp.any(stat_PG > 0, axis=1)),
    }
    return batch.replace(advantage_PGT=jnp.broadcast_to(advantage_PG[:, :, None], batch.shape)), report

  return stateless(
    update,
    Spec(
      name='group_advantage',
      phase=Phase.ADVANTAGE,
      reads=frozenset({'reward_PG', 'stat_PG'}),
      writes=frozenset({'advantage_PGT'}),
      group_size=group_size,
    ),
  )


def centred(reward_PG: Array, stat_PG: Array, leave_one_out: bool) -> Array:
  """Reward less its baseline; exactly 0 outside the statistics and in groups whose counted rewards are all equal."""
  baseline_P1 = masked.mean(reward_PG, stat_PG, axis=1, keepdims=True)
  varies_P1 = masked.spread(reward_PG, stat_PG, axis=1, keepdims=True) > 0
  centred_PG = jnp.where((stat_PG > 0) & varies_P1, reward_PG - baseline_P1, 0.0)
  if not leave_one_out:
    return centred_PG
  count_P1 = jnp.sum(stat_PG, axis=1, keepdims=True)
  return centred_PG * count_P1 / jnp.maximum(count_P1 - 1, 1)  # r - mean of the others = n / (n - 1) * (r - mean)
