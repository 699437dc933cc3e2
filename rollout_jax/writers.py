"""What a run leaves behind, and what it shows while it runs. Only process 0 writes.

  metrics.jsonl    one line per step, on disk before `step` returns; cut after the last whole checkpoint on resume
  rollouts.jsonl   a few rows per step, cut the same way
  run.json         what was run: config, seeds, versions, hardware, method flags
  summary.json     what came of it; written at the end
  tensorboard/     the scalars of metrics.jsonl

A number that is not finite is null in JSON, and the line names it under `nonfinite`. A write that fails is taken back,
so that every file stays readable, and raises WriteError.
"""

import contextlib
import fcntl
import json
import math
import os
import pathlib
import string
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tqdm import tqdm

from rollout_jax.types import ConfigError

SECONDS_BETWEEN_LINES = 20


class WriteError(RuntimeError):
  """The disk is full or the folder cannot be written. Says which file, why, and what to change."""


class Writers:
  """The files and the progress bar of a run of `steps` steps. Lines after `resume_step` are cut; -1 keeps none.

  `shown` makes the console line: format strings whose fields are names of metrics, such as 'reward {reward/mean:.2f}'
  or '{time/tokens_per_second:k} tok/s' (k: 1900 as 1.9k). A part whose metrics are absent at a step is left out.
  """

  def __init__(self, workdir: str | pathlib.Path, *, steps: int, shown: Sequence[str], resume_step: int = -1) -> None:
    self._writes, self._steps, self._shown = jax.process_index() == 0, steps, tuple(shown)
    if not self._writes:
      return
    self._workdir = pathlib.Path(workdir)
    make_folder(self._workdir)
    self._metrics = _Lines(self._workdir / 'metrics.jsonl', resume_step)
    self._rollouts = _Lines(self._workdir / 'rollouts.jsonl', resume_step)
    self._board = _Board(self._workdir / 'tensorboard', resume_step)
    self._bar = _bar('training', steps, max(resume_step, 0))

  def header(self, run: Mapping[str, Any]) -> None:
    """Writes run.json."""
    if self._writes:
      write_json(self._workdir / 'run.json', run)

  def step(self, step: int, metrics: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]] = ()) -> None:
    """Writes one step everywhere. Its line of metrics comes last and reaches the disk before this returns."""
    if not self._writes:
      return
    self._rollouts.append([{'step': step} | dict(row) for row in rollouts])
    self._board.append(step, metrics)
    self._metrics.append([{'step': step} | dict(metrics)])
    say(console_line(step, self._steps, metrics, self._shown))
    self._bar.update(step - self._bar.n)

  def summary(self, summary: Mapping[str, Any]) -> None:
    """Writes summary.json."""
    if self._writes:
      write_json(self._workdir / 'summary.json', summary)

  def close(self) -> None:
    """Takes the progress bar away and closes the files."""
    if self._writes:
      self._bar.close()
      self._metrics.close()
      self._rollouts.close()
      self._board.close()


def say(text: str) -> None:
  """Prints a line on the console, above any progress bar; process 0 only. A run outlives the reader of its console."""
  if jax.process_index() == 0:
    try:
      tqdm.write(text, file=sys.stdout)
      sys.stdout.flush()
    except BrokenPipeError:
      sys.stdout = open(os.devnull, 'w')


@contextlib.contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[int], Any]]:
  """A progress bar with the time left for a long phase; yields advance(n). Without a terminal: a line now and then."""
  began = told = time.monotonic()
  done, bar = 0, _bar(name, total, 0)

  def advance(n: int) -> None:
    nonlocal done, told
    done, now = done + n, time.monotonic()
    bar.update(n)
    if bar.disable and now - told > SECONDS_BETWEEN_LINES:
      told = now
      say(f'{name}: {done}/{total}, {(now - began) / max(done, 1) * (total - done):.0f} s left')

  try:
    yield advance
  finally:
    bar.close()
  say(f'{name}: {done}/{total} in {time.monotonic() - began:.1f} s')


def make_folder(path: str | os.PathLike[str]) -> None:
  """Makes a folder and those above it."""
  with _explained(pathlib.Path(path)):
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
  """Holds the folder for a run. Raises ConfigError if another one does; a process that dies lets go."""
  if jax.process_index() != 0:
    yield
    return
  make_folder(folder)
  with _explained(folder):
    handle = open(folder / '.lock', 'ab')
  with handle:
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ConfigError(
        f'Another process is running in {folder}. Wait until it ends, stop it, or choose another workdir.'
      ) from error
    except OSError:
      pass  # a file system without locks, as some clusters have: nothing is held
    yield


def write_json(path: str | pathlib.Path, value: Any) -> None:
  """Writes a JSON file whole, then renames it into place."""
  path, partial = pathlib.Path(path), pathlib.Path(f'{path}.partial')
  text = json.dumps(plain(value), indent=2, allow_nan=False) + '\n'
  with _explained(path):
    try:
      with open(partial, 'w') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
      os.replace(partial, path)
    except OSError:
      with contextlib.suppress(OSError):
        partial.unlink()
      raise


