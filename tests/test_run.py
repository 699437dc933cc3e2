"""Whole runs, tiny: what they leave behind, that they resume bit for bit, that nothing is traced or fetched beyond the plan."""

import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs import base
from rollout_jax import loop, warm_start
from rollout_jax.build import build, build_verifier
from rollout_jax.decoding.listing import compile_listed, listed
from rollout_jax.run import evaluate_folder, run
from rollout_jax.tasks import product
from rollout_jax.training.checkpoint import Checkpointer
from rollout_jax.types import ConfigError
from rollout_jax.writers import Writers, alone
from tests.overlay import shrink
from tests.runner import SHOWN, Machine, lines

ROOT = pathlib.Path(__file__).parent.parent

# Everything that a checkpoint must carry, in one config: lag, refill, correction, a curriculum with a table, several updates.
HARD = dict(
  scheduler='dynamic',
  curriculum='pass_rate',
  transforms=('combine_rewards', 'limit_staleness', 'drop_degenerate', 'group_advantage', 'tis'),
  rollout__lag=1,
  epochs=2,
  minibatches=2,
  product__size=24,
)


@pytest.mark.parametrize('changes', [{}, HARD], ids=['baseline', 'everything'])
def test_a_run_cut_at_any_step_continues_identically(machine, changes):
  whole = machine('whole', checkpoint__every=2, **changes)
  end = whole.go(5)
  for cut in (1, 4):
    part = dataclasses.replace(whole, folder=whole.folder.parent / f'cut{cut}')
    part.go(5, until=cut)
    again = dataclasses.replace(part, parts=whole.parts).go(5)
    assert lines(part.folder) == lines(whole.folder)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, again.state), jax.tree.map(np.array, end.state))
    np.testing.assert_array_equal(again.visits_N, end.visits_N)
    assert (again.backlog, again.scheduler_state) == (end.backlog, end.scheduler_state)


def test_nothing_is_traced_after_the_second_step_and_fetches_are_counted(machine):
  runner = machine(checkpoint__every=100)
  parts, counts = runner.parts, []
  desk = parts.desk
  sizes = listed(desk.engine.ladder, desk.prefill)
  existing = lambda: {name: desk.engine.programs[name]._cache_size() for name in sizes}

  class Watch(Writers):
    def step(self, step, metrics, rollouts=()):
      super().step(step, metrics, rollouts)
      counts.append((step, runner.clock.traced, runner.clock.compiled, dict(parts.fetcher.counts), metrics))

  with jax.set_mesh(parts.base.mesh), Checkpointer(runner.folder / 'checkpoints', keep=1) as checkpoints:
    params = warm_start.random_params(parts.base, 0)
    compile_listed(desk.engine, params, prefill=desk.prefill, prompt_length=desk.prompt_length)
    assert existing() == sizes
    loop.train(
      parts,
      loop.start(parts, params),
      steps=6,
      frozen={},
      writers=Watch(runner.folder, steps=6, shown=SHOWN),
      checkpoints=checkpoints,
      clock=runner.clock,
      stop=lambda: False,
      evaluate=lambda run: None,
    )
  # A step's line is written while the next step runs: line k is there once step k + 1 was dispatched.
  traced = {step: traced for step, traced, *_ in counts}
  compiled = {step: compiled for step, _, compiled, *_ in counts}
  assert traced[5] == traced[2] and compiled[5] == compiled[2]
  assert existing() == sizes
  for (step, *_, before, _), (_, *_, after, _) in zip(counts[1:4], counts[2:5], strict=True):
    fetched = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    chunks = counts[step][-1]['engine/chunks']
    assert fetched['report'] == 1 and fetched['prompts'] <= 1
    assert fetched['status'] <= chunks + 2 and fetched['rows'] <= fetched['status']
    assert set(fetched) == {'prompts', 'status', 'rows', 'report'}


def test_a_signal_at_any_moment_stops_at_a_checkpoint(machine):
  """`stop` turns true at its n-th call, so also between two lines of the loop."""
  runner = machine(checkpoint__every=100)
  with jax.set_mesh(runner.parts.base.mesh), Checkpointer(runner.folder / 'checkpoints', keep=1) as checkpoints:
    for turn in (2, 3):
      run = loop.start(runner.parts, warm_start.random_params(runner.parts.base, 0))
      loop.train(
        runner.parts,
        run,
        steps=6,
        frozen={},
        writers=Writers(runner.folder, steps=6, shown=SHOWN),
        checkpoints=checkpoints,
        clock=runner.clock,
        stop=functools.partial(next, iter([False] * turn), True),
        evaluate=lambda run: None,
      )
      assert 0 < run.step < 6 and len(lines(runner.folder)) == run.step
      assert (runner.folder / 'checkpoints' / f'{run.step:08d}').is_dir()


