"""The key/value cache of a batch of slots, and attention over it.

Per layer one array [S, K, T, C]: the layout in which a step's grouped product reads whole rows. Layers are tuples, not
stacked, so that each array is donated and written in place. Nothing here knows which slots are live: what lies behind a
row's position is never attended, so stale values need no clearing.
"""

import flax.struct
import jax
import jax.numpy as jnp

from rollout_jax import mesh
from rollout_jax.types import Array

AXES = ('slots', 'kv_heads', None, None)


@flax.struct.dataclass
class Cache:
  """Keys (rotated) and values by layer, each [S, K, T, C]."""

  k: tuple[Array, ...]
  v: tuple[Array, ...]


def empty(layers: int, shape_SKTC: tuple[int, int, int, int], dtype: str) -> Cache:
  """A cache of zeros. Under jit with out_shardings, or each layer's zeros may share one buffer and refuse donation."""
  k, v = ([jnp.zeros(shape_SKTC, dtype) for _ in range(layers)] for _ in range(2))
  return Cache(tuple(k), tuple(v))


def write(cache_SKTC: Array, x_SWKC: Array, position_SW: Array) -> Array:
  """The cache with token w of row s stored at `position_SW`; a position outside [0, T) must not come."""
  # Over rows by vmap, so that the partitioner sees that no row writes to another: with a row index it gathers them all.
  store = jax.vmap(lambda cache_KTC, x_WKC, position_W: cache_KTC.at[:, position_W].set(x_WKC.swapaxes(0, 1)))
  return mesh.constrain(store(cache_SKTC, x_SWKC, position_SW), *AXES)


def visible(position_SW: Array, length: int) -> Array:
  """Which of the cache's `length` entries each query may read, [S, W, T]: those up to its own position."""
  return jnp.arange(length)[None, None, :] <= position_SW[:, :, None]


def attend(q_SWKGC: Array, k_SKTC: Array, v_SKTC: Array, mask_SWT: Array) -> Array:
  """Grouped-query attention, [S, W, K, G, C]; G query heads share a key/value head. Softmax in float32."""
  # dot_general by hand: einsum turns these products around, and on CPU each turn is a copy, or a slow product in bf16.
  q_SKGWC = q_SWKGC.transpose(0, 2, 3, 1, 4) * jnp.asarray(q_SWKGC.shape[-1] ** -0.5, q_SWKGC.dtype)
  score_SKGWT = _product(q_SKGWC, k_SKTC, 3)
  score_SKGWT = jnp.where(mask_SWT[:, None, None, :, :], score_SKGWT, -jnp.inf)
  weight_SKGWT = jax.nn.softmax(score_SKGWT, axis=-1).astype(v_SKTC.dtype)
  return _product(weight_SKGWT, v_SKTC, 2).astype(v_SKTC.dtype).transpose(0, 3, 1, 2, 4)


def _product(x_SKGWX: Array, y_SKTC: Array, axis: int) -> Array:
  """Sum over the last axis of x and `axis` of y for each slot and key/value head, in float32."""
  dimensions = ((4,), (axis,)), ((0, 1), (0, 1))
  return jax.lax.dot_general(x_SKGWX, y_SKTC, dimensions, preferred_element_type=jnp.float32)
