"""Supervised fine-tuning: one update on demonstrations."""

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax

from rollout_jax import masked
from rollout_jax.distribution import distribution
from rollout_jax.models.transformer import Policy
from rollout_jax.training.microbatch import fold
from rollout_jax.training.packing import Places
from rollout_jax.training.score import score
from rollout_jax.training.state import TrainState
from rollout_jax.types import Array, PyTree


class Plan(NamedTuple):
  """How long and on what: `steps` updates on `batch` demonstrations each, of the first `demonstrations` train prompts.

  A forward and backward takes `micro` rows, into which as many demonstrations are packed as fit.
  """

  steps: int
  batch: int
  micro: int
  demonstrations: int
  seed: int


@flax.struct.dataclass
class Packed:
  """Demonstrations packed into rows; those that are not needed are empty and cost nothing."""

  tokens_RL: Array
  position_RL: Array  # index of the token in its demonstration
  segment_RL: Array  # which demonstration of its row a token is of, from 1; 0 is padding
  keep_RL: Array  # 1 at the tokens that are learned


def make_sft_step(
  policy: Policy, tx: optax.GradientTransformation, micro: int
) -> Callable[[TrainState, Packed], tuple[TrainState, Array]]:
  """The function (state, packed) -> (state, loss): one update on the mean negative log-likelihood per kept token."""
  plain = distribution()

  def sft_step(state: TrainState, packed: Packed) -> tuple[TrainState, Array]:
    kept = jnp.sum(packed.keep_RL)

    def of_microbatch(rows: Packed) -> tuple[Array, PyTree]:
      def loss(params: PyTree) -> Array:
        logp_mL, _, _ = score(policy, plain, params, rows.tokens_RL, Places(rows.position_RL, rows.segment_RL))
        return -masked.total(logp_mL, rows.keep_RL) / kept

      return jax.value_and_grad(loss)(state.params['policy'])

    value, gradient = fold(of_microbatch, packed, jnp.any(packed.keep_RL > 0, axis=1), micro)
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
