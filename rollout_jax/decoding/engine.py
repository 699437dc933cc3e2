"""The slot decoder: JetStream's contract (prefill, insert, generate) and what RL adds (collect, park, resume, extend).

S slots of T tokens each. A row enters a free slot, decodes beside strangers until it stops, and is collected; parameters
and policy version are arguments of every call, so new weights need no new engine. What a row samples depends on its key,
its ids and the parameters alone (law 1).

The row's last known token is always fed by the next decode step, which stores its keys and values and draws the token
behind it. So a prefill only fills the cache, one prefix serves any number of slots, and resuming is a prefill too.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rollout_jax import mesh as meshes
from rollout_jax.decoding import rows as rows_lib
from rollout_jax.decoding.rows import Rows
from rollout_jax.decoding.stopping import stop_reason
from rollout_jax.distribution import Distribution
from rollout_jax.models.cache import AXES as CACHE_AXES
from rollout_jax.models.cache import Cache
from rollout_jax.models.transformer import Policy
from rollout_jax.types import Array, ConfigError, PyTree, Source, Stop


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


class Engine(NamedTuple):
  """The decoder as functions. States are donated: use the one that comes back.

  init() -> DecodeState with all slots free.
  prefill(params, tokens_RL) -> Prefix.
  insert(state, prefix, take, slots, rows) -> state. Row j of `rows` enters slot slots[j] with prefix row take[j].
  generate(params, version, state, steps, until_free) -> (state, Status): at most `steps` tokens for each live slot;
    returns earlier once `until_free` slots are free (at once if they already are), or none is live.
  collect(state, slots) -> Rows, on the device; row j is what stands in slot slots[j].
  release(state, slots) -> state with these slots free.
  park(state, slots) -> (state, Rows): collect and release rows that are not finished.
  resume(params, state, rows, slots) -> state: rows of any length enter slots, their past computed anew.
  extend(row, ids) -> row on the host, with a tool's reply behind it, to be resumed.

  `slots`, `take` are host sequences of at most S entries, `rows` comes from `rows.to_device`. `programs` holds the
  jitted functions by name.
  """

  init: Callable[[], DecodeState]
  prefill: Callable[[PyTree, np.ndarray], Prefix]
  insert: Callable[[DecodeState, Prefix, Sequence[int], Sequence[int], Rows], DecodeState]
  generate: Callable[[PyTree, int, DecodeState, int, int], tuple[DecodeState, Status]]
  collect: Callable[[DecodeState, Sequence[int]], Rows]
  release: Callable[[DecodeState, Sequence[int]], DecodeState]
  park: Callable[[DecodeState, Sequence[int]], tuple[DecodeState, Rows]]
  resume: Callable[[PyTree, DecodeState, Rows, Sequence[int]], DecodeState]
  extend: Callable[..., rows_lib.Row]
  programs: dict[str, Callable]


def engine(
  policy: Policy,
  distribution: Distribution,
  *,
  slots: int,
  length: int,
  prompt_length: int,
  end_tokens: Sequence[int],
  mesh: Mesh,
) -> Engine:
  """An engine of `slots` rows of `length` tokens, prompt included; prompts of up to `prompt_length` tokens.

  A row stops at any of `end_tokens`, which stays in the row, or at its limit.
  """
  _check(policy, slots, length, prompt_length, end_tokens)
  whole, placed = meshes.replicated(mesh), state_shardings(policy, slots, length, mesh)
  programs = {
    'init': jax.jit(lambda: empty(policy, slots, length), out_shardings=placed),
    'prefill': jax.jit(lambda params, tokens_RL: prefill(policy, params, tokens_RL)),
    'insert': jax.jit(insert, donate_argnums=0, out_shardings=placed),
    'generate': jax.jit(
      lambda *arguments: generate(policy, distribution, tuple(end_tokens), *arguments),
      donate_argnums=2,
      out_shardings=(placed, whole),
    ),
    'collect': jax.jit(collect, out_shardings=whole),
    'release': jax.jit(release, donate_argnums=0, out_shardings=placed),
    'park': jax.jit(park, donate_argnums=0, out_shardings=(placed, whole)),
    'resume': jax.jit(lambda *arguments: resume(policy, *arguments), donate_argnums=1, out_shardings=placed),
  }

  def call(name, *arguments):
    with jax.set_mesh(mesh):
      return programs[name](*arguments)

  def put(tree):
    return jax.device_put(tree, whole)

  def indices(entries):
    """Host indices as an array of S entries; S stands for none."""
    return put(np.concatenate([np.asarray(entries, np.int32), np.full(slots - len(entries), slots, np.int32)]))

  return Engine(
    init=lambda: call('init'),
    prefill=lambda params, tokens_RL: call('prefill', params, put(tokens_RL)),
    insert=lambda s, prefix, take, to, rows: call('insert', s, prefix, indices(take), indices(to), put(rows)),
    generate=lambda params, version, s, steps, until_free: call(
      'generate', params, put(np.int32(version)), s, put(np.int32(steps)), put(np.int32(until_free))
    ),
    collect=lambda s, of: call('collect', s, indices(of)),
    release=lambda s, of: call('release', s, indices(of)),
    park=lambda s, of: call('park', s, indices(of)),
    resume=lambda params, s, rows, to: call('resume', params, s, put(rows), indices(to)),
    extend=rows_lib.extend,
    programs=programs,
  )


# The programs, before jit.


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
  return Prefix(policy.hidden(params, tokens_RL, position_RL, cache=policy.new_cache(R, L))[1])


def insert(state: DecodeState, prefix: Prefix, take_J: Array, slot_J: Array, rows: Rows) -> DecodeState:
  """Writes all of each given slot: the previous tenant's values are still there."""
  S, T = state.tokens_ST.shape
  row_S = jnp.full(S, -1).at[slot_J].set(jnp.arange(len(slot_J)), mode='drop')  # which row enters each slot
  enters_S = row_S >= 0

  def place(old, incoming, source_S=row_S):
    chosen = incoming.at[source_S].get(mode='clip')
    return jnp.where(enters_S.reshape((S,) + (1,) * (old.ndim - 1)), chosen, old)

  def place_cache(old_SKTC, prefix_RKLC):
    behind = ((0, 0), (0, 0), (0, T - prefix_RKLC.shape[2]), (0, 0))
    return place(old_SKTC, jnp.pad(prefix_RKLC, behind), take_J.at[row_S].get(mode='clip'))

  return DecodeState(
    cache=jax.tree.map(place_cache, state.cache, prefix.cache),
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
  row_S = jnp.arange(S)
  enough = jnp.minimum(until_free, S)

  def step(carry):
    count, s = carry
    fed_S = jnp.maximum(s.cursor_S - 1, 0)
    hidden_SWD, cache = policy.hidden(params, s.tokens_ST[row_S, fed_S][:, None], fed_S[:, None], cache=s.cache)
    token_S, logp_S = distribution.draw(policy.logits(params, hidden_SWD[:, 0]), s.key_S2, s.cursor_S)
    at_S = jnp.where(s.live_S, s.cursor_S, T)  # T is dropped: free slots stand still
    cursor_S = s.cursor_S + s.live_S
    stop_S = jnp.where(s.live_S, stop_reason(token_S, cursor_S, s.limit_S, end_tokens), s.stop_S)
    return count + 1, s.replace(
      cache=cache,
      tokens_ST=s.tokens_ST.at[row_S, at_S].set(token_S, mode='drop'),
      logp_ST=s.logp_ST.at[row_S, at_S].set(logp_S, mode='drop'),
      cursor_S=cursor_S,
      live_S=s.live_S & (stop_S == Stop.NONE),
      stop_S=stop_S,
    )

  def goes_on(carry):
    return (carry[0] < steps) & ((~carry[1].live_S).sum() < enough)

  after = jax.lax.while_loop(goes_on, step, (jnp.int32(0), state))[1]
  index_1T = jnp.arange(T)[None, :]
  drawn_ST = (index_1T >= state.cursor_S[:, None]) & (index_1T < after.cursor_S[:, None])
  after = after.replace(
    source_ST=jnp.where(drawn_ST, Source.DECODED, after.source_ST).astype(jnp.int8),
    version_ST=jnp.where(drawn_ST, version, after.version_ST),
  )
  return after, Status(after.live_S, after.cursor_S)


def collect(state: DecodeState, slot_J: Array) -> Rows:
  """What stands in the slots; entries without a slot are zero."""
  columns = (state.tokens_ST, state.source_ST, state.logp_ST, state.version_ST)
  columns += (state.cursor_S, state.limit_S, state.key_S2, state.stop_S)
  return Rows(*(x.at[slot_J].get(mode='fill', fill_value=0) for x in columns))


def release(state: DecodeState, slot_J: Array) -> DecodeState:
  """Frees the slots. Their rows stay where they are until an insert overwrites them."""
  freed_S = jnp.zeros(state.live_S.shape, bool).at[slot_J].set(True, mode='drop')
  return state.replace(
    cursor_S=jnp.where(freed_S, 0, state.cursor_S),
    live_S=state.live_S & ~freed_S,
    stop_S=jnp.where(freed_S, Stop.NONE, state.stop_S).astype(jnp.int8),
  )


def park(state: DecodeState, slot_J: Array) -> tuple[DecodeState, Rows]:
  """Frees the slots and gives their rows back."""
  return release(state, slot_J), collect(state, slot_J)


def resume(policy: Policy, params: PyTree, state: DecodeState, rows: Rows, slot_J: Array) -> DecodeState:
  """Inserts rows behind a prefill of their whole past."""
  return insert(state, prefill(policy, params, rows.tokens_JT), jnp.arange(len(slot_J)), slot_J, rows)


def state_shardings(policy: Policy, slots: int, length: int, mesh: Mesh) -> DecodeState:
  """Slots over the batch axes, key/value heads over `tensor`."""
  shapes = jax.eval_shape(lambda: empty(policy, slots, length))

  def place(x):
    axes = CACHE_AXES if x.ndim == 4 else ('slots',) + (None,) * (x.ndim - 1)
    return meshes.sharding(mesh, axes, x.shape)

  return jax.tree.map(place, shapes)


def _check(policy: Policy, slots: int, length: int, prompt_length: int, end_tokens: Sequence[int]):
  if slots < 1:
    raise ConfigError(f'rollout.slots must be at least 1, but is {slots}.')
  if not 0 < prompt_length < length:
    raise ConfigError(
      f'rollout.prompt_length ({prompt_length}) must be above 0 and below rollout.length ({length}), which holds prompt '
      'and answer. Raise rollout.length or lower rollout.prompt_length.'
    )
  outside = [token for token in end_tokens if not 0 <= token < policy.shape.vocab_size]
  if outside or not end_tokens:
    raise ConfigError(
      f'End tokens must be one or more ids below the vocabulary size {policy.shape.vocab_size}, but are '
      f'{tuple(end_tokens)}. Change the tokenizer or the model.'
    )
