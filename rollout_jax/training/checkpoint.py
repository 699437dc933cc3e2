"""Checkpoints: arrays by orbax, what the host knows as JSON, and a seal that says that all of it is there.

A checkpoint is a folder named by its step. It is written under another name and renamed when every byte is on disk and
summed, so a kill at any moment leaves the checkpoints before it whole. Arrays are stored by their names in the tree, in
the logical layout, whatever the mesh.
"""

import json
import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from rollout_jax.resolve import nearest
from rollout_jax.types import ConfigError, PyTree
from rollout_jax.writers import WriteError, say

SEAL = 'whole.json'
PARTIAL = 'partial.'


class Checkpointer:
  """The checkpoints in one folder, of which the newest `keep` stay."""

  def __init__(self, folder: str | os.PathLike[str], *, keep: int) -> None:
    self._folder = pathlib.Path(folder).absolute()
    self._keep = keep
    self._orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    logging.getLogger('absl').addFilter(_not_from_orbax)

  def __enter__(self) -> 'Checkpointer':
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()

  def save(self, step: int, arrays: PyTree, host: Mapping[str, Any]) -> None:
    """Saves both; they are safe when this returns. Older checkpoints than `keep`, and any of later steps, go."""
    partial, writes = self._folder / f'{PARTIAL}{step:08d}', jax.process_index() == 0
    named = {name: x for name, x in _named(arrays).items() if x.size}  # orbax refuses arrays without an element
    try:
      if writes:
        self._clear_partial()
        partial.mkdir(parents=True)
      _wait_for_all('checkpoint begins')
      self._orbax.save(partial / 'arrays', args=ocp.args.PyTreeSave(named))
      if writes:
        _write(partial / 'host.json', host)
        _write(partial / SEAL, {'arrays': {name: _form(x) for name, x in named.items()}, 'files': _sums(partial)})
        self._replace(step, partial)
        self._prune(step)
      _wait_for_all('checkpoint ends')
    except (OSError, ValueError) as error:
      if writes:
        shutil.rmtree(partial, ignore_errors=True)
      reason = _disk_fault(error)
      if reason is None:
        raise
      raise WriteError(
        f'Cannot save the checkpoint of step {step} in {self._folder}: {reason}. Free some space or choose another '
        'workdir; the checkpoints before it are whole, and the same command goes on from the newest.'
      ) from error

  def restore(self, template: PyTree) -> tuple[int, PyTree, dict[str, Any]] | None:
    """(step, arrays, host) of the newest whole checkpoint; None if there is none at all.

    The arrays come back in the tree, shapes, dtypes and shardings of the template: arrays, numpy arrays (which stay on the
    host) or ShapeDtypeStructs. A damaged checkpoint is named on the console and passed over; ConfigError if all are.
    """
    steps = self._steps()
    for step in steps:
      fault = _fault(self._folder / f'{step:08d}')
      if fault is None:
        return step, *self._read(self._folder / f'{step:08d}', template)
      say(f'checkpoint {self._folder / f"{step:08d}"} is damaged and passed over: {fault}')
    if steps:
      raise ConfigError(
        f'Each of the {len(steps)} checkpoints in {self._folder} is damaged. '
        'Restore one from a copy, or choose another workdir to start anew.'
      )
    return None

  def close(self) -> None:
    """Ends orbax's threads."""
    self._orbax.close()

  def _steps(self) -> list[int]:
    """The steps of the checkpoints, newest first."""
    if not self._folder.is_dir():
      return []
    return sorted((int(path.name) for path in self._folder.iterdir() if path.name.isdigit()), reverse=True)

  def _read(self, folder: pathlib.Path, template: PyTree) -> tuple[PyTree, dict[str, Any]]:
    stored = json.loads((folder / SEAL).read_text())['arrays']
    wanted = {name: x for name, x in _named(template).items() if x.size}
    _compare(folder, stored, {name: _form(x) for name, x in wanted.items()})
    item = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()}
    args = ocp.args.PyTreeRestore(item=item, restore_args={name: _restore_args(x) for name, x in wanted.items()})
    arrays = self._orbax.restore(folder / 'arrays', args=args)
    place = lambda path, x: arrays[jax.tree_util.keystr(path)] if x.size else _empty(x)
    return jax.tree_util.tree_map_with_path(place, template), json.loads((folder / 'host.json').read_text())

  def _replace(self, step: int, partial: pathlib.Path) -> None:
    """Renames a finished checkpoint into place; one of the same step, damaged or of an earlier try, makes room."""
    final, old = self._folder / f'{step:08d}', self._folder / f'{PARTIAL}old'
    if final.exists():
      final.rename(old)
    partial.rename(final)
    _sync(self._folder)
    shutil.rmtree(old, ignore_errors=True)

  def _prune(self, step: int) -> None:
    before = [other for other in self._steps() if other <= step]
    for other in set(self._steps()) - set(before[: self._keep]):
      shutil.rmtree(self._folder / f'{other:08d}')

  def _clear_partial(self) -> None:
    for path in self._folder.glob(f'{PARTIAL}*'):
      shutil.rmtree(path)