def test_updates_that_are_not_finite_stop_the_run_with_a_cure_and_save_nothing(machine):
  runner = machine(optimizer__bad_updates=2, checkpoint__every=1, transforms=('combine_rewards', 'group_advantage'))
  step = runner.parts.train_step

  def poisoned(state, frozen, batch):
    return step(state, frozen, batch.replace(correction_PGT=batch.correction_PGT * np.inf))

  runner.parts = runner.parts._replace(train_step=poisoned)
  with jax.transfer_guard_host_to_device('allow'), pytest.raises(loop.DivergedError, match='learning_rate'):
    runner.go(6)
  assert [line['update/bad_in_a_row'] for line in lines(runner.folder)] == [1, 2]
  assert [path.name for path in (runner.folder / 'checkpoints').iterdir()] == ['00000001']


def test_rows_that_could_not_be_judged_are_left_out_and_the_run_goes_on(tmp_path, machine):
  """A verifier that raises on some prompts (behaviours U19): the books balance at every step."""
  config = shrink(base.get_config(), task='tests.test_run.flaky', verifier__error_budget=1.0)
  with build_verifier(config) as verifier:
    made = machine()
    Machine(build(config, verifier), tmp_path / 'flaky', made.clock).go(4)
  failed = 0
  for line in lines(tmp_path / 'flaky'):
    failed += line['verdict/error']
    assert line['rows/dropped/verifier_error'] == line['verdict/error'] and 'nonfinite' not in line
    assert line['rows/issued'] == line['rows/trained'] + sum(line[name] for name in line if 'rows/dropped' in name)
  assert 0 < failed < 4 * 16


def flaky(*, heldout: int = 8):
  """A user's task whose verifier raises on problems with an answer that 4 divides."""
  task = product(max_number=30, heldout=heldout)

  def verify(prompt, text):
    if int(prompt.answer) % 4 == 0:
      raise ValueError('no idea')
    return task.verify(prompt, text)

  return task._replace(verify=verify)


@pytest.mark.usefixtures('quick_compile')
def test_learning_rate_zero_stays_flat(machine):
  runner = machine(optimizer__learning_rate=0.0)
  state = runner.go(4).state
  assert all(line['gap/mean'] < 1e-5 and line['gap/above_0.001'] == 0 for line in lines(runner.folder))
  fresh = warm_start.random_params(machine().parts.base, 0)
  jax.tree.map(
    np.testing.assert_array_equal, jax.tree.map(np.array, state.params['policy']), jax.tree.map(np.array, fresh)
  )
  changes = dict(optimizer__learning_rate=0.0, steps=4, evaluation__every=1, sft__steps=20, evaluation__samples=2)
  curve = run(shrink(base.get_config(), **changes), str(runner.folder / 'whole'))['curve']
  scores = [{name: x for name, x in point.items() if name in ('greedy', 'mean@2', 'pass@2')} for point in curve]
  assert len(scores) == 5 and scores == [scores[0]] * 5


def test_a_gap_between_sampled_and_scored_log_probs_is_worth_a_warning(machine, capsys):
  machine(log__gap_alarm=1e-12, transforms=('combine_rewards', 'group_advantage')).go(1)
  assert 'log.gap_alarm' in capsys.readouterr().out


def test_lag_is_the_number_of_versions_between_sampling_and_training(machine):
  runner = machine(rollout__lag=2)
  runner.go(5)
  assert [line['lag/max'] for line in lines(runner.folder)] == [0, 1, 2, 2, 2]
  assert all(line['lag/mean'] == line['lag/max'] for line in lines(runner.folder))


