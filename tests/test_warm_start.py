"""Fine-tuning: cut and resumed it gives the same parameters, it never saves what is not finite, and whom its result suits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from rollout_jax import keys, warm_start
from rollout_jax.build import build_base, build_sft, ingredients
from rollout_jax.training.sft import make_sft_step
from rollout_jax.training.state import init_state
from rollout_jax.types import ConfigError, Stopped
from tests import machines, tiny
from tests.overlay import shrink


def config(**changes):
  return shrink(base.get_config(), sft__steps=4, sft__batch=8, sft__warmup=1, **changes)


def tune(folder, settings, stop=lambda: False):
  made, (tx, plan) = build_base(settings), build_sft(settings)
  with jax.set_mesh(made.mesh):
    return warm_start.fine_tune(made, tx, plan, warm_start.random_params(made, 0), folder, ingredients(settings), stop)


def test_fine_tuning_that_is_stopped_after_each_update_ends_with_the_same_parameters(tmp_path):
  whole = tune(tmp_path / 'whole', config())
  for _ in range(3):
    with pytest.raises(Stopped):
      tune(tmp_path / 'cut', config(), stop=lambda: True)
  cut = tune(tmp_path / 'cut', config(), stop=lambda: True)  # a stop at the last update finds the result saved
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, cut), jax.tree.map(np.array, whole))


@pytest.mark.usefixtures('quick_compile')
def test_an_update_is_the_gradient_of_the_mean_over_kept_tokens_whatever_the_microbatch():
  policy, tx = machines.POLICY, optax.sgd(1.0)
  batch = machines.batch()
  tokens_BT = jnp.asarray(batch.tokens_PGT.reshape(-1, tiny.T))
  keep_BT = jnp.asarray(batch.keep_PGT.reshape(-1, tiny.T)).at[5].set(0)
  fresh = policy.init(keys.named(0, 'init'))

  def naive(params):
    position_BT = jnp.broadcast_to(jnp.arange(tiny.T)[None, :], tokens_BT.shape)
    logits_BTV = policy.logits(params, policy.hidden(params, tokens_BT, position_BT))
    logp_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV[:, :-1]), tokens_BT[:, 1:, None], 2)[..., 0]
    return -jnp.sum(logp_BT * keep_BT[:, 1:]) / keep_BT.sum()

  expected = jax.tree.map(lambda x, g: x - g, fresh, jax.grad(naive)(fresh))
  for micro in (16, 3):
    step = jax.jit(make_sft_step(policy, tx, micro))
    state, loss = step(init_state(fresh, tx), tokens_BT, keep_BT)
    assert float(loss) == pytest.approx(float(naive(fresh)), rel=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    jax.tree.map(close, state.params['policy'], expected)


def test_fine_tuning_that_diverges_says_so_and_leaves_no_result(tmp_path):
  with pytest.raises(ConfigError, match=r'sft\.learning_rate'):
    tune(tmp_path, config(sft__learning_rate=1e30))
  assert not (tmp_path / 'params').exists()


def test_a_warm_start_suits_a_fork_with_another_number_of_prompts_but_not_other_problems(tmp_path):
  tune(tmp_path, config())
  for changes, suits in ((dict(product__size=24), True), (dict(product__max_number=40), False)):
    other = config(**changes)
    made = build_base(other)
    with jax.set_mesh(made.mesh):
      if suits:
        assert warm_start.load(made, tmp_path, ingredients(other)) is not None
      else:
        with pytest.raises(ConfigError, match='max_number: 30 -> 40'):
          warm_start.load(made, tmp_path, ingredients(other))
