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
from rollout_jax.decoding.buckets import Bucket, Ladder
from rollout_jax.decoding.programs import DecodeState, Prefix, Status
from rollout_jax.decoding.rows import Packed, Rows
from rollout_jax.distribution import Distribution
from rollout_jax.models.transformer import Policy
from rollout_jax.types import ConfigError, PyTree, Row


class Engine(NamedTuple):
  """The decoder as functions. States are donated: use the one that comes back.

  init(bucket=None) -> DecodeState with all slots free, of this bucket or the largest.
  prefill(params, packed) -> Prefix, of prompts packed by `rows.pack_prompts`.
  insert(state, prefix, places, slots, rows) -> state. Row j of `rows` enters slot slots[j] with the prompt at the row and
    start places[j] of the prefix.
  generate(params, version, state, steps, until_free) -> (state, Status): at most `steps` tokens for each live slot;
    returns earlier once `until_free` slots are free (at once if they already are), none is live, or a row's cache is full.
  collect(state, slots) -> Rows, on the device; row j is what stands in slot slots[j].
  release(state, slots) -> state with these slots free.
  park(state, slots) -> (state, Rows): collect and release rows that are not finished.
  resume(params, state, rows, slots) -> state: rows of any length enter slots, their past computed anew.
  resize(state, bucket, slots) -> state of another bucket, with what stood in slots[j] in slot j. Not donated.
  extend(row, ids) -> row on the host, with a tool's reply behind it, to be resumed.

  `slots`, `places` are host sequences of at most S entries, `rows` comes from `rows.to_device`. `ladder` are the buckets
  there are. `programs` are the jitted functions by name, for counting what was compiled.
  """

  init: Callable[..., DecodeState]
  prefill: Callable[[PyTree, Packed], Prefix]
  insert: Callable[[DecodeState, Prefix, Sequence[tuple[int, int]], Sequence[int], Rows], DecodeState]
  generate: Callable[[PyTree, int, DecodeState, int, int], tuple[DecodeState, Status]]
  collect: Callable[[DecodeState, Sequence[int]], Rows]
  release: Callable[[DecodeState, Sequence[int]], DecodeState]
  park: Callable[[DecodeState, Sequence[int]], tuple[DecodeState, Rows]]
  resume: Callable[[PyTree, DecodeState, Rows, Sequence[int]], DecodeState]
  resize: Callable[[DecodeState, Bucket, Sequence[int]], DecodeState]
  extend: Callable[[Row, Sequence[int]], Row]
  ladder: Ladder
  programs: dict[str, Callable]


def engine(
  policy: Policy,
  distribution: Distribution,
  *,
  ladder: Ladder,
  prompt_length: int,
  end_tokens: Sequence[int],
  mesh: Mesh,
) -> Engine:
  """An engine for rows of as many tokens as the ladder's longest caches, with prompts of up to `prompt_length` of them.

  A row stops at any of `end_tokens`, which stays in the row, or at its limit; without any, at its limit alone.
  """
  _check(policy, ladder, prompt_length, end_tokens)
  whole = meshes.replicated(mesh)
  largest = Bucket(ladder.slots[-1], ladder.lengths[-1])
  empty = functools.partial(programs.empty, policy, length=largest.length)
  placed = programs.shardings(functools.partial(empty, Bucket(ladder.slots[0], largest.length)), mesh)
  jitted = _jitted(policy, distribution, tuple(end_tokens), empty, whole, placed)

  def call(name, *arguments, **static):
    with jax.set_mesh(mesh):
      return jitted[name](*arguments, **static)

  def put(tree):
    return jax.device_put(tree, whole)

  def index(state, entries):
    """Host indices as an array of S entries; S stands for none."""
    slots = state.bucket.slots
    return np.concatenate([np.asarray(entries, np.int32), np.full(slots - len(entries), slots, np.int32)])

  def insert(state, prefix, places, into, new):
    take, start = np.asarray(places, np.int32).reshape(-1, 2).T
    return call('insert', state, prefix, *put((index(state, take), index(state, start), index(state, into), new)))

  def generate(params, version, state, steps, until_free):
    version, steps, until_free = put((np.int32(version), np.int32(steps), np.int32(until_free)))
    return call('generate', params, version, state, steps, until_free)

  def resize(state, bucket, slots):
    order = np.full(bucket.slots, -1, np.int32)
    order[: len(slots)] = slots
    return call('resize', state, put(order), length=bucket.length)

  return Engine(
    init=lambda bucket=None: call('init', bucket=bucket or largest),
    prefill=lambda params, packed: call('prefill', params, put(packed)),
    insert=insert,
    generate=generate,
    collect=lambda state, chosen: call('collect', state, put(index(state, chosen))),
    release=lambda state, chosen: call('release', state, put(index(state, chosen))),
    park=lambda state, chosen: call('park', state, put(index(state, chosen))),
    resume=lambda params, state, old, into: call('resume', params, state, put(old), put(index(state, into))),
    resize=resize,
    extend=rows.extend,
    ladder=ladder,
    programs=jitted,
  )


def _jitted(policy, distribution, end_tokens, empty, whole, placed) -> dict[str, Callable]:
  """The programs of one engine; states live at `placed`, what the host reads at `whole`."""

  def jit(function, *first, donate=(), static=(), out=None):
    return jax.jit(
      functools.partial(function, *first), donate_argnums=donate, static_argnames=static, out_shardings=out
    )

  return {
    'init': jit(empty, static='bucket', out=placed),
    'prefill': jit(programs.prefill, policy),
    'insert': jit(programs.insert, donate=0, out=placed),
    'generate': jit(programs.generate, policy, distribution, end_tokens, donate=2, out=(placed, whole)),
    'collect': jit(programs.collect, out=whole),
    'release': jit(programs.release, donate=0, out=placed),
    'park': jit(programs.park, donate=0, out=(placed, whole)),
    'resume': jit(programs.resume, policy, donate=1, out=placed),
    'resize': jit(programs.resize, static='length', out=placed),
  }


def _check(policy: Policy, ladder: Ladder, prompt_length: int, end_tokens: Sequence[int]):
  length = ladder.lengths[-1]
  if ladder.slots[0] < 1:
    raise ConfigError(f'rollout.slots must be at least 1, but is {ladder.slots[-1]}.')
  if not 0 < prompt_length < length:
    raise ConfigError(
      f'rollout.prompt_length ({prompt_length}) must be above 0 and below the {length} tokens of a slot, which holds '
      'prompt and answer. Raise rollout.answer_length or lower rollout.prompt_length.'
    )
  if any(not 0 <= token < policy.shape.vocab_size for token in end_tokens):
    raise ConfigError(
      f'End tokens must be ids below the vocabulary size {policy.shape.vocab_size}, but are '
      f'{tuple(end_tokens)}. Change the tokenizer or the model.'
    )
