"""Sums over microbatches of rows, where only the microbatches that hold a live row run (law 8).

Rows without a live token are sorted behind the others and the loop's bound is the number of live rows, so a step costs
what is kept, not what the batch has room for. Rows stay whole: a microbatch is `micro` rows of T tokens. With
`together` above 1 so do groups of that many rows, which then live and die as one; `micro` is a multiple of it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from rollout_jax.mesh import constrain
from rollout_jax.types import Array, PyTree


def order_rows(live_B: Array, micro: int, together: int = 1) -> tuple[Array, Array]:
  """Row numbers [M, micro], live rows first and otherwise in order, and how many of the M microbatches hold a live row.

  The last microbatch is filled up with numbers from B on, which stand for empty rows.
  """
  if together > 1:
    order_Mu, count = order_rows(jnp.any(live_B.reshape(-1, together), axis=1), micro // together)
    order_Mut = order_Mu[:, :, None] * together + jnp.arange(together)[None, None, :]
    return order_Mut.reshape(len(order_Mu), micro), count
  rows = live_B.shape[0]
  blocks = -(-rows // micro)
  order_B = jnp.argsort(~live_B, stable=True)
  order_Mm = jnp.full((blocks * micro,), rows).at[:rows].set(order_B).reshape(blocks, micro)
  return order_Mm, -(-jnp.sum(live_B) // micro)


def take_rows(rows: PyTree, order_m: Array) -> PyTree:
  """The rows with these numbers, cut over the mesh; an empty row is all zeros."""

  def take(x: Array) -> Array:
    x_m = x.at[order_m].get(mode='fill', fill_value=0)
    return constrain(x_m, 'batch', *(None,) * (x.ndim - 1))

  return jax.tree.map(take, rows)


def fold(body: Callable[[PyTree], PyTree], rows: PyTree, live_B: Array, micro: int, together: int = 1) -> PyTree:
  """The sum of `body(microbatch)` over the microbatches with a live row; zeros if there is none."""
  order_Mm, count = order_rows(live_B, micro, together)
  zero = jax.tree.map(
    lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: body(take_rows(rows, order_Mm[0])))
  )

  def add(index: Array, total: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, body(take_rows(rows, order_Mm[index])))

  return lax.fori_loop(0, count, add, zero)


def fill(
  body: Callable[[PyTree], PyTree], rows: PyTree, live_B: Array, micro: int, like: PyTree, together: int = 1
) -> PyTree:
  """`body`'s value for every row of a microbatch with a live row, put back in its place; zeros elsewhere.

  `like` gives shape and dtype of the result, whose leading axis is that of the rows.
  """
  order_Mm, count = order_rows(live_B, micro, together)

  def put(index: Array, filled: PyTree) -> PyTree:
    value = body(take_rows(rows, order_Mm[index]))
    return jax.tree.map(lambda x, x_m: x.at[order_Mm[index]].set(x_m, mode='drop'), filled, value)

  return lax.fori_loop(0, count, put, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))
