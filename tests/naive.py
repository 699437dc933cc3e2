"""The decoder's oracle: a sampler that runs the full forward on every row for every token, and law 1's comparison."""

import jax
import jax.numpy as jnp
import numpy as np

from rollout_jax.distribution import block_size, uniforms
from rollout_jax.types import Row, Source, Stop

MARGIN = 1e-4  # a draw this near to the boundary between two tokens may fall on either side of it


class Naive:
  """Full forwards of one policy with one distribution. Rows are padded at the right, to one shape [B, T]."""

  def __init__(self, policy, distribution, length: int, rows: int):
    self.length, self.rows = length, rows

    @jax.jit
    def forward(params, tokens_BT, key_B2, cursor_B):
      hidden_BTD = policy.hidden(params, tokens_BT, jnp.broadcast_to(jnp.arange(length)[None, :], tokens_BT.shape))
      last_BD = hidden_BTD[jnp.arange(rows), cursor_B - 1]
      logits_BV = policy.logits(params, last_BD)
      return (*distribution.draw(logits_BV, key_B2, cursor_B), logits_BV)

    @jax.jit
    def score(params, tokens_BT):
      """Log-prob of every token given those before it, [B, T]; 0 for the first."""
      hidden_BTD = policy.hidden(params, tokens_BT, jnp.broadcast_to(jnp.arange(length)[None, :], tokens_BT.shape))
      logp_BT, inside_BT = distribution.score(policy.logits(params, hidden_BTD[:, :-1]), tokens_BT[:, 1:])
      return jnp.pad(logp_BT, ((0, 0), (1, 0))), jnp.pad(inside_BT, ((0, 0), (1, 0)), constant_values=True)

    @jax.jit
    def probabilities(logits_BV):
      B, V = logits_BV.shape
      every_BV = jnp.broadcast_to(jnp.arange(V)[None, :], (B, V))
      logp_BV, inside_BV = distribution.score(jnp.broadcast_to(logits_BV[:, None, :], (B, V, V)), every_BV)
      return jnp.where(inside_BV, jnp.exp(logp_BV), 0)

    self._forward, self._score, self._probabilities = forward, score, probabilities

  def _padded(self, rows_ids):
    tokens_BT = np.zeros((self.rows, self.length), np.int32)
    for row_T, ids in zip(tokens_BT, rows_ids, strict=False):
      row_T[: len(ids)] = ids
    return tokens_BT

  def sample(self, params, rows: list[Row], keys, end_tokens, version: int = 0) -> list[Row]:
    """The rows decoded to their ends."""
    ids = [list(row.tokens_T) for row in rows]
    logps = [list(row.logp_T) for row in rows]
    stops = [Stop.NONE for _ in rows]
    key_B2 = np.zeros((self.rows, 2), np.uint32)
    key_B2[: len(rows)] = keys
    while Stop.NONE in stops:
      cursor_B = np.array([len(i) for i in ids] + [1] * (self.rows - len(rows)), np.int32)
      token_B, logp_B, _ = jax.device_get(self._forward(params, self._padded(ids), key_B2, cursor_B))
      for b, row in enumerate(rows):
        if stops[b] == Stop.NONE:
          ids[b].append(int(token_B[b]))
          logps[b].append(float(logp_B[b]))
          stops[b] = Stop.EOS if token_B[b] in end_tokens else Stop.LENGTH if len(ids[b]) >= row.limit else Stop.NONE
    return [self._row(row, *came, version) for row, *came in zip(rows, ids, logps, stops, strict=True)]

  def _row(self, row: Row, ids, logps, stop, version) -> Row:
    n = len(ids) - len(row.tokens_T)
    source_T = np.concatenate([row.source_T, np.full(n, Source.DECODED, np.int8)])
    version_T = np.concatenate([row.version_T, np.full(n, version, np.int32)])
    return Row(row.request, np.array(ids, np.int32), source_T, np.array(logps, np.float32), version_T, row.limit, stop)

  def score(self, params, rows: list[Row]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Log-probs and inside flags of every row's tokens by the full forward; 0 and true for the first token."""
    logp_BT, inside_BT = jax.device_get(self._score(params, self._padded([row.tokens_T for row in rows])))
    cut = [len(row.tokens_T) for row in rows]
    return [logp_BT[b, :n] for b, n in enumerate(cut)], [inside_BT[b, :n] for b, n in enumerate(cut)]

  def distance(self, params, row: Row, key, position: int) -> float:
    """How far the draw at this position is from a boundary: the smaller of its two levels' distances."""
    key_B2, cursor_B = np.zeros((self.rows, 2), np.uint32), np.ones(self.rows, np.int32)
    key_B2[0], cursor_B[0] = key, position
    logits_BV = self._forward(params, self._padded([row.tokens_T]), key_B2, cursor_B)[2]
    p_V = np.asarray(self._probabilities(logits_BV), np.float64)[0]
    u = np.asarray(uniforms(key_B2[:1], cursor_B[:1]), np.float64)[0]
    size = block_size(len(p_V))
    p_js = np.pad(p_V, (0, -len(p_V) % size)).reshape(-1, size)
    sum_j = p_js.sum(1).cumsum() / p_js.sum()
    nearest = [np.abs(sum_j - u[0]).min()]
    for j in {int((sum_j <= u[0] + side).sum()) for side in (-MARGIN, 0, MARGIN)}:
      if j < len(p_js) and p_js[j].sum() > 0:
        nearest.append(np.abs(p_js[j].cumsum() / p_js[j].sum() - u[1]).min())
    return min(nearest)

  def differing(self, params, rows: list[Row], others: list[Row], keys, tolerance: float = 1e-4) -> int:
    """Number of rows whose ids differ, by law 1: each up to its first difference, which must be a draw near a boundary.

    Log-probs up to there agree within `tolerance`; a row without a difference agrees in stop, sources and length too.
    """
    count = 0
    for row, other, key in zip(rows, others, keys, strict=True):
      assert row.request == other.request
      n = min(len(row.tokens_T), len(other.tokens_T))
      unequal = np.flatnonzero(row.tokens_T[:n] != other.tokens_T[:n])
      first = int(unequal[0]) if len(unequal) else n
      np.testing.assert_allclose(row.logp_T[:first], other.logp_T[:first], rtol=0, atol=tolerance)
      if len(unequal):
        count += 1
        distance = self.distance(params, row, key, first)
        assert distance < MARGIN, f'{row.request} differs at {first}, {distance:.1e} away from any boundary'
      else:
        assert len(row.tokens_T) == len(other.tokens_T) and row.stop == other.stop
        np.testing.assert_array_equal(row.source_T, other.source_T)
    return count
