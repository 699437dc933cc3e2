"""What the mains share: flags whose mistakes are explained, and an exit code that says how it went."""

import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from rollout_jax.resolve import flatten, nearest
from rollout_jax.types import ConfigError

CONFIG = config_flags.DEFINE_config_file(
  'config', lock_config=True, help_string='A file of configs/, or your fork of one.'
)
WORKDIR = flags.DEFINE_string(
  'workdir', None, 'The folder of this run; if it holds this run already, it goes on from there.'
)

FAILED, MISUSED = 1, 2


def run(main: Callable[[], object]) -> None:
  """Parses the flags and calls `main()`. Expected errors end in one message and exit code 2, without a traceback."""

  def guarded(argv: Sequence[str]) -> int:
    if len(argv) > 1:
      return _complain(f'what is {argv[1]!r}? Options start with --, such as --workdir=DIR.')
    logging.set_verbosity(logging.WARNING)
    try:
      main()
    except ConfigError as error:
      return _complain(str(error))
    except _expected() as error:
      print(f'\n{type(error).__name__}: {error}', file=sys.stderr)
      return FAILED
    return 0

  app.run(guarded, flags_parser=_parse)


def config_and_workdir() -> tuple[ConfigDict, str]:
  """The two flags that every run needs. Raises ConfigError if one is missing."""
  for name, value in (('config', CONFIG.value), ('workdir', WORKDIR.value)):
    if value is None:
      raise ConfigError(f'--{name} is missing: {flags.FLAGS[name].help}')
  _check_fields(CONFIG.value)
  return CONFIG.value, WORKDIR.value


def _check_fields(config: ConfigDict) -> None:
  """Raises ConfigError for a field that the config file sets and nothing reads; on the command line absl refuses these."""
  from configs import base

  known = flatten(base.get_config().to_dict())
  chosen = (config.task, config.loss, config.curriculum, config.scheduler, *config.transforms)
  own = {'options', *(name.rpartition('.')[2] for name in chosen if '.' in name)}  # sections of a user's own methods
  for name in flatten(config.to_dict()):
    if name not in known and not own & set(name.split('.')[:-1]) and name not in own | {'optimizer.options'}:
      raise ConfigError(f'the config sets {name}, which nothing reads. {nearest(name, known)}')


def _parse(argv: Sequence[str]) -> list[str]:
  """Flags from the command line; what does not exist is explained before anything else happens."""
  path = config_argument(argv).partition(':')[0]
  if path and not pathlib.Path(path).is_file():
    there = sorted(str(p) for p in pathlib.Path('configs').glob('*.py') if p.stem != '__init__')
    sys.exit(_complain(f'--config: there is no file {path}. {nearest(path, there)}'))
  try:
    return flags.FLAGS(argv)
  except Exception as error:  # a config file is the user's code: anything can come out of it
    sys.exit(_complain(_explain(argv, error)))


def _explain(argv: Sequence[str], error: Exception) -> str:
  try:
    fields = _fields(config_argument(argv).partition(':')[0])
  except Exception as fault:  # the file itself is what is wrong
    where = traceback.extract_tb(fault.__traceback__)[-1]
    return f'--config: the file raises {type(fault).__name__}: {fault} ({where.filename}, line {where.lineno}).'
  for argument in argv:
    name, _, value = argument.removeprefix('--config.').partition('=')
    if not argument.startswith('--config.'):
      continue
    if name not in fields:
      return f'--config.{name}: there is no such field. {nearest(name, fields)}'
    if type(fields[name]).__name__ in str(error) or repr(value) in str(error):
      return f'--config.{name}={value}: wanted a {type(fields[name]).__name__} such as {fields[name]!r}.'
  return str(error) or repr(error)


def config_argument(argv: Sequence[str]) -> str:
  """What --config is: a file, perhaps with an argument of its own behind a colon; '' if there is none."""
  values = [a.partition('=')[2] for a in argv if a.startswith('--config=')]
  values += [after for before, after in zip(argv, argv[1:], strict=False) if before == '--config']
  return values[-1] if values else ''


def overrides(argv: Sequence[str]) -> list[str]:
  """The arguments that set fields of the config, as --config.x=1 or as two words."""
  field = lambda argument: argument.startswith(('--config.', '-config.'))
  second = lambda before, argument: field(before) and '=' not in before and not argument.startswith('--')
  return [
    argument for before, argument in zip(['', *argv], argv, strict=False) if field(argument) or second(before, argument)
  ]


def _fields(path: str) -> dict[str, object]:
  """The fields of a config file by dotted name, with their values; none without a file."""
  import importlib.util

  if not path:
    return {}

  spec = importlib.util.spec_from_file_location('config_file', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return flatten(module.get_config().to_dict())


def _expected() -> tuple[type[Exception], ...]:
  from rollout_jax.ledger import LedgerError
  from rollout_jax.loop import DivergedError
  from rollout_jax.rollout.verify import VerifierError
  from rollout_jax.writers import WriteError

  return (WriteError, VerifierError, DivergedError, LedgerError)


def _complain(message: str) -> int:
  print(f'\nerror: {message}', file=sys.stderr)
  return MISUSED
