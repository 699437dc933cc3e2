"""The KL penalty: published numbers (to 1e-5) and gradients by enumeration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax import losses
from rollout_jax.losses.kl import add, kl
from tests.batches import of_tokens, value

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost


def test_estimates_equal_the_published_numbers():
  x_n = np.array([-0.5, -0.1, 0, 0.1, 0.5])
  expected = {
    'k1': x_n,
    'k2': [0.125, 0.005, 0, 0.005, 0.125],
    'k3': [0.148721, 0.005171, 0, 0.004837, 0.106531],
  }
  for kind, numbers in expected.items():
    loss_n, report = kl(kind=kind, beta=0.3).value(of_tokens(x_n - 2, reference_n=-2.0), ())
    np.testing.assert_allclose(loss_n, 0.3 * np.array(numbers), atol=1e-5)
    assert value(report[f'loss/kl_{kind}']) == pytest.approx(np.mean(numbers), abs=1e-5)


def test_of_the_estimators_only_k2_has_the_gradient_of_the_reverse_kl():
  logits_V, reference_V = jnp.array([0.3, -1.0, 0.7, 0.1, 1.4]), jnp.array([1.0, 0.2, -0.5, 0.0, 0.3])
  target_V = jax.nn.log_softmax(reference_V)

  def expected_penalty(kind):
    """Mean over every token under the policy, of the value or of its gradient: the policy that samples is held."""

    def mean(logits_V):
      logp_V = jax.nn.log_softmax(logits_V)
      loss_V, _ = kl(kind=kind, beta=1.0).value(of_tokens(logp_V, reference_n=target_V), ())
      return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp_V)) * loss_V)

    return jax.value_and_grad(mean)(logits_V)

  def divergence(forward):
    def kl_V(logits_V):
      logp_V = jax.nn.log_softmax(logits_V)
      p, q = (target_V, logp_V) if forward else (logp_V, target_V)
      return jnp.sum(jnp.exp(p) * (p - q))

    return jax.value_and_grad(kl_V)(logits_V)

  (reverse, reverse_V), (_, forward_V) = divergence(False), divergence(True)
  assert expected_penalty('k1')[0] == pytest.approx(float(reverse), rel=1e-5)
  assert expected_penalty('k3')[0] == pytest.approx(float(reverse), rel=1e-5)
  np.testing.assert_allclose(expected_penalty('k1')[1], np.zeros(5), atol=1e-6)
  np.testing.assert_allclose(expected_penalty('k2')[1], reverse_V, atol=1e-6)
  np.testing.assert_allclose(expected_penalty('k3')[1], forward_V, atol=1e-6)
  assert not np.allclose(reverse_V, forward_V, atol=1e-2)


def test_penalty_adds_to_the_loss_and_reads_the_reference():
  tokens = of_tokens([-1.0, -2.0], proximal_n=[-1.5, -1.0], reference_n=[-3.0, -1.0])
  policy, penalty = losses.ppo_clip(), kl(kind='k2', beta=0.3)
  loss = add(policy, penalty)
  both, report = loss.value(tokens, loss.prepare(tokens))
  parts = [part.value(tokens, ())[0] for part in (policy, penalty)]
  np.testing.assert_allclose(both, parts[0] + parts[1], rtol=1e-6)
  assert {'loss/ratio', 'loss/kl_k2'} <= report.keys()
  assert loss.reads == {'proximal_logp_PGT', 'advantage_PGT', 'reference_logp_PGT'}


def test_kind_without_beta_measures_and_does_not_penalise():
  tokens = of_tokens([-1.0, -2.0], proximal_n=[-1.5, -1.0], reference_n=[-3.0, -1.0])
  loss_n, report = kl(kind='k3').value(tokens, ())
  assert (loss_n == 0).all() and value(report['loss/kl_k3']) > 0
