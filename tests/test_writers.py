import json
import os
import pathlib
import pty
import subprocess
import sys
import termios
import textwrap

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from rollout_jax.types import ConfigError
from rollout_jax.writers import WriteError, Writers, console_line, plain, progress, write_json

ROOT = pathlib.Path(__file__).parent.parent
SHOWN = ('reward {reward/mean:.2f}', 'kept {groups.kept:.0f}/{groups/all:.0f} groups', '{speed:k} tok/s', 'kl {kl:.3f}')


def _lines(path):
  return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def _events(folder):
  """Every event in the folder, file after file: length, checksum, event, checksum."""
  for path in sorted(folder.iterdir()):
    data = path.read_bytes()
    while data:
      size = int.from_bytes(data[:8], 'little')
      yield Event.FromString(data[12 : 12 + size])
      data = data[12 + size + 4 :]


def _write(workdir, steps, resume_step=-1):
  writers = Writers(workdir, steps=9, shown=SHOWN, resume_step=resume_step)
  for step in steps:
    writers.step(step, {'loss': step / 7}, [{'text': f'a{step}'}, {'text': f'b{step}'}])
  writers.close()


def _run(code, *args, **options):
  """Runs a program from the project's root and gives back what it printed."""
  command = [sys.executable, '-c', textwrap.dedent(code), *map(str, args)]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **options)


def test_each_step_is_one_line_of_metrics_and_a_few_of_rollouts(tmp_path):
  _write(tmp_path, [1, 2])
  assert _lines(tmp_path / 'metrics.jsonl') == [{'step': 1, 'loss': 1 / 7}, {'step': 2, 'loss': 2 / 7}]
  assert [row['text'] for row in _lines(tmp_path / 'rollouts.jsonl')] == ['a1', 'b1', 'a2', 'b2']


def test_a_line_can_be_read_by_others_as_soon_as_its_step_is_done(tmp_path):
  writers = Writers(tmp_path, steps=2, shown=())
  writers.step(1, {'loss': 0.5})
  assert _lines(tmp_path / 'metrics.jsonl') == [{'step': 1, 'loss': 0.5}]
  writers.close()


def test_resume_cuts_the_lines_after_the_step_it_goes_on_from(tmp_path):
  _write(tmp_path / 'whole', [1, 2, 3, 4])
  _write(tmp_path / 'cut', [1, 2, 3])
  _write(tmp_path / 'cut', [3, 4], resume_step=2)
  for name in ('metrics.jsonl', 'rollouts.jsonl'):
    assert (tmp_path / 'cut' / name).read_bytes() == (tmp_path / 'whole' / name).read_bytes()


def test_a_run_without_a_checkpoint_starts_its_files_anew(tmp_path):
  _write(tmp_path, [0, 1, 2])
  _write(tmp_path, [0])
  assert [line['step'] for line in _lines(tmp_path / 'metrics.jsonl')] == [0]


@pytest.mark.parametrize('kept', [1, 9, -1])
def test_a_last_line_that_a_kill_cut_short_is_cut(tmp_path, kept):
  _write(tmp_path, [1, 2, 3])
  whole = (tmp_path / 'metrics.jsonl').read_bytes()
  lines = whole.splitlines(keepends=True)
  (tmp_path / 'metrics.jsonl').write_bytes(b''.join(lines[:2]) + lines[2][:kept])
  _write(tmp_path, [3], resume_step=3)
  assert (tmp_path / 'metrics.jsonl').read_bytes() == whole


def test_a_foreign_line_in_the_middle_is_named_and_nothing_is_cut(tmp_path):
  _write(tmp_path, [1])
  path = tmp_path / 'metrics.jsonl'
  damaged = path.read_bytes() + b'garbage\n' + path.read_bytes()
  path.write_bytes(damaged)
  with pytest.raises(ConfigError, match='metrics.jsonl line 2'):
    Writers(tmp_path, steps=2, shown=(), resume_step=1)
  assert path.read_bytes() == damaged


