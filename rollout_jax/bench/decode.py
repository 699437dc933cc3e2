"""Decoding: our engine against a static batch of its own, and against what the machine could do at best.

Columns of the table, medians over the repeats:

tok/s        tokens decoded per second of the whole round, prefill included, and the range over the repeats
x static     how many times the static batch's tok/s that is, of the same workload
slot use     tokens / slot-steps, a slot-step being one slot of one decode forward
x bound      slot-steps over slots times the least number of forwards that any order of the rows needs
x live       seconds of the round over (tokens x what a slot-step costs at full occupancy)
prefill      prompt tokens computed / asked for
compile      seconds of tracing and compiling, in no other figure
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_jax import keys
from rollout_jax.bench import limits
from rollout_jax.bench.timing import Job, Timing, interleave
from rollout_jax.bench.workloads import PROMPT, STATIC, Workload, desk, policy_and_params, runner, workloads
from rollout_jax.decoding.rows import pack_prompts, prompt_row, to_device
from rollout_jax.models.transformer import Policy
from rollout_jax.rollout.collect import Desk
from rollout_jax.types import PyTree, Request

FULL = 64  # forwards of the job that measures a slot-step at full occupancy


def decode(dtype: str, names: Sequence[str], repeats: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  """The rows of the table, and the machine's limits with the engine's share of them."""
  policy, params = policy_and_params(dtype)
  jobs, works = {}, {}
  for name, work in ((name, workloads()[name]) for name in names):
    ours = desk(policy, work)
    engines = {'engine': (ours, False), 'static': (desk(policy, work, **STATIC), False)}
    if name == 'ragged':
      engines['longest first'] = (ours, True)
    for engine, (which, longest) in engines.items():
      run = runner(which, params, work, longest_first=longest)
      jobs[f'{name} {engine}'] = Job(lambda _, run=run: run())
      works[f'{name} {engine}'] = work
  equal = workloads()['equal']
  jobs['full'] = full(desk(policy, equal), params, equal)
  jobs['products'] = limits.products(policy, 64)
  jobs['read'] = limits.read(policy, 64, PROMPT + FULL)
  timings = interleave(jobs, repeats)
  step = timings['full'].median / FULL
  rows = [_row(name, work, timings, step / work.slots) for name, work in works.items()]
  return rows, _limits(policy, timings, step)


def full(desk: Desk, params: PyTree, work: Workload) -> Job:
  """`FULL` forwards in which every slot is live, prefill apart."""
  requests = [Request(prompt, 0, g) for prompt in range(len(work.budget_N)) for g in range(work.group)]
  asked = [desk.prompt('train', request.prompt) for request in requests]
  rows = [prompt_row(r, ids, PROMPT + desk.budget(r)) for r, ids in zip(requests, asked, strict=True)]
  packed, places = pack_prompts(asked, len(asked), PROMPT, 0)
  entering = to_device(rows, keys.row_keys(0, requests), work.slots, desk.length, 0)
  bucket = desk.engine.ladder.holding(len(rows), PROMPT + FULL)

  def prepare():
    prefix = desk.engine.prefill(params, packed)
    return desk.engine.insert(desk.engine.init(bucket), prefix, places, range(len(rows)), entering)

  return Job(lambda state: desk.engine.generate(params, 0, state, FULL, work.slots), prepare)


def _row(name: str, work: Workload, timings: Mapping[str, Timing], slot_step: float) -> dict[str, Any]:
  timing = timings[name]
  static = timings[f'{name.split()[0]} static']
  usage = timing.result.usage
  rate = lambda seconds: work.tokens / seconds
  return {
    'run': name,
    'tok/s': rate(timing.median),
    'range': [rate(max(timing.seconds)), rate(timing.best)],
    'x static': static.median / timing.median,
    'forwards': usage.forwards,
    'slot use': usage.decoded / usage.slot_steps,
    'x bound': usage.slot_steps / (work.slots * work.bound),
    'x live': timing.median / (work.tokens * slot_step),
    'prefill': usage.prefill_computed / usage.prefill_requested,
    'compile': timing.compile_seconds,
  }


def _limits(policy: Policy, timings: Mapping[str, Timing], step: float) -> dict[str, Any]:
  products, read = (timings[name].median / limits.STEPS for name in ('products', 'read'))
  return {
    'step_ms': step * 1e3,
    'products_ms': products * 1e3,
    'read_ms': read * 1e3,
    'gflops': limits.flops(policy, 64) / products / 1e9,
    'share_of_floor': (products + read) / step,
    'step_range_ms': [
      float(np.min(timings['full'].seconds)) / FULL * 1e3,
      float(np.max(timings['full'].seconds)) / FULL * 1e3,
    ],
  }
