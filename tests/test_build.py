"""What is refused before anything compiles, and what a run's header says of its methods."""

import numpy as np
import pytest

from configs import base
from rollout_jax.build import _row_weight, build
from rollout_jax.check import LEAST
from rollout_jax.losses.aggregation import MODES
from rollout_jax.types import ConfigError
from tests.overlay import shrink


@pytest.mark.parametrize(('name', 'low'), [(name, low) for low, names in LEAST.items() for name in names])
def test_a_number_below_the_smallest_that_works_is_refused_by_name(name, low):
  """Zero prompts per prefill would hang, zero checkpoints to keep would remove the one just written."""
  config = shrink(base.get_config(), **{name.replace('.', '__'): low - 1})
  with pytest.raises(ConfigError, match=f'{name} must be at least {low}'):
    build(config, None)


def test_the_header_names_the_weakest_correctness_class(verifier):
  assert build(shrink(base.get_config()), verifier).header['correctness'] == 'empirical'
  exact = shrink(base.get_config(), transforms=('combine_rewards', 'group_advantage'))
  assert build(exact, verifier).header['correctness'] == 'exact'


@pytest.mark.parametrize('denominator', ['kept', 'original', 'constant'])
@pytest.mark.parametrize('mode', MODES)
def test_groups_that_fill_up_the_devices_change_no_weight(mode, denominator):
  """Six prompts on four devices make a batch of eight: law 5 holds for every denominator."""
  config = shrink(base.get_config(), aggregation__mode=mode, aggregation__denominator=denominator)
  kept_PG = np.arange(24.0).reshape(6, 4)
  padded_PG = np.pad(kept_PG, ((0, 2), (0, 0)))
  weight_PG = _row_weight(config, room=1.0)(kept_PG, kept_PG)
  np.testing.assert_allclose(_row_weight(config, room=8 / 6)(padded_PG, padded_PG)[:6], weight_PG, rtol=1e-6)


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    (dict(scheduler='dynamic', transforms=('combine_rewards', 'group_advantage')), 'drop_degenerate'),
    (dict(scheduler='dynamic', dynamic__high=0.9), 'dynamic.high is 0.9, but drop_degenerate.high is 1.0'),
    (dict(loss='reinforce', epochs=2), 'compares with no earlier policy'),
  ],
)
def test_a_pair_that_cannot_work_is_refused_with_the_reason(verifier, changes, said):
  with pytest.raises(ConfigError, match=said):
    build(shrink(base.get_config(), **changes), verifier)
