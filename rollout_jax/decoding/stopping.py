"""When a row ends."""

import jax.numpy as jnp

from rollout_jax.types import Array, Stop


def stop_reason(token_S: Array, length_S: Array, limit_S: Array, end_tokens: tuple[int, ...]) -> Array:
  """The `Stop` (int8) of each row whose newest token is `token_S`; an end token at the limit counts as EOS."""
  end_E = jnp.asarray(end_tokens, jnp.int32)
  ended_S = (token_S[:, None] == end_E[None, :]).any(axis=-1)
  full_S = length_S >= limit_S
  return jnp.where(ended_S, Stop.EOS, jnp.where(full_S, Stop.LENGTH, Stop.NONE)).astype(jnp.int8)
