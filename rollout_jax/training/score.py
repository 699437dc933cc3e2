"""Log-probs of sampled tokens under given parameters: one forward, the same code as the decoder's."""

import jax
import jax.numpy as jnp

from rollout_jax.distribution import Distribution
from rollout_jax.models.transformer import Policy
from rollout_jax.training.microbatch import fill
from rollout_jax.types import Array, PyTree


def score(
  policy: Policy, distribution: Distribution, params: PyTree, tokens_BT: Array, segment_BT: Array | None = None
) -> tuple[Array, Array, Array]:
  """For each token given those before it: log-prob, whether the sampling distribution holds it, and the entropy there.

  All three are [B, T]; the first position, which nothing predicts, has log-prob 0 and counts as held. Rows are
  left-aligned, so padding at the right is seen by no real token. Where `segment_BT` packs several sequences into a row,
  positions start anew with each and none sees another; what it gives for the first token of a segment means nothing.
  """
  rows, length = tokens_BT.shape
  position_BT = jnp.broadcast_to(jnp.arange(length - 1), (rows, length - 1))
  if segment_BT is not None:
    segment_BT = segment_BT[:, :-1]
    position_BT = position_BT - _starts(segment_BT)
  hidden_BTD = policy.hidden(params, tokens_BT[:, :-1], position_BT, segment_BT)
  logits_BTV = policy.logits(params, hidden_BTD)
  logp_BT, inside_BT = distribution.score(logits_BTV, tokens_BT[:, 1:])
  entropy_BT = distribution.entropy(jax.lax.stop_gradient(logits_BTV))
  first = ((0, 0), (1, 0))
  return jnp.pad(logp_BT, first), jnp.pad(inside_BT, first, constant_values=True), jnp.pad(entropy_BT, first)


def _starts(segment_BT: Array) -> Array:
  """The index [B, T] at which the segment of each entry starts."""
  new_BT = segment_BT[:, 1:] != segment_BT[:, :-1]
  index_T = jnp.arange(1, segment_BT.shape[1])
  return jax.lax.cummax(jnp.pad(jnp.where(new_BT, index_T, 0), ((0, 0), (1, 0))), axis=1)


def score_rows(
  policy: Policy, distribution: Distribution, params: PyTree, tokens_BT: Array, live_B: Array, micro: int
) -> tuple[Array, Array]:
  """Log-probs [B, T] of the rows that are live and whether the distribution holds the tokens, in microbatches.

  Both are zero for microbatches without a live row.
  """

  def body(tokens_mT: Array) -> tuple[Array, Array]:
    logp_mT, inside_mT, _ = score(policy, distribution, params, tokens_mT)
    return logp_mT, inside_mT.astype(jnp.float32)

  like = jax.ShapeDtypeStruct(tokens_BT.shape, jnp.float32)
  return jax.lax.stop_gradient(fill(body, tokens_BT, live_B, micro, (like, like)))
