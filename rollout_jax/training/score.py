"""Log-probs of sampled tokens under given parameters: one forward, the same code as the decoder's."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rollout_jax.distribution import Distribution
from rollout_jax.models.transformer import Policy
from rollout_jax.training.microbatch import fold
from rollout_jax.training.packing import Layout, Places, pack_rows
from rollout_jax.types import Array, PyTree

Scores = tuple[Array, Array, Array]


class Scorer(NamedTuple):
  """How the rows of a batch are scored.

  score(params, tokens_RL, places) -> (logp_RL, inside_RL, entropy_RL): for each token given those before it, its log-prob,
    whether the sampling distribution holds it, and the entropy there. What stands at the first token of a sequence, which
    nothing predicts, means nothing; so with a `chunk` do the tokens of a shared prompt.
  layout(prompt_B, cut_B, width) -> Layout of rows as from `pack_rows`.
  `together` rows share a prompt; `filters`: the distribution may not hold every token.
  """

  score: Callable[[PyTree, Array, Places], Scores]
  layout: Callable[[Array, Array, int], Layout]
  together: int
  filters: bool


def scorer(
  policy: Policy, distribution: Distribution, *, length: int, together: int = 1, chunk: int = 0, remat: str = 'none'
) -> Scorer:
  """Rows packed into rows of `length` tokens; see `score` for the options."""
  return Scorer(
    functools.partial(score, policy, distribution, chunk=chunk, remat=remat),
    functools.partial(pack_rows, length=length, together=together),
    together,
    distribution.filters,
  )


def score(
  policy: Policy,
  distribution: Distribution,
  params: PyTree,
  tokens_RL: Array,
  places: Places,
  *,
  chunk: int = 0,
  remat: str = 'none',
) -> Scores:
  """Scores as of `Scorer.score`.

  Logits of all places are made at once, or with a `chunk` those of so many columns at a time, of which none is kept for the
  backward pass. `remat` says what the layers keep for it (models/transformer.py).
  """
  hidden_RLD = policy.hidden(params, tokens_RL, places.position_RL, places.segment_RL, places.branch_RL, remat=remat)
  if places.before_RL is None:
    hidden_RLD = jnp.pad(hidden_RLD[:, :-1], ((0, 0), (1, 0), (0, 0)))
  else:
    hidden_RLD = jnp.take_along_axis(hidden_RLD, places.before_RL[:, :, None], axis=1)

  def each(hidden_RLD: Array, tokens_RL: Array) -> Scores:
    logits_RLV = policy.logits(params, hidden_RLD)
    logp_RL, inside_RL = distribution.score(logits_RLV, tokens_RL)
    return logp_RL, inside_RL, distribution.entropy(jax.lax.stop_gradient(logits_RLV))

  if not chunk:
    return each(hidden_RLD, tokens_RL)
  return _by_columns(each, hidden_RLD, tokens_RL, _predicted(places), chunk)


def _predicted(places: Places) -> Array:
  """Which places hold a token that somebody may want scored, [R, L]."""
  wanted_RL = (places.segment_RL > 0) & (places.position_RL > 0)
  return wanted_RL if places.branch_RL is None else wanted_RL & (places.branch_RL > 0)


def _by_columns(
  each: Callable[[Array, Array], Scores], hidden_RLD: Array, tokens_RL: Array, wanted_RL: Array, chunk: int
) -> Scores:
  """`each` of the wanted places, which are moved to the front of their rows; columns behind the last of them cost nothing."""
  rows, length = tokens_RL.shape
  order_RL = jnp.argsort(~wanted_RL, axis=1, stable=True)
  most = jnp.max(jnp.sum(wanted_RL, axis=1))
  ids_cRn = jnp.pad(order_RL, ((0, 0), (0, -length % chunk))).reshape(rows, -1, chunk).swapaxes(0, 1)
  take = lambda x, ids: jnp.take_along_axis(x, ids.reshape(ids.shape + (1,) * (x.ndim - 2)), axis=1)
  nothing = lambda hidden, tokens: jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(each, hidden, tokens)
  )

  @jax.checkpoint
  def columns(start_ids):
    start, ids_Rn = start_ids
    return lax.cond(start < most, each, nothing, take(hidden_RLD, ids_Rn), take(tokens_RL, ids_Rn))

  found = lax.map(columns, (jnp.arange(len(ids_cRn)) * chunk, ids_cRn))
  back_RL = jnp.argsort(order_RL, axis=1)
  in_order = lambda x_cRn: take(x_cRn.swapaxes(0, 1).reshape(rows, -1), back_RL)
  return jax.tree.map(in_order, found)


def score_rows(
  scorer: Scorer, params: PyTree, tokens_BT: Array, prompt_B: Array, cut_B: Array, micro: int
) -> tuple[Array, Array]:
  """Log-probs [B, T] of what rows need (cut_B tokens each), and 1 where the distribution holds the token; zero elsewhere."""
  shape = tokens_BT.shape

  def body(rows: Layout) -> tuple[Array, Array]:
    logp_mL, inside_mL, _ = scorer.score(params, rows.take(tokens_BT), rows.places)
    return rows.put(logp_mL, shape), rows.put(inside_mL.astype(jnp.float32), shape)

  layout = scorer.layout(prompt_B, cut_B, shape[1])
  return lax.stop_gradient(fold(body, layout, layout.token_RL[:, 0] > 0, micro))
