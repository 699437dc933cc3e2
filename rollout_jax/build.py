"""From a config to the parts of a run. The only module that reads a ConfigDict; everything below takes plain arguments."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from rollout_jax import curricula, keys, losses, planner, schedulers, tasks, transforms
from rollout_jax.check import check_names, check_numbers, check_pairs, check_sizes, unused_changes
from rollout_jax.decoding.buckets import Ladder, ladder
from rollout_jax.decoding.engine import engine
from rollout_jax.distribution import Distribution, distribution
from rollout_jax.fetch import Fetcher
from rollout_jax.losses.aggregation import row_weight
from rollout_jax.losses.kl import add, kl
from rollout_jax.mesh import make_mesh, replicated, sharding
from rollout_jax.models.tokenizers import Tokenizer, byte, characters
from rollout_jax.models.transformer import Policy, Shape, transformer
from rollout_jax.resolve import bind, resolve
from rollout_jax.rollout.collect import Desk
from rollout_jax.rollout.verify import Verifier
from rollout_jax.schedulers.base import Scheduler
from rollout_jax.tasks.base import Task
from rollout_jax.training.optimizer import optimizer
from rollout_jax.training.score import Scorer, scorer
from rollout_jax.training.sft import Plan
from rollout_jax.training.state import init_state, state_shardings
from rollout_jax.training.step import Objective, Schedule, make_train_step
from rollout_jax.transforms import chain as chains
from rollout_jax.types import Array, ConfigError, Correctness, Curriculum, Transform
from rollout_jax.writers import plain


class Base(NamedTuple):
  """What supervised fine-tuning, training and evaluation share: the task, the policy, and where it lies."""

  task: Task
  tokenizer: Tokenizer
  policy: Policy
  mesh: Mesh
  length: int  # T: tokens of a row


class Parts(NamedTuple):
  """The parts of a run of RL."""

  base: Base
  desk: Desk  # rolls out for training
  greedy: Desk  # rolls out for evaluation, greedily
  sampled: Desk  # rolls out for evaluation, as in training but under keys of its own
  scheduler: Scheduler
  curriculum: Curriculum
  group: int  # G
  capacity: int  # P of a batch
  lag: int  # versions between the policy that samples and the one that trains
  batch_sharding: NamedSharding
  init: Any  # params -> TrainState, jitted
  train_step: Any  # (state, frozen, batch) -> (state, report), jitted
  sample: Any  # curriculum state -> (curriculum state, prompt_P), jitted
  fetcher: Fetcher
  reference: bool  # whether the step reads frozen['reference']
  evaluate_every: int
  checkpoint_every: int
  bad_updates: int
  logged_rows: int
  gap_alarm: float
  memory: list[planner.Item]
  header: Mapping[str, Any]


def build_base(config: ConfigDict) -> Base:
  """Task, tokenizer, policy and mesh. Raises ConfigError where they do not fit."""
  task = bind(resolve(config.task, tasks, 'task'), _section(config, config.task), {})
  tokenizer = byte() if task.alphabet is None else characters(task.alphabet)
  policy = transformer(Shape(vocab_size=tokenizer.vocab_size, **config.model))
  return Base(
    task, tokenizer, policy, make_mesh(config.mesh.train), config.rollout.prompt_length + config.rollout.answer_length
  )


def build_tx(config: ConfigDict) -> optax.GradientTransformation:
  """The optimizer of RL; a decay without a length ends with the run."""
  section = config.optimizer.to_dict()
  del section['bad_updates']
  updates = config.steps * config.epochs * config.minibatches
  section['decay_steps'] = section['decay_steps'] or max(updates - section['warmup'], 1)
  return optimizer(section.pop('name'), **section)


def build_sft(config: ConfigDict) -> tuple[optax.GradientTransformation, Plan]:
  """The optimizer and the plan of supervised fine-tuning: AdamW with warm-up and a cosine decay over all of its steps."""
  sft = config.sft
  tx = optimizer(
    'adamw',
    learning_rate=sft.learning_rate,
    warmup=sft.warmup,
    decay='cosine',
    decay_steps=max(sft.steps - sft.warmup, 1),
    decay_to=sft.decay_to,
    clip=1.0,
    options={'b2': 0.98, 'weight_decay': 0.01},
  )
  return tx, Plan(sft.steps, sft.batch, sft.microbatch, sft.demonstrations, config.seed)


def ingredients(config: ConfigDict) -> Mapping[str, Any]:
  """What a warm start depends on; its folder says so."""
  return plain(
    {
      'task': {'name': config.task, **_section(config, config.task)},
      'model': config.model.to_dict(),
      'sft': config.sft.to_dict(),
      'seed': config.seed,
      'length': config.rollout.prompt_length + config.rollout.answer_length,
      'warm_start': config.warm_start,
    }
  )


def build_verifier(config: ConfigDict) -> Verifier:
  """Starts the verifiers' worker processes; close it when done."""
  v = config.verifier
  return Verifier(
    config.task, _section(config, config.task), workers=v.workers, limit_s=v.limit_s, error_budget=v.error_budget
  )


