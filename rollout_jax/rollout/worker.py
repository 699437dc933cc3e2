"""What a verifier's worker process runs: it builds the task for itself, then judges batches of rows until the pipe closes.

It shares a clock with the process that started it: clock[ROW] is the place in the batch of the row under way, clock[DEADLINE]
the monotonic second at which the worker counts as hung (infinity while it waits for work). A worker never touches a device.
"""

import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping, MutableSequence
from multiprocessing.connection import Connection, wait
from typing import Any

from rollout_jax import tasks
from rollout_jax.resolve import bind, resolve
from rollout_jax.tasks.base import Prompt, Task
from rollout_jax.types import Outcome, Verdict

ROW, DEADLINE = 0, 1
SEND_S = 0.05  # findings are sent at least this often, so that a crash costs few of them
LONGEST = 500  # characters of a detail

Finding = tuple[int, str, float]  # outcome, detail, seconds that verifying took


def work(
  pipe: Connection, clock: MutableSequence[float], name: str, section: Mapping[str, Any], limit_s: float, draw_s: float
) -> None:
  """Sends '' when ready, or what is wrong with the task; then for each batch of (split, index, text) its findings in order.

  Verifying a row may take `limit_s`, drawing its problem `draw_s`.
  """
  # Ctrl-C and SIGTERM reach every process of a terminal or a job, but are for the run: it finishes its step with this worker.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  threading.Thread(target=_leave_with_parent, daemon=True).start()
  try:
    task: Task = bind(resolve(name, tasks, 'task'), section, {})
  except Exception as error:
    pipe.send(_say(error))
    return
  clock[DEADLINE] = math.inf
  pipe.send('')
  while True:
    try:
      batch = pipe.recv()
    except EOFError:
      return
    findings: list[Finding] = []
    sent = time.monotonic()
    for row, (split, index, text) in enumerate(batch):
      findings.append(_judge(task, clock, row, split, index, text, limit_s, draw_s))
      if time.monotonic() - sent > SEND_S:
        pipe.send(findings)
        findings, sent = [], time.monotonic()
    pipe.send(findings)


def _judge(
  task: Task,
  clock: MutableSequence[float],
  row: int,
  split: str,
  index: int,
  text: str,
  limit_s: float,
  draw_s: float,
) -> Finding:
  # Infinity first: who reads the clock between two of these lines must not blame one row for another.
  clock[DEADLINE] = math.inf
  clock[ROW] = row
  clock[DEADLINE] = time.monotonic() + draw_s
  seconds = 0.0
  try:
    prompt = task.prompt(split, index)
    began = time.monotonic()
    clock[DEADLINE] = began + limit_s
    outcome, detail = _verdict(task, prompt, text)
    seconds = time.monotonic() - began
  except BaseException as error:  # a verifier that exits or runs out of memory costs its row, not the worker
    outcome, detail = Outcome.ERROR, _say(error)
  clock[DEADLINE] = math.inf
  if seconds > limit_s:  # finished just before it was stopped: the limit is one for all rows
    outcome, detail = Outcome.TIMEOUT, late(limit_s)
  return int(outcome), detail, seconds


def _verdict(task: Task, prompt: Prompt, text: str) -> tuple[Outcome, str]:
  verdict = task.verify(prompt, text)
  sound = isinstance(verdict, Verdict) and isinstance(verdict.outcome, Outcome) and isinstance(verdict.detail, str)
  if not sound:
    return Outcome.ERROR, f'the verifier returned a {type(verdict).__name__}, not a Verdict of an Outcome and a text'
  return verdict.outcome, verdict.detail[:LONGEST]


def late(limit_s: float) -> str:
  """The detail of a TIMEOUT."""
  return f'no verdict within {limit_s:g} s'


def _say(error: BaseException) -> str:
  return ''.join(traceback.format_exception_only(error)).strip()[:LONGEST]


def _leave_with_parent() -> None:
  """Ends this process when the one that started it has died, even while a verifier hangs."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  wait([parent.sentinel])
  os._exit(1)
