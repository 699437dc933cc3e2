"""Uniform: every prompt once per epoch, in an order drawn anew for each epoch. The baseline.

Config: `curriculum='uniform'`.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from rollout_jax.keys import wrap
from rollout_jax.types import Array, Curriculum

ROUNDS = 6  # of the Feistel network


@flax.struct.dataclass
class Place:
  """Where in which epoch the next draw begins."""

  epoch: Array  # int32
  cursor: Array  # int32, in [0, N)


def uniform(size: int, prompts: int) -> Curriculum:
  """Draws the next `prompts` of `size` prompts; a draw that passes the end of an epoch goes on in the next one.

  The order of an epoch is named by (key, epoch) alone: `sample` takes the same key at every call.
  """

  def init() -> Place:
    return Place(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

  def sample(state: Place, key: Array) -> tuple[Place, Array]:
    place_P = state.cursor.astype(jnp.uint32) + jnp.arange(prompts, dtype=jnp.uint32)  # may pass 2**31
    prompt_P = jax.vmap(lambda epoch, place: permuted(jax.random.fold_in(wrap(key), epoch), place, size))(
      state.epoch + (place_P // size).astype(jnp.int32), place_P % size
    )
    after = state.cursor.astype(jnp.uint32) + prompts
    state = Place(state.epoch + (after // size).astype(jnp.int32), (after % size).astype(jnp.int32))
    return state, prompt_P

  return Curriculum(init, sample, lambda batch, state: state)


def permuted(key: Array, place: Array, size: int) -> Array:
  """What stands at `place` of a random order of 0 ... size - 1 that the key names, without making the order.

  A Feistel network permutes the numbers of an even number of bits, and is applied again until the number is below `size`
  (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002): at most 4 times on average.
  """
  half = max(1, math.ceil((size - 1).bit_length() / 2))
  mask = np.uint32((1 << half) - 1)

  def scramble(number: Array) -> Array:
    left, right = number >> half, number & mask
    for i in range(ROUNDS):
      noise = jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, i), right))
      left, right = right, left ^ (noise & mask)
    return left << half | right

  outside = lambda number: number >= size
  return jax.lax.while_loop(outside, scramble, scramble(place.astype(jnp.uint32))).astype(jnp.int32)