def test_float32_survives_json_bit_for_bit(tmp_path):
  values = np.random.default_rng(0).normal(size=100).astype(np.float32)
  writers = Writers(tmp_path, steps=1, shown=())
  writers.step(1, {'values': values, 'first': values[0]})
  writers.close()
  (line,) = _lines(tmp_path / 'metrics.jsonl')
  np.testing.assert_array_equal(np.array(line['values'], np.float32), values)
  assert np.float32(line['first']) == values[0]


def test_a_number_that_is_not_finite_is_null_and_named(tmp_path):
  writers = Writers(tmp_path, steps=1, shown=())
  writers.step(1, {'loss': float('nan'), 'norm': np.float32('inf'), 'fine': 1.0})
  writers.close()
  assert _lines(tmp_path / 'metrics.jsonl') == [
    {'step': 1, 'loss': None, 'norm': None, 'fine': 1.0, 'nonfinite': ['loss', 'norm']}
  ]


def test_plain_turns_numpy_and_tuples_into_json():
  value = {'a': np.int32(3), 'b': (np.float32(0.5), [np.bool_(True)]), 3: np.arange(2)}
  assert plain(value) == {'a': 3, 'b': [0.5, [True]], '3': [0, 1]}
  assert type(plain(value)['a']) is int


def test_tensorboard_holds_the_scalars_and_hides_what_a_resume_repeats(tmp_path):
  _write(tmp_path, [1, 2, 3])
  _write(tmp_path, [3], resume_step=2)
  events = list(_events(tmp_path / 'tensorboard'))
  scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
  assert [(step, tag) for step, tag, _ in scalars] == [(1, 'loss'), (2, 'loss'), (3, 'loss'), (3, 'loss')]
  np.testing.assert_allclose([value for *_, value in scalars], np.array([1, 2, 3, 3]) / 7)
  assert [event.step for event in events if event.HasField('session_log')] == [0, 3]


def test_the_console_line_is_readable():
  metrics = {'reward/mean': 0.4111, 'groups.kept': 9, 'groups/all': 16, 'speed': 1912.3, 'kl': 0.00123}
  assert console_line(12, 300, metrics, SHOWN) == 'step  12/300  reward 0.41  kept 9/16 groups  1.91k tok/s  kl 0.001'


def test_the_console_line_leaves_out_what_a_step_lacks_and_shows_nan():
  assert console_line(1, 9, {'kl': float('nan'), 'reward/mean': None}, SHOWN) == 'step 1/9  kl nan'


@pytest.mark.parametrize(
  ('speed', 'text'), [(7, '7'), (999.6, '1000'), (12345, '12.3k'), (2.5e6, '2.5M'), (0.25, '0.25')]
)
def test_thousands_are_short(speed, text):
  assert console_line(1, 9, {'speed': speed}, ('{speed:k}',)) == f'step 1/9  {text}'


def test_a_console_that_nobody_reads_any_more_stops_nothing():
  code = "from rollout_jax.writers import say\nfor n in range(9999): say('a line')\nimport sys; print('done', file=sys.stderr)"
  program = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  program.stdout.readline()
  program.stdout.close()
  assert program.stderr.read() == 'done\n' and program.wait() == 0


def test_without_a_terminal_there_are_lines_and_no_bar(tmp_path, capsys):
  _write(tmp_path, [1, 2])
  with progress('evaluating', 3) as advance:
    advance(3)
  out, err = capsys.readouterr()
  assert [line.split('  ')[0] for line in out.splitlines()[:2]] == ['step 1/9', 'step 2/9']
  assert out.splitlines()[2].startswith('evaluating: 3/3 in 0.')
  assert err == ''


