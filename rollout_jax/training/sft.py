"""Supervised fine-tuning: one update on demonstrations."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from rollout_jax import masked
from rollout_jax.distribution import distribution
from rollout_jax.models.transformer import Policy
from rollout_jax.training.microbatch import fold
from rollout_jax.training.score import score
from rollout_jax.training.state import TrainState
from rollout_jax.types import Array, PyTree


class Plan(NamedTuple):
  """How long and on what: `steps` updates on `batch` demonstrations each, of the first `demonstrations` train prompts.

  A forward and backward takes `micro` rows.
  """

  steps: int
  batch: int
  micro: int
  demonstrations: int
  seed: int


def make_sft_step(
  policy: Policy, tx: optax.GradientTransformation, micro: int
) -> Callable[[TrainState, Array, Array], tuple[TrainState, Array]]:
  """The function (state, tokens_BT, keep_BT) -> (state, loss): one update on the mean negative log-likelihood per kept token."""
  plain = distribution()

  def sft_step(state: TrainState, tokens_BT: Array, keep_BT: Array) -> tuple[TrainState, Array]:
    weight_BT = keep_BT / jnp.sum(keep_BT)

    def of_microbatch(rows: tuple[Array, Array]) -> tuple[Array, PyTree]:
      tokens_mT, weight_mT = rows

      def loss(params: PyTree) -> Array:
        logp_mT, _, _ = score(policy, plain, params, tokens_mT)
        return -masked.total(logp_mT, weight_mT)

      return jax.value_and_grad(loss)(state.params['policy'])

    value, gradient = fold(of_microbatch, (tokens_BT, weight_BT), jnp.any(keep_BT > 0, axis=1), micro)
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
