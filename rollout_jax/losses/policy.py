"""Policy losses: what each token would have minimised, before weights.

ppo_clip    PPO's clipped surrogate (arXiv 1707.06347) with DAPO's separate upper bound (clip-higher: low=0.2,
            high=0.28, arXiv 2503.14476) and dual clip (arXiv 1912.09729; verl uses 3). Left out: the value loss.
reinforce   The score function itself. It compares with no other policy: use it with one update per batch.

Config: `loss='ppo_clip'`, section `ppo_clip`.
"""

import jax
import jax.numpy as jnp

from rollout_jax import masked, ratios
from rollout_jax.types import Array, ConfigError, Loss, Report, Tokens


def ppo_clip(*, low: float = 0.2, high: float = 0.2, dual: float = 0.0) -> Loss:
  """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = learner / proximal; with `dual` > 0 at most -A dual where A < 0.

  Reports over kept tokens: the ratio, its largest value in a row averaged over rows (so that it adds up over
  microbatches), the share that a clip holds (no gradient), the share that the dual clip holds, and the k3 estimate of
  KL(proximal || learner).
  """
  if not 0 < low <= 1 or high <= 0:
    raise ConfigError(
      f'ppo_clip needs 0 < low <= 1 and high > 0 (distances from ratio 1), but got low={low}, high={high}.'
    )
  if dual != 0 and dual <= 1 + high:
    raise ConfigError(f'ppo_clip.dual bounds the ratio from above: 0 (off) or more than 1 + high, but is {dual}.')

  def value(tokens: Tokens, scalars: tuple) -> tuple[Array, Report]:
    log_n = ratios.log_ratio(tokens.learner_logp_n, tokens.proximal_logp_n, tokens.keep_n)
    ratio_n = jnp.exp(log_n)
    free_n = -tokens.advantage_n * ratio_n
    held_n = -tokens.advantage_n * jnp.clip(ratio_n, 1 - low, 1 + high)
    loss_n = jnp.maximum(free_n, held_n)
    report = {
      'loss/ratio': masked.average(ratio_n, tokens.keep_n),
      'loss/ratio_max': row_maximum(ratio_n, tokens),
      'loss/clipped': masked.average(held_n > free_n, tokens.keep_n),
      'loss/kl_proximal': masked.average(ratio_n - 1 - log_n, tokens.keep_n),
    }
    if dual > 0:
      ceiling_n = jnp.where(tokens.advantage_n < 0, -tokens.advantage_n * dual, jnp.inf)
      report['loss/dual_clipped'] = masked.average(loss_n > ceiling_n, tokens.keep_n)
      loss_n = jnp.minimum(loss_n, ceiling_n)
    return loss_n, report

  return Loss(lambda tokens: (), value, frozenset({'proximal_logp_PGT', 'advantage_PGT'}))


def reinforce() -> Loss:
  """-A log-prob; reports the log-prob of the kept tokens."""

  def value(tokens: Tokens, scalars: tuple) -> tuple[Array, Report]:
    return -tokens.advantage_n * tokens.learner_logp_n, {
      'loss/logp': masked.average(tokens.learner_logp_n, tokens.keep_n)
    }

  return Loss(lambda tokens: (), value, frozenset({'advantage_PGT'}))


def row_maximum(x_n: Array, tokens: Tokens):
  """Largest kept `x_n` of a row, as a Mean over rows with a kept token."""
  x_B = jax.ops.segment_max(jnp.where(tokens.keep_n > 0, x_n, -jnp.inf), tokens.row_n, tokens.rows)
  return masked.average(x_B, tokens.per_row(tokens.keep_n) > 0)
