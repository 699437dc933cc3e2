"""From the parameters that train to the parameters that are served to the decoder.

Both have the same layout, so publishing moves nothing. What is served while steps run (lag > 0) must not share a buffer
with the training state, which every step donates: it is copied once.
"""

import jax
import jax.numpy as jnp

from rollout_jax.types import PyTree


@jax.jit
def copy(params: PyTree) -> PyTree:
  """The same parameters in buffers of their own, laid out alike."""
  return jax.tree.map(jnp.copy, params)
