"""Bad input, as a user gives it: a message says what was wanted, what came and what to change, and the exit code is not 0."""

import json
import pathlib
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from configs import base
from experiments import cli

ROOT = pathlib.Path(__file__).parent.parent
TINY = '--config=tests/tiny_config.py'


def call(*flags, module='experiments.train'):
  """(exit code, what was said) of a main in a process of its own."""
  done = subprocess.run([sys.executable, '-m', module, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
  return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
  ('flags', 'wanted'),
  [
    (['--config.rollout.slotz=4'], ['rollout.slotz', "'rollout.slots'"]),
    (['--config.pods.n=4'], ['pods.n', "'pods.m'"]),
    (['--config.steps=many'], ['steps', 'int']),
    (['--config.transforms=("combine_rewards","group_advantag")'], ['group_advantag', "'group_advantage'"]),
    (['--config.loss=ppo_clp'], ['ppo_clp', "'ppo_clip'"]),
    (['--config.scheduler=dynamik'], ['dynamik', "'dynamic'"]),
    (['--config.mesh.train=(4,4,1)'], ['8 available', '(4, 4, 1)', 'mesh']),
    (['--config.mesh.train=(8,1,1)', '--config.microbatch=4'], ['microbatch', 'multiple of 8']),
    (['--config.mesh.train=(1,1,8)'], ['tensor', 'kv_heads']),
    (['--config.rollout.prompt_length=3'], ['rollout.prompt_length', 'up to 5 tokens']),
    (['--config.transforms=("group_advantage","combine_rewards")'], ['combine_rewards', 'group_advantage', 'REWARD']),
    (['--config.transforms=("combine_rewards","tis")'], ['advantage_PGT', 'group_advantage']),
    (['--config.rollout.group=1'], ['group']),
    (['--config.optimizer.name=adam_w'], ['adam_w', "'adamw'"]),
    (['--config.evaluation.problems=512'], ['evaluation.problems', 'holds out 8']),
    (['--config.warm_start=runs/nowhere'], ['runs/nowhere', 'experiments.sft']),
    (['--config.task=jsonl', '--config.jsonl.path=nowhere.jsonl'], ['nowhere.jsonl']),
    (['--config.distribution.temperature=-1.0'], ['temperature']),
    (['stray'], ['stray', '--workdir']),
  ],
  ids=lambda x: x[0] if isinstance(x, list) and x[0].startswith('--') else None,
)
def test_a_mistake_is_explained(tmp_path, flags, wanted):
  code, said = call(TINY, f'--workdir={tmp_path}', *flags)
  assert code != 0
  assert 'Traceback' not in said, said
  for part in wanted:
    assert part in said, said


def test_a_config_file_that_is_not_there(tmp_path):
  code, said = call('--config=configs/quickstrt.py', f'--workdir={tmp_path}')
  assert code != 0 and 'configs/quickstart.py' in said and 'Traceback' not in said


@pytest.mark.parametrize(
  ('line', 'wanted'),
  [
    ('config.rollout.slotz = 4', ['rollout.slotz', "'rollout.slots'"]),
    ('config.pods.n = 4', ['pods.n', "'pods.m'"]),
    ('config.pods.m = unknown', ['fork.py', 'line 6', 'unknown']),
  ],
)
def test_a_mistake_in_a_config_file_is_explained(tmp_path, line, wanted):
  lines = 'from tests import tiny_config\n\n\ndef get_config():\n  config = tiny_config.get_config()\n'
  (tmp_path / 'fork.py').write_text(f'{lines}  {line}\n  return config\n')
  code, said = call(f'--config={tmp_path / "fork.py"}', f'--workdir={tmp_path / "run"}')
  assert code != 0 and 'Traceback' not in said, said
  for part in wanted:
    assert part in said, said


def test_a_config_may_have_sections_for_its_own_methods():
  config = base.get_config()
  config.transforms = (*config.transforms, 'my_methods.shorter')
  config.shorter = ConfigDict({'weight': 0.1})
  config.optimizer.options = ConfigDict({'momentum': 0.9})
  cli._check_fields(config)


def test_a_missing_workdir_is_asked_for():
  code, said = call(TINY)
  assert code != 0 and '--workdir' in said and 'Traceback' not in said


def test_a_workdir_that_cannot_be_made(tmp_path):
  (tmp_path / 'file').write_text('')
  code, said = call(TINY, f'--workdir={tmp_path / "file" / "run"}')
  assert code != 0 and 'file' in said and 'Traceback' not in said


def test_a_malformed_line_of_data_is_named(tmp_path):
  path = tmp_path / 'problems.jsonl'
  path.write_text(json.dumps({'question': '1+1', 'answer': '#### 2'}) + '\n{"question": \n')
  code, said = call(TINY, f'--workdir={tmp_path / "run"}', '--config.task=jsonl', f'--config.jsonl.path={path}')
  assert code != 0 and 'problems.jsonl' in said and '2' in said and 'Traceback' not in said


@pytest.mark.parametrize(('size', 'file'), [(20_000, 'checkpoint'), (500_000, 'metrics.jsonl')])
def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, size, file):
  """RLIMIT_FSIZE stands in for a disk that is full: no file may grow beyond a size that the run soon needs."""
  limited = (
    'import resource, runpy, sys, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); '
    f'resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); '
    "sys.argv = ['train', *sys.argv[1:]]; runpy.run_module('experiments.train', run_name='__main__')"
  )
  flags = [TINY, f'--workdir={tmp_path}', '--config.steps=2000', '--config.checkpoint.every=2000']
  done = subprocess.run([sys.executable, '-c', limited, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
  said = done.stdout + done.stderr
  assert done.returncode != 0 and 'Cannot ' in said and file in said and 'Free some space' in said, said
  if file == 'metrics.jsonl':
    for line in (tmp_path / file).read_text().splitlines():
      json.loads(line)


def test_overrides_are_one_word_or_two():
  argv = [
    '--config=a.py',
    '--config.steps=3',
    '--seeds',
    '2',
    '--config.rollout.group',
    '8',
    '--out=d',
    '--config.flag',
  ]
  assert cli.overrides(argv) == ['--config.steps=3', '--config.rollout.group', '8', '--config.flag']


def test_help_names_the_flags():
  code, said = call('--helpshort', module='experiments.ablate')
  assert '--forks' in said and '--seeds' in said
