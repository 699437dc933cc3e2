"""The slot decoder: JetStream's contract (prefill, insert, generate) and what RL adds (collect, park, resume, extend).

S slots of T tokens each. A row enters a free slot, decodes beside strangers until it stops, and is collected. Parameters
and policy version are arguments of every call, so new weights need no new engine. What a row samples depends on its key,
its ids and the parameters alone (law 1).
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rollout_jax import mesh as meshes
from rollout_jax.decoding import programs, rows
from rollout_jax.decoding.programs import DecodeState, Prefix, Status
from rollout_jax.decoding.rows import Rows
from rollout_jax.distribution import Distribution
from rollout_jax.models.transformer import Policy
from rollout_jax.types import ConfigError, PyTree, Row


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

  `slots`, `take` are host sequences of at most S entries, `rows` comes from `rows.to_device`. `programs` are the jitted
  functions by name, for counting what was compiled.
  """

  init: Callable[[], DecodeState]
  prefill: Callable[[PyTree, np.ndarray], Prefix]
  insert: Callable[[DecodeState, Prefix, Sequence[int], Sequence[int], Rows], DecodeState]
  generate: Callable[[PyTree, int, DecodeState, int, int], tuple[DecodeState, Status]]
  collect: Callable[[DecodeState, Sequence[int]], Rows]
  release: Callable[[DecodeState, Sequence[int]], DecodeState]
  park: Callable[[DecodeState, Sequence[int]], tuple[DecodeState, Rows]]
  resume: Callable[[PyTree, DecodeState, Rows, Sequence[int]], DecodeState]
  extend: Callable[[Row, Sequence[int]], Row]
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
  whole = meshes.replicated(mesh)
  empty = functools.partial(programs.empty, policy, slots, length)
  jitted = _jitted(policy, distribution, tuple(end_tokens), empty, whole, programs.shardings(empty, mesh))

  def call(name, *arguments):
    with jax.set_mesh(mesh):
      return jitted[name](*arguments)

  def put(tree):
    return jax.device_put(tree, whole)

  def index(entries):
    """Host indices as an array of S entries; S stands for none."""
    return put(np.concatenate([np.asarray(entries, np.int32), np.full(slots - len(entries), slots, np.int32)]))

  def generate(params, version, state, steps, until_free):
    version, steps, until_free = put((np.int32(version), np.int32(steps), np.int32(until_free)))
    return call('generate', params, version, state, steps, until_free)

  return Engine(
    init=lambda: call('init'),
    prefill=lambda params, tokens_RL: call('prefill', params, put(tokens_RL)),
    insert=lambda state, prefix, take, into, new: call('insert', state, prefix, index(take), index(into), put(new)),
    generate=generate,
    collect=lambda state, chosen: call('collect', state, index(chosen)),
    release=lambda state, chosen: call('release', state, index(chosen)),
    park=lambda state, chosen: call('park', state, index(chosen)),
    resume=lambda params, state, old, into: call('resume', params, state, put(old), index(into)),
    extend=rows.extend,
    programs=jitted,
  )


def _jitted(policy, distribution, end_tokens, empty, whole, placed) -> dict[str, Callable]:
  """The programs of one engine; states live at `placed`, what the host reads at `whole`."""

  def jit(function, *first, donate=(), out=None):
    return jax.jit(functools.partial(function, *first), donate_argnums=donate, out_shardings=out)

  return {
    'init': jit(empty, out=placed),
    'prefill': jit(programs.prefill, policy),
    'insert': jit(programs.insert, donate=0, out=placed),
    'generate': jit(programs.generate, policy, distribution, end_tokens, donate=2, out=(placed, whole)),
    'collect': jit(programs.collect, out=whole),
    'release': jit(programs.release, donate=0, out=placed),
    'park': jit(programs.park, donate=0, out=(placed, whole)),
    'resume': jit(programs.resume, policy, donate=1, out=placed),
  }


def _check(policy: Policy, slots: int, length: int, prompt_length: int, end_tokens: Sequence[int]):
  if slots < 1:
    raise ConfigError(f'rollout.slots must be at least 1, but is {slots}.')
  if not 0 < prompt_length < length:
    raise ConfigError(
      f'rollout.prompt_length ({prompt_length}) must be above 0 and below the {length} tokens of a slot, which holds '
      'prompt and answer. Raise rollout.answer_length or lower rollout.prompt_length.'
    )
  outside = [token for token in end_tokens if not 0 <= token < policy.shape.vocab_size]
  if outside or not end_tokens:
    raise ConfigError(
      f'End tokens must be one or more ids below the vocabulary size {policy.shape.vocab_size}, but are '
      f'{tuple(end_tokens)}. Change the tokenizer or the model.'
    )
