"""The floors of the house, read from the imports: a module knows only what lies below it, and its own folder."""

import ast
import pathlib

import pytest

LIBRARY = pathlib.Path(__file__).parent.parent / 'rollout_jax'
FLOORS = (
  {'types', 'masked', 'packing'},
  {'distribution', 'ratios', 'posterior', 'keys', 'mesh', 'resolve', 'fetch', 'ledger', 'writers', 'signal', 'clock'},
  {'models', 'transforms', 'curricula', 'losses', 'schedulers', 'tasks'},
  {'decoding', 'training'},
  {'rollout'},
  {'evaluate', 'report', 'check', 'planner'},
  {'build'},
  {'record', 'warm_start', 'bench'},
  {'loop'},
  {'run'},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in LIBRARY.rglob('*.py') if path.parent != LIBRARY or path.name != '__init__.py')


def _room(path):
  """The floor's word for a file: its folder in the library, or its own name at the top."""
  return path.relative_to(LIBRARY).parts[0].removesuffix('.py')


def _imports(path):
  """Every dotted name that a file imports, `from a import b` as a.b, with the line."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from ((alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}:{node.lineno}: imports are absolute'
      yield from ((f'{node.module}.{alias.name}', node.lineno) for alias in node.names)


def _names(path):
  return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize('path', MODULES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_a_module_imports_only_from_floors_below_and_its_own_folder(path):
  own = _room(path)
  assert own in FLOOR, f'{own} stands on no floor: give it one in {__file__}'
  for name, line in _imports(path):
    package, _, rest = name.partition('.')
    assert package not in ('experiments', 'configs', 'tests'), f'{path}:{line}: the library imports {name}'
    if package != 'rollout_jax':
      continue
    room = rest.partition('.')[0]
    assert room in FLOOR, f'{path}:{line}: import the module, not the package ({name})'
    beside = FLOOR[room] == FLOOR[own] and path.parent == LIBRARY and (LIBRARY / f'{room}.py').exists()
    allowed = room == own or beside or FLOOR[room] < FLOOR[own]
    assert allowed, f'{path}:{line}: {own} (floor {FLOOR[own] - 1}) must not import {room} (floor {FLOOR[room] - 1})'


@pytest.mark.parametrize('path', MODULES, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_only_build_check_and_run_read_a_config_and_nobody_flags_or_the_environment(path):
  imported = {name.partition('.')[0] for name, _ in _imports(path)}
  assert 'absl' not in imported, f'{path} imports absl'
  assert 'ml_collections' not in imported or _room(path) in ('build', 'check', 'run'), f'{path} imports ml_collections'
  assert not {'environ', 'getenv', 'putenv'} & _names(path), f'{path} reads the environment'


def test_a_package_init_only_exports():
  for path in LIBRARY.rglob('__init__.py'):
    kinds = {type(node) for node in ast.parse(path.read_text()).body}
    assert kinds <= {ast.Import, ast.ImportFrom, ast.Expr, ast.Assign}, f'{path} does more than export'
