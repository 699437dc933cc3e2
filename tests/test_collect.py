"""The host loop: the same tokens whatever the slots, chunks and refills (laws 1 and 2), and verdicts of the right rows."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import base
from rollout_jax import warm_start
from rollout_jax.build import build, build_verifier
from rollout_jax.rollout.collect import collect
from rollout_jax.schedulers import dynamic, synchronous
from rollout_jax.schedulers.base import Plan
from rollout_jax.tasks import product
from rollout_jax.types import Outcome, Stop, Verdict
from tests import tiny
from tests.overlay import shrink

PROMPTS = 6


@pytest.fixture(scope='module')
def desks(verifier):
  """Desks over one verifier, by what a test varies of the config."""
  made = {}

  def make(**changes):
    name = str(changes)
    if name not in made:
      made[name] = build(shrink(base.get_config(), **changes), verifier)
    return made[name]

  return make


def roll_out(parts, desk=None, scheduler=None, params=None):
  """One round of PROMPTS prompts and tiny.G rollouts each; (round, numbers that `progress` was told)."""
  scheduler = synchronous(PROMPTS, tiny.G) if scheduler is None else scheduler
  told, at = [], iter(range(1000))
  with jax.set_mesh(parts.base.mesh):
    params = warm_start.random_params(parts.base, 0) if params is None else params
    _, result = collect(
      parts.desk if desk is None else desk,
      params,
      7,
      split='train',
      group=tiny.G,
      scheduler=scheduler,
      state=scheduler.init(),
      draw=lambda n: [(next(at), 0) for _ in range(n)],
      progress=told.append,
    )
  return result, told


def same(first, second):
  """Rows whose ids differ between two rounds."""
  pairs = [
    (a, b) for x, y in zip(first.groups, second.groups, strict=True) for a, b in zip(x.rows, y.rows, strict=True)
  ]
  assert all(a.request == b.request for a, b in pairs)
  return sum(a.tokens_T.tolist() != b.tokens_T.tolist() for a, b in pairs)


@pytest.mark.parametrize(
  'changes',
  [
    dict(rollout__slots=16),
    dict(rollout__halvings=0),
    dict(rollout__halvings=3, rollout__length_step=8, rollout__chunk=3),
    dict(rollout__chunk=3),
    dict(rollout__refill=8),
    dict(rollout__prefill=2),
    dict(verifier__delay=5),
  ],
  ids=str,
)
def test_same_tokens_whatever_the_slots_chunks_refills_and_delays(desks, changes):
  plain, _ = roll_out(desks())
  other, _ = roll_out(desks(**changes))
  assert same(plain, other) <= 1  # law 1: a draw within 1e-4 of a boundary may fall on the other side
  assert other.usage.decoded == pytest.approx(plain.usage.decoded, abs=tiny.T)


def test_refilling_slots_gives_the_same_tokens_with_fewer_forwards_than_static_batches(desks):
  """Law 2 for continuous batching: a static batch waits for its longest row before the next one starts."""
  many = synchronous(2 * PROMPTS, tiny.G)
  refilled, _ = roll_out(desks(rollout__refill=1), scheduler=many)
  static, _ = roll_out(desks(rollout__refill=tiny.SLOTS, rollout__chunk=1000), scheduler=many)
  assert same(refilled, static) <= 1
  assert refilled.usage.forwards < static.usage.forwards


def test_a_group_that_enters_together_is_prefilled_once(desks):
  result, _ = roll_out(desks())
  usage = result.usage
  asked = sum(len(row.tokens_T) - row.decoded for group in result.groups for row in group.rows)
  assert usage.prefill_requested == asked and usage.prefill_computed <= asked / 2


def test_the_books_of_a_round_balance(desks):
  result, told = roll_out(desks())
  rows = [row for group in result.groups for row in group.rows]
  assert result.usage.issued == len(rows) == sum(told) == PROMPTS * tiny.G
  assert result.usage.decoded == sum(row.decoded for row in rows)
  assert all(row.stop in (Stop.EOS, Stop.LENGTH) for row in rows)
  assert all(set(row.version_T[row.source_T == 2].tolist()) == {7} for row in rows)
  assert result.usage.forwards * tiny.SLOTS >= result.usage.slot_steps >= result.usage.decoded


def test_few_rows_decode_in_fewer_slots(desks):
  """Law 8: where a tail of long rows runs, a forward costs less. Each row ends within the budget of its own."""
  budget = lambda request: 30 if request.rollout == request.prompt == 1 else 3

  def tailed(halvings):
    parts = desks(rollout__halvings=halvings, rollout__chunk=4)
    result, _ = roll_out(parts, desk=dataclasses.replace(parts.desk, budget=budget))
    assert all(row.decoded <= budget(row.request) for group in result.groups for row in group.rows)
    return result

  whole, halved = tailed(0), tailed(2)
  assert same(whole, halved) <= 1
  assert whole.usage.slot_steps == whole.usage.forwards * tiny.SLOTS
  assert halved.usage.slot_steps < 0.75 * whole.usage.slot_steps


def test_every_row_gets_the_verdict_of_its_own_text(desks):
  parts = desks()
  result, _ = roll_out(parts)
  task = product(**shrink(base.get_config()).product.to_dict())
  for group in result.groups:
    for row, verdict in zip(group.rows, group.verdicts, strict=True):
      assert verdict == task.verify(task.prompt('train', group.prompt), parts.desk.text(row.answer_T))


def test_dynamic_refills_until_its_bound_and_keeps_the_order_of_drawing(desks):
  result, _ = roll_out(desks(), scheduler=dynamic(PROMPTS, tiny.G, max_factor=2.0))
  assert [group.prompt for group in result.groups] == list(range(2 * PROMPTS))  # an untrained policy has no signal


@pytest.mark.parametrize('delay', [0, 1, 3])
def test_a_verdict_reaches_the_scheduler_exactly_delay_chunks_after_the_row_came_down(desks, delay):
  parts, scheduler, chunks, settled = desks(verifier__delay=delay), synchronous(PROMPTS, tiny.G), [], []

  def generate(*arguments):
    chunks.append(None)
    return parts.desk.engine.generate(*arguments)

  def settle(state, position, verdict):
    settled.append(len(chunks))
    return scheduler.settle(state, position, verdict)

  desk = dataclasses.replace(parts.desk, engine=parts.desk.engine._replace(generate=generate))
  result, told = roll_out(parts, desk, scheduler._replace(settle=settle))  # told: rows that came down, look by look
  most = len(chunks)
  assert settled == [min(look + delay, most) for look, rows in enumerate(told, 1) for _ in range(rows)]
  assert result.usage.chunks == most


def hostile(*, heldout: int = 8):
  """A user's task by dotted path whose verifier raises on one prompt, hangs on another and talks nonsense on a third."""
  task = product(max_number=30, heldout=heldout)

  def verify(prompt, text):
    number = {task.prompt('train', i).text: i for i in range(3)}.get(prompt.text)
    if number == 0:
      raise ValueError('no idea')
    while number == 1:
      pass
    return 'yes' if number == 2 else Verdict(Outcome.WRONG)

  return task._replace(verify=verify)


