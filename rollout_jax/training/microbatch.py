"""Sums over microbatches of rows, where only the microbatches that hold a live row run (law 8).

Rows without a live token are sorted behind the others and the loop's bound is the number of live rows, so a step costs
what is kept, not what the batch has room for.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rollout_jax.mesh import constrain
from rollout_jax.types import Array, PyTree


def order_rows(live_R: Array, micro: int) -> tuple[Array, Array]:
  """Row numbers [M, micro], live rows first and otherwise in order, and how many of the M microbatches hold a live row.

  The last microbatch is filled up with numbers from R on, which stand for empty rows.
  """
  rows = live_R.shape[0]
  blocks = -(-rows // micro)
  order_R = jnp.argsort(~live_R, stable=True)
  order_Mm = jnp.full((blocks * micro,), rows).at[:rows].set(order_R).reshape(blocks, micro)
  return order_Mm, -(-jnp.sum(live_R) // micro)


def take_rows(rows: PyTree, order_m: Array) -> PyTree:
  """The rows with these numbers, cut over the mesh; an empty row is all zeros."""

  def take(x: Array) -> Array:
    x_m = x.at[order_m].get(mode='fill', fill_value=0)
    return constrain(x_m, 'batch', *(None,) * (x.ndim - 1))

  return jax.tree.map(take, rows)


def fold(body: Callable[[PyTree], PyTree], rows: PyTree, live_R: Array, micro: int) -> PyTree:
  """The sum of `body(microbatch)` over the microbatches with a live row; zeros if there is none."""
  order_Mm, count = order_rows(live_R, micro)
  zero = jax.tree.map(
    lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: body(take_rows(rows, order_Mm[0])))
  )

  def add(index: Array, total: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, body(take_rows(rows, order_Mm[index])))

  return lax.fori_loop(0, count, add, zero)