def read_json(path: str | os.PathLike[str]) -> Any:
  """What a JSON file of this program holds; ConfigError if it cannot be read."""
  try:
    return json.loads(pathlib.Path(path).read_text())
  except (OSError, ValueError) as error:
    raise ConfigError(f'{path} cannot be read ({error}). Restore it from a copy, or choose another folder.') from error


def plain(value: Any) -> Any:
  """The value as JSON can hold it: numpy to Python, tuples to lists, a number that is not finite to None."""
  if isinstance(value, Mapping):
    return {str(key): plain(item) for key, item in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    return plain(value.tolist())
  if isinstance(value, list | tuple):
    return [plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def console_line(step: int, steps: int, metrics: Mapping[str, Any], shown: Sequence[str]) -> str:
  """One readable line, such as `step   12/300  reward 0.41  len 21.3  1.9k tok/s`."""
  parts = [f'step {step:>{len(str(steps))}}/{steps}']
  for template in shown:
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    if all(metrics.get(name) is not None for name in names):
      parts.append(_Format().vformat(template, (), metrics))
  return '  '.join(parts)


class _Format(string.Formatter):
  """Formats by whole names of metrics, dots and slashes included, with `k` for thousands."""

  def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
    return kwargs[field_name], field_name

  def format_field(self, value: Any, format_spec: str) -> str:
    if format_spec != 'k':
      return super().format_field(value, format_spec)
    for unit, size in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
      if abs(value) >= size:
        return f'{value / size:.3g}{unit}'
    return f'{value:.0f}' if abs(value) >= 100 else f'{value:.3g}'


class _Lines:
  """A JSONL file to which whole batches of lines are appended: all of them reach the disk, or none."""

  def __init__(self, path: pathlib.Path, resume_step: int) -> None:
    self._path = path
    with _explained(path):
      self._file = open(path, 'ab', buffering=0)
      self._end = _kept(path, resume_step)
      self._file.truncate(self._end)

  def append(self, records: Sequence[Mapping[str, Any]]) -> None:
    data = b''.join(json.dumps(_named(record), allow_nan=False).encode() + b'\n' for record in records)
    with _explained(self._path):
      try:
        written = 0
        while written < len(data):  # a disk that fills up takes a part
          written += self._file.write(data[written:])
        os.fsync(self._file.fileno())
      except OSError:
        with contextlib.suppress(OSError):
          self._file.truncate(self._end)
        raise
    self._end += len(data)

  def close(self) -> None:
    self._file.close()


class _Board:
  """TensorBoard's event file, written at once: the package's usual writer is a thread, which loses errors."""

  def __init__(self, folder: pathlib.Path, resume_step: int) -> None:
    self._folder = folder
    with _explained(folder):
      folder.mkdir(exist_ok=True)
      self._events = EventsWriter(str(folder / 'events'), f'.{len(os.listdir(folder))}')
      start = SessionLog(status=SessionLog.START)  # hides what an earlier process wrote from this step on
      self._events.write_event(Event(wall_time=time.time(), step=max(resume_step + 1, 0), session_log=start))

  def append(self, step: int, metrics: Mapping[str, Any]) -> None:
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float | np.number)}
    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
    with _explained(self._folder):
      self._events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
      self._events.flush()

  def close(self) -> None:
    self._events.close()


def _named(record: Mapping[str, Any]) -> dict[str, Any]:
  """The record for JSON, with the names of its numbers that are not finite."""
  lost = [k for k, v in record.items() if isinstance(v, float | np.floating) and not math.isfinite(v)]
  return plain(record) | ({'nonfinite': lost} if lost else {})


def _kept(path: pathlib.Path, resume_step: int) -> int:
  """The length of the file up to its first line of a later step; a last line that was cut short goes too."""
  end = 0
  with open(path, 'rb') as file:
    for number, line in enumerate(file, start=1):
      try:
        step = json.loads(line)['step']
      except (ValueError, KeyError, TypeError) as error:
        if not file.read(1):
          break
        raise ConfigError(
          f'{path} line {number} is not of this program. Restore the file or choose another workdir.'
        ) from error
      if step > resume_step or not line.endswith(b'\n'):
        break
      end += len(line)
  return end


def _bar(name: str, total: int, done: int) -> tqdm:
  quiet = jax.process_index() != 0 or not sys.stderr.isatty()
  return tqdm(total=total, initial=done, desc=name, disable=quiet, leave=False, dynamic_ncols=True)


@contextlib.contextmanager
def _explained(path: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise WriteError(
      f'Cannot write {path}: {error.strerror or error}. Free some space or choose another workdir; '
      'what was saved before is whole, and the same command goes on from there.'
    ) from error
