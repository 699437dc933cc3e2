"""From verdicts to rewards.

Config: `transforms=('combine_rewards', ...)`, section `combine_rewards`.
"""

import jax.numpy as jnp

from rollout_jax import masked
from rollout_jax.transforms.chain import stateless
from rollout_jax.types import Outcome, Phase, Report, RolloutBatch, Spec, Transform


def combine_rewards(*, correct: float = 1.0, wrong: float = 0.0, malformed: float = 0.0) -> Transform:
  """Adds to each row's reward what its verdict is worth; `malformed` is for text from which no answer could be read.

  A row that was never judged (verifier error or timeout) gets nothing, and neither does a row that does not exist.
  """
  worth = {Outcome.CORRECT: correct, Outcome.WRONG: wrong, Outcome.FORMAT: malformed}

  def update(batch: RolloutBatch, **extra) -> tuple[RolloutBatch, Report]:
    reward_PG = sum(jnp.where(batch.verdict_PG == outcome, value, 0.0) for outcome, value in worth.items())
    reward_PG = batch.reward_PG + jnp.where(batch.exists_PG, reward_PG, 0.0)
    report = {
      'reward/mean': masked.average(reward_PG, batch.stat_PG),
      'reward/correct': masked.average(batch.verdict_PG == Outcome.CORRECT, batch.stat_PG),
      'reward/malformed': masked.average(batch.verdict_PG == Outcome.FORMAT, batch.stat_PG),
      'reward/error': masked.average(batch.verdict_PG == Outcome.ERROR, batch.exists_PG),
      'reward/timeout': masked.average(batch.verdict_PG == Outcome.TIMEOUT, batch.exists_PG),
    }
    return batch.replace(reward_PG=reward_PG), report

  return stateless(
    update,
    Spec(
      name='combine_rewards',
      phase=Phase.REWARD,
      reads=frozenset({'verdict_PG', 'exists_PG', 'stat_PG'}),
      writes=frozenset({'reward_PG'}),
    ),
  )
