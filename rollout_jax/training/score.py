"""Log-probs of sampled tokens under given parameters: one forward, the same code as the decoder's."""

import functools
from collections.abc import Callable
from typing import NamedTuple

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


class Scorer(NamedTuple):
  """How the rows of a batch are scored, `together` at a time; `filters`: the distribution may not hold every token.

  score(params, tokens_BT, prompt_B) -> (logp_BT, inside_BT, entropy_BT) as from `score`; row b's prompt has prompt_B[b] tokens.
  """

  score: Callable[[PyTree, Array, Array], tuple[Array, Array, Array]]
  together: int
  filters: bool


def scorer(policy: Policy, distribution: Distribution) -> Scorer:
  """Each row by itself."""
  return Scorer(lambda params, tokens_BT, _: score(policy, distribution, params, tokens_BT), 1, distribution.filters)


def group_scorer(policy: Policy, distribution: Distribution, group: int, prompt_length: int) -> Scorer:
  """Groups of `group` rows with one prompt of up to `prompt_length` tokens, which is computed once for all of them.

  The same log-probs and gradients as each row by itself, for P * L + B * A tokens of work instead of B * T = B * (L + A)
  (PrefixGrouper, arXiv 2506.05433). It is what the decoder does: the prompt is prefilled, and its keys and values are
  copied to each row, which goes on from its prompt's last token; the copies' gradients add up. Prompt tokens get no
  log-prob. Over devices, microbatches of fewer groups than data * fsdp are computed whole on each of them.
  """
  return Scorer(
    functools.partial(_score_groups, policy, distribution, group, prompt_length), group, distribution.filters
  )


def _score_groups(
  policy: Policy,
  distribution: Distribution,
  group: int,
  prompt_length: int,
  params: PyTree,
  tokens_BT: Array,
  prompt_B: Array,
) -> tuple[Array, Array, Array]:
  T = tokens_BT.shape[1]
  prompt_PG = prompt_B.reshape(-1, group)
  longest_P = jnp.argmax(prompt_PG, axis=1)  # a row that is there, if any row of its group is
  asked_P1T = jnp.take_along_axis(tokens_BT.reshape(-1, group, T), longest_P[:, None, None], axis=1)
  asked_PL = asked_P1T[:, 0, :prompt_length]
  position_PL = jnp.broadcast_to(jnp.arange(prompt_length), asked_PL.shape)
  _, cache = policy.hidden(params, asked_PL, position_PL, cache=policy.new_cache(len(asked_PL), T))
  cache = jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), cache)
  last_B = jnp.maximum(jnp.repeat(jnp.max(prompt_PG, axis=1), group), 1) - 1
  fed_BA = last_B[:, None] + jnp.arange(T - prompt_length)[None, :]
  hidden_BAD, _ = policy.hidden(params, jnp.take_along_axis(tokens_BT, fed_BA, axis=1), fed_BA, cache=cache)
  logits_BAV = policy.logits(params, hidden_BAD)
  logp_BA, inside_BA = distribution.score(logits_BAV, jnp.take_along_axis(tokens_BT, fed_BA + 1, axis=1))
  entropy_BA = distribution.entropy(jax.lax.stop_gradient(logits_BAV))

  def place(x_BA: Array, elsewhere: float | bool) -> Array:
    empty_T = jnp.full((T,), elsewhere, x_BA.dtype)
    return jax.vmap(lambda x_A, fed_A: empty_T.at[fed_A + 1].set(x_A))(x_BA, fed_BA)

  return place(logp_BA, 0.0), place(inside_BA, True), place(entropy_BA, 0.0)


def score_rows(
  scorer: Scorer, params: PyTree, tokens_BT: Array, prompt_B: Array, live_B: Array, micro: int
) -> tuple[Array, Array]:
  """Log-probs [B, T] of the rows that are live and whether the distribution holds the tokens, in microbatches.

  Both are zero for microbatches without a live row.
  """

  def body(rows: tuple[Array, Array]) -> tuple[Array, Array]:
    logp_mT, inside_mT, _ = scorer.score(params, *rows)
    return logp_mT, inside_mT.astype(jnp.float32)

  like = jax.ShapeDtypeStruct(tokens_BT.shape, jnp.float32)
  scored = fill(body, (tokens_BT, prompt_B), live_B, micro, (like, like), scorer.together)
  return jax.lax.stop_gradient(scored)
