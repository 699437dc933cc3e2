"""From losses per token to one number: the weight that each row gives to its tokens.

With k the kept tokens of a row, o its tokens before the first filter, K the number of rows with a kept token, O that
of rows with a token before the first filter, B all rows of the minibatch whether or not they exist, and c a constant:

  mode                  denominator kept   original      constant
  token_mean            sum of k           sum of o      B * c      DAPO; c = the nominal tokens of a row
  seq_mean_token_mean   K * k              O * o         B * k      GRPO
  seq_mean_token_sum    K                  O             B
  constant_length       K * c              O * c         B * c      Dr.GRPO with 'constant'; c = the longest answer

'kept' lets the survivors of a filter take the place of what was dropped; 'original' makes the step smaller instead;
'constant' depends on nothing that was sampled (for seq_mean_token_mean it is TRL's mean over all rows).

Config: section `aggregation`.
"""

from collections.abc import Callable

import jax.numpy as jnp

from rollout_jax.types import Array, ConfigError

MODES = ('token_mean', 'seq_mean_token_mean', 'seq_mean_token_sum', 'constant_length')
DENOMINATORS = ('kept', 'original', 'constant')


def row_weight(mode: str, denominator: str, *, constant: float = 0.0) -> Callable[[Array, Array], Array]:
  """weight(kept_PG, original_PG) -> weight_PG, 1 / denominator of each row, on a whole minibatch.

  The loss is the sum over tokens of weight[row] * coefficient * loss. kept_PG counts the tokens of each row that are
  in the loss; original_PG may have further columns, for rows that a selector removed. Both may also be flat, [B]. A
  row without a kept token has weight zero, so a minibatch without one has a finite loss of zero.
  """
  for name, value, known in (('mode', mode, MODES), ('denominator', denominator, DENOMINATORS)):
    if value not in known:
      raise ConfigError(f'aggregation.{name} must be one of {known}, but is {value!r}.')
  if constant <= 0 and (mode == 'constant_length' or (mode, denominator) == ('token_mean', 'constant')):
    raise ConfigError(
      f'aggregation.constant, the nominal number of tokens of a row, must be above 0 for mode {mode!r} with '
      f'denominator {denominator!r}, but is {constant}.'
    )

  def weight(kept_PG: Array, original_PG: Array) -> Array:
    kept_PG, original_PG = kept_PG.astype(jnp.float32), original_PG.astype(jnp.float32)
    own_PG = original_PG[..., : kept_PG.shape[-1]] if denominator == 'original' else kept_PG
    counted = original_PG if denominator == 'original' else kept_PG
    rows = kept_PG.size if denominator == 'constant' else jnp.sum(counted > 0)
    tokens = kept_PG.size * constant if denominator == 'constant' else jnp.sum(counted)
    below_PG = {
      'token_mean': jnp.full_like(kept_PG, tokens),
      'seq_mean_token_mean': rows * own_PG,
      'seq_mean_token_sum': jnp.full_like(kept_PG, rows),
      'constant_length': jnp.full_like(kept_PG, rows * constant),
    }[mode]
    return jnp.where(kept_PG > 0, 1.0 / jnp.where(kept_PG > 0, below_PG, 1.0), 0.0)

  return weight
