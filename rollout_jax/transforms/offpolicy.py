"""Corrections for tokens that another policy, or the same one with other numerics, has sampled.

tis   Truncated importance sampling: weight min(proximal / behaviour, cap). Token level as in Yao et al. (2025, 'Your
      efficient RL framework secretly brings you off-policy RL training'), sequence level as in verl: the product over
      the row's kept tokens. Left out: verl's normalisation of the weights to mean 1.

Config: `transforms=(..., 'tis')`, section `tis`.
"""

import jax.numpy as jnp

from rollout_jax import masked, ratios
from rollout_jax.transforms.chain import stateless
from rollout_jax.types import ConfigError, Correctness, Phase, Report, RolloutBatch, Spec, Transform

LEVELS = ('token', 'sequence')


def tis(*, level: str = 'token', cap: float = 2.0) -> Transform:
  """Weights each kept token by the probability ratio proximal / behaviour of the token or of its row, at most `cap`.

  Unbiased for the objective with the ratio truncated at `cap`. tis/capped is the share of tokens (rows) that the cap
  changed; tis/ess and its neighbours are those of `ratios.health`, over tokens (rows).
  """
  if level not in LEVELS:
    raise ConfigError(f'tis.level must be one of {LEVELS}, but is {level!r}.')
  if cap < 1:
    raise ConfigError(f'tis.cap must be at least 1, or on-policy samples would be weighted down, but is {cap}.')

  def update(batch: RolloutBatch, **extra) -> tuple[RolloutBatch, Report]:
    kept_PGT = batch.keep_PGT * batch.exists_PG[:, :, None]
    log_PGX = ratios.log_ratio(batch.proximal_logp_PGT, batch.behaviour_logp_PGT, kept_PGT)
    kept_PGX = kept_PGT
    if level == 'sequence':
      log_PGX = ratios.bound(jnp.sum(log_PGX, axis=2, keepdims=True))
      kept_PGX = jnp.max(kept_PGT, axis=2, keepdims=True)
    weight_PGX = jnp.minimum(jnp.exp(log_PGX), cap)
    report = {
      'tis/weight': masked.average(weight_PGX, kept_PGX),
      'tis/capped': masked.average(jnp.exp(log_PGX) > cap, kept_PGX),
      **ratios.health('tis', log_PGX, weight_PGX, kept_PGX),
    }
    weight_PGT = jnp.where(kept_PGT > 0, weight_PGX, 1.0)
    return batch.replace(correction_PGT=batch.correction_PGT * weight_PGT), report

  return stateless(
    update,
    Spec(
      name='tis',
      phase=Phase.CORRECT,
      reads=frozenset({'proximal_logp_PGT', 'behaviour_logp_PGT', 'keep_PGT', 'exists_PG'}),
      writes=frozenset({'correction_PGT'}),
      correctness=Correctness.CORRECTED,
    ),
  )
