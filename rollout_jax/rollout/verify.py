"""Verifiers in worker processes, with a wall-clock limit per row.

A row costs itself alone, whatever its verifier does: one that raises, returns nonsense or kills its process gives ERROR, one
that hangs gives TIMEOUT and its process is killed and replaced; the rows beside it are judged as if it were not there. Rows
travel in batches. The worker writes down which row it is at and until when, so that the guilty one is known at once.

Nothing here runs in the background: workers get work, and hung ones are killed, whenever the run submits, flushes or waits.
A verdict does not depend on the number of workers, the batches, or when it is asked for.
"""

import collections
import dataclasses
import itertools
import math
import multiprocessing
import time
from collections.abc import Hashable, Iterable, Mapping, MutableSequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Self

from rollout_jax.rollout import worker
from rollout_jax.types import ConfigError, Outcome, Verdict

BATCH = 64  # rows in one message, at most
WINDOW = 64  # verdicts that the error budget looks back on
START_S = (
  60.0  # for a worker to start or to draw a problem: the run itself has done both, so longer means that it hangs
)
LOOK_S = 0.05  # between two looks at the workers' clocks
LOST = 3  # workers that may end one after another without having judged a row


class VerifierError(RuntimeError):
  """Verification cannot go on: workers do not start, or too many rows fail."""


class VerifierBudgetError(VerifierError):
  """More of the last verdicts than the error budget allows are ERROR or TIMEOUT."""


@dataclasses.dataclass(frozen=True)
class _Row:
  key: Hashable
  split: str
  index: int
  text: str


@dataclasses.dataclass
class _Worker:
  process: BaseProcess
  pipe: connection.Connection
  clock: MutableSequence[float]
  ready: bool = False
  batch: list[_Row] = dataclasses.field(default_factory=list)
  done: int = 0  # rows of the batch whose findings are here

  @property
  def hung(self) -> bool:
    return time.monotonic() > self.clock[worker.DEADLINE]