def test_without_a_terminal_a_long_phase_says_how_much_time_is_left(capsys, monkeypatch):
  monkeypatch.setattr('rollout_jax.writers.SECONDS_BETWEEN_LINES', 0)
  with progress('evaluating', 4) as advance:
    advance(1)
    advance(2)
  assert [line.split(',')[0] for line in capsys.readouterr().out.splitlines()[:2]] == [
    'evaluating: 1/4',
    'evaluating: 3/4',
  ]


def test_on_a_terminal_a_bar_with_the_time_left_stays_below_the_lines(tmp_path):
  code = """
    import sys, time
    from rollout_jax.writers import Writers
    writers = Writers(sys.argv[1], steps=3, shown=())
    for step in (1, 2):
      time.sleep(0.15)  # the bar is drawn at most ten times a second
      writers.step(step, {})
    writers.close()
  """
  ours, theirs = pty.openpty()
  termios.tcsetwinsize(theirs, (24, 80))
  command = [sys.executable, '-c', textwrap.dedent(code), str(tmp_path)]
  subprocess.run(command, cwd=ROOT, stderr=theirs, check=True, stdout=subprocess.DEVNULL, timeout=120)
  shown = os.read(ours, 100_000).decode()
  os.close(ours)
  os.close(theirs)
  assert 'training:  67%' in shown and '2/3 [' in shown and '<00:0' in shown


def test_json_is_written_whole_then_renamed(tmp_path):
  write_json(tmp_path / 'run.json', {'seed': 1})
  with pytest.raises(TypeError):
    write_json(tmp_path / 'run.json', {'seed': object()})
  assert json.loads((tmp_path / 'run.json').read_text()) == {'seed': 1}
  assert [path.name for path in tmp_path.iterdir()] == ['run.json']


def test_a_workdir_under_a_file_is_refused_with_the_reason(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(WriteError, match='Cannot write .*file/run: Not a directory'):
    Writers(tmp_path / 'file' / 'run', steps=1, shown=())


def test_a_full_device_is_named_and_the_old_file_stays(tmp_path):
  write_json(tmp_path / 'run.json', {'seed': 1})
  (tmp_path / 'run.json.partial').symlink_to('/dev/full')
  with pytest.raises(WriteError, match='run.json: No space left on device'):
    write_json(tmp_path / 'run.json', {'seed': 2})
  assert json.loads((tmp_path / 'run.json').read_text()) == {'seed': 1}


FULL = """
  import resource, sys
  from rollout_jax.writers import Writers, WriteError, write_json
  workdir = sys.argv[1]
  writers = Writers(workdir, steps=99, shown=())
  writers.header({'seed': 1})
  resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
  try:
    for step in range(1, 99):
      writers.step(step, {'loss': 0.5, 'text': 'x' * 100}, [{'text': 'y' * int(sys.argv[2])}])
  except WriteError as error:
    print(error)
  try:
    writers.header({'seed': 'z' * 4000})
  except WriteError as error:
    print(error)
"""


@pytest.mark.parametrize(('size', 'name'), [(1, 'metrics.jsonl'), (900, 'rollouts.jsonl')])
def test_a_disk_that_fills_up_costs_the_line_in_hand_and_nothing_before_it(tmp_path, size, name):
  done = _run(FULL, tmp_path, size)
  assert done.returncode == 0, done.stderr
  first, second = [line for line in done.stdout.splitlines() if line.startswith('Cannot')]
  assert f'{name}: File too large' in first and 'Free some space' in first and 'run.json' in second
  metrics, rollouts = _lines(tmp_path / 'metrics.jsonl'), _lines(tmp_path / 'rollouts.jsonl')
  assert [line['step'] for line in metrics] == list(range(1, len(metrics) + 1)) and len(metrics) > 1
  assert len(rollouts) in (len(metrics), len(metrics) + 1)
  assert json.loads((tmp_path / 'run.json').read_text()) == {'seed': 1}
  _write(tmp_path, [len(metrics) + 1], resume_step=len(metrics))
  assert [line['step'] for line in _lines(tmp_path / 'rollouts.jsonl')][-2:] == [len(metrics) + 1] * 2
