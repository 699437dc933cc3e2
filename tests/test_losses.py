"""The laws that every loss keeps, then the published columns of PPO (to 1e-5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_jax import losses, transforms
from rollout_jax.losses.aggregation import DENOMINATORS, MODES, row_weight
from rollout_jax.losses.kl import ESTIMATORS, add, kl
from rollout_jax.types import ConfigError, Tokens
from tests.batches import of_rewards, of_tokens, value

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost

POLICY = {name: getattr(losses, name)() for name in losses.__all__} | {
  'ppo_clip higher': losses.ppo_clip(low=0.2, high=0.28),
  'ppo_clip dual': losses.ppo_clip(dual=3.0),
}
PENALTY = {kind: kl(kind=kind, beta=0.3) for kind in ('none', *ESTIMATORS) if kind != 'none'} | {'none': kl()}
SUMS = {f'{name} + {kind}': add(loss, PENALTY[kind]) for name, loss in POLICY.items() for kind in ('k3',)}
EVERY = POLICY | PENALTY | SUMS
ROWS = 6


def random_tokens(seed=0, count=40) -> Tokens:
  """A token view with masked tokens, weights, an empty row, and log-probs that differ between policies."""
  rng = np.random.default_rng(seed)
  logp = lambda: jnp.asarray(-rng.gamma(2.0, 1.0, count), jnp.float32)
  row_n = rng.integers(0, ROWS - 1, count)
  keep_n = jnp.asarray(rng.random(count) < 0.7, jnp.float32)
  return of_tokens(
    logp(),
    proximal_n=logp(),
    advantage_n=rng.normal(size=count),
    keep_n=keep_n,
    row_n=row_n,
    rows=ROWS,
    reference_n=logp(),
  ).replace(coefficient_n=keep_n * jnp.asarray(rng.random(count) + 0.5, jnp.float32))


def total(loss, tokens, weight_B):
  """The loss of a whole minibatch and its report, as the training step makes it."""
  loss_n, report = loss.value(tokens, loss.prepare(tokens))
  return jnp.sum(weight_B[tokens.row_n] * tokens.coefficient_n * loss_n), report


def gradient(loss, tokens, weight_B):
  """Gradient of the loss with respect to the learner's log-probs, [n]."""
  return jax.grad(lambda logp_n: total(loss, tokens.replace(learner_logp_n=logp_n), weight_B)[0])(tokens.learner_logp_n)


# What every loss keeps.


@pytest.mark.parametrize('name', EVERY)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 99))
def test_order_of_tokens_changes_nothing_and_masked_tokens_have_no_gradient(name, seed):
  tokens, weight_B = random_tokens(seed), jnp.ones(ROWS)
  order_n = np.random.default_rng(seed).permutation(40)
  other = jax.tree.map(lambda x_n: x_n[order_n], tokens)
  (one, report), (two, other_report) = (TOTAL[name](t, weight_B) for t in (tokens, other))
  np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
  for key in report:
    np.testing.assert_allclose(value(report[key]), value(other_report[key]), rtol=1e-4, atol=1e-5, err_msg=key)
  gradient_n = GRADIENT[name](tokens, weight_B)
  np.testing.assert_allclose(gradient_n[order_n], GRADIENT[name](other, weight_B), rtol=1e-4, atol=1e-6)
  assert (np.asarray(gradient_n)[np.asarray(tokens.keep_n) == 0] == 0).all()


TOTAL = {name: jax.jit(lambda t, w, loss=loss: total(loss, t, w)) for name, loss in EVERY.items()}
GRADIENT = {name: jax.jit(lambda t, w, loss=loss: gradient(loss, t, w)) for name, loss in EVERY.items()}


@pytest.mark.parametrize('name', EVERY)
def test_jit_changes_nothing(name):
  tokens = random_tokens()
  (fast, fast_report), (slow, report) = TOTAL[name](tokens, jnp.ones(ROWS)), total(EVERY[name], tokens, jnp.ones(ROWS))
  np.testing.assert_allclose(fast, slow, rtol=1e-5)
  for key in report:
    np.testing.assert_allclose(value(fast_report[key]), value(report[key]), rtol=1e-5, err_msg=key)


@pytest.mark.parametrize('name', EVERY)
def test_nothing_kept_gives_a_finite_zero(name):
  tokens = random_tokens()
  zero_n = jnp.zeros_like(tokens.keep_n)
  tokens = tokens.replace(keep_n=zero_n, coefficient_n=zero_n)
  for mode in MODES:
    weight_B = row_weight(mode, 'kept', constant=8)(tokens.per_row(tokens.keep_n), tokens.per_row(tokens.keep_n))
    loss, report = TOTAL[name](tokens, weight_B)
    assert loss == 0 and (GRADIENT[name](tokens, weight_B) == 0).all()
    assert all(np.isfinite(value(mean)) for mean in report.values())


@pytest.mark.parametrize('name', POLICY)
@pytest.mark.parametrize('advantage', [1.5, -1.5, 0.0])
def test_on_policy_gradient_is_minus_advantage(name, advantage):
  tokens = of_tokens([-1.0, -0.2, -3.0], advantage_n=advantage)
  np.testing.assert_allclose(GRADIENT[name](tokens, jnp.ones(1)), [-advantage] * 3, rtol=1e-6)


@pytest.mark.parametrize('name', [n for n in EVERY if 'ppo' in n])
def test_on_policy_ratio_is_one_and_nothing_is_clipped(name):
  tokens = random_tokens()
  tokens = tokens.replace(proximal_logp_n=tokens.learner_logp_n)
  _, report = TOTAL[name](tokens, jnp.ones(ROWS))
  assert value(report['loss/ratio']) == value(report['loss/ratio_max']) == 1
  assert value(report['loss/clipped']) == value(report['loss/kl_proximal']) == 0