def _named(tree: PyTree) -> dict[str, Any]:
  return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _form(x: Any) -> list[Any]:
  """Shape and dtype, as JSON has them."""
  return [list(x.shape), str(x.dtype)]


def _restore_args(x: Any) -> ocp.RestoreArgs:
  if isinstance(x, np.ndarray):
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
  return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)


def _empty(x: Any) -> Any:
  if isinstance(x, np.ndarray):
    return np.zeros(x.shape, x.dtype)
  return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)


def _compare(folder: pathlib.Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  """Refuses a checkpoint of another model, optimizer or method than the config's."""
  for name, form in wanted.items():
    if name not in stored:
      raise ConfigError(f'{folder} holds no {name}, which this config needs. {nearest(name, stored)} {CHANGED}')
    if stored[name] != form:
      raise ConfigError(f'{folder} holds {name} as {stored[name]}, but this config needs {form}. {CHANGED}')
  for name in stored:
    if name not in wanted:
      raise ConfigError(f'{folder} holds {name}, which this config does not use. {nearest(name, wanted)} {CHANGED}')


CHANGED = 'Use the config that wrote it, or another workdir.'


def _write(path: pathlib.Path, value: Any) -> None:
  with open(path, 'w') as file:
    json.dump(value, file)
    file.flush()
    os.fsync(file.fileno())


def _sync(folder: pathlib.Path) -> None:
  """Puts the names in a folder on disk."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _sums(folder: pathlib.Path) -> dict[str, list[int]]:
  """Size and checksum of every file but the seal."""
  sums = {}
  for path in sorted(folder.rglob('*')):
    if path.is_file() and path.name != SEAL:
      size, total = 0, 0
      with open(path, 'rb') as file:
        while block := file.read(1 << 22):
          size, total = size + len(block), zlib.crc32(block, total)
      sums[str(path.relative_to(folder))] = [size, total]
  return sums


def _fault(folder: pathlib.Path) -> str | None:
  """What is wrong with a checkpoint's files; None if each is there and as it was written."""
  try:
    written = json.loads((folder / SEAL).read_text())['files']
  except FileNotFoundError:
    return f'it has no {SEAL}'
  except (ValueError, KeyError, TypeError):
    return f'{SEAL} cannot be read'
  found = _sums(folder)
  for name, (size, total) in written.items():
    if name not in found:
      return f'{name} is missing'
    if found[name][0] != size:
      return f'{name} has {found[name][0]} bytes instead of {size}'
    if found[name][1] != total:
      return f'{name} has other content than was written'
  return None


def _disk_fault(error: Exception) -> str | None:
  """The system's words for a failed write; tensorstore hides its number in a ValueError. None for any other error."""
  if isinstance(error, OSError):
    return error.strerror or str(error)
  number = re.search(r"os_error_code='(\d+)'", str(error))
  return os.strerror(int(number[1])) if number else None


def _not_from_orbax(record: logging.LogRecord) -> bool:
  """Keeps orbax's log off the console: what goes wrong is raised as well."""
  return 'orbax' not in record.pathname


def _wait_for_all(what: str) -> None:
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)
