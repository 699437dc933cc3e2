"""Rows of a batch packed into rows of L places inside the jitted step: padding costs nothing (law 8).

What is packed is a unit: a row, or with shared prompts the rows of a group, laid out as their prompt once and then each
answer (PrefixGrouper, arXiv 2506.05433). Tokens behind the last one that a row keeps are left out, and so are rows that
keep none. A unit is never split, so a loss sees whole rows.
"""

import flax.struct
import jax.numpy as jnp
from jax import lax

from rollout_jax.types import Array


@flax.struct.dataclass
class Places:
  """What a forward must know of the token at each place of R packed rows of L."""

  position_RL: Array  # int32, its index in its own sequence
  segment_RL: Array  # int32, its unit, which sees itself alone; 0 is padding
  # int32, 0 for a prompt and n for the n-th answer, which sees the prompt and itself; None where no prompt is shared
  branch_RL: Array | None = None
  before_RL: Array | None = None  # int32, the place of the token before it; None where that is always the place before


@flax.struct.dataclass
class Layout:
  """Which token of a batch [B, T] stands at each place. A row of zeros is empty."""

  token_RL: Array  # int32, 1 + its index in [B * T]; 0 for none
  places: Places

  def take(self, x_BT: Array) -> Array:
    """What belongs to the token at each place, [R, L]; zero where there is none."""
    return jnp.pad(x_BT.reshape(-1), (1, 0))[self.token_RL]

  def put(self, x_RL: Array, shape_BT: tuple[int, int]) -> Array:
    """The reverse: [B, T], zero for tokens without a place."""
    flat_n = jnp.zeros(1 + shape_BT[0] * shape_BT[1], x_RL.dtype)
    return flat_n.at[self.token_RL].set(x_RL)[1:].reshape(shape_BT)


def cuts(keep_BT: Array) -> Array:
  """How many of its first tokens a row needs, [B]: up to the last one that is kept."""
  return jnp.max(jnp.where(keep_BT > 0, jnp.arange(1, keep_BT.shape[1] + 1), 0), axis=1)


def pack_rows(prompt_B: Array, cut_B: Array, width: int, length: int, together: int = 1) -> Layout:
  """The layout of rows of `width` tokens, of which each needs the first cut_B (none if 0), prompt_B of them its prompt.

  With `together` above 1, so many neighbours share a prompt. `length` must have room for any unit. As many rows as units.
  """
  prompt_Ug, cut_Ug = prompt_B.reshape(-1, together), cut_B.reshape(-1, together)
  answer_Ug = jnp.maximum(cut_Ug - prompt_Ug, 0)
  prompt_U = jnp.max(jnp.where(answer_Ug > 0, prompt_Ug, 0), axis=1)
  units = len(prompt_U)
  row_U, start_U = first_fit(prompt_U + jnp.sum(answer_Ug, axis=1), length)
  first_Ug = (
    (start_U + prompt_U)[:, None] + jnp.cumsum(answer_Ug, axis=1) - answer_Ug
  )  # place of an answer's first token
  leads_Ug = (jnp.cumsum(answer_Ug > 0, axis=1) == 1) & (answer_Ug > 0)  # the row whose prompt stands for all

  index_11T = jnp.arange(width)[None, None, :]
  answer_UgT = (index_11T >= prompt_Ug[:, :, None]) & (index_11T < cut_Ug[:, :, None])
  prompt_UgT = (index_11T < prompt_Ug[:, :, None]) & leads_Ug[:, :, None]
  place_UgT = jnp.where(answer_UgT, (first_Ug - prompt_Ug)[:, :, None] + index_11T, start_U[:, None, None] + index_11T)
  place_UgT = jnp.where(answer_UgT | prompt_UgT, row_U[:, None, None] * length + place_UgT, units * length)
  number_n = jnp.arange(1, place_UgT.size + 1, dtype=jnp.int32)
  token_RL = jnp.zeros(units * length, jnp.int32).at[place_UgT.reshape(-1)].set(number_n, mode='drop')
  token_RL = token_RL.reshape(units, length)

  there_RL, row_RL = token_RL > 0, jnp.maximum(token_RL - 1, 0) // width
  position_RL = jnp.where(there_RL, jnp.maximum(token_RL - 1, 0) % width, 0)
  places = Places(position_RL, jnp.where(there_RL, row_RL // together + 1, 0))
  if together > 1:
    asked_RL = position_RL < prompt_B[row_RL]
    last_U = start_U + prompt_U - 1
    at_RL = jnp.arange(length)[None, :] - 1
    before_RL = jnp.where(position_RL == prompt_B[row_RL], last_U[row_RL // together], at_RL)
    places = places.replace(
      branch_RL=jnp.where(asked_RL, 0, row_RL % together + 1),
      before_RL=jnp.where(there_RL, jnp.maximum(before_RL, 0), 0),
    )
  return Layout(token_RL, places)


def first_fit(length_U: Array, room: int) -> tuple[Array, Array]:
  """The row and start of each unit: the first row with `room` for it, the longest unit first. Used rows come first."""
  order_U = jnp.argsort(-length_U, stable=True)

  def place(used_R: Array, length: Array) -> tuple[Array, tuple[Array, Array]]:
    row = jnp.argmax(used_R + length <= room)
    return used_R.at[row].add(length), (row, used_R[row])

  _, (row_U, start_U) = lax.scan(place, jnp.zeros(len(length_U), jnp.int32), length_U[order_U].astype(jnp.int32))
  back_U = jnp.zeros_like(order_U).at[order_U].set(jnp.arange(len(order_U)))
  return row_U[back_U].astype(jnp.int32), start_U[back_U].astype(jnp.int32)
