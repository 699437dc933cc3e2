"""Aggregation against published numbers and cases worked by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax import transforms
from rollout_jax.losses.aggregation import DENOMINATORS, MODES, row_weight
from rollout_jax.transforms.chain import chain
from rollout_jax.transforms.select import max_variance
from rollout_jax.types import ConfigError
from tests import batches

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost


LENGTHS, LOSSES = np.array([2, 4]), np.array([1, 2, 1, 1, 1, 5.0])
ROW = np.array([0, 0, 1, 1, 1, 1])
VECTORS = {'token_mean': 1.833333, 'seq_mean_token_sum': 5.5, 'seq_mean_token_mean': 1.75, 'constant_length': 0.6875}


def aggregate(mode, denominator, keep_n, original_B=LENGTHS, constant=8, rows=2):
  kept_B = np.bincount(ROW, keep_n, rows)
  weight_B = row_weight(mode, denominator, constant=constant)(jnp.asarray(kept_B), jnp.asarray(original_B))
  return float(jnp.sum(weight_B[ROW] * keep_n * LOSSES))


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('denominator', ['kept', 'original'])
def test_modes_equal_the_published_numbers(mode, denominator):
  assert aggregate(mode, denominator, np.ones(6)) == pytest.approx(VECTORS[mode], abs=1e-5)


DROPPED = {  # the last token of the second row is masked: losses [1, 2] and [1, 1, 1]
  ('token_mean', 'kept'): 6 / 5,
  ('token_mean', 'original'): 6 / 6,
  ('token_mean', 'constant'): 6 / (2 * 8),
  ('seq_mean_token_mean', 'kept'): (1.5 + 1) / 2,
  ('seq_mean_token_mean', 'original'): (1.5 + 3 / 4) / 2,
  ('seq_mean_token_mean', 'constant'): (1.5 + 1) / 2,
  ('seq_mean_token_sum', 'kept'): 6 / 2,
  ('seq_mean_token_sum', 'original'): 6 / 2,
  ('seq_mean_token_sum', 'constant'): 6 / 2,
  ('constant_length', 'kept'): 6 / (2 * 8),
  ('constant_length', 'original'): 6 / (2 * 8),
  ('constant_length', 'constant'): 6 / (2 * 8),
}


@pytest.mark.parametrize('mode, denominator', DROPPED)
def test_dropping_a_token_changes_only_the_denominators_that_count_it(mode, denominator):
  assert aggregate(mode, denominator, np.array([1, 1, 1, 1, 1, 0])) == pytest.approx(DROPPED[mode, denominator])


GONE = {  # the second row is masked and a third was never rolled out: losses [1, 2]
  ('token_mean', 'kept'): 3 / 2,
  ('token_mean', 'original'): 3 / 6,
  ('token_mean', 'constant'): 3 / (3 * 8),
  ('seq_mean_token_mean', 'kept'): 1.5,
  ('seq_mean_token_mean', 'original'): 1.5 / 2,
  ('seq_mean_token_mean', 'constant'): 1.5 / 3,
  ('seq_mean_token_sum', 'kept'): 3,
  ('seq_mean_token_sum', 'original'): 3 / 2,
  ('seq_mean_token_sum', 'constant'): 3 / 3,
  ('constant_length', 'kept'): 3 / 8,
  ('constant_length', 'original'): 3 / (2 * 8),
  ('constant_length', 'constant'): 3 / (3 * 8),
}


@pytest.mark.parametrize('mode, denominator', GONE)
def test_masked_rows_and_rows_never_rolled_out_count_as_the_denominator_says(mode, denominator):
  original_B = np.array([2, 4, 0])
  assert aggregate(mode, denominator, np.array([1, 1, 0, 0, 0, 0]), original_B, rows=3) == pytest.approx(
    GONE[mode, denominator]
  )


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('denominator', DENOMINATORS)
def test_weights_are_finite_and_zero_when_nothing_is_kept(mode, denominator):
  for original in (jnp.zeros(3), jnp.ones(3)):
    assert (row_weight(mode, denominator, constant=8)(jnp.zeros(3), original) == 0).all()


@functools.cache
def selected():
  """One batch after PODS, once with the other rows gathered away and once with them masked."""

  def gather(batch):
    parts = chain(transforms.pods(m=3), transforms.group_advantage())
    return parts.before_score(batch, parts.init())[0]

  def mask(batch):
    chosen_PG = jax.vmap(max_variance, (0, 0, 0, None))(batch.reward_PG, batch.stat_PG, batch.rollout_PG, 3)
    batch = batch.replace(
      original_PG=jnp.sum(batch.keep_PGT, axis=2),
      stat_PG=batch.stat_PG * chosen_PG,
      keep_PGT=batch.keep_PGT * chosen_PG[:, :, None],
    )
    return transforms.group_advantage().update(batch, ())[0]

  return [jax.jit(select)(batches.mixed(4)) for select in (gather, mask)]


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('denominator', ['kept', 'original'])
def test_selecting_rows_by_gather_and_by_mask_gives_one_loss(mode, denominator):
  def loss(batch):
    weight_PG = row_weight(mode, denominator, constant=8)(jnp.sum(batch.keep_PGT, axis=2), batch.original_PG)
    return jnp.sum(weight_PG[:, :, None] * batch.advantage_PGT * batch.behaviour_logp_PGT * batch.keep_PGT)

  gathered, masked = selected()
  assert gathered.shape[1] == 3 and masked.shape[1] == batches.G
  np.testing.assert_allclose(loss(gathered), loss(masked), rtol=1e-5)


def test_constant_that_a_mode_needs_is_demanded_and_names_are_checked():
  for mode, denominator in (('constant_length', 'kept'), ('token_mean', 'constant')):
    with pytest.raises(ConfigError, match='aggregation.constant'):
      row_weight(mode, denominator)
  with pytest.raises(ConfigError, match="aggregation.mode must be one of .*'token_mean'.*'tokens'"):
    row_weight('tokens', 'kept')
  with pytest.raises(ConfigError, match='aggregation.denominator'):
    row_weight('token_mean', 'all')
