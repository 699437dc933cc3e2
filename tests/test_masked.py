"""Masked reductions against numpy on the selected entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rollout_jax import masked

SHAPE = (3, 5)
NUMBERS = arrays(np.float32, SHAPE, elements=st.floats(-8, 8, width=16))
MASKS = arrays(np.float32, SHAPE, elements=st.sampled_from([0.0, 1.0]))
REDUCTIONS = {
  'total': (masked.total, lambda x: x.sum()),
  'mean': (masked.mean, lambda x: x.mean() if x.size else 0.0),
  'spread': (masked.spread, lambda x: x.max() - x.min() if x.size else 0.0),
  'maximum': (masked.maximum, lambda x: x.max() if x.size else 0.0),
  'std': (masked.std, lambda x: x.std(ddof=1) if x.size > 1 else 0.0),
}
JITTED = {
  name: jax.jit(lambda x, where, f=f: (f(x, where, axis=1), f(x, where))) for name, (f, _) in REDUCTIONS.items()
}


@pytest.mark.parametrize('name', REDUCTIONS)
@settings(max_examples=15, deadline=None)
@given(x=NUMBERS, where=MASKS)
def test_reduction_equals_numpy_on_the_selected_entries_and_never_sees_the_rest(name, x, where):
  expected = REDUCTIONS[name][1]
  by_row, whole = JITTED[name](np.where(where > 0, x, np.nan), where)
  np.testing.assert_allclose(whole, expected(x[where > 0]), atol=1e-4)
  np.testing.assert_allclose(by_row, [expected(r[w > 0]) for r, w in zip(x, where, strict=True)], atol=1e-4)


@pytest.mark.parametrize('count', [1, 2, 7, 16])
@pytest.mark.parametrize('number', [0.7, 0.1, 1 / 3, -1e4])
def test_std_of_equal_numbers_is_exactly_zero(count, number):
  x = jnp.full((1, count), number, jnp.float32)
  assert masked.std(x, jnp.ones_like(x), axis=1) == 0


@pytest.mark.parametrize('name', REDUCTIONS)
def test_gradient_is_finite_where_nothing_is_selected_and_zero_outside_the_mask(name):
  f = REDUCTIONS[name][0]
  x, where = jnp.arange(10.0).reshape(2, 5), jnp.array([[0, 0, 0, 0, 0], [1, 1, 0, 1, 0.0]])
  gradient = jax.grad(lambda x: jnp.sum(f(x, where, axis=1)))(x)
  assert np.isfinite(gradient).all()
  assert (np.asarray(gradient)[np.asarray(where) == 0] == 0).all()


def test_weights_below_one_average_to_the_weighted_mean():
  assert masked.mean(jnp.array([1.0, 3.0]), jnp.array([0.1, 0.3])) == pytest.approx(2.5)


def test_average_adds_up_over_parts_and_counts_only_the_selected():
  x, where = jnp.arange(6.0), jnp.array([1, 0, 1, 1, 0, 1.0])
  whole, parts = masked.average(x, where), masked.average(x[:2], where[:2]) + masked.average(x[2:], where[2:])
  assert whole.value() == parts.value() == pytest.approx((0 + 2 + 3 + 5) / 4)
  assert masked.average(x, jnp.zeros(6)).value() == 0


def test_count_and_single_become_means_over_batches():
  assert (masked.count(jnp.array([True, True, False])) + masked.count(jnp.array([True]))).value() == 1.5
  assert (masked.single(jnp.float32(3)) + masked.single(jnp.float32(5))).value() == 4
