"""Pure steps on a batch inside the training step (families C and A.1), by the names that a config uses."""

from rollout_jax.transforms.advantages import group_advantage
from rollout_jax.transforms.filters import drop_degenerate, limit_staleness
from rollout_jax.transforms.offpolicy import tis
from rollout_jax.transforms.reward import combine_rewards
from rollout_jax.transforms.select import pods

__all__ = ['combine_rewards', 'drop_degenerate', 'group_advantage', 'limit_staleness', 'pods', 'tis']
