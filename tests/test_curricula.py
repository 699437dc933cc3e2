"""Curricula: laws that all of them keep, then epochs and histories worked by hand."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_jax import curricula, posterior
from rollout_jax.keys import named
from rollout_jax.types import ConfigError
from tests import batches
from tests.batches import of_rewards

SIZE, PROMPTS = 10, 4
MEMBERS = {name: getattr(curricula, name)(SIZE, PROMPTS) for name in curricula.__all__}
SAMPLE = {name: jax.jit(member.sample) for name, member in MEMBERS.items()}
UPDATE = {name: jax.jit(member.update) for name, member in MEMBERS.items()}
KEY = named(0, 'curriculum')


def observed(prompt_P, right_P, group=8, **fields):
  """A batch in which this many of the group's rows are right."""
  correct_PG = np.arange(group) < np.asarray(right_P)[:, None]
  return of_rewards(correct_PG, correct_PG=correct_PG, prompt_P=np.asarray(prompt_P, np.int32), **fields)


@pytest.mark.parametrize('name', MEMBERS)
def test_draws_are_prompts_of_the_task_each_at_most_once_and_the_same_with_and_without_jit(name):
  slow = fast = MEMBERS[name].init()
  for _ in range(2):
    slow, drawn_P = MEMBERS[name].sample(slow, KEY)
    fast, prompt_P = SAMPLE[name](fast, KEY)
    np.testing.assert_array_equal(prompt_P, drawn_P)
    assert prompt_P.dtype == jnp.int32 and prompt_P.shape == (PROMPTS,)
    assert len(set(prompt_P.tolist())) == PROMPTS and (prompt_P >= 0).all() and (prompt_P < SIZE).all()


@pytest.mark.parametrize('name', MEMBERS)
def test_state_taken_to_the_host_and_back_goes_on_with_the_same_draws(name):
  state, drawn = MEMBERS[name].init(), []
  for _ in range(3):
    state, _ = SAMPLE[name](state, KEY)
    state = UPDATE[name](observed([1, 2, 3, -1], [0, 4, 8, 3]), state)
  restored = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
  for _ in range(3):
    state, prompt_P = SAMPLE[name](state, KEY)
    restored, again_P = SAMPLE[name](restored, KEY)
    np.testing.assert_array_equal(prompt_P, again_P)
    drawn.append(prompt_P.tolist())
  assert len({tuple(draw) for draw in drawn}) == 3


@pytest.mark.parametrize('name', MEMBERS)
def test_runs_with_other_seeds_draw_other_prompts(name):
  draws = {tuple(SAMPLE[name](MEMBERS[name].init(), named(seed, 'curriculum'))[1].tolist()) for seed in range(5)}
  assert len(draws) > 1


@pytest.mark.parametrize('name', MEMBERS)
def test_batch_of_nothing_leaves_the_state_bit_for_bit(name):
  state = UPDATE[name](observed([4, 5, 6, 7], [1, 2, 3, 4]), MEMBERS[name].init())
  empty = batches.masked_out(observed([1, 2, 3, 4], [8, 8, 0, 0]))
  padded = observed([-1, -1, -1, -1], [8, 8, 0, 0])
  for batch in (empty, padded):
    jax.tree.map(np.testing.assert_array_equal, UPDATE[name](batch, state), state)


# Uniform.


@settings(max_examples=8, deadline=None)
@given(size=st.sampled_from([1, 3, 5, 7]), prompts=st.sampled_from([1, 3, 8]), seed=st.integers(0, 5))
def test_every_prompt_runs_once_per_epoch_whatever_the_batch(size, prompts, seed):
  member = UNIFORM.setdefault((size, prompts), curricula.uniform(size, prompts))
  sample = JITTED.setdefault((size, prompts), jax.jit(member.sample))
  state, drawn = member.init(), []
  while len(drawn) < 4 * size:
    state, prompt_P = sample(state, named(seed, 'curriculum'))
    drawn += prompt_P.tolist()
  for epoch in range(len(drawn) // size):
    assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))
  assert (int(state.epoch), int(state.cursor)) == divmod(len(drawn), size)


UNIFORM, JITTED = {}, {}


def test_order_of_an_epoch_does_not_depend_on_the_size_of_the_draws_and_changes_from_epoch_to_epoch():
  def drawn(prompts, count):
    member = curricula.uniform(7, prompts)
    state, ids, sample = member.init(), [], jax.jit(member.sample)
    while len(ids) < count:
      state, prompt_P = sample(state, KEY)
      ids += prompt_P.tolist()
    return ids[:count]

  assert drawn(2, 28) == drawn(7, 28) == drawn(16, 28)
  orders = [tuple(drawn(7, 28)[i : i + 7]) for i in range(0, 28, 7)]
  assert len(set(orders)) == 4


