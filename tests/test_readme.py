"""README's code and its claims about files hold."""

import pathlib
import re
import sys

from configs import base
from rollout_jax import curricula, losses, schedulers, tasks, transforms

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text()


def test_the_worked_example_runs_as_a_method_from_outside_the_library(machine, tmp_path, monkeypatch):
  block = next(b for b in re.findall(r'```python\n(.*?)```', README, re.S) if b.startswith('# my_methods.py'))
  (tmp_path / 'my_methods.py').write_text(block)
  monkeypatch.syspath_prepend(tmp_path)
  config = base.get_config()
  config.transforms = ('combine_rewards', 'my_methods.shorter', 'group_advantage')
  runner = machine(config=config)
  runner.go(2)
  from tests.runner import lines

  assert 0 < lines(runner.folder)[1]['shorter/used'] <= 1
  sys.modules.pop('my_methods')


def test_every_file_that_readme_names_is_there():
  rooms = 'configs|scripts|decoding|rollout|schedulers|transforms|curricula|losses|tasks'
  for name in re.findall(rf'`((?:{rooms})/[\w/.]*)`', README):
    assert (ROOT / name).exists() or (ROOT / 'rollout_jax' / name).exists(), name


def test_every_method_has_a_row():
  for family in (transforms, losses, curricula, schedulers, tasks):
    for name in family.__all__:
      assert f'`{name}`' in README, f'{name} has no row in README'
