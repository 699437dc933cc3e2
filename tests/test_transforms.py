"""Every transform: the laws that all of them keep, then numbers worked by hand (published formulas, to 1e-5)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_jax import masked, ratios, transforms
from rollout_jax.signal import informative
from rollout_jax.transforms.select import max_variance
from rollout_jax.types import ConfigError, Outcome, Phase
from tests import batches
from tests.batches import of_rewards, value

MEMBERS = {name: getattr(transforms, name)() for name in transforms.__all__} | {
  'combine_rewards shaped': transforms.combine_rewards(correct=2.0, wrong=-1.0, malformed=-0.5),
  'drop_degenerate narrow': transforms.drop_degenerate(low=0.2, high=0.5),
  'group_advantage batch': transforms.group_advantage(scope='batch'),
  'group_advantage dr_grpo': transforms.group_advantage(scope='none'),
  'group_advantage rloo': transforms.group_advantage(scope='none', leave_one_out=True),
  'group_advantage raw': transforms.group_advantage(ddof=0, singleton='raw'),
  'limit_staleness strict': transforms.limit_staleness(limit=1),
  'pods pair': transforms.pods(m=2),
  'pods all': transforms.pods(m=batches.G),
  'tis sequence': transforms.tis(level='sequence', cap=5.0),
}
FILTERED = {'keep_PGT', 'stat_PG'}


def plain(member, batch):
  after, _, report = member.update(batch, member.init(), version=jnp.int32(batches.VERSION))
  return after, report


JITTED = {name: jax.jit(lambda batch, member=member: plain(member, batch)) for name, member in MEMBERS.items()}


def applied(member, batch):
  return jax.jit(lambda batch: plain(member, batch))(batch)


def by_rollout(batch, order_P=None):
  """The fields with rows in the order of their rollout numbers, and groups in the order given."""
  fields = batches.arrays(batch)
  order_PG = np.argsort(fields['rollout_PG'], axis=1)
  for name, x in fields.items():
    if name.rsplit('_', 1)[1].startswith('PG'):
      x = np.take_along_axis(x, order_PG.reshape(*order_PG.shape, *(1,) * (x.ndim - 2)), axis=1)
    fields[name] = x if order_P is None else x[order_P]
  return fields


def assert_close(one, other):
  assert one.keys() == other.keys()
  for name in one:
    np.testing.assert_allclose(one[name], other[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize('name', MEMBERS)
def test_jit_changes_nothing(name):
  batch = batches.mixed()
  (after, report), (fast, fast_report) = plain(MEMBERS[name], batch), JITTED[name](batch)
  assert_close(batches.arrays(after), batches.arrays(fast))
  assert_close({k: value(v) for k, v in report.items()}, {k: value(v) for k, v in fast_report.items()})


@pytest.mark.parametrize('name', MEMBERS)
@settings(max_examples=4, deadline=None)
@given(order_P=st.permutations(range(batches.P)), order_G=st.permutations(range(batches.G)), seed=st.integers(0, 9))
def test_order_of_prompts_and_of_rollouts_changes_nothing(name, order_P, order_G, seed):
  batch = batches.mixed(seed)
  after, report = JITTED[name](batch)
  other, other_report = JITTED[name](batches.reordered(batch, np.array(order_P), np.array(order_G)))
  assert_close(by_rollout(after, np.array(order_P)), by_rollout(other))
  assert_close({k: value(v) for k, v in report.items()}, {k: value(v) for k, v in other_report.items()})


@pytest.mark.parametrize('name', MEMBERS)
def test_everything_is_finite_when_nothing_is_kept(name):
  after, report = JITTED[name](batches.masked_out(batches.mixed()))
  for field, x in batches.arrays(after).items():
    assert np.isfinite(x).all(), field
  for key, mean in report.items():
    assert np.isfinite(value(mean)), key


@pytest.mark.parametrize('name', MEMBERS)
@pytest.mark.parametrize('seed', range(3))
def test_only_declared_fields_change_and_only_as_their_phase_may(name, seed):
  spec, batch = MEMBERS[name].spec, batches.mixed(seed)
  fields = batches.arrays(JITTED[name](batch)[0])
  assert fields['stat_PG'].shape == (batches.P, spec.group_size(batches.G))
  before = batches.arrays(batch)
  left_PG = fields['rollout_PG']  # as collected, a row's rollout number is its place in the group
  for field, x in fields.items():
    if field in spec.writes:
      continue
    old = before[field]
    if field.rsplit('_', 1)[1].startswith('PG'):
      old = np.take_along_axis(old, left_PG.reshape(*left_PG.shape, *(1,) * (old.ndim - 2)), axis=1)
    np.testing.assert_array_equal(x, old, err_msg=field)
  if spec.phase == Phase.FILTER:
    assert spec.writes <= FILTERED
    for field in FILTERED:
      assert np.isin(fields[field], [0, 1]).all() and (fields[field] <= before[field]).all(), field
  if 'correction_PGT' in spec.writes:
    assert (fields['correction_PGT'] > 0).all()


@pytest.mark.parametrize('name', MEMBERS)
def test_nothing_outside_the_loss_reaches_what_is_kept(name):
  batch = batches.mixed()
  poison = lambda x: jnp.where(batch.keep_PGT > 0, x, jnp.nan)
  poisoned = batch.replace(
    behaviour_logp_PGT=poison(batch.behaviour_logp_PGT),
    proximal_logp_PGT=poison(batch.proximal_logp_PGT),
    reward_PG=jnp.where(batch.stat_PG > 0, batch.reward_PG, jnp.nan),
  )
  (clean, report), (dirty, dirty_report) = JITTED[name](batch), JITTED[name](poisoned)
  kept_PGT = np.asarray(clean.keep_PGT)
  for field, x in batches.arrays(clean).items():
    if field.endswith('_PGT'):
      np.testing.assert_array_equal(np.where(kept_PGT > 0, x, 0), np.where(kept_PGT > 0, getattr(dirty, field), 0))
  assert_close({k: value(v) for k, v in report.items()}, {k: value(v) for k, v in dirty_report.items()})


@pytest.mark.parametrize('name', [n for n, m in MEMBERS.items() if m.spec.phase == Phase.CORRECT])
def test_correction_is_the_identity_when_behaviour_is_proximal(name):
  batch = batches.mixed()
  batch = batch.replace(proximal_logp_PGT=batch.behaviour_logp_PGT)
  after, report = JITTED[name](batch)
  np.testing.assert_array_equal(after.correction_PGT, batch.correction_PGT)
  np.testing.assert_array_equal(after.keep_PGT, batch.keep_PGT)
  area = MEMBERS[name].spec.name
  assert value(report[f'{area}/ess']) == 1 and value(report[f'{area}/kl']) == value(report[f'{area}/chi2']) == 0


# Rewards.


def test_verdicts_become_rewards_and_errors_are_counted_apart():
  batch = of_rewards(np.zeros((1, 6)), stat_PG=[[1, 1, 1, 0, 0, 0]]).replace(
    verdict_PG=jnp.array([[1, 0, 2, 3, 4, 0]], jnp.int8), exists_PG=jnp.array([[1, 1, 1, 1, 1, 0]], bool)
  )
  after, report = applied(MEMBERS['combine_rewards shaped'], batch)
  np.testing.assert_allclose(after.reward_PG, [[2, -1, -0.5, 0, 0, 0]])
  assert value(report['reward/mean']) == pytest.approx(0.5 / 3)
  assert value(report['reward/correct']) == value(report['reward/malformed']) == pytest.approx(1 / 3)
  assert value(report['reward/error']) == value(report['reward/timeout']) == pytest.approx(1 / 5)


def test_rewards_add_to_what_is_there():
  after, _ = applied(MEMBERS['combine_rewards'], of_rewards([[0.25, -1]], correct_PG=[[True, False]]))
  np.testing.assert_allclose(after.reward_PG, [[1.25, -1]])


# Filters.


def test_group_is_kept_only_if_some_but_not_all_of_its_judged_rows_are_right():
  correct_PG = [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
  stat_PG = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
  # Shaping gave the rewards of every group a spread: the filter must look at correctness alone.
  batch = of_rewards(np.tile([1, 0.75, 0.5, 0], (5, 1)), stat_PG=stat_PG, correct_PG=np.array(correct_PG) > 0)
  after, report = applied(MEMBERS['drop_degenerate'], batch)
  kept_PG = np.array([0, 0, 1, 0, 0])[:, None] * np.array(stat_PG)
  np.testing.assert_array_equal(after.stat_PG, kept_PG)
  np.testing.assert_array_equal(after.keep_PGT[:, :, 1], kept_PG)
  counts = {key.split('/')[1]: value(mean) for key, mean in report.items()}
  assert counts == {'kept_groups': 1, 'hard_groups': 1, 'easy_groups': 2}


@pytest.mark.parametrize('low, high', [(0.0, 1.0), (0.25, 0.75), (0.1, 0.7), (0.3, 0.9), (0.2, 0.6)])
def test_signal_rule_gives_one_answer_on_host_and_device_at_every_pass_rate(low, high):
  for group in (4, 5, 8, 10, 16, 30):
    correct_PG = np.tri(group + 1, group, -1)  # group k has k right rows
    stat_PG = np.ones_like(correct_PG)
    host_P = informative(correct_PG.tolist(), stat_PG.tolist(), low, high)
    device_P = informative(jnp.asarray(correct_PG), jnp.asarray(stat_PG), low, high)
    exact_P = [round(low * 10000) * group < k * 10000 < round(high * 10000) * group for k in range(group + 1)]
    np.testing.assert_array_equal(host_P, exact_P)
    np.testing.assert_array_equal(device_P, exact_P)


def test_row_is_stale_by_its_oldest_sampled_token():
  version_PGT = np.array([[[-1, 10, 10], [-1, 9, 10], [-1, 10, 7], [-1, 2, 10], [-1, -1, -1]]], np.int32)
  batch = of_rewards(np.ones((1, 5))).replace(
    version_PGT=jnp.asarray(version_PGT), keep_PGT=jnp.ones((1, 5, 3)), exists_PG=jnp.array([[1, 1, 1, 1, 0]], bool)
  )
  after, report = applied(MEMBERS['limit_staleness'], batch)
  np.testing.assert_array_equal(after.stat_PG, [[1, 1, 1, 0, 1]])
  np.testing.assert_array_equal(after.keep_PGT[:, :, 2], [[1, 1, 1, 0, 1]])
  assert value(report['staleness/dropped_rows']) == 1
  assert value(report['staleness/lag']) == (0 + 1 + 3 + 8) / 4


# Selection.

PODS = [
  ([0, 0, 1, 0.2, 0.9, 0.5, 1, 0], 4, [0, 0, 1, 1], 0.25, [-0.865875, -0.865875, 0.865875, 0.865875]),
  ([0, 0.1, 0.2, 0.3, 1], 3, [0, 0.1, 1], 0.202222, [-0.665629, -0.484094, 1.149724]),
  ([0.1, 0.4, 0.45, 0.5, 0.8, 0.95], 3, [0.1, 0.8, 0.95], 0.137222, [-1.138562, 0.404006, 0.734556]),
  ([1, 1, 1, 0, 1, 1], 4, [0, 1, 1, 1], 0.1875, [-1.499700, 0.499900, 0.499900, 0.499900]),
  ([0, 0, 0, 0], 2, [0, 0], 0, [0, 0]),
  ([0, 0.12, 1, 0.2, 0.9, 0.5, 0.95, 0.3], 4, [0, 0.12, 0.95, 1], 0.211419, [-0.974513, -0.748539, 0.814448, 0.908604]),
]


@pytest.mark.parametrize('rewards, m, chosen, variance, advantages', PODS)
def test_pods_chooses_and_scores_the_published_subsets(rewards, m, chosen, variance, advantages):
  after, report = applied(transforms.pods(m=m), of_rewards([rewards]))
  np.testing.assert_allclose(np.sort(after.reward_PG[0]), chosen, atol=1e-6)
  assert value(report['pods/variance_after']) == pytest.approx(variance, abs=1e-5)
  scored, _ = applied(transforms.group_advantage(eps=1e-4), after)
  np.testing.assert_allclose(np.sort(scored.advantage_PGT[0, :, 0]), advantages, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
  rewards=st.lists(st.sampled_from([0, 0, 1, 1, 0.25, 0.5, -0.3, 0.9]), min_size=7, max_size=7),
  counted=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_no_other_subset_of_the_counted_rows_has_more_variance(rewards, counted):
  r, stat = np.array(rewards, np.float32), np.array(counted, np.float32)
  chosen = np.asarray(MAX_VARIANCE(r, stat))
  assert chosen.sum() == 3
  inside = np.flatnonzero(stat)
  if len(inside) <= 3:
    assert chosen[inside].all()
  else:
    assert stat[chosen].all()
    best = max(np.var(r[list(subset)]) for subset in itertools.combinations(inside, 3))
    assert np.var(r[chosen]) == pytest.approx(best, abs=1e-6)


MAX_VARIANCE = jax.jit(lambda r, stat: max_variance(r, stat, jnp.arange(7), 3))


@pytest.mark.parametrize('right, wrong', [(3, 5), (1, 7), (6, 2), (4, 4)])
def test_pods_on_binary_rewards_takes_half_right_and_half_wrong_where_it_can(right, wrong):
  after, _ = applied(transforms.pods(m=4), of_rewards([[1] * right + [0] * wrong]))
  assert after.reward_PG.sum() == min(right, max(2, 4 - wrong))


def test_rows_that_pods_leaves_keep_their_order_and_frozen_counts_keep_their_columns():
  batch = of_rewards([[0.5, 1, 0.4, 0]]).replace(original_PG=jnp.array([[1.0, 2, 3, 4]]))
  after, _ = applied(transforms.pods(m=2), batch)
  np.testing.assert_array_equal(after.rollout_PG, [[1, 3]])
  np.testing.assert_array_equal(after.original_PG, [[2, 4, 1, 3]])


# Advantages.

ADVANTAGES = {
  'unbiased': dict(eps=1e-6),
  'unbiased 1e-4': dict(eps=1e-4),
  'population': dict(ddof=0),
  'dr_grpo': dict(scope='none'),
  'rloo': dict(scope='none', leave_one_out=True),
}
TABLE = [
  ([1, 0, 0, 1], 'unbiased', [0.866024, -0.866024, -0.866024, 0.866024]),
  ([1, 0, 0, 1], 'unbiased 1e-4', [0.865875, -0.865875, -0.865875, 0.865875]),
  ([1, 0, 0, 1], 'population', [0.999998, -0.999998, -0.999998, 0.999998]),
  ([1, 0, 0, 1], 'dr_grpo', [0.5, -0.5, -0.5, 0.5]),
  ([1, 0, 0, 1], 'rloo', [0.666667, -0.666667, -0.666667, 0.666667]),
  ([1, 0, 0, 0], 'unbiased', [1.499997, -0.499999, -0.499999, -0.499999]),
  ([1, 0, 0, 0], 'unbiased 1e-4', [1.499700, -0.499900, -0.499900, -0.499900]),
  ([1, 0, 0, 0], 'population', [1.732047, -0.577349, -0.577349, -0.577349]),
  ([1, 0, 0, 0], 'dr_grpo', [0.75, -0.25, -0.25, -0.25]),
  ([1, 0, 0, 0], 'rloo', [1, -0.333333, -0.333333, -0.333333]),
  ([0.2, 0.5, 0.9, 0.4], 'unbiased', [-1.019046, 0, 1.358728, -0.339682]),
  ([0.2, 0.5, 0.9, 0.4], 'unbiased 1e-4', [-1.018703, 0, 1.358271, -0.339568]),
  ([0.2, 0.5, 0.9, 0.4], 'population', [-1.176692, 0, 1.568923, -0.392231]),
  ([0.2, 0.5, 0.9, 0.4], 'dr_grpo', [-0.3, 0, 0.4, -0.1]),
  ([0.2, 0.5, 0.9, 0.4], 'rloo', [-0.4, 0, 0.533333, -0.133333]),
]


def advantages(options, reward_PG, stat_PG=None):
  after, report = applied(transforms.group_advantage(**options), of_rewards(reward_PG, stat_PG=stat_PG))
  assert (after.advantage_PGT == after.advantage_PGT[:, :, :1]).all()
  return np.asarray(after.advantage_PGT[:, :, 0]), report


@pytest.mark.parametrize('rewards, estimator, expected', TABLE)
def test_advantages_equal_the_published_table(rewards, estimator, expected):
  np.testing.assert_allclose(advantages(ADVANTAGES[estimator], [rewards])[0], [expected], atol=1e-5)


@pytest.mark.parametrize('estimator', ADVANTAGES)
@pytest.mark.parametrize('reward', [0.0, 1.0, 0.7, 0.1])
def test_group_of_equal_rewards_gets_exactly_zero(estimator, reward):
  advantage_PG, report = advantages(ADVANTAGES[estimator], np.full((2, 7), reward), [[1] * 7, [1, 1, 1, 0, 0, 1, 1]])
  assert (advantage_PG == 0).all() and value(report['advantage/zero_groups']) == 1


@pytest.mark.parametrize('estimator', ADVANTAGES)
def test_masked_group_equals_the_smaller_group_and_the_masked_row_gets_zero(estimator):
  masked_PG, _ = advantages(ADVANTAGES[estimator], [[1, 0, 5, 0]], [[1, 1, 0, 1]])
  smaller_PG, _ = advantages(ADVANTAGES[estimator], [[1, 0, 0]])
  np.testing.assert_allclose(masked_PG, np.insert(smaller_PG, 2, 0, axis=1), atol=1e-6)
  if estimator == 'unbiased':
    np.testing.assert_allclose(masked_PG, [[1.154699, -0.577349, 0, -0.577349]], atol=1e-5)


def test_singleton_gets_zero_or_its_reward():
  reward_PG, stat_PG = [[0.7, 0, 0], [1, 0, 0]], [[1, 0, 0], [1, 1, 1]]
  for estimator in ADVANTAGES.values():
    assert (advantages(estimator, reward_PG, stat_PG)[0][0] == 0).all()
    raw_PG, _ = advantages(estimator | dict(singleton='raw'), reward_PG, stat_PG)
    np.testing.assert_allclose(raw_PG[0], [0.7, 0, 0])


def test_batch_scope_divides_by_the_deviation_of_the_whole_batch():
  advantage_PG, report = advantages(dict(scope='batch'), [[1, 0, 0, 1], [1, 0, 0, 0]])
  expected = [[0.966090, -0.966090, -0.966090, 0.966090], [1.449135, -0.483045, -0.483045, -0.483045]]
  np.testing.assert_allclose(advantage_PG, expected, atol=1e-5)
  assert value(report['advantage/reward_mean']) == pytest.approx(3 / 8)
  assert value(report['advantage/zero_groups']) == 0


@pytest.mark.parametrize('estimator, power', [('unbiased', 0), ('dr_grpo', 1), ('rloo', 1)])
def test_shifting_rewards_changes_nothing_and_scaling_them_scales_what_is_not_normalised(estimator, power):
  reward_PG = np.random.default_rng(0).random((3, 5))
  plain_PG, _ = advantages(ADVANTAGES[estimator], reward_PG)
  affine_PG, _ = advantages(ADVANTAGES[estimator], 4 * reward_PG - 3)
  np.testing.assert_allclose(affine_PG, plain_PG * 4**power, atol=1e-4)


# Off-policy.

GAPS = np.array([[0.1, -0.3, 1.2], [0, 0.5, 0]], np.float32)  # of two sequences, the second of two tokens
KEPT = np.array([[1, 1, 1], [1, 1, 0]], np.float32)


def corrected(**options):
  batch = of_rewards(np.ones((1, 2))).replace(
    behaviour_logp_PGT=jnp.full((1, 2, 3), -2.0),
    proximal_logp_PGT=jnp.asarray(GAPS[None]) - 2.0,
    keep_PGT=jnp.asarray(KEPT[None]),
    correction_PGT=jnp.full((1, 2, 3), 3.0),
  )
  after, report = applied(transforms.tis(**options), batch)
  return np.asarray(after.correction_PGT[0]) / 3, {key.split('/')[1]: value(mean) for key, mean in report.items()}


def test_token_weights_are_truncated_and_multiply_what_is_there():
  weight, report = corrected()
  np.testing.assert_allclose(weight, [[1.105171, 0.740818, 2], [1, 1.648721, 1]], atol=1e-5)
  assert report['capped'] == pytest.approx(1 / 5)
  assert report['ess'] == pytest.approx(0.889103, abs=1e-5)
  assert report['chi2'] == pytest.approx(2.302335, abs=1e-5)
  assert report['gap_max'] == pytest.approx(1.2) and report['gap'] == pytest.approx(2.1 / 5)


@pytest.mark.parametrize('cap, expected', [(10.0, [2.718282, 1.648721]), (2.0, [2, 1.648721])])
def test_sequence_weight_is_the_product_over_the_row(cap, expected):
  weight, report = corrected(level='sequence', cap=cap)
  np.testing.assert_allclose(weight, np.where(KEPT > 0, np.array(expected)[:, None], 1), atol=1e-5)
  assert report['capped'] == (0.5 if cap == 2 else 0)


def test_health_estimates_equal_the_published_numbers_of_each_sequence():
  first = ratios.health('x', jnp.asarray(GAPS[0]), jnp.ones(3), jnp.asarray(KEPT[0]))
  assert value(first['x/kl']) == pytest.approx(-0.333333, abs=1e-5)
  assert value(first['x/k3']) == pytest.approx(0.388702, abs=1e-5)
  second = ratios.health('x', jnp.asarray(GAPS[1]), jnp.ones(3), jnp.asarray(KEPT[1]))
  assert value(second['x/k3']) == pytest.approx(0.074361, abs=1e-5)


def test_effective_sample_size_of_weights_worked_by_hand():
  weight = jnp.array([1, 1, 2, 0.5, 99.0])
  assert ratios.effective(weight, jnp.array([1, 1, 1, 1, 0.0])) == pytest.approx(0.81)


def test_ratio_stays_finite_however_far_the_policies_are_apart():
  gap = ratios.log_ratio(jnp.array([0.0, -500.0]), jnp.array([-500.0, 0.0]), jnp.ones(2))
  np.testing.assert_array_equal(gap, [20, -20])
  assert np.isfinite(jnp.exp(gap)).all()


# Arguments.


@pytest.mark.parametrize(
  'make, field',
  [
    (lambda: transforms.drop_degenerate(low=0.5, high=0.5), 'low'),
    (lambda: transforms.limit_staleness(limit=-1), 'limit'),
    (lambda: transforms.pods(m=1), 'pods.m'),
    (lambda: transforms.group_advantage(scope='groups'), 'scope'),
    (lambda: transforms.group_advantage(singleton='one'), 'singleton'),
    (lambda: transforms.group_advantage(ddof=2), 'ddof'),
    (lambda: transforms.tis(level='row'), 'tis.level'),
    (lambda: transforms.tis(cap=0.5), 'tis.cap'),
  ],
)
def test_argument_that_cannot_work_is_refused_by_name(make, field):
  with pytest.raises(ConfigError, match=field):
    make()


def test_every_outcome_that_says_nothing_about_a_row_is_worth_nothing():
  for outcome in (Outcome.ERROR, Outcome.TIMEOUT):
    batch = of_rewards([[0.0]]).replace(verdict_PG=jnp.array([[outcome]], jnp.int8))
    assert applied(MEMBERS['combine_rewards shaped'], batch)[0].reward_PG == 0


def test_variance_report_leaves_out_groups_without_a_counted_row():
  _, report = applied(transforms.pods(m=2), of_rewards([[0, 1, 0, 1], [5, 0, 0, 0]], stat_PG=[[1] * 4, [0] * 4]))
  assert value(report['pods/variance_before']) == pytest.approx(0.25)
  assert masked.average(jnp.ones(2), jnp.ones(2)).value() == 1
