import ctypes
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from rollout_jax import tasks
from rollout_jax.resolve import bind, resolve
from rollout_jax.rollout import verify
from rollout_jax.rollout.verify import LOST, WINDOW, Verifier, VerifierBudgetError, VerifierError
from rollout_jax.tasks.base import Prompt, Task
from rollout_jax.types import ConfigError, Outcome, Verdict

ROOT = pathlib.Path(__file__).parent.parent
LIMIT_S = 0.5
TASK = f'{__name__}.troubled'


class Unprintable(Exception):
  def __str__(self):
    raise RuntimeError('not even this')


def _raise(error):
  raise error


DEEDS = {
  'right': lambda: Verdict(Outcome.CORRECT, 'as it should be'),
  'wrong': lambda: Verdict(Outcome.WRONG),
  'unreadable': lambda: Verdict(Outcome.FORMAT),
  'raise': lambda: _raise(ValueError('no such answer')),
  'unprintable': lambda: _raise(Unprintable()),
  'memory': lambda: _raise(MemoryError('too much')),
  'sys.exit': lambda: sys.exit(3),
  'none': lambda: None,
  'number': lambda: Verdict(1, ''),
  'text': lambda: Verdict(Outcome.CORRECT, 7),
  'os._exit': lambda: os._exit(7),
  'segfault': lambda: ctypes.string_at(0),
  'killed': lambda: os.kill(os.getpid(), signal.SIGKILL),
  'hang': lambda: time.sleep(600),
  'hang in C': lambda: str(7 ** (10**8))[0],  # one long call that lets no other thread and no signal handler run
  'slow': lambda: (time.sleep(0.8 * LIMIT_S), Verdict(Outcome.CORRECT))[1],
}
HARMLESS = {'right': Outcome.CORRECT, 'wrong': Outcome.WRONG, 'unreadable': Outcome.FORMAT}
ENDS_ITS_PROCESS = {'os._exit': '7', 'segfault': '-11', 'killed': '-9'}
RAISES = {
  'raise': 'ValueError: no such answer',
  'unprintable': 'Unprintable',
  'memory': 'MemoryError: too much',
  'sys.exit': 'SystemExit: 3',
}


def troubled(*, offset: int = 0) -> Task:
  """A user's own task: its verifier does what the row's text says. The answer of prompt i is i + offset."""

  def prompt(split, index):
    if index < 0:
      raise IndexError('no such prompt')
    return Prompt(f'{split} {index}', str(index + offset))

  def verify(prompt, text):
    if text.startswith('='):
      return Verdict(Outcome.CORRECT if text[1:] == prompt.answer else Outcome.WRONG)
    return DEEDS[text]()

  return Task(100, 100, prompt, verify, None, 10, 10)


def unbuildable() -> Task:
  raise OSError('no such file')


def dies_at_start() -> Task:
  os._exit(5)


def hangs_at_start() -> Task:
  time.sleep(600)


@pytest.fixture(scope='module')
def verifier():
  with Verifier(TASK, {'offset': 1000}, workers=2, limit_s=LIMIT_S, error_budget=1.0) as shared:
    yield shared


def _judge(verifier, texts):
  """Verdicts of rows with these texts, in order."""
  keys = [(n, text) for n, text in enumerate(texts)]
  for n, text in keys:
    verifier.submit((n, text), 'train', n, text)
  return list(verifier.wait(keys).values())


def test_verdicts_are_those_of_the_tasks_own_verifier(verifier):
  assert _judge(verifier, ['right', 'wrong', 'unreadable']) == [
    Verdict(Outcome.CORRECT, 'as it should be'),
    Verdict(Outcome.WRONG),
    Verdict(Outcome.FORMAT),
  ]


def test_a_worker_draws_the_prompt_of_the_row_with_the_tasks_section(verifier):
  verifier.submit('mine', 'heldout', 42, '=1042')
  verifier.submit('next', 'train', 43, '=1042')
  assert [v.outcome for v in verifier.wait(['mine', 'next']).values()] == [Outcome.CORRECT, Outcome.WRONG]


@pytest.mark.parametrize(('deed', 'detail'), RAISES.items())
def test_a_verifier_that_raises_gives_an_error_with_its_text(verifier, deed, detail):
  (verdict,) = _judge(verifier, [deed])
  assert verdict.outcome is Outcome.ERROR
  assert detail in verdict.detail


