"""Law 10: every file in configs/ builds and takes two steps, with one overlay that they share."""

import importlib
import pathlib

import pytest

from tests.runner import lines

CONFIGS = sorted(
  path.stem for path in pathlib.Path(__file__).parent.parent.glob('configs/*.py') if path.stem != '__init__'
)


@pytest.mark.usefixtures('quick_compile')  # a training step for each: compiling is all it costs
@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_takes_two_steps(machine, name):
  runner = machine(config=importlib.import_module(f'configs.{name}').get_config())
  run = runner.go(2)
  assert int(run.state.step) == run.step == 2
  for line in lines(runner.folder):
    assert line['tok/decoded'] > 0 and 'nonfinite' not in line
    assert line['update/not_finite'] == 0


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_says_in_one_sentence_what_it_is_and_how_to_run_it(name):
  module = importlib.import_module(f'configs.{name}')
  assert module.__doc__.splitlines()[0].rstrip().endswith(('.', ':'))
  assert 'python -m experiments' in module.__doc__ or 'scripts/' in module.__doc__ or name == 'base'
