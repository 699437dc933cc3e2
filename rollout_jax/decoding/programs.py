"""What is done to the decoder's slots, as pure functions; `engine` jits them.

A row's last known token is always fed by the next decode step, which stores its keys and values and draws the token
behind it. So a prefill only fills the cache, one prefix serves any number of slots, and resuming is a prefill too.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from rollout_jax import mesh as meshes
from rollout_jax.decoding.buckets import Bucket
from rollout_jax.decoding.rows import Packed, Rows
from rollout_jax.decoding.stopping import stop_reason
from rollout_jax.distribution import Distribution
from rollout_jax.models.cache import AXES as CACHE_AXES
from rollout_jax.models.cache import Cache
from rollout_jax.models.transformer import Policy
from rollout_jax.types import Array, PyTree, Source, Stop


@flax.struct.dataclass
class DecodeState:
  """All slots. A free slot (not live) stands still: nothing of it is written until the next insert writes all of it.

  Rows have room for T tokens always; the cache holds `length` of them, which may be fewer (see `buckets`).
  """

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

  @property
  def bucket(self) -> Bucket:
    """Its slots, and the tokens that their caches hold."""
    return Bucket(self.live_S.shape[0], self.cache.k[0].shape[2])


@flax.struct.dataclass
class Prefix:
  """Keys and values of prompts packed into R rows of L tokens, each to be inserted into any number of slots."""

  cache: Cache


class Status(NamedTuple):
  """What the host sees after each chunk."""

  live_S: Array
  length_S: Array
  forwards: Array  # decode forwards of the chunk


def empty(policy: Policy, bucket: Bucket, length: int) -> DecodeState:
  """All slots free, for rows of up to `length` tokens."""
  slots = bucket.slots
  return DecodeState(
    cache=policy.new_cache(slots, bucket.length),
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


def prefill(policy: Policy, params: PyTree, packed: Packed) -> Prefix:
  """Keys and values of every token. Those at and behind a prompt's last token are written again before they are read."""
  return Prefix(policy.prefix(params, packed.tokens_RL, packed.position_RL, packed.segment_RL))


def insert(state: DecodeState, prefix: Prefix, take_J: Array, start_J: Array, slot_J: Array, rows: Rows) -> DecodeState:
  """Row j enters slot slot_J[j] with the keys and values of prefix row take_J[j] from its column start_J[j] on."""
  row_S = row_of_slot(state, slot_J)

  def of_slot(x_RKLC: Array) -> Array:
    L = x_RKLC.shape[2]
    behind_RKLC = jnp.pad(x_RKLC, ((0, 0), (0, 0), (0, L), (0, 0)))  # a slice that would reach over the end is moved
    size = (1, x_RKLC.shape[1], L, x_RKLC.shape[3])
    cut = lambda row: lax.dynamic_slice(behind_RKLC, (take_J[row], 0, start_J[row], 0), size)[0]
    return fit(jax.vmap(cut)(row_S), state.bucket.length)

  return enter(state, row_S >= 0, jax.tree.map(of_slot, prefix.cache), jax.tree.map(lambda x: x[row_S], rows))


def resume(policy: Policy, params: PyTree, state: DecodeState, rows: Rows, slot_J: Array) -> DecodeState:
  """Row j enters slot slot_J[j] behind a prefill of its whole past, computed where the slot is."""
  row_S = row_of_slot(state, slot_J)
  row_by_slot = jax.tree.map(lambda x: x[row_S], rows)
  tokens_SL = row_by_slot.tokens_JT[:, : state.bucket.length]
  position_SL = jnp.broadcast_to(jnp.arange(tokens_SL.shape[1])[None, :], tokens_SL.shape)
  return enter(state, row_S >= 0, policy.prefix(params, tokens_SL, position_SL, None), row_by_slot)


def resize(state: DecodeState, slot_S: Array, *, length: int) -> DecodeState:
  """What stood in slot slot_S[s] now stands in slot s, with caches of `length` tokens; no slot (-1) leaves s free."""
  free_S = slot_S < 0

  def take(x: Array) -> Array:
    return x[jnp.maximum(slot_S, 0)]

  moved = jax.tree.map(take, dataclasses.replace(state, cache=None))
  return dataclasses.replace(
    moved,
    cache=jax.tree.map(lambda x: fit(take(x), length), state.cache),
    live_S=moved.live_S & ~free_S,
    stop_S=jnp.where(free_S, Stop.NONE, moved.stop_S).astype(jnp.int8),
    cursor_S=jnp.where(free_S, 0, moved.cursor_S),
  )


def fit(x_SKTC: Array, length: int) -> Array:
  """Keys or values cut or padded to `length` tokens."""
  x_SKTC = x_SKTC[:, :, :length]
  return jnp.pad(x_SKTC, ((0, 0), (0, 0), (0, length - x_SKTC.shape[2]), (0, 0)))


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
  """A chunk of decode steps inside one program. It also ends before a live row outgrows its cache."""
  S, T = state.tokens_ST.shape
  longest = state.bucket.length
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
    count, s = carry
    return (count < steps) & ((~s.live_S).sum() < enough) & ~(s.live_S & (s.cursor_S > longest)).any()

  forwards, after = lax.while_loop(goes_on, step, (jnp.int32(0), state))
  index_1T = jnp.arange(T)[None, :]
  drawn_ST = (index_1T >= state.cursor_S[:, None]) & (index_1T < after.cursor_S[:, None])
  after = dataclasses.replace(
    after,
    source_ST=jnp.where(drawn_ST, Source.DECODED, after.source_ST).astype(jnp.int8),
    version_ST=jnp.where(drawn_ST, version, after.version_ST),
  )
  return after, Status(after.live_S, after.cursor_S, forwards)


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
