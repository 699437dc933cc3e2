"""Transforms in a row: how they run, and what is checked before anything compiles.

A chain has two halves. Between them the training step packs the kept rows and scores them: the second half begins with
the first member that corrects, or that reads a log-prob which only the score gives. A chain freezes `original_PG`, the
tokens of each row in the loss, before its first member of phase FILTER or later.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rollout_jax import masked
from rollout_jax.types import Array, ConfigError, Loss, Phase, PyTree, Report, RolloutBatch, Spec, Transform

PROXIMAL, REFERENCE = 'proximal_logp_PGT', 'reference_logp_PGT'
SCORES = frozenset({PROXIMAL, REFERENCE})
SINGLE_WRITER = frozenset({'advantage_PGT', 'value_PGT', *SCORES})
FIELDS = {field.name: field.default is None for field in dataclasses.fields(RolloutBatch)}  # name -> filled on the way
# The reward is all zero as collected: a member must write it before another reads it.
COLLECTED = frozenset(name for name, later in FIELDS.items() if not later) - {'reward_PG'}
DTYPES = {
  'int8': ('source_PGT', 'stop_PG', 'verdict_PG'),
  'int32': ('prompt_P', 'visit_P', 'rollout_PG', 'tokens_PGT', 'version_PGT'),
  'bool': ('exists_PG',),
}


def stateless(update: Callable[..., tuple[RolloutBatch, Report]], spec: Spec) -> Transform:
  """A transform of update(batch, **extra) -> (batch, report) that remembers nothing and observes nothing."""

  def with_state(batch: RolloutBatch, state: PyTree, **extra) -> tuple[RolloutBatch, PyTree, Report]:
    batch, report = update(batch, **extra)
    return batch, state, report

  return Transform(init=tuple, update=with_state, observe=lambda batch, state: state, spec=spec)


class Chain(NamedTuple):
  """The members' functions as one; `state` is a tuple with one entry per member.

  init() -> state; before_score and after_score(batch, state, **extra) -> (batch, state, Report), one after the other;
  then observe(batch as collected, state) -> state; reward(batch, state, **extra) -> batch after the REWARD members alone;
  group_size(G) -> rows of a group that are left.
  """

  init: Callable[[], tuple]
  reward: Callable[..., RolloutBatch]
  before_score: Callable[..., tuple[RolloutBatch, tuple, Report]]
  after_score: Callable[..., tuple[RolloutBatch, tuple, Report]]
  observe: Callable[[RolloutBatch, tuple], tuple]
  group_size: Callable[[int], int]


def chain(*members: Transform) -> Chain:
  """The members in this order, unchecked: see `check`."""
  late = [i for i, m in enumerate(members) if m.spec.phase >= Phase.CORRECT or m.spec.reads & SCORES]
  split = late[0] if late else len(members)

  def reward(batch: RolloutBatch, state: tuple, **extra) -> RolloutBatch:
    rewarding = [i for i, m in enumerate(members) if m.spec.phase == Phase.REWARD]
    return run([members[i] for i in rewarding], batch, tuple(state[i] for i in rewarding), extra)[0]

  def before_score(batch: RolloutBatch, state: tuple, **extra) -> tuple[RolloutBatch, tuple, Report]:
    batch, head, report = run(members[:split], batch, state[:split], extra)
    return frozen(batch), (*head, *state[split:]), report

  def after_score(batch: RolloutBatch, state: tuple, **extra) -> tuple[RolloutBatch, tuple, Report]:
    batch, tail, report = run(members[split:], batch, state[split:], extra)
    return batch, (*state[:split], *tail), report

  def observe(batch: RolloutBatch, state: tuple) -> tuple:
    return tuple(m.observe(batch, s) for m, s in zip(members, state, strict=True))

  def group_size(group: int) -> int:
    for member in members:
      group = member.spec.group_size(group)
    return group

  return Chain(lambda: tuple(m.init() for m in members), reward, before_score, after_score, observe, group_size)


def run(members: Sequence[Transform], batch: RolloutBatch, state: tuple, extra: dict):
  """The batch after these members, their states, and one report; dropped/NAME counts the rows that each took out."""
  report: Report = {}
  after: list[PyTree] = []
  for member, before in zip(members, state, strict=True):
    filters = member.spec.phase >= Phase.FILTER
    rows = rows_in_loss(batch)
    batch, new, said = member.update(frozen(batch) if filters else batch, before, **extra)
    if filters:
      said = {**said, f'dropped/{member.spec.name}': masked.count(rows - rows_in_loss(batch))}
    if twice := report.keys() & said.keys():
      raise ConfigError(
        f'transforms: {member.spec.name} and a member before it both report {sorted(twice)}: rename one.'
      )
    after.append(new)
    report |= said
  return batch, tuple(after), report


def rows_in_loss(batch: RolloutBatch) -> Array:
  """Number of rows with a token in the loss."""
  weight_PGT = batch.exists_PG[:, :, None] * batch.keep_PGT * batch.correction_PGT
  return jnp.sum(jnp.any(weight_PGT > 0, axis=2))


def frozen(batch: RolloutBatch) -> RolloutBatch:
  """The batch with `original_PG`, unless it was frozen before."""
  if batch.original_PG is not None:
    return batch
  return batch.replace(original_PG=jnp.sum(batch.keep_PGT, axis=2) * batch.exists_PG)


class Scores(NamedTuple):
  """Which log-probs the training step must compute between the halves."""

  proximal: bool
  reference: bool


def reads_score(members: Sequence[Transform], loss: Loss, updates: int) -> Scores:
  """What must be scored, with so many optimizer updates per batch.

  With one, the proximal log-prob that the loss reads is stop_gradient(learner) and costs no forward.
  """
  read = frozenset().union(*(m.spec.reads for m in members))
  return Scores(
    proximal=PROXIMAL in read or (updates > 1 and PROXIMAL in loss.reads),
    reference=REFERENCE in read | loss.reads,
  )


def check(members: Sequence[Transform], loss: Loss, shape: tuple[int, int, int], updates: int = 1) -> None:
  """Raises ConfigError if these members cannot work on a batch of shape (P, G, T), in this order, with this loss.

  `updates` is the number of optimizer steps per batch.
  """
  if updates > 1 and PROXIMAL not in loss.reads:
    raise ConfigError(
      f'The loss compares with no earlier policy, so it is wrong from the second update on a batch, but epochs * '
      f'minibatches is {updates}. Set both to 1, or use a loss with a ratio, such as ppo_clip.'
    )
  specs = [member.spec for member in members]
  _check_order(specs)
  _check_pairs(specs)
  _check_fields(specs, loss)
  _check_group(specs, shape[1])
  parts = chain(*members)
  extra = {'version': jax.ShapeDtypeStruct((), jnp.int32)}
  jax.eval_shape(lambda batch, extra: _both_halves(parts, batch, extra), _abstract(shape), extra)


def _check_order(specs: Sequence[Spec]) -> None:
  for before, after in zip(specs, specs[1:], strict=False):
    if after.phase < before.phase:
      right = tuple(spec.name for spec in sorted(specs, key=lambda spec: spec.phase))
      phases = ', '.join(phase.name for phase in Phase)
      raise ConfigError(
        f'transforms: {before.name} ({before.phase.name}) stands before {after.name} ({after.phase.name}), but phases '
        f'run in the order {phases}. Write transforms={right}.'
      )


def _check_pairs(specs: Sequence[Spec]) -> None:
  names = [spec.name for spec in specs]
  for spec in specs:
    if names.count(spec.name) > 1:
      raise ConfigError(
        f'transforms: {spec.name} stands {names.count(spec.name)} times; a member works once. Remove it.'
      )
    for other, reason in dict(spec.forbids).items():
      if other in names:
        raise ConfigError(
          f'transforms: {spec.name} and {other} cannot stand in one chain: {reason}. Remove one of them.'
        )


def _check_fields(specs: Sequence[Spec], loss: Loss) -> None:
  provided = COLLECTED | SCORES
  writer: dict[str, str] = {}
  for spec in specs:
    if unknown := (spec.reads | spec.writes) - FIELDS.keys():
      raise ConfigError(f'transforms: {spec.name} reads or writes {sorted(unknown)}, no fields of RolloutBatch.')
    for field in sorted(spec.reads - provided):
      raise ConfigError(f'transforms: {spec.name} reads {field}, which no member before it writes. {_missing(field)}')
    for field in sorted(spec.writes & SINGLE_WRITER):
      if field in writer:
        raise ConfigError(
          f'transforms: {writer[field]} and {spec.name} both write {field}, which has one writer. Remove one of them.'
        )
      writer[field] = spec.name
    provided |= spec.writes
  for field in sorted(loss.reads - provided):
    raise ConfigError(f'transforms: the loss reads {field}, which no member writes. {_missing(field)}')


def _missing(field: str) -> str:
  cure = {'reward_PG': 'combine_rewards', 'advantage_PGT': 'group_advantage'}
  return f'Add a member that does, such as {cure[field]}.' if field in cure else 'Add a member that does.'


def _check_group(specs: Sequence[Spec], group: int) -> None:
  selector = None
  for spec in specs:
    try:
      after = spec.group_size(group)
    except ValueError as error:
      raise ConfigError(f'transforms: {spec.name} cannot work on groups of {group}: {error}.') from error
    if after != group and selector is not None:
      raise ConfigError(
        f'transforms: {selector} and {spec.name} both change the size of a group, and the second would choose from '
        'what the first has left. Remove one of them.'
      )
    selector, group = spec.name if after != group else selector, after


def _both_halves(parts: Chain, batch: RolloutBatch, extra: dict) -> tuple:
  collected, state = batch, parts.init()
  batch, state, before = parts.before_score(batch, state, **extra)
  scored = {name: jnp.zeros(batch.shape, jnp.float32) for name in SCORES}
  batch, state, after = parts.after_score(batch.replace(**scored), state, **extra)
  if twice := before.keys() & after.keys():
    raise ConfigError(f'transforms: two members report {sorted(twice)}: rename one.')
  return batch, parts.observe(collected, state), before | after


def _abstract(shape: tuple[int, int, int]) -> RolloutBatch:
  sizes = dict(zip('PGT', shape, strict=True))
  dtype = {name: kind for kind, names in DTYPES.items() for name in names}

  def leaf(name: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([sizes[axis] for axis in name.rsplit('_', 1)[1]], dtype.get(name, 'float32'))

  return RolloutBatch(**{name: leaf(name) for name, later in FIELDS.items() if not later})
