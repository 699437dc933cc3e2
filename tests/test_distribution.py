import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax import keys
from rollout_jax.distribution import block_size, distribution, draw_from, keep_set, nucleus
from rollout_jax.types import ConfigError

SETTINGS = [
  {},
  {'temperature': 0.7},
  {'top_k': 5},
  {'top_p': 0.8},
  {'min_p': 0.1},
  {'temperature': 1.3, 'top_k': 20, 'top_p': 0.9, 'min_p': 0.02},
  {'temperature': 0.7, 'top_p': 0.9, 'mode': 'raw'},
  {'greedy': True},
]


def logits_of(rows: int, vocabulary: int, seed: int = 0, scale: float = 2.0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, vocabulary)) * scale, jnp.float32)


def row_keys(rows: int, seed: int = 0):
  return jax.vmap(lambda i: keys.named(seed, i))(jnp.arange(rows))


def draws(settings, logits_BV, seed: int = 0):
  """Token and log-prob drawn from each row of logits."""
  B = len(logits_BV)
  return jax.jit(distribution(**settings).draw)(logits_BV, row_keys(B, seed), jnp.zeros(B, jnp.int32))


def naive_probabilities(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """The processed distribution by sorting and loops, in float64."""
  scaled_V = np.asarray(logits_V, np.float64) / temperature
  order = np.argsort(-scaled_V)
  order = order[:top_k] if top_k else order
  p = np.exp(scaled_V[order] - scaled_V.max())
  p /= p.sum()
  kept, mass = [], 0.0
  for token, prob in zip(order, p, strict=True):
    if mass < top_p and prob >= min_p * p[0]:
      kept.append(token)
    mass += prob
  out_V = np.zeros_like(scaled_V)
  out_V[kept] = np.exp(scaled_V[kept] - scaled_V.max())
  return out_V / out_V.sum()


@pytest.mark.parametrize('vocabulary', [64, 1000])
@pytest.mark.parametrize('settings', [{}, {'temperature': 1.3, 'top_k': 20, 'top_p': 0.9, 'min_p': 0.02}])
def test_draws_follow_the_naive_probabilities_by_chi_square(vocabulary, settings):
  logits_V = logits_of(1, vocabulary, scale=1.0)[0]
  n = 40_000
  token_B, _ = draws(settings, jnp.broadcast_to(logits_V, (n, vocabulary)))
  expected_V = naive_probabilities(logits_V, **settings) * n
  counts_V = np.bincount(token_B, minlength=vocabulary)
  assert (counts_V[expected_V == 0] == 0).all()
  rare_V = expected_V < 5  # pooled: the statistic needs a few draws per bin
  expected = np.append(expected_V[~rare_V], expected_V[rare_V].sum())
  counts = np.append(counts_V[~rare_V], counts_V[rare_V].sum())
  chi = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
  freedom = len(expected) - 1
  assert abs(chi - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize('settings', SETTINGS, ids=str)
@pytest.mark.parametrize('vocabulary', [64, 100])
def test_log_prob_of_a_draw_equals_its_score_bit_for_bit(settings, vocabulary):
  method, logits_BV = distribution(**settings), logits_of(512, vocabulary)
  token_B, logp_B = method.draw(logits_BV, row_keys(512), jnp.zeros(512, jnp.int32))
  scored_B, inside_B = method.score(logits_BV, token_B)
  np.testing.assert_array_equal(logp_B, scored_B)
  compiled_B, _ = jax.jit(method.score)(logits_BV, token_B)  # XLA may sum in another order when it fuses
  np.testing.assert_allclose(compiled_B, draws(settings, logits_BV)[1], rtol=0, atol=1e-6)
  assert token_B.dtype == jnp.int32 and logp_B.dtype == jnp.float32 and bool(inside_B.all())


@pytest.mark.parametrize('settings', SETTINGS[:6], ids=str)
def test_scores_of_all_tokens_are_the_naive_probabilities_and_finite_outside(settings):
  logits_BV = logits_of(16, 100)
  every_BV = jnp.broadcast_to(jnp.arange(100), (16, 100))
  each_BVV = jnp.broadcast_to(logits_BV[:, None], (16, 100, 100))
  logp_BV, inside_BV = jax.jit(distribution(**settings).score)(each_BVV, every_BV)
  want_BV = np.stack([naive_probabilities(row, **settings) for row in logits_BV])
  np.testing.assert_array_equal(inside_BV, want_BV > 0)
  np.testing.assert_allclose(np.where(inside_BV, np.exp(logp_BV), 0), want_BV, rtol=1e-4)
  temperature = settings.get('temperature', 1.0)
  plain_BV = jax.nn.log_softmax(logits_BV / temperature)
  np.testing.assert_allclose(np.where(inside_BV, plain_BV, logp_BV), plain_BV, rtol=1e-5, atol=1e-5)


def test_raw_mode_draws_from_the_processed_and_scores_the_plain_softmax():
  logits_BV = logits_of(256, 64)
  processed_B, _ = draws({'temperature': 0.7, 'top_k': 3}, logits_BV)
  raw_B, logp_B = draws({'temperature': 0.7, 'top_k': 3, 'mode': 'raw'}, logits_BV)
  np.testing.assert_array_equal(processed_B, raw_B)
  want_B = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits_BV)), np.asarray(raw_B)[:, None], 1)[:, 0]
  np.testing.assert_allclose(logp_B, want_B, atol=1e-5)


