"""Selection against brute force and published subsets."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_jax import transforms
from rollout_jax.transforms.select import max_variance
from tests.batches import applied, of_rewards, value

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost


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


def test_variance_report_leaves_out_groups_without_a_counted_row():
  _, report = applied(transforms.pods(m=2), of_rewards([[0, 1, 0, 1], [5, 0, 0, 0]], stat_PG=[[1] * 4, [0] * 4]))
  assert value(report['pods/variance_before']) == pytest.approx(0.25)
