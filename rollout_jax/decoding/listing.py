"""The list of the decoder's programs: one per function and shape, known before anything runs."""

from collections.abc import Callable

import numpy as np

from rollout_jax.decoding.buckets import Bucket, Ladder
from rollout_jax.decoding.engine import Engine
from rollout_jax.decoding.rows import Packed, prefill_rows, to_device
from rollout_jax.types import PyTree


def listed(ladder: Ladder, prefill: int) -> dict[str, int]:
  """How many programs a loop may need of each of the engine's functions, with `prefill` prompts a prefill at most."""
  buckets, sizes = len(ladder.slots) * len(ladder.lengths), len(prefill_rows(prefill))
  each = dict.fromkeys(('init', 'generate', 'collect'), buckets)
  return {**each, 'prefill': sizes, 'insert': sizes * buckets, 'resize': buckets * (buckets - 1)}


def compile_listed(
  engine: Engine,
  params: PyTree,
  *,
  prefill: int,
  prompt_length: int,
  advance: Callable[[int], None] = lambda programs: None,
) -> None:
  """Compiles all that `listed` counts, by running each on slots without a row. Takes memory for three states meanwhile.

  `advance(n)` hears of every n programs that are ready.
  """
  ladder = engine.ladder
  prefixes = [
    engine.prefill(params, Packed(*np.zeros((3, rows, prompt_length), np.int32))) for rows in prefill_rows(prefill)
  ]
  advance(len(prefixes))
  buckets = [Bucket(slots, length) for slots in ladder.slots for length in ladder.lengths]
  for bucket in buckets:
    state = engine.init(bucket)
    nothing = to_device([], np.zeros((0, 2), np.uint32), bucket.slots, ladder.lengths[-1], 0)
    for prefix in prefixes:
      state = engine.insert(state, prefix, [], [], nothing)
    state, _ = engine.generate(params, 0, state, 0, 0)
    engine.collect(state, [])
    for other in buckets:
      if other != bucket:
        engine.resize(state, other, [])
    advance(3 + len(prefixes) + len(buckets) - 1)
