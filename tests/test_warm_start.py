"""Fine-tuning: cut and resumed it gives the same parameters, it never saves what is not finite, and whom its result suits."""

import jax
import numpy as np
import pytest

from configs import base
from rollout_jax import warm_start
from rollout_jax.build import build_base, build_sft, ingredients
from rollout_jax.types import ConfigError, Stopped
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