@pytest.mark.parametrize('deed', ['none', 'number', 'text'])
def test_a_verifier_that_returns_nonsense_gives_an_error(verifier, deed):
  (verdict,) = _judge(verifier, [deed])
  assert verdict.outcome is Outcome.ERROR
  assert 'not a Verdict' in verdict.detail


def test_a_prompt_that_cannot_be_drawn_gives_an_error(verifier):
  verifier.submit('row', 'train', -1, 'right')
  assert verifier.wait(['row'])['row'] == Verdict(Outcome.ERROR, 'IndexError: no such prompt')


@pytest.mark.parametrize(('deed', 'code'), ENDS_ITS_PROCESS.items())
def test_a_row_that_ends_its_process_is_an_error_and_costs_no_other_row(verifier, deed, code):
  texts = ['right', 'wrong', 'unreadable'] * 20
  texts[31] = deed
  verdicts = _judge(verifier, texts)
  assert verdicts[31] == Verdict(Outcome.ERROR, f'the verifier ended its process (exit code {code})')
  rest = [(text, v.outcome) for text, v in zip(texts, verdicts, strict=True) if text != deed]
  assert rest == [(text, HARMLESS[text]) for text, _ in rest]


@pytest.mark.parametrize('deed', ['hang', 'hang in C'])
def test_a_row_that_hangs_is_a_timeout_and_costs_no_other_row(verifier, deed):
  texts = ['right', 'slow', 'wrong', deed, 'raise', 'unreadable', deed, 'right']
  began = time.monotonic()
  outcomes = [v.outcome for v in _judge(verifier, texts)]
  assert outcomes == [
    Outcome.CORRECT,
    Outcome.CORRECT,
    Outcome.WRONG,
    Outcome.TIMEOUT,
    Outcome.ERROR,
    Outcome.FORMAT,
    Outcome.TIMEOUT,
    Outcome.CORRECT,
  ]
  assert time.monotonic() - began < 20 * LIMIT_S


def test_a_batch_of_slow_rows_is_not_taken_for_a_hung_one(verifier):
  assert {v.outcome for v in _judge(verifier, ['slow'] * 6)} == {Outcome.CORRECT}


def test_verdicts_do_not_depend_on_workers_batches_or_order(verifier):
  rng = random.Random(0)
  texts = rng.choices([*HARMLESS, *RAISES, 'none'], k=300) + ['os._exit', 'hang']
  rng.shuffle(texts)
  expected = _judge(verifier, texts)
  with Verifier(TASK, {}, workers=1, limit_s=LIMIT_S, error_budget=1.0) as alone:
    order = list(range(len(texts)))
    rng.shuffle(order)
    for n, place in enumerate(order):
      alone.submit(place, 'train', place, texts[place])
      if n % 7 == 0:
        alone.flush()
    assert list(alone.wait(range(len(texts))).values()) == expected


def test_submitting_and_flushing_do_not_wait_for_a_hung_row(verifier):
  began = time.monotonic()
  for n in range(200):
    verifier.submit(('row', n), 'train', n, 'right' if n else 'hang')
  verifier.flush()
  assert time.monotonic() - began < LIMIT_S
  verdicts = verifier.wait([('row', n) for n in range(200)])
  assert [v.outcome for v in verdicts.values()] == [Outcome.TIMEOUT] + [Outcome.CORRECT] * 199


def test_an_idle_worker_that_is_killed_is_replaced(verifier):
  _judge(verifier, ['right'])
  for each in verifier._workers:
    os.kill(each.process.pid, signal.SIGKILL)
    each.process.join()
  assert [v.outcome for v in _judge(verifier, ['right', 'wrong'] * 10)] == [Outcome.CORRECT, Outcome.WRONG] * 10


def test_a_stop_signal_to_the_whole_job_costs_no_verdict(verifier):
  """The run saves after its step: a row that is under way when SIGTERM comes must get its own verdict."""
  verifier.submit('row', 'train', 0, 'slow')
  verifier.flush()
  for each in verifier._workers:
    os.kill(each.process.pid, signal.SIGTERM)
    os.kill(each.process.pid, signal.SIGINT)
  assert verifier.wait(['row'])['row'].outcome == Outcome.CORRECT


