"""What is done to the decoder's slots, as pure functions; `engine` jits them.

A row's last known token is always fed by the next decode step, which stores its keys and values and draws the token
behind it. So a prefill only fills the cache, one prefix serves any number of slots, and resuming is a prefill too.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rollout_jax import mesh as meshes
from rollout_jax.decoding.rows import Rows
from rollout_jax.decoding.stopping import stop_reason
from rollout_jax.distribution import Distribution
from rollout_jax.models.cache import AXES as CACHE_AXES
from rollout_jax.models.cache import Cache
from rollout_jax.models.transformer import Policy
from rollout_jax.types import Array, PyTree, Source, Stop


@flax.struct.dataclass
class DecodeState:
  """All slots. A free slot (not live) stands still: nothing of it is written until the next insert writes all of it."""

  cache: Cache
  tokens_ST: Array  # int32
  source_ST: Array  # int8, Source
  logp_ST: Array  # float32
  version_ST: Array  # int32
  cursor_S: Array  # int32, tokens in the row so far: where the next one is written
  limit_S: Array  # int32, cursor at which the row must stop
  key_S2: Array  # uint32, row keys
  live_S: Array  # bool
  stop_S: Array  # int8, Stop


@flax.struct.dataclass
class Prefix:
  """Keys and values of R prompts of up to L tokens, each to be inserted into any number of slots."""

  cache: Cache


class Status(NamedTuple):
  """What the host sees after each chunk."""

  live_S: Array
  length_S: Array


def empty(policy: Policy, slots: int, length: int) -> DecodeState:
  """All slots free."""
  return DecodeState(
    cache=policy.new_cache(slots, length),
    tokens_ST=jnp.zeros((slots, length), jnp.int32),
    source_ST=jnp.full((slots, length), Source.PAD, jnp.int8),
    logp_ST=jnp.zeros((slots, length), jnp.float32),
    version_ST=jnp.full((slots, length), -1, jnp.int32),
    cursor_S=jnp.zeros(slots, jnp.int32),
    limit_S=jnp.zeros(slots, jnp.int32),
    key_S2=jnp.zeros((slots, 2), jnp.uint32),
    live_S=jnp.zeros(slots, bool),
    stop_S=jnp.full(slots, Stop.NONE, jnp.int8),
  )


def prefill(policy: Policy, params: PyTree, tokens_RL: Array) -> Prefix:
  """Keys and values of every token. Those at and behind a row's last token are written again before they are read."""
  R, L = tokens_RL.shape
  position_RL = jnp.broadcast_to(jnp.arange(L)[None, :], (R, L))
  _, cache = policy.hidden(params, tokens_RL, position_RL, cache=policy.new_cache(R, L))
  return Prefix(cast(Cache, cache))


def insert(state: DecodeState, prefix: Prefix, take_J: Array, slot_J: Array, rows: Rows) -> DecodeState:
  """Row j enters slot slot_J[j] with the keys and values of prefix row take_J[j]."""
  T = state.tokens_ST.shape[1]
  row_S = row_of_slot(state, slot_J)
  cache = jax.tree.map(lambda x: x[take_J[row_S]], prefix.cache)
  cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, T - x.shape[2]), (0, 0))), cache)
  return enter(state, row_S >= 0, cache, jax.tree.map(lambda x: x[row_S], rows))


def resume(policy: Policy, params: PyTree, state: DecodeState, rows: Rows, slot_J: Array) -> DecodeState:
  """Row j enters slot slot_J[j] behind a prefill of its whole past, computed where the slot is."""
  row_S = row_of_slot(state, slot_J)
  row_by_slot = jax.tree.map(lambda x: x[row_S], rows)
  return enter(state, row_S >= 0, prefill(policy, params, row_by_slot.tokens_JT).cache, row_by_slot)


def row_of_slot(state: DecodeState, slot_J: Array) -> Array:
  """Which row enters each slot, [S]; -1 for none."""
  return jnp.full(state.live_S.shape, -1).at[slot_J].set(jnp.arange(len(slot_J)), mode='drop')


