"""Schedulers: what is rolled out when, and what makes a batch (families A.1, B.1 and B.2 of the survey)."""

from rollout_jax.schedulers.dynamic import dynamic
from rollout_jax.schedulers.synchronous import synchronous

__all__ = ['dynamic', 'synchronous']