def test_verdicts_are_counted_by_outcome_and_their_seconds_add_up():
  with Verifier(TASK, {}, workers=1, limit_s=LIMIT_S, error_budget=1.0) as fresh:
    _judge(fresh, ['right', 'right', 'wrong', 'unreadable', 'raise', 'hang', 'slow'])
    assert fresh.counts == {
      Outcome.CORRECT: 3,
      Outcome.WRONG: 1,
      Outcome.FORMAT: 1,
      Outcome.ERROR: 1,
      Outcome.TIMEOUT: 1,
    }
    assert 1.8 * LIMIT_S <= fresh.seconds < 2.5 * LIMIT_S  # slow takes 0.8 of a limit, hang a whole one


def test_a_key_is_taken_once_and_cannot_be_in_the_queue_twice(verifier):
  with pytest.raises(KeyError, match='never submitted'):
    verifier.wait(['unknown'])
  verifier.submit('key', 'train', 0, 'right')
  with pytest.raises(ValueError, match='submitted before'):
    verifier.submit('key', 'train', 0, 'right')
  assert verifier.wait(['key'])['key'].outcome is Outcome.CORRECT
  with pytest.raises(KeyError, match='taken'):
    verifier.wait(['key'])


def test_a_run_in_which_most_verdicts_fail_stops_and_says_why():
  texts = ['raise', 'right'] * (WINDOW // 2)
  with Verifier(TASK, {}, workers=1, limit_s=LIMIT_S, error_budget=0.5) as fresh:
    assert len(_judge(fresh, texts)) == WINDOW  # half of them: as much as the budget allows
    fresh.submit('last', 'train', 0, 'none')
    fresh.submit('straw', 'train', 0, 'none')
    with pytest.raises(VerifierBudgetError, match=f'33 of the last {WINDOW}.*(?s:.*)ERROR: ValueError: no such answer'):
      fresh.wait(['last', 'straw'])


def test_few_verdicts_never_exhaust_the_budget():
  with Verifier(TASK, {}, workers=1, limit_s=LIMIT_S, error_budget=0.0) as fresh:
    assert {v.outcome for v in _judge(fresh, ['raise'] * (WINDOW - 1))} == {Outcome.ERROR}


def test_a_task_that_cannot_be_built_in_a_worker_is_explained():
  path = f'{__name__}.unbuildable'
  with Verifier(path, {}, workers=1, limit_s=LIMIT_S, error_budget=0.5) as fresh:
    fresh.submit(0, 'train', 0, 'right')
    with pytest.raises(ConfigError, match='unbuildable cannot be built in a worker process: OSError: no such file'):
      fresh.wait([0])


def test_workers_that_die_again_and_again_end_the_wait_and_name_the_pending_rows():
  with Verifier(f'{__name__}.dies_at_start', {}, workers=1, limit_s=LIMIT_S, error_budget=0.5) as fresh:
    for name in ('anna', 'bert'):
      fresh.submit(name, 'train', 0, 'right')
    with pytest.raises(VerifierError, match=f'{LOST} verifier processes.*exit code 5. 2 rows are waiting: anna, bert'):
      fresh.wait(['anna'])


def test_a_worker_that_hangs_at_its_start_ends_the_wait_and_names_the_pending_rows(monkeypatch):
  monkeypatch.setattr(verify, 'START_S', 0.5)
  with Verifier(f'{__name__}.hangs_at_start', {}, workers=1, limit_s=LIMIT_S, error_budget=0.5) as fresh:
    fresh.submit('anna', 'train', 0, 'right')
    with pytest.raises(VerifierError, match='the last one did nothing for 0.5 s. 1 rows are waiting: anna'):
      fresh.wait(['anna'])


def test_rows_given_to_a_worker_that_never_reads_them_are_given_to_another(monkeypatch):
  with Verifier(TASK, {}, workers=1, limit_s=LIMIT_S, error_budget=0.5) as fresh:
    _judge(fresh, ['right'])
    os.kill(fresh._workers[0].process.pid, signal.SIGSTOP)
    monkeypatch.setattr(verify, 'START_S', 3.0)
    assert [v.outcome for v in _judge(fresh, ['right', 'wrong'])] == [Outcome.CORRECT, Outcome.WRONG]


@pytest.mark.parametrize(
  ('wrong', 'message'),
  [({'workers': 0}, 'at least 1'), ({'limit_s': 0.0}, 'positive'), ({'error_budget': 1.5}, 'from 0 to 1')],
)
def test_impossible_settings_are_refused(wrong, message):
  with pytest.raises(ConfigError, match=message):
    Verifier(TASK, {}, **({'workers': 1, 'limit_s': 1.0, 'error_budget': 0.5} | wrong))


def test_closing_ends_a_hung_worker_at_once():
  fresh = Verifier(TASK, {}, workers=1, limit_s=60.0, error_budget=0.5)
  _judge(fresh, ['right'])
  fresh.submit('row', 'train', 0, 'hang')
  fresh.flush()
  began, pid = time.monotonic(), fresh._workers[0].process.pid
  fresh.close()
  assert time.monotonic() - began < 5
  with pytest.raises(ProcessLookupError):
    os.kill(pid, 0)


RUN = """
import time
from rollout_jax import tasks
from rollout_jax.resolve import bind, resolve
from rollout_jax.rollout import verify
from rollout_jax.rollout.verify import Verifier
if __name__ == '__main__':
  verifier = Verifier('tests.test_verify.troubled', {}, workers=1, limit_s=600.0, error_budget=0.5)
  verifier.submit('first', 'train', 0, 'right')
  verifier.wait(['first'])
  verifier.submit('second', 'train', 0, 'hang')
  verifier.flush()
  print(verifier._workers[0].process.pid, flush=True)
  time.sleep(600)
"""


def test_a_hung_worker_dies_with_a_run_that_is_killed(tmp_path):
  script = tmp_path / 'run.py'
  script.write_text(RUN)
  env = os.environ | {'PYTHONPATH': str(ROOT)}
  run = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=env, text=True)
  assert run.stdout is not None
  pid = int(run.stdout.readline())
  run.kill()
  run.wait()
  run.stdout.close()
  for _ in range(200):
    if not pathlib.Path(f'/proc/{pid}').exists():
      return
    time.sleep(0.05)
  os.kill(pid, signal.SIGKILL)
  pytest.fail('the worker outlived its run')


