"""Uniform: every prompt once per epoch, in an order drawn anew for each epoch. The baseline.

Config: `curriculum='uniform'`.
"""

import flax.struct
import jax
import jax.numpy as jnp

from rollout_jax.keys import wrap
from rollout_jax.types import Array, Curriculum


@flax.struct.dataclass
class Place:
  """Where in which epoch the next draw begins."""

  epoch: Array  # int32
  cursor: Array  # int32, in [0, N)


def uniform(size: int, prompts: int) -> Curriculum:
  """Draws the next `prompts` of `size` prompts; a draw that passes the end of an epoch goes on in the next one.

  The order of an epoch is named by (key, epoch) alone: `sample` takes the same key at every call.
  """
  epochs = 1 + (prompts + size - 2) // size  # that one draw can touch

  def init() -> Place:
    return Place(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

  def sample(state: Place, key: Array) -> tuple[Place, Array]:
    key_E = [jax.random.fold_in(wrap(key), state.epoch + i) for i in range(epochs)]
    order_EN = jnp.stack([jax.random.permutation(epoch_key, size) for epoch_key in key_E])
    place_P = state.cursor + jnp.arange(prompts, dtype=jnp.int32)
    after = state.cursor + prompts
    state = Place(state.epoch + after // size, after % size)
    return state, order_EN[place_P // size, place_P % size].astype(jnp.int32)

  return Curriculum(init, sample, lambda batch, state: state)
