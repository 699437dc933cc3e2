"""Off-policy weights and health against published numbers (to 1e-5)."""

import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax import ratios, transforms
from tests.batches import applied, of_rewards, value

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost


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
