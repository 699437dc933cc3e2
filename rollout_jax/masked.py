"""Masked reductions: one definition each. A mask is 0/1 (or weights) and broadcasts to the shape of `x` by hand."""

import jax.numpy as jnp

from rollout_jax.types import Array, Mean

Axis = int | tuple[int, ...] | None


def total(x: Array, where: Array, axis: Axis = None, keepdims: bool = False) -> Array:
  """Sum of x over `where`; what is outside may be inf or nan."""
  return jnp.sum(jnp.where(where > 0, x, 0) * where, axis=axis, keepdims=keepdims)


def mean(x: Array, where: Array, axis: Axis = None, keepdims: bool = False) -> Array:
  """Mean of x over `where`; zero where nothing is selected."""
  count = jnp.sum(where, axis=axis, keepdims=keepdims)
  return total(x, where, axis, keepdims) / jnp.where(count > 0, count, 1)


def spread(x: Array, where: Array, axis: Axis = None, keepdims: bool = False) -> Array:
  """Largest less smallest selected x; zero where nothing is selected."""
  low = jnp.min(jnp.where(where > 0, x, jnp.inf), axis=axis, keepdims=keepdims)
  high = jnp.max(jnp.where(where > 0, x, -jnp.inf), axis=axis, keepdims=keepdims)
  return jnp.where(high > low, high - low, 0.0)


def std(x: Array, where: Array, axis: Axis = None, ddof: int = 1, keepdims: bool = False) -> Array:
  """Standard deviation over `where` with n - ddof; exactly zero if all selected values are equal (behaviours U7)."""
  centred = x - mean(x, where, axis, keepdims=True)
  count = jnp.sum(where, axis=axis, keepdims=keepdims)
  square = total(centred**2, where, axis, keepdims)
  varies = spread(x, where, axis, keepdims) > 0
  variance = jnp.where(varies, square, 1.0) / jnp.maximum(count - ddof, 1)
  return jnp.where(varies, jnp.sqrt(variance), 0.0)


def maximum(x: Array, where: Array, axis: Axis = None) -> Array:
  """Largest selected x; zero where nothing is selected."""
  high = jnp.max(jnp.where(where > 0, x, -jnp.inf), axis=axis)
  return jnp.where(jnp.isfinite(high), high, 0.0)


def average(x: Array, where: Array) -> Mean:
  """Mean of x over `where` as a Mean that adds up."""
  return Mean(total(jnp.asarray(x, jnp.float32), where), jnp.sum(where).astype(jnp.float32))


def count(x: Array) -> Mean:
  """A count: its total is the number, its count is one, so that it adds up over steps as a mean per step."""
  return Mean(jnp.sum(jnp.asarray(x, jnp.float32)), jnp.ones((), jnp.float32))


def single(x: Array) -> Mean:
  """One number of a whole batch, a maximum or a ratio: over steps it becomes the mean of the batches' numbers."""
  return Mean(jnp.asarray(x, jnp.float32), jnp.ones((), jnp.float32))
