"""Reports on hand-made runs, and an ablation from warm start to table, cut and resumed."""

import json
import pathlib
import subprocess
import sys

import pytest

from rollout_jax.report import cost_to_score, plot, table

ROOT = pathlib.Path(__file__).parent.parent


def summary(before, after, decoded=1000):
  """A run with an evaluation at half of its tokens, half of the way up."""
  cost = lambda share: {'decoded': decoded * share, 'trained': decoded * share / 2, 'device_seconds': 10 * share}
  middle = (before + after) / 2
  curve = [
    {'step': 0, 'greedy': before},
    {'step': 1, 'greedy': middle, **cost(0.5)},
    {'step': 2, 'greedy': after, **cost(1)},
  ]
  totals = {**cost(1), 'seconds': 10.0}
  return {'accuracy': {'before': before, 'after': after}, 'totals': totals, 'curve': curve}


def test_cost_to_score_lies_on_the_line_between_two_evaluations():
  curve = summary(0.2, 0.6)['curve']
  assert cost_to_score(curve, 0.3, 'decoded') == pytest.approx(250)
  assert cost_to_score(curve, 0.5, 'decoded') == pytest.approx(750)
  assert cost_to_score(curve, 0.2, 'decoded') == 0 and cost_to_score(curve, 0.7, 'decoded') is None


def test_a_table_has_means_spreads_and_the_cost_to_the_baselines_quality(tmp_path):
  runs = {'base': [summary(0.2, 0.5), summary(0.2, 0.7)], 'fork': [summary(0.2, 0.9, 500), summary(0.2, 0.4, 500)]}
  text = table(runs)
  assert '0.600 ± 0.141' in text and 'decoded to 0.600' in text
  assert '286 (1 of 2)' in text  # 0.2 -> 0.9 in 500 tokens reaches 0.6 after 4/7 of them
  plot(runs, tmp_path / 'curves.png')
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')


def ablate(out, *flags):
  command = [sys.executable, '-m', 'experiments.ablate', '--config=tests/tiny_config.py', f'--out={out}', *flags]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_ablation_shares_a_warm_start_and_is_not_run_again(tmp_path):
  """Slow: an ablation starts a process for the warm start and one for each run."""
  flags = [
    f'--forks={tmp_path / "fork.py"}',
    '--seeds=1',
    '--config.sft.steps=3',
    '--config.sft.batch=8',
    '--config.steps=2',
  ]
  (tmp_path / 'fork.py').write_text(
    'from tests import tiny_config\n\n\ndef get_config():\n  config = tiny_config.get_config()\n'
    "  config.loss = 'reinforce'\n  return config\n"
  )
  done = ablate(tmp_path / 'out', *flags)
  assert done.returncode == 0, done.stdout + done.stderr
  assert '| base' in done.stdout and '| fork' in done.stdout
  runs = {name: json.loads((tmp_path / 'out' / name / '0' / 'summary.json').read_text()) for name in ('base', 'fork')}
  assert runs['base']['accuracy']['before'] == runs['fork']['accuracy']['before']
  header = json.loads((tmp_path / 'out' / 'fork' / '0' / 'run.json').read_text())
  assert header['config']['loss'] == 'reinforce' and header['config']['warm_start'].endswith('warm_start')
  assert (tmp_path / 'out' / 'curves.png').exists()
  again = ablate(tmp_path / 'out', *flags)
  assert again.returncode == 0 and 'step 1/2' not in again.stdout and '| fork' in again.stdout


def test_a_fork_that_is_not_there_is_refused(tmp_path):
  done = ablate(tmp_path, '--forks=configs/nowhere.py')
  assert done.returncode != 0 and 'configs/nowhere.py' in done.stderr