def test_every_order_is_about_as_likely_and_neighbours_are_independent():
  from rollout_jax.curricula.uniform import permuted

  order = jax.jit(jax.vmap(lambda seed, place: permuted(jax.random.key(seed), place, 4), in_axes=(0, None)))
  orders = jnp.stack([order(jnp.arange(2400), place) for place in range(4)], axis=1)
  seen = collections.Counter(map(tuple, orders.tolist()))
  assert len(seen) == 24 and sum((n - 100) ** 2 / 100 for n in seen.values()) < 49.7  # chi-square, 23 d.o.f., p = 0.001
  whole = np.asarray(jax.jit(jax.vmap(lambda place: permuted(KEY_OF_WHOLE, place, 65536)))(jnp.arange(65536)))
  assert sorted(whole.tolist()) == list(range(65536))
  for distance in (1, 2, 256):  # correlation of two uniform numbers: standard deviation 1 / 256
    assert abs(np.corrcoef(whole[:-distance], whole[distance:])[0, 1]) < 4 / 256


KEY_OF_WHOLE = jax.random.key(3)


def test_an_epoch_of_almost_two_to_the_31_ends_where_it_should():
  member = curricula.uniform(2**31 - 1, 8)
  state = member.init().replace(epoch=jnp.int32(3), cursor=jnp.int32(2**31 - 4))
  state, prompt_P = jax.jit(member.sample)(state, KEY)
  assert (int(state.epoch), int(state.cursor)) == (4, 5) and (np.asarray(prompt_P) >= 0).all()


# Pass rates.


@pytest.mark.parametrize('decay, expected', [(1.0, (10, 4)), (0.5, (8.5, 3.5))])
def test_posterior_equals_the_published_numbers(decay, expected):
  table = posterior.Beta(jnp.array([4.0]), jnp.array([2.0]))
  table = posterior.observe(table, jnp.array([0]), jnp.array([6.0]), jnp.array([2.0]), decay=decay, prior=1.0)
  assert (table.success_N[0], table.failure_N[0]) == expected
  assert posterior.mean(table)[0] == pytest.approx(0.714286 if decay == 1 else 0.708333, abs=1e-5)


def test_only_judged_rows_of_prompts_in_the_batch_are_counted():
  stat_PG = np.ones((4, 8))
  stat_PG[1, 0] = 0  # a right row that was never judged
  stat_PG[2] = 0
  state = MEMBERS['pass_rate'].init()
  before = state.replace(table=jax.tree.map(lambda x: x + 0.1 * jnp.arange(SIZE), state.table))
  after = UPDATE['pass_rate'](observed([7, 3, 5, -1], [6, 2, 8, 4], stat_PG=stat_PG), before).table
  decayed = 0.5 * (1 + 0.1 * np.arange(SIZE)) + 0.5
  for column, (seven, three) in (('success_N', (6, 1)), ('failure_N', (2, 6))):
    new, old = np.asarray(getattr(after, column)), np.asarray(getattr(before.table, column))
    np.testing.assert_allclose(new[[7, 3]], decayed[[7, 3]] + [seven, three], rtol=1e-6)
    others = np.setdiff1d(np.arange(SIZE), [3, 7])
    np.testing.assert_array_equal(new[others], old[others])


def test_prompt_that_stands_in_a_batch_twice_decays_once_and_counts_both():
  table = UPDATE['pass_rate'](observed([2, 2, 9, 9], [8, 4, 0, 0]), MEMBERS['pass_rate'].init()).table
  assert (table.success_N[2], table.failure_N[2]) == (13, 5)
  assert (table.success_N[9], table.failure_N[9]) == (1, 17)


def test_prompts_are_drawn_in_proportion_to_their_learnability():
  member = curricula.pass_rate(4, 1)
  success_N, failure_N = jnp.array([1.0, 5, 9, 19]), jnp.array([1.0, 5, 1, 1])
  state = member.init()
  state = state.replace(table=posterior.Beta(success_N, failure_N))
  draws = 4000
  states = jax.vmap(lambda draw: state.replace(draw=draw))(jnp.arange(draws))
  prompt_X = jax.jit(jax.vmap(lambda s: member.sample(s, KEY)[1][0]))(states)
  weight_N = np.array([0.25, 0.25, 0.09, 0.0475])
  expected_N = weight_N / weight_N.sum()
  share_N = np.bincount(prompt_X, minlength=4) / draws
  assert (np.abs(share_N - expected_N) < 4 * np.sqrt(expected_N / draws)).all()


def test_more_prompts_than_the_task_has_are_refused_where_they_must_differ():
  with pytest.raises(ConfigError, match='4 prompts per round of a task with 3'):
    curricula.pass_rate(3, 4)
  with pytest.raises(ConfigError, match='decay=2'):
    curricula.pass_rate(8, 4, decay=2)
