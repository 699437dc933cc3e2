import sys
import types

import pytest

from rollout_jax import resolve
from rollout_jax.types import ConfigError


def pods(group, *, m: int = 4, rule: str = 'max_variance'):
  return ('pods', group, m, rule)


def tis(*, cap: float = 2.0, levels: tuple = (1, 2), on: bool = True):
  return ('tis', cap, levels, on)


def _private():
  pass


METHODS = types.ModuleType('methods')
METHODS.pods, METHODS.tis, METHODS._private, METHODS.number = pods, tis, _private, 3
METHODS.__all__ = ['pods', 'tis', 'number']


@pytest.fixture
def outside(tmp_path, monkeypatch):
  (tmp_path / 'outside_fork.py').write_text('def doubled(group, *, by=2):\n  return group * by\n')
  (tmp_path / 'outside_broken.py').write_text('import surely_not_installed\n')
  monkeypatch.syspath_prepend(tmp_path)
  yield
  sys.modules.pop('outside_fork', None)


def test_a_name_resolves_to_the_exported_function():
  assert resolve.resolve('pods', METHODS, 'transform') is pods


def test_an_unknown_name_shows_the_nearest_spelling():
  with pytest.raises(ConfigError, match=r"No transform is called 'podz'. Did you mean 'pods'\?"):
    resolve.resolve('podz', METHODS, 'transform')


def test_a_name_like_none_other_shows_all_there_is():
  with pytest.raises(ConfigError, match='There is: pods, tis.'):
    resolve.resolve('grpo_with_everything', METHODS, 'transform')


def test_what_is_not_exported_does_not_resolve():
  with pytest.raises(ConfigError):
    resolve.resolve('_private', METHODS, 'transform')
  with pytest.raises(ConfigError):
    resolve.resolve('number', METHODS, 'transform')


def test_a_dotted_path_resolves_to_a_function_outside(outside):
  assert resolve.bind(resolve.resolve('outside_fork.doubled', METHODS, 'transform'), {'by': 3}, {'group': 4}) == 12


@pytest.mark.parametrize(
  ('path', 'message'),
  [
    ('outside_forc.doubled', "no module 'outside_forc'"),
    ('outside_fork.doubledd', "Did you mean 'doubled'"),
    ('./fork.py', 'must be a Python name'),
    ('.doubled', 'must be a Python name'),
  ],
)
def test_a_dotted_path_that_leads_nowhere_says_where_it_ends(outside, path, message):
  with pytest.raises(ConfigError, match=message):
    resolve.resolve(path, METHODS, 'transform')


def test_a_missing_import_inside_the_users_module_is_shown_as_it_is(outside):
  with pytest.raises(ModuleNotFoundError, match='surely_not_installed'):
    resolve.resolve('outside_broken.method', METHODS, 'transform')


def test_keywords_with_defaults_are_fields_and_the_rest_are_facts():
  assert resolve.fields(pods) == {'m': 4, 'rule': 'max_variance'}
  assert resolve.facts(pods) == ('group',)
  assert resolve.facts(tis) == ()


def test_bind_gives_a_method_the_facts_it_asks_for_and_its_section():
  facts = {'group': 8, 'prompts': 16}
  assert resolve.bind(pods, {'m': 2, 'rule': 'random'}, facts) == ('pods', 8, 2, 'random')
  assert resolve.bind(pods, {}, facts) == ('pods', 8, 4, 'max_variance')


def test_an_int_serves_as_float_and_a_list_as_tuple():
  made = resolve.bind(tis, {'cap': 3, 'levels': [5, 6]}, {})
  assert made == ('tis', 3.0, (5, 6), True) and type(made[1]) is float


@pytest.mark.parametrize('section', [{'m': 2.5}, {'m': True}, {'m': '4'}, {'rule': 3}])
def test_a_field_of_another_type_is_refused(section):
  with pytest.raises(ConfigError, match=r'pods\.(m|rule) wants an? (int|str)'):
    resolve.bind(pods, section, {'group': 8})


def test_a_field_that_the_method_does_not_take_shows_the_nearest_spelling():
  with pytest.raises(ConfigError, match=r"pods takes no field 'rules'. Did you mean 'rule'\?"):
    resolve.bind(pods, {'rules': 'random'}, {'group': 8})


def test_a_fact_that_nobody_supplies_is_a_fault_of_the_program():
  with pytest.raises(ConfigError, match='pods asks for group; the facts are prompts'):
    resolve.bind(pods, {}, {'prompts': 8})


@pytest.mark.parametrize(
  'method', [lambda cap=2.0: cap, lambda *, cap=None: cap, lambda **fields: fields, lambda *facts: facts]
)
def test_a_signature_outside_the_convention_is_refused(method):
  with pytest.raises(ConfigError):
    resolve.fields(method)


def test_sections_hold_every_field_of_every_exported_function():
  expected = {'pods': {'m': 4, 'rule': 'max_variance'}, 'tis': {'cap': 2.0, 'levels': (1, 2), 'on': True}}
  assert resolve.sections(METHODS) == expected


def test_two_methods_of_one_name_are_refused():
  other = types.ModuleType('other')
  other.tis, other.__all__ = tis, ['tis']
  with pytest.raises(TypeError, match="two methods are called 'tis'; the second is in other"):
    resolve.sections(METHODS, other)


def test_a_difference_of_configs_is_one_line_per_field():
  old = {'rollout': {'slots': 64, 'shape': [1, 2]}, 'gone': 1, 'name': 'a', 'empty': {}}
  new = {'rollout': {'slots': 32, 'shape': (1, 2)}, 'name': 'b', 'empty': {}, 'fresh': True}
  assert resolve.flatten_diff(old, new) == [
    'fresh: absent -> true',
    'gone: 1 -> absent',
    'name: "a" -> "b"',
    'rollout.slots: 64 -> 32',
  ]
