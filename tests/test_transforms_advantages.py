"""Advantages against the published tables (to 1e-5)."""

import numpy as np
import pytest

from rollout_jax import transforms
from tests.batches import applied, of_rewards, value

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost


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
