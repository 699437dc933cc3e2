"""The sampling distribution: one object draws tokens and scores them, so that the two can never differ (law 4).

The tempered softmax is filtered by top-k, then top-p, then min-p, each of them on what the one before kept. A filter is
a threshold on the logit: tokens tied with the last one kept are kept too, so the kept set depends on logits alone.

A draw is an inverse CDF in two levels, with a fresh uniform for each: the block of the vocabulary, then the token in
the block. It stays accurate at 150k tokens, where one level could never draw some of them, and needs no random number
per token. No filter sorts the vocabulary but top-k.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rollout_jax import keys
from rollout_jax.types import Array, ConfigError

INFINITY = 0x7F800000  # the bits of float32's infinity
TRIANGLE = 256  # longest cumulative sum that is done as a product with a triangle of ones (faster than cumsum)


class Distribution(NamedTuple):
  """How tokens are drawn from logits, and what log-prob they get. Logits are finite.

  draw(logits_BV, key_B2, position_B) -> (token_B, logp_B) with row keys and the positions of the drawn tokens.
  score(logits_xV, token_x) -> (logp_x, inside_x) for any leading axes x. The log-prob is finite always: where `inside`
  is false the token was filtered out, and the log-prob is that of the tempered softmax before the filters.
  entropy(logits_xV) -> entropy_x of the distribution that the log-probs are of. `filters`: whether inside can be false.
  """

  draw: Callable[[Array, Array, Array], tuple[Array, Array]]
  score: Callable[[Array, Array], tuple[Array, Array]]
  entropy: Callable[[Array], Array]
  filters: bool
  description: str


def distribution(
  *,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  greedy: bool = False,
  mode: str = 'processed',
) -> Distribution:
  """The distribution of these settings.

  Args:
    top_k: number of most probable tokens kept; 0 keeps all.
    top_p: the fewest most probable tokens whose mass reaches it are kept; 1 keeps all.
    min_p: tokens at least this fraction as probable as the most probable one are kept; 0 keeps all.
    greedy: draw the most probable token; log-probs are those of the plain softmax.
    mode: 'processed' for log-probs of the distribution that is drawn from, 'raw' for those of the plain softmax.
  """
  _check(temperature, top_k, top_p, min_p, greedy, mode)
  filtered = top_k > 0 or top_p < 1 or min_p > 0
  raw = greedy or mode == 'raw'

  def temper(logits_xV):
    logits_xV = logits_xV.astype(jnp.float32)
    return logits_xV if temperature == 1 else logits_xV / temperature

  def kept(scaled_xV):
    return keep_set(jax.lax.stop_gradient(scaled_xV), top_k, top_p, min_p)

  def draw(logits_BV, key_B2, position_B):
    if greedy:
      token_B = most_probable(logits_BV)
      return token_B, log_prob(logits_BV.astype(jnp.float32), token_B)
    scaled_BV = temper(logits_BV)
    keep_BV = kept(scaled_BV) if filtered else None
    token_B = draw_from(_mass(scaled_BV, keep_BV)[0], uniforms(key_B2, position_B))
    return token_B, log_prob(logits_BV.astype(jnp.float32), token_B) if raw else log_prob(scaled_BV, token_B, keep_BV)

  def score(logits_xV, token_x):
    if raw or not filtered:
      scaled_xV = logits_xV.astype(jnp.float32) if raw else temper(logits_xV)
      return log_prob(scaled_xV, token_x), jnp.ones(token_x.shape, bool)
    scaled_xV = temper(logits_xV)
    keep_xV = kept(scaled_xV)
    inside_x = jnp.take_along_axis(keep_xV, token_x[..., None], axis=-1, mode='promise_in_bounds')[..., 0]
    return jnp.where(inside_x, log_prob(scaled_xV, token_x, keep_xV), log_prob(scaled_xV, token_x)), inside_x

  def entropy(logits_xV):
    scaled_xV = logits_xV.astype(jnp.float32) if raw else temper(logits_xV)
    mass_xV, top_x1 = _mass(scaled_xV, kept(scaled_xV) if filtered and not raw else None)
    total_x = mass_xV.sum(axis=-1)
    return jnp.log(total_x) - (mass_xV * (scaled_xV - top_x1)).sum(axis=-1) / total_x

  settings = f'temperature {temperature:g}, top-k {top_k}, top-p {top_p:g}, min-p {min_p:g}'
  description = f'{"greedy" if greedy else settings}; {"raw" if raw else mode} log-probs'
  return Distribution(draw, score, entropy, filtered and not raw, description)


def log_prob(scaled_xV: Array, token_x: Array, keep_xV: Array | None = None) -> Array:
  """Log-prob of the token under the softmax over the kept set (over everything if None)."""
  mass_xV, top_x1 = _mass(scaled_xV, keep_xV)
  chosen_x = jnp.take_along_axis(scaled_xV, token_x[..., None], axis=-1, mode='promise_in_bounds')[..., 0]
  return chosen_x - top_x1[..., 0] - jnp.log(mass_xV.sum(axis=-1))


def most_probable(logits_BV: Array) -> Array:
  """The first of the largest logits: argmax by two plain reductions, which is several times faster on CPU."""
  B, V = logits_BV.shape
  index_BV = jax.lax.broadcasted_iota(jnp.int32, (B, V), 1)
  largest_BV = logits_BV >= logits_BV.max(axis=-1, keepdims=True)
  return jnp.where(largest_BV, index_BV, V - 1).min(axis=-1)


def keep_set(scaled_xV: Array, top_k: int, top_p: float, min_p: float) -> Array:
  """True for the tokens that top-k, then top-p, then min-p keep. The most probable token is always kept."""
  keep_xV = jnp.ones(scaled_xV.shape, bool)
  if 0 < top_k < scaled_xV.shape[-1]:
    keep_xV = scaled_xV >= jax.lax.top_k(scaled_xV, top_k)[0][..., -1:]
  if top_p < 1:
    keep_xV = keep_xV & nucleus(jnp.where(keep_xV, scaled_xV, -jnp.inf), top_p)
  if min_p > 0:
    keep_xV = keep_xV & (scaled_xV >= scaled_xV.max(axis=-1, keepdims=True) + math.log(min_p))
  return keep_xV


def nucleus(scaled_xV: Array, top_p: float) -> Array:
  """True for the tokens that top-p keeps: those whose more probable tokens hold less than `top_p` of the mass.

  No sort: the crossing is searched between two distances from the largest logit, `near` (kept) and `far` (not kept), with
  three probes a pass, by their bit patterns, which are ordered as the distances are. A row is settled once one token
  alone is left between the two: that is the one at which the mass crosses. At most 16 passes; ties need most.
  """
  mass_xV, top_x1 = _mass(scaled_xV, None)
  distance_xV = top_x1 - scaled_xV
  total_x = _sum(mass_xV)

  def within(bits_x: Array) -> tuple[Array, Array]:
    """Mass and number of the tokens nearer than this distance."""
    nearer_xV = distance_xV < lax.bitcast_convert_type(bits_x, jnp.float32)[..., None]
    return _sum(jnp.where(nearer_xV, mass_xV, 0.0)), _sum(nearer_xV.astype(jnp.float32))

  def narrow(carry):
    near_x, far_x, fewer_x, more_x, probes = carry
    for probe_x in probes:
      mass_x, number_x = within(probe_x)
      kept_x = (mass_x < top_p * total_x) & (probe_x >= near_x)
      out_x = (mass_x >= top_p * total_x) & (probe_x <= far_x)
      near_x, fewer_x = jnp.where(kept_x, probe_x, near_x), jnp.where(kept_x, number_x, fewer_x)
      far_x, more_x = jnp.where(out_x, probe_x, far_x), jnp.where(out_x, number_x, more_x)
    return near_x, far_x, fewer_x, more_x, _between(near_x, far_x)

  def unsettled(carry):
    near_x, far_x, fewer_x, more_x, _ = carry
    return jnp.any((more_x - fewer_x > 1) & (far_x - near_x > 1))

  like_x = jnp.zeros(total_x.shape, jnp.int32)
  far_x = like_x + INFINITY
  first = [like_x + int(np.float32(d).view(np.int32)) for d in (0.5, 4.0, 32.0)]
  start = like_x, far_x, jnp.zeros(total_x.shape), jnp.full(total_x.shape, jnp.inf), first
  far_x = lax.while_loop(unsettled, narrow, start)[1]
  return distance_xV < lax.bitcast_convert_type(far_x, jnp.float32)[..., None]


def _between(near_x: Array, far_x: Array) -> list[Array]:
  """Three bit patterns that divide the gap into four; no sum of two of them, which could overflow."""
  gap_x = far_x - near_x
  return [near_x + gap_x // 4, near_x + gap_x // 2, far_x - gap_x // 4]


def _sum(x_xV: Array) -> Array:
  """Sum over the last axis, in rows of 128 that are added up first: several times faster on CPU, and more accurate."""
  V = x_xV.shape[-1]
  padded_xV = jnp.pad(x_xV, [(0, 0)] * (x_xV.ndim - 1) + [(0, -V % 128)])
  return padded_xV.reshape(*x_xV.shape[:-1], -1, 128).sum(axis=-2).sum(axis=-1)


def uniforms(key_B2: Array, position_B: Array) -> Array:
  """Two uniforms in [0, 1) per row, [B, 2]: the only randomness of a draw."""
  key_B2 = jax.vmap(keys.draw_key)(key_B2, position_B)
  return jax.vmap(lambda key: jax.random.uniform(keys.wrap(key), (2,)))(key_B2)


def block_size(vocabulary: int) -> int:
  """Tokens per block of the two-level draw: a power of two near the root, at most 128."""
  return int(2 ** min(max(round(math.log2(vocabulary) / 2), 3), 7))


def draw_from(mass_BV: Array, uniform_B2: Array) -> Array:
  """A token per row with probability in proportion to its mass. A token of zero mass is never drawn."""
  B, V = mass_BV.shape
  size = block_size(V)
  padded_BV = jnp.pad(mass_BV, ((0, 0), (0, -V % size)))
  mass_Bjs = padded_BV.reshape(B, -1, size)
  block_B = _invert(mass_Bjs.sum(axis=-1), uniform_B2[:, 0])
  inner_Bs = jnp.take_along_axis(mass_Bjs, block_B[:, None, None], axis=1, mode='promise_in_bounds')[:, 0]
  within_B = _invert(inner_Bs, uniform_B2[:, 1])
  return block_B * size + within_B


def _invert(mass_Bj: Array, uniform_B: Array) -> Array:
  """First index with mass whose cumulative sum exceeds uniform * total; if rounding leaves none, the last with mass."""
  B, J = mass_Bj.shape
  if J <= TRIANGLE:
    triangle_JJ = jnp.triu(jnp.ones((J, J), jnp.float32))
    sum_Bj = jnp.matmul(mass_Bj, triangle_JJ, precision=jax.lax.Precision.HIGHEST)
  else:
    sum_Bj = jnp.cumsum(mass_Bj, axis=-1)
  index_Bj = jax.lax.broadcasted_iota(jnp.int32, (B, J), 1)
  above_Bj = sum_Bj > uniform_B[:, None] * sum_Bj[:, -1:]
  first_B = jnp.where(above_Bj & (mass_Bj > 0), index_Bj, J).min(axis=-1)
  last_B = jnp.where(mass_Bj > 0, index_Bj, 0).max(axis=-1)
  return jnp.minimum(first_B, last_B)


def _mass(scaled_xV: Array, keep_xV: Array | None) -> tuple[Array, Array]:
  """Unnormalised probabilities, zero outside the kept set, and the largest logit, [x, 1]."""
  top_x1 = jax.lax.stop_gradient(scaled_xV.max(axis=-1, keepdims=True))
  mass_xV = jnp.exp(scaled_xV - top_x1)
  return mass_xV if keep_xV is None else jnp.where(keep_xV, mass_xV, 0.0), top_x1


def _check(temperature, top_k, top_p, min_p, greedy, mode):
  wanted = {
    'temperature': (temperature, temperature > 0, 'a number above 0 (greedy=True draws the most probable token)'),
    'top_k': (top_k, isinstance(top_k, int) and top_k >= 0, 'a whole number, 0 for no limit'),
    'top_p': (top_p, 0 < top_p <= 1, 'a number in (0, 1], 1 for no limit'),
    'min_p': (min_p, 0 <= min_p < 1, 'a number in [0, 1), 0 for no limit'),
    'mode': (mode, mode in ('processed', 'raw'), "'processed' or 'raw'"),
  }
  for name, (value, good, text) in wanted.items():
    if not good:
      raise ConfigError(f'{name} must be {text}, but is {value!r}.')
  if greedy and (temperature, top_k, top_p, min_p) != (1.0, 0, 1.0, 0.0):
    raise ConfigError(
      'greedy takes no temperature, top_k, top_p or min_p (its log-probs are those of the plain softmax), but '
      f'temperature={temperature}, top_k={top_k}, top_p={top_p}, min_p={min_p} came. Leave them at their defaults.'
    )