class Verifier:
  """`workers` processes that judge rows of the task called `task`, built with `section` in each of them.

  `counts` is the number of verdicts handed out by outcome, `seconds` the time that verifiers took, over all workers.
  """

  def __init__(self, task: str, section: Mapping[str, Any], *, workers: int, limit_s: float, error_budget: float):
    if workers < 1:
      raise ConfigError(f'verifier.workers must be at least 1, but is {workers}.')
    if not limit_s > 0:
      raise ConfigError(f'verifier.limit_s must be a positive number of seconds, but is {limit_s}.')
    if not 0 <= error_budget <= 1:
      raise ConfigError(f'verifier.error_budget is a share of rows, from 0 to 1, but is {error_budget}.')
    self.counts: collections.Counter[Outcome] = collections.Counter()
    self.seconds = 0.0
    self._task, self._section, self._limit_s, self._budget = task, dict(section), limit_s, error_budget
    self._queue: collections.deque[_Row] = collections.deque()
    self._pending: dict[Hashable, None] = {}
    self._verdicts: dict[Hashable, Verdict] = {}
    self._recent: collections.deque[Verdict] = collections.deque(maxlen=WINDOW)
    self._lost = 0
    # A server without threads or devices forks the workers: they start in milliseconds and never copy a live JAX.
    self._context = multiprocessing.get_context('forkserver')
    self._context.set_forkserver_preload([worker.__name__])
    self._workers: list[_Worker] = []
    # At the latest when the program ends: multiprocessing would wait for ever for workers that ignore its SIGTERM.
    self._end = Finalize(self, _end, (self._workers,), exitpriority=1)
    self._workers.extend(self._start() for _ in range(workers))

  def submit(self, key: Hashable, split: str, index: int, text: str) -> None:
    """Puts a row in the queue; `key` is its name and must be new. Does not wait."""
    if key in self._pending or key in self._verdicts:
      raise ValueError(f'row {key} was submitted before, and nobody has taken its verdict yet')
    self._pending[key] = None
    self._queue.append(_Row(key, split, index, text))
    if len(self._queue) >= BATCH:
      self._look(0)

  def flush(self) -> None:
    """Hands queued rows to idle workers, and takes in what is ready. Does not wait."""
    self._look(0)

  def wait(self, keys: Iterable[Hashable]) -> dict[Hashable, Verdict]:
    """The verdicts of these rows, each handed out once, in this order.

    It ends: each phase of a worker has a deadline. Raises VerifierBudgetError, or VerifierError if no worker works.
    """
    taken = {}
    for key in keys:
      if key not in self._pending and key not in self._verdicts:
        raise KeyError(f'row {key} was never submitted, or its verdict has been taken')
      while key in self._pending:
        self._look(LOOK_S)
      taken[key] = self._verdicts.pop(key)
      self._count(taken[key])
    return taken

  def close(self) -> None:
    """Ends the workers, whatever they are at."""
    self._end()
    self._pending.clear()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _start(self) -> _Worker:
    here, there = self._context.Pipe()
    clock = self._context.RawArray('d', [-1, time.monotonic() + START_S])
    arguments = (there, clock, self._task, self._section, self._limit_s, START_S)
    process = self._context.Process(target=worker.work, args=arguments, daemon=True)
    process.start()
    there.close()
    return _Worker(process, here, clock)

  def _look(self, timeout: float) -> None:
    """Takes in findings, replaces workers that died or hang, hands out rows; waits at most `timeout` for something."""
    ready = set(connection.wait([each.pipe for each in self._workers], timeout))
    for place, each in enumerate(self._workers):
      alive = self._receive(each) if each.pipe in ready else True
      if not alive or each.hung:
        self._bury(each, hung=alive)
        self._workers[place] = self._start()
    idle = [each for each in self._workers if each.ready and not each.batch]
    for left, each in zip(range(len(idle), 0, -1), idle, strict=True):
      self._hand_out(each, min(BATCH, math.ceil(len(self._queue) / left)))

  def _hand_out(self, each: _Worker, count: int) -> None:
    if not count:
      return
    each.batch, each.done = [self._queue.popleft() for _ in range(count)], 0
    each.clock[worker.ROW], each.clock[worker.DEADLINE] = -1, time.monotonic() + START_S
    try:
      each.pipe.send([(row.split, row.index, row.text) for row in each.batch])
    except OSError:
      pass  # it died while it was idle, which the next look sees

  def _receive(self, each: _Worker) -> bool:
    """Takes in all that the worker has sent; False if it is dead."""
    try:
      while each.pipe.poll():
        self._take_in(each, each.pipe.recv())
    except (EOFError, OSError):
      return False
    return True

  def _take_in(self, each: _Worker, message: str | list[worker.Finding]) -> None:
    if isinstance(message, str):
      if message:
        raise ConfigError(f'the task {self._task} cannot be built in a worker process: {message}')
      each.ready = True
      return
    for outcome, detail, seconds in message:
      self._settle(each.batch[each.done], Verdict(Outcome(outcome), detail), seconds)
      each.done += 1
    if each.done == len(each.batch):
      each.batch, each.done = [], 0

  def _settle(self, row: _Row, verdict: Verdict, seconds: float) -> None:
    del self._pending[row.key]
    self._verdicts[row.key] = verdict
    self.seconds += seconds
    self._lost = 0

  def _bury(self, each: _Worker, *, hung: bool) -> None:
    """Kills a worker, settles the row that it was at, and puts its other rows back to the front of the queue."""
    _stop(each)
    self._receive(each)
    row, deadline = int(each.clock[worker.ROW]), each.clock[worker.DEADLINE]
    code = each.process.exitcode
    guilty = row if each.done <= row < len(each.batch) and deadline < math.inf else None
    rest = [other for n, other in enumerate(each.batch) if n >= each.done and n != guilty]
    self._queue.extendleft(reversed(rest))
    if guilty is not None:
      died = Verdict(Outcome.ERROR, f'the verifier ended its process (exit code {code})')
      late = Verdict(Outcome.TIMEOUT, worker.late(self._limit_s))
      self._settle(each.batch[guilty], late if hung else died, self._limit_s if hung else 0.0)
      return
    self._lost += 1
    if self._lost >= LOST:
      how = f'did nothing for {START_S:g} s' if hung else f'ended with exit code {code}'
      names = ', '.join(map(str, itertools.islice(self._pending, 8)))
      raise VerifierError(
        f'{LOST} verifier processes in a row did not judge a single row; the last one {how}. '
        f'{len(self._pending)} rows are waiting: {names or "none"}.'
      )

  def _count(self, verdict: Verdict) -> None:
    self.counts[verdict.outcome] += 1
    self._recent.append(verdict)
    if not self.counts[Outcome.ERROR] + self.counts[Outcome.TIMEOUT]:
      return
    failed = [v for v in self._recent if v.outcome in (Outcome.ERROR, Outcome.TIMEOUT)]
    if len(self._recent) == WINDOW and len(failed) > self._budget * WINDOW:
      texts = '\n  '.join(f'{v.outcome.name}: {v.detail}' for v in failed[:3])
      raise VerifierBudgetError(
        f'{len(failed)} of the last {WINDOW} verdicts are ERROR or TIMEOUT, more than verifier.error_budget='
        f'{self._budget:g} allows. Mend the verifier of {self._task}, or raise verifier.limit_s. The first:\n  {texts}'
      )


def _end(workers: list[_Worker]) -> None:
  for each in workers:
    _stop(each)
    each.pipe.close()
  workers.clear()


def _stop(each: _Worker) -> None:
  each.process.kill()
  each.process.join()