def test_top_k_of_one_and_greedy_draw_the_most_probable_token():
  logits_BV = logits_of(256, 100)
  greedy_B, logp_B = draws({'greedy': True}, logits_BV)
  np.testing.assert_array_equal(greedy_B, np.argmax(logits_BV, axis=-1))
  np.testing.assert_allclose(logp_B, np.max(jax.nn.log_softmax(logits_BV), axis=-1), atol=1e-5)
  token_B, logp_B = draws({'top_k': 1}, logits_BV)
  np.testing.assert_array_equal(greedy_B, token_B)
  np.testing.assert_array_equal(logp_B, np.zeros(256))


def test_tokens_tied_with_the_last_one_kept_are_kept():
  logits_1V = jnp.log(jnp.array([[0.3, 0.3, 0.2, 0.2]]))
  np.testing.assert_array_equal(keep_set(logits_1V, 1, 1.0, 0.0)[0], [True, True, False, False])
  np.testing.assert_array_equal(keep_set(logits_1V, 0, 0.7, 0.0)[0], [True, True, True, True])
  np.testing.assert_array_equal(keep_set(logits_1V, 9, 1.0, 0.9)[0], [True, True, False, False])


NUCLEUS = jax.jit(nucleus)
KINDS = {
  'normal': lambda rng, V: 3 * rng.standard_normal(V),
  'flat': lambda rng, V: np.full(V, 1.5),
  'nearly flat': lambda rng, V: 7 + 1e-6 * rng.standard_normal(V),
  'peaked': lambda rng, V: np.where(np.arange(V) == V // 3, 40.0, rng.standard_normal(V)),
  'ties': lambda rng, V: np.round(2 * rng.standard_normal(V)),
  'far': lambda rng, V: -np.geomspace(1e-6, 3e4, V),
}


@pytest.mark.parametrize('vocabulary', [7, 128, 1000])
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('top_p', [0.05, 0.5, 0.9, 0.999999])
def test_the_nucleus_is_what_a_sort_gives(kind, vocabulary, top_p):
  logits_BV = np.stack([KINDS[kind](np.random.default_rng(i), vocabulary) for i in range(4)]).astype(np.float32)
  keep_BV = np.asarray(NUCLEUS(logits_BV, top_p))
  for logits_V, keep_V in zip(logits_BV.astype(np.float64), keep_BV, strict=True):
    mass_V = np.exp(logits_V - logits_V.max())
    above_V = np.array([mass_V[logits_V > x].sum() for x in logits_V]) / mass_V.sum()
    clear_V = np.abs(above_V - top_p) > 1e-6  # sums in float32 may fall on either side
    np.testing.assert_array_equal(keep_V[clear_V], (above_V < top_p)[clear_V])
    assert keep_V[logits_V.argmax()] and np.array_equal(keep_V, logits_V >= logits_V[keep_V].min())


@pytest.mark.parametrize('vocabulary', [8, 100, 32768 + 5])
def test_a_token_of_zero_mass_is_never_drawn_at_any_edge(vocabulary):
  size = block_size(vocabulary)
  uniform = [0.0, 1e-9, 0.5, 1 - 2**-24, 1.0]  # 1.0 stands for a product that rounded up to the total
  uniform_B2 = jnp.array([(a, b) for a in uniform for b in uniform], jnp.float32)
  rng, draw = np.random.default_rng(0), jax.jit(draw_from)
  token_V = np.arange(vocabulary)
  masses = [1.0 * (token_V == only) for only in (0, vocabulary // 2, vocabulary - 1)]
  masses.append(1.0 * (token_V < size) * (token_V % 3 == 1))  # the last blocks are empty
  masses += [rng.random(vocabulary) * (rng.random(vocabulary) < share) for share in (0.5, 0.99)]
  for mass_V in masses:
    if mass_V.sum() > 0:
      mass_BV = jnp.broadcast_to(jnp.asarray(mass_V, jnp.float32), (len(uniform_B2), vocabulary))
      token_B = np.asarray(draw(mass_BV, uniform_B2))
      assert (mass_V[token_B] > 0).all()


def test_a_large_vocabulary_is_drawn_as_exactly_as_its_sample_size_allows():
  vocabulary, n = 32768, 2048
  logits_V = logits_of(1, vocabulary)[0]
  p_V = naive_probabilities(logits_V)
  draw = jax.jit(distribution().draw)
  counts_V = np.zeros(vocabulary)
  for i in range(4):
    token_B, _ = draw(jnp.broadcast_to(logits_V, (n, vocabulary)), row_keys(n, i), jnp.zeros(n, jnp.int32))
    counts_V += np.bincount(token_B, minlength=vocabulary)
  total = counts_V.sum()
  drawn = np.abs(counts_V / total - p_V).sum() / 2
  exact = np.abs(np.random.default_rng(1).multinomial(int(total), p_V) / total - p_V).sum() / 2
  assert abs(drawn - exact) < 0.01


def test_entropy_is_that_of_the_distribution_of_the_log_probs():
  logits_BV = logits_of(8, 100)
  for settings in SETTINGS[:6]:
    p_BV = np.stack([naive_probabilities(row, **settings) for row in logits_BV])
    want_B = -np.where(p_BV > 0, p_BV * np.log(np.maximum(p_BV, 1e-30)), 0).sum(-1)
    np.testing.assert_allclose(distribution(**settings).entropy(logits_BV), want_B, atol=1e-4)
  plain_BV = np.asarray(jax.nn.log_softmax(logits_BV))
  want_B = -(np.exp(plain_BV) * plain_BV).sum(-1)
  np.testing.assert_allclose(distribution(temperature=2.0, mode='raw').entropy(logits_BV), want_B, atol=1e-4)


def test_the_gradient_of_a_score_is_that_of_the_log_softmax():
  logits_BV, token_B = logits_of(8, 100), jnp.arange(8)
  got_BV = jax.grad(lambda x: distribution(temperature=0.7).score(x, token_B)[0].sum())(logits_BV)
  want_BV = jax.grad(lambda x: jax.nn.log_softmax(x / 0.7)[jnp.arange(8), token_B].sum())(logits_BV)
  np.testing.assert_allclose(got_BV, want_BV, atol=1e-5)
  filtered_BV = jax.grad(lambda x: distribution(top_k=4, top_p=0.9).score(x, token_B)[0].sum())(logits_BV)
  assert bool(jnp.isfinite(filtered_BV).all())


def test_a_draw_depends_on_its_own_key_and_position_only():
  logits_BV, key_B2, position_B = logits_of(64, 64), row_keys(64), jnp.arange(64)
  draw = jax.jit(distribution().draw)
  token_B, _ = draw(logits_BV, key_B2, position_B)
  order_B = np.random.default_rng(0).permutation(64)
  np.testing.assert_array_equal(draw(logits_BV[order_B], key_B2[order_B], position_B[order_B])[0], token_B[order_B])
  assert (draw(logits_BV, key_B2, position_B + 1)[0] != token_B).any()


def test_nothing_but_top_k_sorts():
  def sorts(**settings):
    program = jax.make_jaxpr(distribution(**settings).draw)(logits_of(4, 64), row_keys(4), jnp.zeros(4, jnp.int32))
    return ' sort[' in str(program) or ' top_k[' in str(program)

  assert not sorts(temperature=0.5, min_p=0.1)
  assert not sorts(top_p=0.9) and sorts(top_k=3)


@pytest.mark.parametrize(
  'settings',
  [
    {'temperature': 0.0},
    {'temperature': float('nan')},
    {'top_k': -1},
    {'top_k': 2.5},
    {'top_p': 0.0},
    {'top_p': 1.2},
    {'min_p': 1.0},
    {'mode': 'exact'},
    {'greedy': True, 'temperature': 0.5},
  ],
  ids=str,
)
def test_bad_settings_are_refused_by_name(settings):
  with pytest.raises(ConfigError, match=list(settings)[-1]):
    distribution(**settings)


def test_the_description_names_settings_and_log_prob_mode():
  text = distribution(temperature=0.7, top_p=0.9).description
  assert 'temperature 0.7' in text and 'top-p 0.9' in text and 'processed' in text
  assert 'greedy' in distribution(greedy=True).description and 'raw' in distribution(mode='raw').description
