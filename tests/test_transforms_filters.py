"""Rewards and filters, worked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax import transforms
from rollout_jax.signal import informative
from rollout_jax.types import Outcome
from tests.batches import applied, of_rewards, value

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost


SHAPED = transforms.combine_rewards(correct=2.0, wrong=-1.0, malformed=-0.5)


def test_verdicts_become_rewards_and_errors_are_counted_apart():
  batch = of_rewards(np.zeros((1, 6)), stat_PG=[[1, 1, 1, 0, 0, 0]]).replace(
    verdict_PG=jnp.array([[1, 0, 2, 3, 4, 0]], jnp.int8), exists_PG=jnp.array([[1, 1, 1, 1, 1, 0]], bool)
  )
  after, report = applied(SHAPED, batch)
  np.testing.assert_allclose(after.reward_PG, [[2, -1, -0.5, 0, 0, 0]])
  assert value(report['reward/mean']) == pytest.approx(0.5 / 3)
  assert value(report['reward/correct']) == value(report['reward/malformed']) == pytest.approx(1 / 3)
  assert value(report['reward/error']) == value(report['reward/timeout']) == pytest.approx(1 / 5)


def test_rewards_add_to_what_is_there():
  after, _ = applied(transforms.combine_rewards(), of_rewards([[0.25, -1]], correct_PG=[[True, False]]))
  np.testing.assert_allclose(after.reward_PG, [[1.25, -1]])


def test_every_outcome_that_says_nothing_about_a_row_is_worth_nothing():
  for outcome in (Outcome.ERROR, Outcome.TIMEOUT):
    batch = of_rewards([[0.0]]).replace(verdict_PG=jnp.array([[outcome]], jnp.int8))
    assert applied(SHAPED, batch)[0].reward_PG == 0


def test_group_is_kept_only_if_some_but_not_all_of_its_judged_rows_are_right():
  correct_PG = [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
  stat_PG = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
  # Shaping gave the rewards of every group a spread: the filter must look at correctness alone.
  batch = of_rewards(np.tile([1, 0.75, 0.5, 0], (5, 1)), stat_PG=stat_PG, correct_PG=np.array(correct_PG) > 0)
  after, report = applied(transforms.drop_degenerate(), batch)
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
  after, report = applied(transforms.limit_staleness(), batch)
  np.testing.assert_array_equal(after.stat_PG, [[1, 1, 1, 0, 1]])
  np.testing.assert_array_equal(after.keep_PGT[:, :, 2], [[1, 1, 1, 0, 1]])
  assert value(report['staleness/dropped_rows']) == 1
  assert value(report['staleness/lag']) == (0 + 1 + 3 + 8) / 4
