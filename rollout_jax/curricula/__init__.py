"""Curricula: which prompts run (family D), by the names that a config uses."""

from rollout_jax.curricula.pass_rate import pass_rate
from rollout_jax.curricula.uniform import uniform

__all__ = ['pass_rate', 'uniform']
