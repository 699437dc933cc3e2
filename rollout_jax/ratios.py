"""Ratios of two log-probs of the same tokens, and how far the two policies are apart."""

import jax.numpy as jnp

from rollout_jax import masked
from rollout_jax.types import Array, Report

LIMIT = 20.0  # bound of a log-ratio before exp, so that a ratio stays finite in float32


def log_ratio(numerator: Array, denominator: Array, where: Array) -> Array:
  """log(numerator / denominator) within +-LIMIT; zero outside `where`, whatever stands there."""
  return bound(jnp.where(where > 0, numerator - denominator, 0.0))


def bound(log_ratio: Array) -> Array:
  """The log-ratio cut to +-LIMIT; beyond it there is no gradient."""
  return jnp.clip(log_ratio, -LIMIT, LIMIT)


def effective(weight: Array, where: Array) -> Array:
  """Effective sample size as a share of the samples, (sum w)^2 / (n sum w^2): 1 if all weights are equal."""
  mean, square = masked.mean(weight, where), masked.mean(weight**2, where)
  return jnp.where(square > 0, mean**2 / jnp.where(square > 0, square, 1.0), 1.0)


def health(area: str, log_ratio: Array, weight: Array, where: Array) -> Report:
  """How far a policy has moved from the one that sampled; log_ratio = log(policy / sampler) at tokens that it sampled.

  ess: effective sample size of the `weight` really used (below 0.3 is a warning). kl: mean of log(sampler / policy), an
  estimate of KL(sampler || policy); k3: the same quantity estimated by mean of r - 1 - log r, never negative.
  chi2: mean of r^2, less 1. gap, gap_max: mean and largest |log r| of the batch.
  """
  ratio = jnp.exp(log_ratio)
  return {
    f'{area}/ess': masked.single(effective(weight, where)),
    f'{area}/kl': masked.average(-log_ratio, where),
    f'{area}/k3': masked.average(ratio - 1 - log_ratio, where),
    f'{area}/chi2': masked.average(ratio**2 - 1, where),
    f'{area}/gap': masked.average(jnp.abs(log_ratio), where),
    f'{area}/gap_max': masked.single(masked.maximum(jnp.abs(log_ratio), where)),
  }