def build(config: ConfigDict, verifier: Verifier) -> Parts:
  """All parts of a run. Everything that can be refused is refused here, before anything compiles."""
  check_numbers(config)
  check_names(config)
  check_pairs(config)
  base, rollout = build_base(config), config.rollout
  facts = {
    'prompts': rollout.prompts,
    'group': rollout.group,
    'size': base.task.size,
    'length': base.length,
    'prompt_length': rollout.prompt_length,
    'steps': config.steps,
  }
  scheduler = bind(resolve(config.scheduler, schedulers, 'scheduler'), _section(config, config.scheduler), facts)
  curriculum = bind(resolve(config.curriculum, curricula, 'curriculum'), _section(config, config.curriculum), facts)
  members = [bind(resolve(name, transforms, 'transform'), _section(config, name), facts) for name in config.transforms]
  loss = bind(resolve(config.loss, losses, 'loss'), _section(config, config.loss), facts)
  loss = add(loss, kl(**config.kl))
  shards = math.prod(base.mesh.shape[axis] for axis in ('data', 'fsdp'))
  step = math.lcm(shards, config.minibatches)
  capacity = -(-scheduler.capacity // step) * step
  check_sizes(config, base.task, shards)
  updates = config.epochs * config.minibatches
  chains.check(members, loss, (capacity, rollout.group, base.length), updates)

  sampling = distribution(**config.distribution)
  tx = build_tx(config)
  chain = chains.chain(*members)
  scores = chains.reads_score(members, loss, updates)
  together = chain.group_size(rollout.group) if config.share_prompts else 1
  longest = _pack_length(config, base, together)
  train_step = make_train_step(
    scorer=_scorer(config, base, sampling, together, longest),
    chain=chain,
    objective=Objective(
      loss=loss,
      row_weight=_row_weight(config, room=capacity / rollout.prompts),
    ),
    curriculum=curriculum,
    tx=tx,
    schedule=Schedule(config.epochs, config.minibatches, config.microbatch, config.seed),
    score_proximal=scores.proximal,
    score_reference=scores.reference,
  )
  make = lambda params: init_state(params, tx, chain.init(), curriculum.init())
  shardings = state_shardings(base.policy, tx, base.mesh, jax.eval_shape(make, base.policy.shapes))
  everywhere = replicated(base.mesh)
  memory = _memory(config, base, jax.eval_shape(make, base.policy.shapes), shardings, longest, scores.reference)
  fetcher = Fetcher()
  desk = _desk(config, base, sampling, verifier, fetcher, 'rollout')
  return Parts(
    base=base,
    desk=desk,
    greedy=_desk(config, base, distribution(greedy=True), verifier, fetcher, 'greedy'),
    sampled=dataclasses.replace(desk, seed=_seed(config, 'sampled')),
    scheduler=scheduler,
    curriculum=curriculum,
    group=rollout.group,
    capacity=capacity,
    lag=rollout.lag,
    batch_sharding=sharding(base.mesh, ('batch',)),
    init=jax.jit(make, out_shardings=shardings),
    train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, everywhere)),
    sample=jax.jit(
      lambda state: curriculum.sample(state, keys.named(config.seed, 'curriculum')), out_shardings=everywhere
    ),
    fetcher=fetcher,
    reference=scores.reference,
    evaluate_every=config.evaluation.every,
    checkpoint_every=config.checkpoint.every,
    bad_updates=config.optimizer.bad_updates,
    logged_rows=config.log.rollouts,
    gap_alarm=config.log.gap_alarm,
    memory=memory,
    header=_header(config, members, scheduler, curriculum, sampling),
  )