def test_a_run_leaves_its_files_and_a_second_call_finds_it_finished(tmp_path, capsys):
  config = shrink(base.get_config(), sft__steps=4, sft__batch=8, evaluation__samples=4, curriculum='uniform', pods__m=3)
  summary = run(config, str(tmp_path))
  said = capsys.readouterr().out
  assert json.loads((tmp_path / 'summary.json').read_text())['accuracy'].keys() == {'before', 'after'}
  assert [point['step'] for point in summary['curve']] == [0, 2] and 'pass@4' in summary['curve'][0]
  header = json.loads((tmp_path / 'run.json').read_text())
  assert header['methods']['drop_degenerate'] == 'empirical' and header['hardware']['platform'] == 'cpu'
  assert header['changed_but_unused'] == ['pods.m = 3'] and 'warning: pods.m = 3' in said
  record = json.loads((tmp_path / 'metrics.jsonl').read_text().splitlines()[-1])
  assert record['tok/decoded'] == record['tok/trained'] + record['tok/filtered']
  row = json.loads((tmp_path / 'rollouts.jsonl').read_text().splitlines()[0])
  assert {'prompt_text', 'text', 'verdict', 'reward', 'stop', 'versions'} <= row.keys()
  assert list((tmp_path / 'tensorboard').iterdir())
  assert evaluate_folder(config, str(tmp_path))['greedy'] == summary['accuracy']['after']
  assert run(config, str(tmp_path)) == summary and 'finished' in capsys.readouterr().out


def test_a_workdir_with_another_config_is_refused_with_the_difference(tmp_path):
  config = shrink(base.get_config())
  warm_start.claim(tmp_path, json.loads(config.to_json()))
  config.rollout.slots = 16
  with pytest.raises(ConfigError, match='rollout.slots: 8 -> 16'):
    run(config, str(tmp_path))


def test_a_folder_in_which_another_process_runs_is_refused(tmp_path):
  with alone(tmp_path), pytest.raises(ConfigError, match='Another process'):
    run(shrink(base.get_config()), str(tmp_path))
  with alone(tmp_path):
    pass  # who has ended holds nothing


def train(folder, *flags, wait=True):
  """The main in a process of its own, as a user starts it."""
  command = [sys.executable, '-m', 'experiments.train', '--config=tests/tiny_config.py', f'--workdir={folder}', *flags]
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  return process.communicate()[0] if wait else process


def wait_until(holds, process):
  while process.poll() is None and not holds():
    time.sleep(0.01)


def has_lines(folder, count):
  path = folder / 'metrics.jsonl'
  return path.exists() and path.read_text().count('\n') >= count


def test_kill_9_and_the_same_command_again_give_the_same_metrics(tmp_path):
  """Slow: processes that start JAX and load their programs from the compilation cache. One is killed in fine-tuning."""
  cut, flags = tmp_path / 'cut', ('--config.sft.steps=400', '--config.sft.batch=8')
  train(tmp_path / 'whole', *flags)
  moments = (
    lambda: (cut / 'warm_start' / 'checkpoints' / '00000100').exists(),
    lambda: has_lines(cut, 1),
    lambda: has_lines(cut, 4),
  )
  for moment in moments:
    process = train(cut, *flags, wait=False)
    wait_until(moment, process)
    assert process.poll() is None, f'the run ended before it was killed: {process.communicate()[0]}'
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    if moment is moments[0]:
      assert not (cut / 'warm_start' / 'params').exists()
  train(cut, *flags)
  assert len(lines(tmp_path / 'whole')) == 8
  assert lines(tmp_path / 'cut') == lines(tmp_path / 'whole')
  summaries = [json.loads((tmp_path / name / 'summary.json').read_text()) for name in ('cut', 'whole')]
  assert summaries[0]['accuracy'] == summaries[1]['accuracy']


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_cleanly(tmp_path, number):
  process = train(tmp_path, '--config.steps=100000', wait=False)
  wait_until(lambda: has_lines(tmp_path, 2), process)
  process.send_signal(number)
  said = process.communicate()[0]
  assert process.returncode == 0, said
  done = len(lines(tmp_path))
  assert f'stopped at step {done} of 100000 and saved' in said
  assert (tmp_path / 'checkpoints' / f'{done:08d}').is_dir()


@pytest.mark.usefixtures('quick_compile')
def test_eight_devices_take_the_same_steps_as_one_and_a_checkpoint_moves_between_them(machine):
  """2 data x 2 fsdp x 2 tensor: a whole run with lag, a table and several updates; cut there, it goes on on one device."""
  changes = dict(
    checkpoint__every=2, curriculum='pass_rate', rollout__lag=1, minibatches=2, optimizer__learning_rate=1e-3
  )
  one, eight = machine('one', **changes), machine('eight', mesh__train=(2, 2, 2), **changes)
  one.go(3)
  eight.go(3, until=2)
  dataclasses.replace(one, folder=eight.folder).go(3)
  for single, spread in zip(lines(one.folder), lines(eight.folder), strict=True):
    assert spread['prompts'] == single['prompts']
    for name in ('tok/decoded', 'reward/accuracy', 'loss/total', 'update/norm', 'policy/entropy'):
      assert spread[name] == pytest.approx(single[name], rel=1e-3, abs=1e-4), name
