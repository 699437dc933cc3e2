"""What is refused before anything compiles, and what a run's header says of its methods."""

import pytest

from configs import base
from rollout_jax.build import LEAST, build
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
