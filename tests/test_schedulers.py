"""Schedulers as pure functions: what is drawn, when a round ends, and that no verdict's timing changes a decision."""

import json
import random

import pytest

from rollout_jax import schedulers
from rollout_jax.schedulers import dynamic, synchronous
from rollout_jax.types import ConfigError, Outcome, Verdict

P, G = 4, 2
GOOD, BAD = [Outcome.CORRECT, Outcome.WRONG], [Outcome.WRONG, Outcome.WRONG]


def play(scheduler, outcomes, seed=0):
  """Runs a round in which group p ends with outcomes[p], rows settling in a random order; the numbers drawn, in order."""
  rng, state, drawn, flying = random.Random(seed), scheduler.init(), [], []
  for _ in range(1000):
    state, plan = scheduler.plan(json.loads(json.dumps(state)))  # a state survives a checkpoint at any moment
    if plan.done:
      assert not flying and state == scheduler.init()
      return drawn
    for _ in range(plan.draw):
      position = sum(drawn) + _
      flying += [(position, outcome) for outcome in outcomes(position)]
    if plan.draw:
      drawn.append(plan.draw)
    if flying:
      position, outcome = flying.pop(rng.randrange(len(flying)))
      state = scheduler.settle(state, position, Verdict(outcome))
  raise AssertionError('the round never ended')


def test_synchronous_draws_one_batch_and_waits_for_all_of_it():
  assert play(synchronous(P, G), lambda position: BAD) == [P]


def test_dynamic_draws_nothing_more_when_every_group_has_signal():
  assert play(dynamic(P, G), lambda position: GOOD) == [P]


def test_dynamic_replaces_each_group_without_signal_by_one_prompt():
  drawn = play(dynamic(P, G, max_factor=3.0), lambda position: BAD if position in (0, 2, 5) else GOOD)
  assert sum(drawn) == P + 3 and drawn[0] == P and set(drawn[1:]) == {1}


def test_dynamic_stops_at_its_bound_with_what_there_is():
  assert sum(play(dynamic(P, G, max_factor=2.5), lambda position: BAD)) == 10 == dynamic(P, G, max_factor=2.5).capacity


@pytest.mark.parametrize('seed', range(5))
def test_dynamic_never_starts_a_row_that_it_does_not_finish(seed):
  """The number of prompts of a round depends on their outcomes, not on the order in which verdicts arrive."""
  outcomes = lambda position: GOOD if position % 3 else BAD
  assert sum(play(dynamic(P, G), outcomes, seed)) == sum(play(dynamic(P, G), outcomes, seed + 100))


def test_a_row_that_was_not_judged_gives_no_signal():
  assert sum(play(dynamic(P, G, max_factor=2), lambda p: [Outcome.CORRECT, Outcome.ERROR] if p == 0 else GOOD)) == P + 1


@pytest.mark.parametrize('settings', [dict(max_factor=0.5), dict()])
def test_dynamic_says_what_is_wrong_with_its_settings(settings):
  with pytest.raises(ConfigError, match='max_factor|group'):
    dynamic(P, G if settings else 1, **settings)


@pytest.mark.parametrize('name', schedulers.__all__)
def test_every_scheduler_ends_its_round_whatever_the_outcomes(name):
  for outcome in Outcome:
    scheduler = getattr(schedulers, name)(P, G)
    assert P <= sum(play(scheduler, lambda position, o=outcome: [o, o])) <= scheduler.capacity
