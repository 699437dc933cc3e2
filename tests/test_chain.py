"""Chains: what runs when, what is frozen, and what is refused before anything compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax import losses, masked, transforms
from rollout_jax.losses.kl import add, kl
from rollout_jax.transforms.chain import chain, check, reads_score, stateless
from rollout_jax.types import ConfigError, Phase, Spec, Transform
from tests import batches
from tests.batches import applied, of_rewards, value

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost

SHAPE = (batches.P, batches.G, batches.T)
VERSION = jnp.int32(batches.VERSION)
WHOLE = (
  transforms.combine_rewards(),
  transforms.limit_staleness(),
  transforms.drop_degenerate(),
  transforms.pods(),
  transforms.group_advantage(),
  transforms.tis(),
)


def named(name, phase=Phase.FILTER, report=(), **spec):
  """A member that does nothing and reports these names."""
  said = {key: masked.count(jnp.ones(1)) for key in report}
  return stateless(lambda batch, **extra: (batch, said), Spec(name=name, phase=phase, **spec))


def members(*names):
  return [getattr(transforms, name)() for name in names]


def first_half(parts, batch):
  """before_score under jit, with the state as it is at the start."""
  return jax.jit(lambda batch: parts.before_score(batch, parts.init(), version=VERSION))(batch)


def refusal(parts, loss=None, shape=SHAPE):
  with pytest.raises(ConfigError) as caught:
    check(parts, loss or losses.ppo_clip(), shape)
  return str(caught.value)


# What is refused.


def test_every_member_together_in_the_right_order_passes():
  check(WHOLE, losses.ppo_clip(), SHAPE)


def test_wrong_order_is_refused_with_both_names_and_the_right_order():
  said = refusal(members('combine_rewards', 'pods', 'drop_degenerate', 'group_advantage'))
  assert 'pods (SELECT) stands before drop_degenerate (FILTER)' in said
  assert "transforms=('combine_rewards', 'drop_degenerate', 'pods', 'group_advantage')" in said


def test_member_that_stands_twice_is_refused():
  assert 'tis stands 2 times' in refusal(members('combine_rewards', 'group_advantage', 'tis', 'tis'))


def test_loss_without_advantage_is_refused_with_a_cure():
  assert 'such as group_advantage' in refusal(members('combine_rewards'))


def test_advantage_without_reward_is_refused_with_a_cure():
  said = refusal(members('group_advantage'))
  assert 'group_advantage reads reward_PG' in said and 'such as combine_rewards' in said


def test_second_advantage_is_refused():
  second = named('mine', Phase.ADVANTAGE, writes=frozenset({'advantage_PGT'}))
  said = refusal([*members('combine_rewards', 'group_advantage'), second])
  assert 'group_advantage and mine both write advantage_PGT' in said


def test_forbidden_pair_is_refused_with_its_reason():
  mine = named('mine', forbids={'tis': 'the ratio would count twice'})
  parts = members('combine_rewards', 'group_advantage', 'tis')
  check([parts[0], mine, parts[1]], losses.ppo_clip(), SHAPE)
  said = refusal([parts[0], mine, *parts[1:]])
  assert 'mine and tis cannot stand in one chain: the ratio would count twice' in said


def test_field_that_a_batch_does_not_have_is_refused():
  assert "mine reads or writes ['advantage_PG']" in refusal([named('mine', reads=frozenset({'advantage_PG'}))])


def test_selection_of_more_rows_than_there_are_is_refused():
  said = refusal(members('combine_rewards', 'pods', 'group_advantage'), shape=(4, 3, 6))
  assert 'pods cannot work on groups of 3' in said and 'pods.m=4' in said


@pytest.mark.parametrize('name', ['group_advantage', 'drop_degenerate'])
def test_statistics_of_a_group_of_one_are_refused(name):
  parts = members(*dict.fromkeys(('combine_rewards', name, 'group_advantage')))
  assert f'{name} cannot work on groups of 1' in refusal(parts, shape=(4, 1, 6))


def test_group_of_one_passes_with_raw_rewards():
  parts = [transforms.combine_rewards(), transforms.group_advantage(scope='none', singleton='raw')]
  check(parts, losses.reinforce(), (4, 1, 6))


def test_second_selector_is_refused():
  halve = named('halve', Phase.SELECT, group_size=lambda group: group // 2)
  said = refusal([*members('combine_rewards', 'pods'), halve, *members('group_advantage')])
  assert 'pods and halve both change the size of a group' in said


@pytest.mark.parametrize('phase', [Phase.FILTER, Phase.CORRECT])
def test_report_with_a_name_that_is_taken_is_refused(phase):
  parts = members('combine_rewards', 'group_advantage')
  parts.insert(2 if phase == Phase.CORRECT else 1, named('mine', phase, report=['reward/mean']))
  assert "['reward/mean']" in refusal(parts)


# What runs.


def test_halves_one_after_the_other_equal_the_members_one_after_the_other():
  parts, batch = chain(*WHOLE), batches.mixed()

  @jax.jit
  def halves(batch):
    batch, state, report = parts.before_score(batch, parts.init(), version=VERSION)
    batch, state, more = parts.after_score(batch, state, version=VERSION)
    return batch, report | more

  after, report = halves(batch)
  for member in WHOLE:
    if member.spec.name == 'limit_staleness':
      batch = batch.replace(original_PG=batch.keep_PGT.sum(axis=2))
    batch, _, said = jax.jit(member.update)(batch, (), version=VERSION)
    for key, mean in said.items():
      np.testing.assert_allclose(value(report[key]), value(mean), rtol=1e-6, err_msg=key)
  for name, x in batches.arrays(batch).items():
    np.testing.assert_allclose(getattr(after, name), x, rtol=1e-6, err_msg=name)
  assert after.shape[1] == parts.group_size(batches.G) == 4


def test_rows_that_each_member_takes_out_of_the_loss_are_counted():
  batch = of_rewards(np.zeros((2, 6)), correct_PG=np.array([[1] * 6, [0, 1, 0, 1, 0, 1]]) > 0)
  batch = batch.replace(version_PGT=batch.version_PGT.at[:, :, 1].set(9).at[1, 0, 1].set(3))
  parts = chain(*WHOLE[:-1])
  after, _, report = first_half(parts, batch)
  dropped = {key.split('/')[1]: value(mean) for key, mean in report.items() if key.startswith('dropped/')}
  assert dropped == {'limit_staleness': 1, 'drop_degenerate': 6, 'pods': 1, 'group_advantage': 0}
  assert after.keep_PGT.sum() == 12 - sum(dropped.values())


def test_rewards_alone_are_those_of_every_row_as_collected():
  batch, parts = batches.mixed(), chain(*WHOLE)
  rewarded = jax.jit(lambda b: parts.reward(b, parts.init(), version=VERSION))(batch)
  alone, _ = applied(transforms.combine_rewards(), batch)
  np.testing.assert_array_equal(rewarded.reward_PG, alone.reward_PG)
  np.testing.assert_array_equal(rewarded.keep_PGT, batch.keep_PGT)


def test_correction_waits_for_the_score():
  batch = batches.mixed().replace(proximal_logp_PGT=None)
  after, _, report = first_half(chain(*WHOLE), batch)
  assert after.proximal_logp_PGT is None and not any(key.startswith('tis/') for key in report)


def test_member_that_reads_a_score_early_moves_the_score_up():
  shaping = named('shaping', Phase.REWARD, report=['mine/seen'], reads=frozenset({'reference_logp_PGT'}))
  parts = chain(transforms.combine_rewards(), shaping, transforms.group_advantage())
  batch, state, report = first_half(parts, batches.mixed())
  assert 'mine/seen' not in report and batch.advantage_PGT is None
  batch, state, report = parts.after_score(batch, state, version=VERSION)
  assert 'mine/seen' in report and batch.advantage_PGT is not None


@pytest.mark.parametrize(
  'chosen', [(), ('drop_degenerate',), ('pods',), ('limit_staleness', 'drop_degenerate', 'pods')]
)
def test_original_counts_the_tokens_in_the_loss_before_the_first_filter(chosen):
  batch = batches.mixed()
  parts = chain(*members('combine_rewards', *chosen, 'group_advantage'))
  after, *_ = first_half(parts, batch)
  before_PG = batch.keep_PGT.sum(axis=2)
  assert after.original_PG.sum() == before_PG.sum()
  if 'pods' in chosen:
    assert after.original_PG.shape == (batches.P, batches.G) and after.keep_PGT.shape[1] == 4
    before_PG = jnp.take_along_axis(before_PG, after.rollout_PG, axis=1)
  np.testing.assert_array_equal(after.original_PG[:, : after.shape[1]], before_PG)


def test_observe_sees_the_batch_as_collected_and_each_member_keeps_its_own_state():
  def counter(name, phase):
    def update(batch, state, **extra):
      return batch.replace(stat_PG=batch.stat_PG * 0), state, {f'{name}/seen': masked.single(state)}

    def observe(batch, state):
      return state + batch.stat_PG.sum()

    return Transform(lambda: jnp.zeros(()), update, observe, Spec(name=name, phase=phase))

  parts = chain(counter('first', Phase.FILTER), transforms.pods(m=2), counter('last', Phase.CORRECT))

  @jax.jit
  def step(collected, state):
    batch, state, report = parts.before_score(collected, state, version=VERSION)
    batch, state, more = parts.after_score(batch, state, version=VERSION)
    return parts.observe(collected, state), report | more

  state = parts.init()
  for seen in (0, 6, 12):
    state, report = step(of_rewards([[1, 0, 1], [0, 0, 1]]), state)
    assert value(report['first/seen']) == value(report['last/seen']) == seen


@pytest.mark.parametrize(
  'names, loss, updates, expected',
  [
    (['group_advantage'], losses.ppo_clip(), 1, (False, False)),
    (['group_advantage'], losses.ppo_clip(), 4, (True, False)),
    (['group_advantage'], losses.reinforce(), 4, (False, False)),
    (['group_advantage', 'tis'], losses.reinforce(), 1, (True, False)),
    (['group_advantage'], add(losses.ppo_clip(), kl(kind='k2', beta=0.1)), 1, (False, True)),
    (['group_advantage'], add(losses.ppo_clip(), kl()), 1, (False, False)),
  ],
)
def test_only_what_is_read_is_scored(names, loss, updates, expected):
  assert reads_score(members(*names), loss, updates) == expected


def test_dead_group_gives_no_advantage_and_a_filter_before_the_estimator_is_seen_by_it():
  batch = of_rewards([[0, 0, 0, 0], [0, 0, 0, 0]], correct_PG=np.array([[1, 1, 1, 1], [1, 0, 1, 0]]) > 0)
  stale = batch.version_PGT.at[:, :, 1].set(9).at[1, 2, 1].set(3)
  batch = batch.replace(version_PGT=stale)
  parts = chain(*members('combine_rewards', 'limit_staleness', 'drop_degenerate', 'group_advantage'))
  after, *_ = first_half(parts, batch)
  assert (after.advantage_PGT[0] == 0).all() and (after.keep_PGT[0] == 0).all()
  np.testing.assert_allclose(after.advantage_PGT[1, :, 0], [1.154699, -0.577349, 0, -0.577349], atol=1e-5)