def _pack_length(config: ConfigDict, base: Base, together: int) -> int:
  """Tokens of a packed row, which must have room for the longest unit."""
  longest = base.length + (together - 1) * config.rollout.answer_length
  if config.pack.length and config.pack.length < longest:
    raise ConfigError(
      f'pack.length is {config.pack.length}, but a prompt with its {together} answer(s) may have {longest} tokens: make it '
      f'{longest} or more, or 0 for just that; or lower rollout.answer_length, or set share_prompts=False.'
    )
  return config.pack.length or longest


def _scorer(config: ConfigDict, base: Base, sampling: Distribution, together: int, length: int) -> Scorer:
  return scorer(
    base.policy, sampling, length=length, together=together, chunk=config.pack.logits, remat=config.pack.remat
  )


def _ladder(config: ConfigDict, base: Base) -> Ladder:
  return ladder(
    slots=config.rollout.slots,
    halvings=config.rollout.halvings,
    length=base.length,
    length_step=config.rollout.length_step,
    shards=base.mesh.shape['data'] * base.mesh.shape['fsdp'],
  )


def _memory(
  config: ConfigDict, base: Base, state: Any, placed: Any, length: int, reference: bool
) -> list[planner.Item]:
  """The run's memory. Raises ConfigError if the devices do not have it."""
  items = planner.plan(
    base.policy,
    state,
    placed,
    base.mesh,
    copies=(config.rollout.lag + 1 if config.rollout.lag else 0) + reference,
    ladder=_ladder(config, base),
    training=planner.Training(config.microbatch, length, config.pack.logits, config.pack.remat),
  )
  planner.check(items, planner.room(base.mesh.devices.flat[0]))
  return items


def _row_weight(config: ConfigDict, room: float) -> Callable[[Array, Array], Array]:
  """The aggregation's weight. A constant denominator counts rollout.prompts groups, whatever a batch has `room` for."""
  aggregation = config.aggregation
  weight = row_weight(aggregation.mode, aggregation.denominator, constant=aggregation.constant)
  if aggregation.denominator != 'constant':
    return weight
  return lambda kept_PG, original_PG: weight(kept_PG, original_PG) * room


def _desk(
  config: ConfigDict, base: Base, sampling: Distribution, verifier: Verifier, fetcher: Fetcher, purpose: str
) -> Desk:
  """A desk with an engine of its own: the distribution is compiled into it."""
  r, task, tokenizer = config.rollout, base.task, base.tokenizer
  return Desk(
    engine=engine(
      base.policy,
      sampling,
      ladder=_ladder(config, base),
      prompt_length=r.prompt_length,
      end_tokens=tokenizer.end_tokens,
      mesh=base.mesh,
    ),
    prompt=lambda split, index: tokenizer.encode(task.prompt(split, index).text),
    text=tokenizer.decode,
    verifier=verifier,
    fetcher=fetcher,
    seed=_seed(config, purpose),
    pad=tokenizer.pad,
    length=base.length,
    prompt_length=r.prompt_length,
    budget=lambda request: r.answer_length,
    prefill=r.prefill,
    chunk=r.chunk,
    refill=r.refill,
    delay=config.verifier.delay,
  )


def _seed(config: ConfigDict, purpose: str) -> int:
  """The seed of the row keys of one purpose, so that training and evaluation never share a key."""
  return zlib.crc32(f'{purpose}/{config.seed}'.encode())


def _section(config: ConfigDict, name: str) -> Mapping[str, Any]:
  """The section of a method; a user's own method at a dotted path has one if the config gives it one."""
  section = config.get(name.rpartition('.')[2], None)
  return {} if section is None else section.to_dict()


def _header(
  config: ConfigDict, members: list[Transform], scheduler: Scheduler, curriculum: Curriculum, sampling: Distribution
) -> Mapping[str, Any]:
  """What the run's header says of the methods: each with its correctness class, and the weakest of them, the run's."""
  classes = {member.spec.name: member.spec.correctness.value for member in members}
  classes |= {config.scheduler: scheduler.correctness.value, config.curriculum: curriculum.correctness.value}
  if config.rollout.lag:
    classes['lag'] = 'corrected' if 'tis' in config.transforms else 'empirical'
  return {
    'methods': classes,
    'correctness': max(classes.values(), key=[c.value for c in Correctness].index),
    'sampling': sampling.description,
    'changed_but_unused': unused_changes(config),
  }