def enter(state: DecodeState, enters_S: Array, cache: Cache, rows: Rows) -> DecodeState:
  """Row s enters slot s where `enters_S`. Writes all of the slot: the previous tenant's values are still there."""

  def place(old, entering):
    return jnp.where(enters_S.reshape(enters_S.shape + (1,) * (old.ndim - 1)), entering, old)

  return DecodeState(
    cache=jax.tree.map(place, state.cache, cache),
    tokens_ST=place(state.tokens_ST, rows.tokens_JT),
    source_ST=place(state.source_ST, rows.source_JT),
    logp_ST=place(state.logp_ST, rows.logp_JT),
    version_ST=place(state.version_ST, rows.version_JT),
    cursor_S=place(state.cursor_S, rows.length_J),
    limit_S=place(state.limit_S, rows.limit_J),
    key_S2=place(state.key_S2, rows.key_J2),
    live_S=state.live_S | enters_S,
    stop_S=place(state.stop_S, rows.stop_J),
  )


def generate(
  policy: Policy,
  distribution: Distribution,
  end_tokens: tuple[int, ...],
  params: PyTree,
  version: Array,
  state: DecodeState,
  steps: Array,
  until_free: Array,
) -> tuple[DecodeState, Status]:
  """A chunk of decode steps inside one program."""
  S, T = state.tokens_ST.shape
  put = jax.vmap(lambda row_T, at, value: row_T.at[at].set(value, mode='drop'))
  enough = jnp.minimum(until_free, S)

  def step(carry):
    count, s = carry
    fed_S = jnp.maximum(s.cursor_S - 1, 0)
    hidden_SWD, cache = policy.hidden(
      params, jnp.take_along_axis(s.tokens_ST, fed_S[:, None], axis=1), fed_S[:, None], cache=s.cache
    )
    token_S, logp_S = distribution.draw(policy.logits(params, hidden_SWD[:, 0]), s.key_S2, s.cursor_S)
    at_S = jnp.where(s.live_S, s.cursor_S, T)  # T is dropped: free slots stand still
    cursor_S = s.cursor_S + s.live_S
    stop_S = jnp.where(s.live_S, stop_reason(token_S, cursor_S, s.limit_S, end_tokens), s.stop_S)
    return count + 1, dataclasses.replace(
      s,
      cache=cache,
      tokens_ST=put(s.tokens_ST, at_S, token_S),
      logp_ST=put(s.logp_ST, at_S, logp_S),
      cursor_S=cursor_S,
      live_S=s.live_S & (stop_S == Stop.NONE),
      stop_S=stop_S,
    )

  def goes_on(carry):
    return (carry[0] < steps) & ((~carry[1].live_S).sum() < enough)

  after = jax.lax.while_loop(goes_on, step, (jnp.int32(0), state))[1]
  index_1T = jnp.arange(T)[None, :]
  drawn_ST = (index_1T >= state.cursor_S[:, None]) & (index_1T < after.cursor_S[:, None])
  after = dataclasses.replace(
    after,
    source_ST=jnp.where(drawn_ST, Source.DECODED, after.source_ST).astype(jnp.int8),
    version_ST=jnp.where(drawn_ST, version, after.version_ST),
  )
  return after, Status(after.live_S, after.cursor_S)


def collect(state: DecodeState, slot_J: Array) -> Rows:
  """What stands in the slots; entries without a slot are zero."""
  matrices = state.tokens_ST, state.source_ST, state.logp_ST, state.version_ST
  vectors = state.cursor_S, state.limit_S, state.key_S2, state.stop_S
  return Rows(*(x.at[slot_J].get(mode='fill', fill_value=0) for x in (*matrices, *vectors)))


def release(state: DecodeState, slot_J: Array) -> DecodeState:
  """Frees the slots. Their rows stay where they are until an insert overwrites them."""
  freed_S = jnp.zeros(state.live_S.shape, bool).at[slot_J].set(True, mode='drop')
  return dataclasses.replace(
    state,
    cursor_S=jnp.where(freed_S, 0, state.cursor_S),
    live_S=state.live_S & ~freed_S,
    stop_S=jnp.where(freed_S, Stop.NONE, state.stop_S).astype(jnp.int8),
  )


def park(state: DecodeState, slot_J: Array) -> tuple[DecodeState, Rows]:
  """Frees the slots and gives their rows back."""
  return release(state, slot_J), collect(state, slot_J)


def shardings(empty: Callable[[], DecodeState], mesh: Mesh) -> DecodeState:
  """Where a state lives: slots over the batch axes, key/value heads over `tensor`."""

  def place(x):
    axes = CACHE_AXES if x.ndim == len(CACHE_AXES) else ('slots',) + (None,) * (x.ndim - 1)
    return meshes.sharding(mesh, axes, x.shape)

  return jax.tree.map(place, jax.eval_shape(empty))
