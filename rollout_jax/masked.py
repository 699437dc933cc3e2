"""Masked reductions: one definition each. A mask is 0/1 (or weights) and broadcasts to the shape of `x` by hand."""

import jax.numpy as jnp

from rollout_jax.types import Array, Mean


def total(x: Array, where: Array, axis: int | tuple[int, ...] | None = None) -> Array:
  """Sum of x over `where`; what is outside may be inf or nan."""
  return jnp.sum(jnp.where(where > 0, x, 0) * where, axis=axis)


def mean(x: Array, where: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
  """Mean of x over `where`; zero where nothing is selected."""
  count = jnp.sum(where, axis=axis, keepdims=keepdims)
  return jnp.sum(jnp.where(where > 0, x, 0) * where, axis=axis, keepdims=keepdims) / jnp.maximum(count, 1)


def std(x: Array, where: Array, axis: int, ddof: int = 1, keepdims: bool = False) -> Array:
  """Standard deviation over `where` with n - ddof; exactly zero if all selected values are equal (behaviours U7)."""
  centred = x - mean(x, where, axis, keepdims=True)
  count = jnp.sum(where, axis=axis, keepdims=keepdims)
  square = jnp.sum(jnp.where(where > 0, centred, 0) ** 2 * where, axis=axis, keepdims=keepdims)
  low = jnp.min(jnp.where(where > 0, x, jnp.inf), axis=axis, keepdims=keepdims)
  high = jnp.max(jnp.where(where > 0, x, -jnp.inf), axis=axis, keepdims=keepdims)
  value = jnp.where(high > low, square, 1.0) / jnp.maximum(count - ddof, 1)
  return jnp.where(high > low, jnp.sqrt(value), 0.0)


def maximum(x: Array, where: Array, axis: int | None = None) -> Array:
  """Largest selected x; zero where nothing is selected."""
  high = jnp.max(jnp.where(where > 0, x, -jnp.inf), axis=axis)
  return jnp.where(jnp.isfinite(high), high, 0.0)


def average(x: Array, where: Array) -> Mean:
  """Mean of x over `where` as a Mean that adds up."""
  return Mean(total(jnp.asarray(x, jnp.float32), where), jnp.sum(where).astype(jnp.float32))


def count(x: Array) -> Mean:
  """A count: its total is the number, its count is one, so that it adds up over steps as a mean per step."""
  return Mean(jnp.sum(jnp.asarray(x, jnp.float32)), jnp.ones((), jnp.float32))
