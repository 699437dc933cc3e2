"""A name in a config -> a function; its section's fields and defaults from the signature.

A method is a function. Its parameters without a default are facts, which the builder supplies (`prompts`, `group`);
its keyword-only parameters with a default are its section of the config, which stands under the function's name.
"""

import difflib
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from rollout_jax.types import ConfigError

KINDS = (bool, int, float, str, tuple)


def nearest(name: str, choices: Iterable[str]) -> str:
  """The sentence that helps after a name that does not exist: the nearest spelling, or all that there is."""
  choices = sorted(choices)
  close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
  if close:
    return f'Did you mean {close[0]!r}?'
  return f'There is: {", ".join(choices)}.' if choices else 'There is none.'


def resolve(name: str, namespace: ModuleType, kind: str) -> Callable[..., Any]:
  """The function called `name` among those that the module exports, or at a dotted path outside it."""
  if '.' in name:
    return _outside(name, kind)
  exported = _functions(namespace)
  if name not in exported:
    path = 'Your own function goes by its dotted path, such as my_package.my_module.my_function.'
    raise ConfigError(f'No {kind} is called {name!r}. {nearest(name, exported)} {path}')
  return exported[name]


def fields(method: Callable[..., Any]) -> dict[str, Any]:
  """The section of a method: its keyword-only parameters and their defaults."""
  section = {}
  for parameter in _parameters(method):
    if parameter.default is parameter.empty:
      continue
    if parameter.kind is not parameter.KEYWORD_ONLY:
      raise ConfigError(f'{_name(method)}: {parameter.name!r} has a default, so it must stand after the *')
    if not isinstance(parameter.default, KINDS):
      raise ConfigError(f'{_name(method)}: the default of {parameter.name!r} is not a bool, int, float, str or tuple')
    section[parameter.name] = parameter.default
  return section


def facts(method: Callable[..., Any]) -> tuple[str, ...]:
  """The names that a method must be given because they have no default."""
  return tuple(p.name for p in _parameters(method) if p.default is p.empty)


def bind(method: Callable[..., Any], section: Mapping[str, Any], supplied: Mapping[str, Any]) -> Any:
  """What the method returns when called with the facts that it asks for and the fields of its section."""
  defaults = fields(method)
  for name in section:
    if name not in defaults:
      raise ConfigError(f'{_name(method)} takes no field {name!r}. {nearest(name, defaults)}')
  missing = [name for name in facts(method) if name not in supplied]
  if missing:
    raise ConfigError(
      f'{_name(method)} asks for {", ".join(missing)}; the facts are {", ".join(sorted(supplied))}. '
      'Give the parameter a default after the * to make it a field of the config.'
    )
  chosen = {name: _like(defaults[name], value, f'{_name(method)}.{name}') for name, value in section.items()}
  return method(**{name: supplied[name] for name in facts(method)}, **chosen)


def sections(*namespaces: ModuleType) -> dict[str, dict[str, Any]]:
  """A section with the default of every field, for each function that the modules export."""
  made: dict[str, dict[str, Any]] = {}
  for namespace in namespaces:
    for name, method in _functions(namespace).items():
      if name in made:
        raise TypeError(f'two methods are called {name!r}; the second is in {namespace.__name__}')
      made[name] = fields(method)
  return made


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Nested sections as one dict of dotted names; an empty section is itself a value."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    name = f'{prefix}{key}'
    flat |= flatten(value, f'{name}.') if isinstance(value, Mapping) and value else {name: value}
  return flat


def flatten_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """One line per field that differs, such as `rollout.slots: 64 -> 32`. A tuple equals the list it becomes in JSON."""
  before = {name: json.dumps(value) for name, value in flatten(old).items()}
  after = {name: json.dumps(value) for name, value in flatten(new).items()}
  return [
    f'{name}: {before.get(name, "absent")} -> {after.get(name, "absent")}'
    for name in sorted(before | after)
    if before.get(name) != after.get(name)
  ]


def _functions(namespace: ModuleType) -> dict[str, Callable[..., Any]]:
  return {name: getattr(namespace, name) for name in namespace.__all__ if inspect.isfunction(getattr(namespace, name))}


def _outside(path: str, kind: str) -> Callable[..., Any]:
  module_name, _, name = path.rpartition('.')
  wanted = f'{path!r}, the dotted path of a {kind}, does not lead to a function'
  if not all(part.isidentifier() for part in path.split('.')):
    raise ConfigError(f'{wanted}: each part between the dots must be a Python name.')
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as error:
    if error.name is None or not f'{module_name}.'.startswith(f'{error.name}.'):
      raise  # the module is there, something that it imports is not
    advice = 'It must be importable from the folder that you run in.'
    raise ConfigError(f'{wanted}: there is no module {error.name!r}. {advice}') from error
  method = getattr(module, name, None)
  if not callable(method):
    defined = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith('_')]
    raise ConfigError(f'{wanted}: {module_name} has no function {name!r}. {nearest(name, defined)}')
  return method


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
  parameters = list(inspect.signature(method).parameters.values())
  for parameter in parameters:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
      raise ConfigError(f'{_name(method)}: {parameter} cannot be a fact or a field; a method names each parameter')
  return parameters


def _like(default: Any, value: Any, where: str) -> Any:
  """`value` in the type of the default: a float takes an int, a tuple takes a list, nothing else is converted."""
  kind = type(default)
  if kind is float and type(value) is int:
    return float(value)
  if kind is tuple and isinstance(value, list):
    return tuple(value)
  if type(value) is not kind:
    raise ConfigError(
      f'{where} wants a {kind.__name__} such as {default!r}, but {value!r} is a {type(value).__name__}.'
    )
  return value


def _name(method: Callable[..., Any]) -> str:
  return getattr(method, '__name__', repr(method))
