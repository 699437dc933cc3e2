"""Supervised fine-tuning: one update on demonstrations."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from rollout_jax import masked
from rollout_jax.distribution import distribution
from rollout_jax.models.transformer import Policy
from rollout_jax.training.score import score
from rollout_jax.training.state import TrainState
from rollout_jax.types import Array, PyTree


class Plan(NamedTuple):
  """How long and on what: `steps` updates on `batch` demonstrations each, of the first `demonstrations` train prompts."""

  steps: int
  batch: int
  demonstrations: int
  seed: int


def make_sft_step(
  policy: Policy, tx: optax.GradientTransformation
) -> Callable[[TrainState, Array, Array], tuple[TrainState, Array]]:
  """The function (state, tokens_BT, keep_BT) -> (state, loss): one update on the mean negative log-likelihood per kept token."""
  plain = distribution()

  def sft_step(state: TrainState, tokens_BT: Array, keep_BT: Array) -> tuple[TrainState, Array]:
    def loss(params: PyTree) -> Array:
      logp_BT, _, _ = score(policy, plain, params, tokens_BT)
      return -masked.mean(logp_BT, keep_BT)

    value, gradient = jax.value_and_grad(loss)(state.params['policy'])
    change, opt_state = tx.update(gradient, state.opt_state['policy'], state.params['policy'])
    params = optax.apply_updates(state.params['policy'], change)
    one = jnp.ones((), jnp.int32)
    state = state.replace(
      step=state.step + one,
      update=state.update + one,
      params={'policy': params},
      opt_state={'policy': opt_state},
    )
    return state, value

  return sft_step