def test_a_verifier_that_raises_hangs_or_talks_nonsense_costs_those_rows_only():
  config = shrink(
    base.get_config(), task='tests.test_collect.hostile', verifier__limit_s=0.3, verifier__error_budget=0.9
  )
  with build_verifier(config) as verifier:
    parts = build(config, verifier)
    result, _ = roll_out(parts)
  outcomes = {group.prompt: {verdict.outcome for verdict in group.verdicts} for group in result.groups}
  assert outcomes == {
    0: {Outcome.ERROR},
    1: {Outcome.TIMEOUT},
    2: {Outcome.ERROR},
    **{i: {Outcome.WRONG} for i in (3, 4, 5)},
  }
  assert 'no idea' in result.groups[0].verdicts[0].detail


def test_sampled_and_scored_log_probs_agree(desks):
  from tests import machines

  parts = desks()
  result, _ = roll_out(parts)
  params = warm_start.random_params(parts.base, 0)
  rows = [row for group in result.groups for row in group.rows]
  tokens_BT = np.stack([np.pad(row.tokens_T, (0, tiny.T - len(row.tokens_T))) for row in rows])
  for row, logp_T in zip(rows, machines.full_forward(params, tokens_BT), strict=True):
    np.testing.assert_allclose(row.logp_T, np.where(row.source_T == 2, logp_T[: len(row.tokens_T)], 0), atol=1e-4)


def test_a_scheduler_that_does_nothing_is_a_clear_error(desks):
  stuck = synchronous(PROMPTS, tiny.G)._replace(plan=lambda state: (state, Plan()))
  with pytest.raises(RuntimeError, match='neither draws nor ends'):
    roll_out(desks(), scheduler=stuck)
