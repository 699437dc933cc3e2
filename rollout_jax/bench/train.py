"""The training step: what packing, shared prompts, chunked logits and rematerialisation cost and save.

Each run is one training step on the same 128 rows (16 prompts of 32 tokens, 8 answers each, log-normal lengths of
coefficient of variation 1, mean 32, up to 128 tokens) with every row kept, or half of the groups without signal. `padded`
gives each row a row of its own at full length, as a batch without packing has it.

tok/s     kept tokens per second of the step          x padded  how many times that of the padded batch
rows      packed rows, of `length` places             filled    share of their places that hold a token
temp MiB  memory that the compiled step needs beside its arguments and results
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rollout_jax.bench.timing import Job, interleave
from rollout_jax.bench.workloads import PROMPT, lognormal, policy_and_params
from rollout_jax.curricula import uniform
from rollout_jax.distribution import distribution
from rollout_jax.losses import ppo_clip
from rollout_jax.losses.aggregation import row_weight
from rollout_jax.mesh import make_mesh
from rollout_jax.models.transformer import Policy
from rollout_jax.training.optimizer import optimizer
from rollout_jax.training.packing import Layout, Places
from rollout_jax.training.score import Scorer, scorer
from rollout_jax.training.state import init_state
from rollout_jax.training.step import Objective, Schedule, make_train_step
from rollout_jax.transforms import chain as chains
from rollout_jax.transforms import combine_rewards, drop_degenerate, group_advantage
from rollout_jax.types import Array, Outcome, PyTree, RolloutBatch, Source, Stop

PROMPTS, GROUP, ANSWER = 16, 8, 128
T = PROMPT + ANSWER
TOKENS = 2048  # places of a microbatch

# The scorer's options of each run, and whether half of the groups are without signal.
RUNS: Mapping[str, tuple[dict[str, Any], bool]] = {
  'padded': ({}, False),
  'packed': (dict(length=2 * T), False),
  'packed, half dead': (dict(length=2 * T), True),
  'packed, logits 64': (dict(length=2 * T, chunk=64), False),
  'packed, logits 64, remat layers': (dict(length=2 * T, chunk=64, remat='layers'), False),
  'packed, shared prompts': (dict(length=PROMPT + GROUP * ANSWER, together=GROUP), False),
}


def train(dtype: str, repeats: int) -> list[dict[str, Any]]:
  """The rows of the table."""
  policy, params = policy_and_params(dtype)
  jobs, memory, batches = {}, {}, {}
  for name, (options, half) in RUNS.items():
    make = _padded if name == 'padded' else scorer
    step, start = training_step(
      policy, make(policy, distribution(), **{'length': T} | options), options.get('length', T)
    )
    batches[name] = batch(half)
    with jax.set_mesh(make_mesh((1, 1, 1))):
      compiled = step.lower(jax.eval_shape(start, params), {}, batches[name]).compile()
    memory[name] = compiled.memory_analysis().temp_size_in_bytes
    run = lambda state, step=step, name=name: step(state, {}, batches[name])[1][0]
    jobs[name] = Job(run, functools.partial(start, params))
  timings = interleave(jobs, repeats)
  kept = {name: float(each.keep_PGT[informative(each)].sum()) for name, each in batches.items()}
  rate = {name: kept[name] / timing.median for name, timing in timings.items()}
  return [
    {
      'run': name,
      'seconds': timing.median,
      'range': [timing.best, max(timing.seconds)],
      'kept': kept[name],
      'tok/s': rate[name],
      'x padded': rate[name] / rate['padded'],
      'rows': float(timing.result['packing/rows'].value()),
      'filled': float(timing.result['packing/filled'].value()),
      'temp MiB': memory[name] / 2**20,
      'compile': timing.compile_seconds,
    }
    for name, timing in timings.items()
  ]


def training_step(policy: Policy, scoring: Scorer, length: int) -> tuple[Callable, Callable[[PyTree], PyTree]]:
  """GRPO with one update by AdamW, jitted, and the function params -> state."""
  chain, curriculum = chains.chain(combine_rewards(), drop_degenerate(), group_advantage()), uniform(PROMPTS, PROMPTS)
  tx = optimizer(
    'adamw', learning_rate=1e-5, warmup=0, decay='constant', decay_steps=1, decay_to=1.0, clip=1.0, options={}
  )
  step = make_train_step(
    scorer=scoring,
    chain=chain,
    objective=Objective(ppo_clip(), row_weight('token_mean', 'kept', constant=1.0)),
    curriculum=curriculum,
    tx=tx,
    schedule=Schedule(1, 1, max(TOKENS // length, 1), seed=0),
    score_proximal=False,
    score_reference=False,
  )
  start = jax.jit(lambda params: init_state(jax.tree.map(jnp.copy, params), tx, chain.init(), curriculum.init()))
  return jax.jit(step, donate_argnums=0), start


def _padded(policy: Policy, sampling, *, length: int) -> Scorer:
  """A scorer that gives every live row a row of its own, at full length."""
  packing = scorer(policy, sampling, length=length)

  def layout(prompt_B: Array, cut_B: Array, width: int) -> Layout:
    index_BT = jnp.arange(len(cut_B) * width, dtype=jnp.int32).reshape(-1, width)
    live_B1 = (cut_B > 0)[:, None]
    position_BT = jnp.broadcast_to(jnp.arange(width)[None, :], index_BT.shape)
    return Layout(jnp.where(live_B1, index_BT + 1, 0), Places(position_BT, jnp.where(live_B1, 1, 0) + 0 * index_BT))

  return packing._replace(layout=layout)


def batch(half_dead: bool) -> RolloutBatch:
  """The rows; half of each group is right, but with `half_dead` no row of every other group is."""
  rng = np.random.default_rng(0)
  shape = PROMPTS, GROUP, T
  length_PG = PROMPT + np.array(lognormal(PROMPTS * GROUP, mean=32, cv=1.0, most=ANSWER)).reshape(PROMPTS, GROUP)
  place_T = np.arange(T)
  real_PGT = place_T < length_PG[:, :, None]
  asked_PGT = np.broadcast_to(place_T < PROMPT, shape)
  tokens_PGT = rng.integers(1, 1024, shape)
  tokens_PGT = np.where(asked_PGT, tokens_PGT[:, :1], tokens_PGT)
  decoded_PGT = real_PGT & ~asked_PGT
  correct_PG = np.broadcast_to(np.arange(GROUP) % 2 == 0, (PROMPTS, GROUP)).copy()
  if half_dead:
    correct_PG[1::2] = False
  return RolloutBatch(
    prompt_P=np.arange(PROMPTS, dtype=np.int32),
    visit_P=np.zeros(PROMPTS, np.int32),
    rollout_PG=np.broadcast_to(np.arange(GROUP, dtype=np.int32), (PROMPTS, GROUP)).copy(),
    tokens_PGT=np.where(real_PGT, tokens_PGT, 0).astype(np.int32),
    source_PGT=np.where(real_PGT, np.where(asked_PGT, Source.PROMPT, Source.DECODED), Source.PAD).astype(np.int8),
    behaviour_logp_PGT=np.where(decoded_PGT, -np.log(1024), 0).astype(np.float32),
    version_PGT=np.where(decoded_PGT, 0, -1).astype(np.int32),
    stop_PG=np.full((PROMPTS, GROUP), Stop.LENGTH, np.int8),
    exists_PG=np.ones((PROMPTS, GROUP), bool),
    verdict_PG=np.where(correct_PG, Outcome.CORRECT, Outcome.WRONG).astype(np.int8),
    reward_PG=np.zeros((PROMPTS, GROUP), np.float32),
    stat_PG=np.ones((PROMPTS, GROUP), np.float32),
    keep_PGT=decoded_PGT.astype(np.float32),
    correction_PGT=np.ones(shape, np.float32),
  )


def informative(batch: RolloutBatch) -> np.ndarray:
  """Which groups are neither all right nor all wrong, bool [P]."""
  right_PG = batch.verdict_PG == Outcome.CORRECT
  return right_PG.any(axis=1) & ~right_PG.all(axis=1)
