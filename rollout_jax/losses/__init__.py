"""Policy losses, by the names that a config uses. Beside them the penalty `kl` and `aggregation`."""

from rollout_jax.losses.policy import ppo_clip, reinforce

__all__ = ['ppo_clip', 'reinforce']