@pytest.mark.parametrize('name', EVERY)
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('denominator', DENOMINATORS)
def test_split_into_microbatches_of_rows_changes_neither_gradient_nor_report(name, mode, denominator):
  tokens = random_tokens(3)
  kept_B = tokens.per_row(tokens.keep_n)
  weight_B = row_weight(mode, denominator, constant=8)(kept_B, tokens.per_row(jnp.ones(40)))
  whole, whole_report = TOTAL[name](tokens, weight_B)
  parts = []
  for low, high in ((0, 2), (2, 3), (3, ROWS)):
    inside_n = ((tokens.row_n >= low) & (tokens.row_n < high)).astype(jnp.float32)
    part = tokens.replace(keep_n=tokens.keep_n * inside_n, coefficient_n=tokens.coefficient_n * inside_n)
    parts.append((*TOTAL[name](part, weight_B), GRADIENT[name](part, weight_B)))
  np.testing.assert_allclose(sum(loss for loss, _, _ in parts), whole, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(sum(g for *_, g in parts), GRADIENT[name](tokens, weight_B), rtol=1e-4, atol=1e-6)
  for key, mean in whole_report.items():
    added = parts[0][1][key] + parts[1][1][key] + parts[2][1][key]
    np.testing.assert_allclose(value(added), value(mean), rtol=1e-4, atol=1e-5, err_msg=key)


# PPO.

COLUMNS = [  # ratio, plain +, plain -, dual 3 -, clip-higher +
  (0.5, -0.5, 0.8, 0.8, -0.5),
  (1.25, -1.2, 1.25, 1.25, -1.25),
  (2, -1.2, 2, 2, -1.28),
  (5, -1.2, 5, 3, -1.28),
]


@pytest.mark.parametrize('ratio, positive, negative, dual, higher', COLUMNS)
def test_clipped_losses_equal_the_published_columns(ratio, positive, negative, dual, higher):
  def loss(name, advantage):
    tokens = of_tokens([np.log(ratio) - 1], proximal_n=-1.0, advantage_n=advantage)
    return POLICY[name].value(tokens, ())[0][0]

  assert loss('ppo_clip', 1.0) == pytest.approx(positive, abs=1e-5)
  assert loss('ppo_clip', -1.0) == pytest.approx(negative, abs=1e-5)
  assert loss('ppo_clip dual', -1.0) == pytest.approx(dual, abs=1e-5)
  assert loss('ppo_clip dual', 1.0) == pytest.approx(positive, abs=1e-5)
  assert loss('ppo_clip higher', 1.0) == pytest.approx(higher, abs=1e-5)


def test_held_tokens_have_no_gradient_and_are_counted():
  ratio_n, advantage_n = np.array([1.5, 0.5, 1.5, 0.5, 1.1, 9.0]), np.array([1, -1, -1, 1, 1, -1.0])
  tokens = of_tokens(np.log(ratio_n) - 1, proximal_n=-1.0, advantage_n=advantage_n, row_n=[0, 0, 0, 1, 1, 1], rows=2)
  gradient_n = gradient(POLICY['ppo_clip dual'], tokens, jnp.ones(2))
  np.testing.assert_allclose(gradient_n, [0, 0, 1.5, -0.5, -1.1, 0], atol=1e-5)
  _, report = total(POLICY['ppo_clip dual'], tokens, jnp.ones(2))
  assert value(report['loss/clipped']) == pytest.approx(2 / 6)
  assert value(report['loss/dual_clipped']) == pytest.approx(1 / 6)
  assert value(report['loss/ratio_max']) == pytest.approx((1.5 + 9) / 2)
  assert value(report['loss/ratio']) == pytest.approx(ratio_n.mean())


def test_ratio_of_policies_far_apart_stays_finite():
  tokens = of_tokens([0.0, -300.0], proximal_n=[-300.0, 0.0], advantage_n=-1.0)
  loss_n, _ = POLICY['ppo_clip'].value(tokens, ())
  assert np.isfinite(loss_n).all() and np.isfinite(gradient(POLICY['ppo_clip'], tokens, jnp.ones(1))).all()


def test_correction_stands_outside_the_clip_so_three_policies_give_the_decoupled_loss():
  batch = of_rewards([[1.0]]).replace(
    behaviour_logp_PGT=jnp.log(jnp.array([[[1, 0.2]]])), proximal_logp_PGT=jnp.log(jnp.array([[[1, 0.3]]]))
  )
  after, *_ = transforms.tis().update(batch, ())
  tokens = of_tokens([np.log(0.36)], proximal_n=np.log(0.3)).replace(coefficient_n=after.correction_PGT[0, 0, 1:])
  assert total(POLICY['ppo_clip'], tokens, jnp.ones(1))[0] == pytest.approx(-1.8, abs=1e-5)


@pytest.mark.parametrize(
  'make, field',
  [
    (lambda: losses.ppo_clip(low=0.0), 'ppo_clip'),
    (lambda: losses.ppo_clip(high=-0.1), 'ppo_clip'),
    (lambda: losses.ppo_clip(dual=1.1), 'ppo_clip.dual'),
    (lambda: kl(kind='k4', beta=0.1), 'kl.kind'),
    (lambda: kl(kind='k2', beta=-0.1), 'kl.beta'),
    (lambda: kl(beta=0.1), 'kl.beta'),
  ],
)
def test_argument_that_cannot_work_is_refused_by_name(make, field):
  with pytest.raises(ConfigError, match=field):
    make()