def test_a_program_that_forgets_to_close_ends_all_the_same(tmp_path):
  script = tmp_path / 'run.py'
  script.write_text(RUN.replace('time.sleep(600)', ''))
  env = os.environ | {'PYTHONPATH': str(ROOT)}
  assert subprocess.run([sys.executable, script], env=env, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
  ('name', 'section'), [('countdown', {'seed': 3}), ('reasoning_gym', {'dataset': 'prime_factorization', 'size': 40})]
)
def test_workers_judge_the_very_problems_that_the_run_draws(name, section):
  task = bind(resolve(name, tasks, 'task'), section, {})
  with Verifier(name, section, workers=1, limit_s=5.0, error_budget=0.0) as fresh:
    for i in range(40):
      fresh.submit(i, 'train', i, task.prompt('train', i).answer)
      fresh.submit(40 + i, 'heldout', i, task.prompt('heldout', i).answer)
      fresh.submit(80 + i, 'train', i, 'junk')
    outcomes = [verdict.outcome for verdict in fresh.wait(range(120)).values()]
  assert outcomes == [Outcome.CORRECT] * 80 + [Outcome.FORMAT] * 40


def test_workers_never_initialise_a_device():
  code = """
from jax._src import xla_bridge
from rollout_jax import tasks
from rollout_jax.rollout import worker
tasks.gcd()
assert not xla_bridge.backends_are_initialized()
"""
  subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)


def test_a_worker_gives_at_least_a_thousand_verdicts_a_second():
  rows = 5000  # loose by a factor of ten or so: it is to catch a message per row or a look per row, not a busy machine
  with Verifier('gcd', {}, workers=1, limit_s=5.0, error_budget=0.5) as fresh:
    fresh.submit('first', 'train', 0, '#1')
    fresh.wait(['first'])
    began = time.monotonic()
    for n in range(rows):
      fresh.submit(n, 'train', n, '31%76=31#1')
    fresh.wait(range(rows))
    assert rows / (time.monotonic() - began) > 1000
