"""Prompts with a checkable answer, by the names that a config uses."""

from rollout_jax.tasks.compact import countdown, gcd, product
from rollout_jax.tasks.jsonl import jsonl
from rollout_jax.tasks.reasoning_gym import reasoning_gym

__all__ = ['countdown', 'gcd', 'jsonl', 'product', 'reasoning_gym']
