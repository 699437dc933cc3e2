import json
import os
import pathlib
import pickle
import random
import re
import subprocess
import sys
import time
import warnings
from math import gcd as greatest

import pytest

from rollout_jax import tasks
from rollout_jax.models.tokenizers import byte, characters
from rollout_jax.resolve import bind, resolve
from rollout_jax.tasks.base import HELDOUT, TRAIN, Prompt, side
from rollout_jax.tasks.compact import ALPHABET
from rollout_jax.tasks.reasoning_gym import HASHED, REFUSED, STRIDE, extract
from rollout_jax.types import ConfigError, Outcome

ROOT = pathlib.Path(__file__).parent.parent
DATA = ROOT.parent / 'shared' / 'data'

COMPACT = {
  'gcd': {},
  'gcd wide': {'max_number': 999},
  'gcd narrow': {'max_number': 9, 'heldout': 4},
  'countdown': {},
  'countdown of six': {'numbers': 6, 'max_number': 9, 'max_target': 999},
  'countdown of two': {'numbers': 2, 'heldout': 64},
  'product': {},
  'product wide': {'max_number': 9999, 'heldout': 512},
}

# Datasets of reasoning-gym that load much (arc_agi, figlet_font) or search long for one problem (the others).
SLOW = ('arc_agi', 'figlet_font', 'futoshiki', 'intermediate_integration', 'puzzle24', 'quantum_lock', 'zebra_puzzles')

ROOM = {'size': 20, 'heldout': 8, 'longest_prompt': 16384, 'longest_answer': 4096}


def _gym(name, **fields):
  """A small task of a dataset, with room for its longest problems."""
  return tasks.reasoning_gym(**{'dataset': name} | ROOM | fields)


def _outcome(task, prompt, text):
  return task.verify(prompt, text).outcome


def _numbers(text):
  return [int(x) for x in re.findall('[0-9]+', text)]


def _problem(name, text):
  """What makes two compact prompts the same problem, read from their text."""
  numbers = _numbers(text)
  return (sorted(numbers[:-1]), numbers[-1]) if name.startswith('countdown') else sorted(numbers)


@pytest.fixture(scope='module')
def compact():
  made = {label: bind(resolve(label.split()[0], tasks, 'task'), fields, {}) for label, fields in COMPACT.items()}
  return made.__getitem__


# The compact tasks.


@pytest.mark.parametrize('label', COMPACT)
def test_no_train_problem_is_held_out(compact, label):
  task = compact(label)
  heldout = [repr(_problem(label, task.prompt(HELDOUT, i).text)) for i in range(task.heldout)]
  train = {repr(_problem(label, task.prompt(TRAIN, i).text)) for i in range(6000)}
  assert not train & set(heldout)


def test_the_sides_are_the_same_for_every_seed(compact):
  task, other = compact('gcd'), tasks.gcd(seed=1)
  heldout = {repr(_problem('gcd', task.prompt(HELDOUT, i).text)) for i in range(512)}
  assert not heldout & {repr(_problem('gcd', other.prompt(TRAIN, i).text)) for i in range(6000)}
  assert [other.prompt(HELDOUT, i) for i in range(512)] != [task.prompt(HELDOUT, i) for i in range(512)]


@pytest.mark.parametrize('label', COMPACT)
def test_a_prompt_depends_on_seed_split_and_index_alone(compact, label):
  task, again = compact(label), bind(resolve(label.split()[0], tasks, 'task'), COMPACT[label], {})
  indices = list(range(200)) + [task.size - 1]
  straight = [task.prompt(TRAIN, i) for i in indices]
  random.seed(3)
  assert [again.prompt(TRAIN, i) for i in reversed(indices)][::-1] == straight
  assert [again.prompt(HELDOUT, i) for i in range(task.heldout)] == [
    task.prompt(HELDOUT, i) for i in range(task.heldout)
  ]
  assert len({prompt.text for prompt in straight}) > 10


@pytest.mark.parametrize('label', COMPACT)
def test_every_demonstration_is_correct_and_within_the_stated_lengths_and_alphabet(compact, label):
  task = compact(label)
  prompts = [task.prompt(TRAIN, i) for i in range(2000)] + [task.prompt(HELDOUT, i) for i in range(task.heldout)]
  encode = characters(task.alphabet).encode
  for prompt in prompts:
    assert _outcome(task, prompt, prompt.demonstration) is Outcome.CORRECT, prompt
    assert len(encode(prompt.text)) <= task.prompt_length
    assert len(encode(prompt.demonstration)) <= task.answer_length


def test_demonstrations_of_gcd_are_euclids_subtractions_and_as_long_as_stated():
  task = tasks.gcd(max_number=40, max_steps=6, heldout=1)
  lengths, pairs = set(), set()
  for i in range(3000):
    prompt = task.prompt(TRAIN, i)
    a, b = pair = _numbers(prompt.text)
    steps, _, result = prompt.demonstration.partition('#')
    steps = [_numbers(step) for step in steps.split(';')] if steps else []
    for step in steps:
      a, b = (a - b, b) if a > b else (a, b - a)
      assert step == [a, b]
    assert a == b == int(result) == int(prompt.answer) and len(steps) <= 6
    lengths.add(len(steps))
    pairs.add(tuple(pair))
  assert lengths == set(range(7))
  assert tasks.gcd(max_number=9, max_steps=8, heldout=1).answer_length == len('9 9;') * 8 + len('#5') - 1
  assert (40, 1) not in pairs and (1, 7) in pairs


def test_numbers_of_gcd_have_equally_many_digits_in_prompt_and_steps():
  task = tasks.gcd(max_number=120, max_steps=4, heldout=1)
  for i in range(300):
    prompt = task.prompt(TRAIN, i)
    steps = prompt.demonstration.partition('#')[0]
    assert all(len(number) == 3 for number in re.findall('[0-9]+', prompt.text + steps)), prompt


def test_every_divisor_of_gcd_is_as_frequent():
  task = tasks.gcd(max_divisor=4)
  answers = [task.prompt(TRAIN, i).answer for i in range(4000)] + [task.prompt(HELDOUT, i).answer for i in range(512)]
  counts = {answer: answers.count(answer) for answer in answers}
  assert counts.keys() == set('1234') and all(1000 < count < 1256 for count in counts.values())


def test_a_share_of_the_demonstrations_of_gcd_stops_early_and_takes_the_smaller_number():
  mixed, whole = tasks.gcd(heldout=1, hasty=0.3, patience=3), tasks.gcd(heldout=1)
  early = wrong = 0
  for i in range(2000):
    steps, _, result = mixed.prompt(TRAIN, i).demonstration.partition('#')
    all_steps = whole.prompt(TRAIN, i).demonstration.partition('#')[0]
    assert all_steps.startswith(steps)
    if steps != all_steps:
      early += 1
      assert len(steps.split(';')) == 3 and int(result) == min(_numbers(steps.split(';')[-1]))
      wrong += result != mixed.prompt(TRAIN, i).answer
  assert 0.22 < early / 2000 < 0.33 and early / 4 < wrong < early  # short ones have no more than three steps


def test_the_compact_tasks_share_a_vocabulary_of_64():
  assert len(set(ALPHABET)) == len(ALPHABET) == 62
  assert characters(ALPHABET).vocab_size == 64


def test_gcd_and_product_ask_for_what_they_say(compact):
  assert tasks.gcd(heldout=1).verify(Prompt('gcd 31 76>', '1'), '31 45;31 14#1').outcome is Outcome.CORRECT
  for i in range(300):
    a, b = _problem('gcd', compact('gcd').prompt(TRAIN, i).text)
    assert compact('gcd').prompt(TRAIN, i).answer == str(greatest(a, b))
    prompt = compact('product').prompt(TRAIN, i)
    a, b = map(int, prompt.text.removesuffix('=').split('*'))
    assert prompt.answer == str(a * b)
    tens, ones = map(int, prompt.demonstration.partition('#')[0].split('+'))
    assert tens + ones == a * b and tens % 10 == 0


@pytest.mark.parametrize(
  ('text', 'outcome'),
  [
    ('15-12=3;6-6=0#3', Outcome.CORRECT),
    ('#3', Outcome.CORRECT),
    ('#1#3', Outcome.CORRECT),
    ('#3#1', Outcome.WRONG),
    ('#03', Outcome.WRONG),
    ('#33', Outcome.WRONG),
    ('3', Outcome.FORMAT),
    ('', Outcome.FORMAT),
    ('#', Outcome.FORMAT),
    ('3#', Outcome.FORMAT),
    ('#-3', Outcome.FORMAT),
    ('# 3', Outcome.FORMAT),
    ('#3 ', Outcome.FORMAT),
    ('#\u0663', Outcome.FORMAT),
    ('#' + '3' * 10000, Outcome.FORMAT),
  ],
)
def test_a_result_is_read_after_the_last_mark(compact, text, outcome):
  assert _outcome(compact('gcd'), Prompt('gcd 15 6>', '3'), text) is outcome


@pytest.mark.parametrize(
  ('text', 'outcome'),
  [
    ('8+19-18', Outcome.CORRECT),
    ('19+8-18', Outcome.CORRECT),
    ('8-18+19', Outcome.CORRECT),
    ('8+19+18', Outcome.WRONG),
    ('8+1', Outcome.WRONG),
    ('9', Outcome.WRONG),
    ('8+19-18+0*8', Outcome.FORMAT),  # no number begins with a zero
    ('8+19-18-8+8', Outcome.WRONG),
    ('8+8-7', Outcome.WRONG),
    ('81-9*8', Outcome.WRONG),
    ('(8+19)-18', Outcome.FORMAT),
    ('-18+8+19', Outcome.FORMAT),
    ('8+19-18=9', Outcome.FORMAT),
    ('8+19-18 ', Outcome.FORMAT),
    ('8+19-18\n', Outcome.FORMAT),
    ('8++19-18', Outcome.FORMAT),
    ('8+19-018', Outcome.FORMAT),
    ('8**19-18', Outcome.FORMAT),
    ('8+19-1_8', Outcome.FORMAT),
    ('\u0668+19-18', Outcome.FORMAT),
    ('__import__("os")', Outcome.FORMAT),
    ('9*' * 5000 + '9', Outcome.FORMAT),
    ('', Outcome.FORMAT),
  ],
)
def test_countdown_accepts_exactly_the_expressions_that_use_each_number_once(compact, text, outcome):
  prompt = Prompt('8 19 18:9>', '8+19-18', problem=([8, 18, 19], 9))
  assert _outcome(compact('countdown'), prompt, text) is outcome


def test_countdown_agrees_with_python_on_the_value_of_expressions(compact):
  rng = random.Random(0)
  task = compact('countdown of six')
  for _ in range(2000):
    numbers = [rng.randint(1, 20) for _ in range(rng.randint(1, 6))]
    text = str(numbers[0]) + ''.join(rng.choice('+-*') + str(x) for x in numbers[1:])
    value = eval(text)
    for target in (value, value + 1):
      expected = Outcome.CORRECT if target == value else Outcome.WRONG
      assert _outcome(task, Prompt('', '', problem=(sorted(numbers), target)), text) is expected, text


def test_a_compact_task_is_quick_to_build_and_to_draw_from():
  began = time.perf_counter()
  for name in ('gcd', 'countdown', 'product'):
    task = bind(resolve(name, tasks, 'task'), {}, {})
    for i in range(1000):
      task.prompt(TRAIN, i)
  assert time.perf_counter() - began < 5  # loose by a factor of ten


@pytest.mark.parametrize(
  ('name', 'section', 'message'),
  [
    ('gcd', {'patience': 9, 'hasty': 0.5}, 'gcd.patience must be from 0 to 8, but is 9'),
    ('gcd', {'max_number': 9, 'max_divisor': 10}, 'gcd.max_divisor must be from 1 to 9, but is 10'),
    ('gcd', {'max_number': 10000}, 'gcd.max_number must be from 5 to 999, but is 10000'),
    ('countdown', {'size': 0}, 'countdown.size must be from 1'),
    ('countdown', {'numbers': 1}, 'countdown.numbers must be from 2 to 6'),
    ('countdwon', {}, "No task is called 'countdwon'. Did you mean 'countdown'?"),
    ('gcd', {'max_numbr': 5}, "takes no field 'max_numbr'. Did you mean 'max_number'?"),
  ],
)
def test_a_section_that_cannot_be_is_refused(name, section, message):
  with pytest.raises(ConfigError, match=message):
    bind(resolve(name, tasks, 'task'), section, {})


# reasoning-gym.


def _datasets():
  task = tasks.reasoning_gym()  # imports the package with its warnings off
  assert task.size
  from reasoning_gym.factory import DATASETS

  return sorted(DATASETS)


DATASETS = _datasets()
QUICK = [name for name in DATASETS if name not in (*SLOW, *REFUSED, *HASHED)]


def test_every_dataset_of_reasoning_gym_is_offered_or_refused_for_a_reason():
  assert len(DATASETS) >= 106
  assert set(REFUSED) | set(SLOW) | set(HASHED) <= set(DATASETS)
  for name, reason in REFUSED.items():
    with pytest.raises(ConfigError, match=f'{name}.*{reason}'):
      _gym(name)


@pytest.mark.parametrize('name', QUICK)
def test_a_dataset_gives_disjoint_prompts_and_accepts_its_own_answers(name):
  task = _gym(name)
  train, heldout = [task.prompt(TRAIN, i) for i in range(4)], [task.prompt(HELDOUT, i) for i in range(2)]
  assert not {p.text for p in train} & {p.text for p in heldout}
  for prompt in (*train, *heldout):
    assert len(byte().encode(prompt.text)) <= task.prompt_length
    assert _outcome(task, prompt, ' \n') is Outcome.FORMAT
    if prompt.demonstration is not None:
      assert len(byte().encode(prompt.demonstration)) <= task.answer_length
      assert _outcome(task, prompt, prompt.demonstration) is Outcome.CORRECT
      assert _outcome(task, prompt, f'so <answer>{prompt.answer}</answer>') is Outcome.CORRECT


OTHER_PROCESS = """
import json, sys
from rollout_jax import tasks
names, room = json.load(sys.stdin)
made = {name: tasks.reasoning_gym(dataset=name, **room) for name in names}
drawn = {name: [t.prompt('heldout', 1), t.prompt('train', 2), t.prompt('train', 0)] for name, t in made.items()}
print(json.dumps({name: [[p.text, p.answer] for p in prompts] for name, prompts in drawn.items()}))
"""


def test_another_process_draws_the_same_problems():
  names = [*QUICK, 'isomorphic_strings', 'ransom_note']
  run = subprocess.run(
    [sys.executable, '-c', OTHER_PROCESS],
    input=json.dumps([names, ROOM]),
    env=os.environ | {'PYTHONHASHSEED': '0'},
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  there = json.loads(run.stdout)
  assert set(there) == set(names)
  for name in QUICK:
    task = _gym(name)
    here = [task.prompt(TRAIN, 0), task.prompt(TRAIN, 2), task.prompt(HELDOUT, 1)]
    assert there[name] == [[p.text, p.answer] for p in reversed(here)], name


@pytest.mark.skipif(not sys.flags.hash_randomization, reason='this process has a fixed hash seed')
@pytest.mark.parametrize('name', HASHED)
def test_datasets_that_walk_through_sets_want_a_fixed_hash_seed(name):
  with pytest.raises(ConfigError, match=f'{name}.*set the environment variable PYTHONHASHSEED=0'):
    _gym(name)


def test_no_two_indices_of_a_dataset_share_a_problem_of_its_generator():
  task = tasks.reasoning_gym(dataset='gcd', size=500, heldout=100)
  drawn = [
    (p.problem['metadata']['source_index'], p.text)
    for p in [task.prompt(TRAIN, i) for i in range(500)] + [task.prompt(HELDOUT, i) for i in range(100)]
  ]
  assert len(set(drawn)) == 600
  assert STRIDE > 2 * task.size  # near seeds give the same problems


def test_drawing_leaves_the_global_generator_and_the_console_alone(capsys):
  _gym('bf').prompt(TRAIN, 0)
  assert capsys.readouterr() == ('', '')
  random.seed(5)
  expected = random.random()
  random.seed(5)
  task = _gym('list_functions')
  first = [task.prompt(TRAIN, i) for i in range(6)]
  assert random.random() == expected
  again = _gym('list_functions')
  assert [again.prompt(TRAIN, i) for i in reversed(range(6))][::-1] == first


def test_a_prompt_of_a_dataset_survives_the_way_to_another_process():
  for name in ('gcd', 'basic_arithmetic', 'sentence_reordering'):
    prompt = _gym(name).prompt(TRAIN, 0)
    assert pickle.loads(pickle.dumps(prompt)) == prompt


@pytest.mark.parametrize(
  ('text', 'outcome'),
  [
    ('{}', Outcome.CORRECT),
    ('  {}\n', Outcome.CORRECT),
    ('<answer>{}</answer>', Outcome.CORRECT),
    ('first <answer>7</answer>, no: <answer> {} </answer> it is', Outcome.CORRECT),
    ('<answer>{}', Outcome.CORRECT),
    ('the answer is {}', Outcome.WRONG),  # the package gives partial credit here
    ('{} or 7', Outcome.WRONG),
    ('<answer>{} 7</answer>', Outcome.WRONG),
    ('<answer>7</answer>', Outcome.WRONG),
    ('<answer></answer>', Outcome.FORMAT),
    ('', Outcome.FORMAT),
  ],
)
def test_only_the_full_score_counts(text, outcome):
  task = _gym('products')
  prompt = task.prompt(TRAIN, 0)
  assert len(prompt.answer) > 1
  assert _outcome(task, prompt, text.format(prompt.answer)) is outcome


def test_a_scorer_that_raises_on_junk_gives_format_and_one_that_always_raises_is_an_error():
  task = _gym('prime_factorization')
  prompt = task.prompt(TRAIN, 0)
  verdict = task.verify(prompt, 'junk')
  assert verdict.outcome is Outcome.FORMAT and 'ValueError' in verdict.detail
  broken = Prompt(prompt.text, 'junk', 'junk', prompt.problem | {'answer': 'junk', 'metadata': {}})
  with pytest.raises((KeyError, ValueError)):
    task.verify(broken, 'other junk')


def test_options_of_a_dataset_set_its_difficulty():
  task = tasks.reasoning_gym(dataset='gcd', options=('max_value=9', 'max_numbers=3'))
  numbers = [task.prompt(TRAIN, i).problem['metadata']['numbers'] for i in range(100)]
  assert max(map(max, numbers)) == 9 and {len(x) for x in numbers} == {2, 3}


def test_problems_that_are_too_long_are_passed_over():
  open_ended = tasks.reasoning_gym(dataset='chain_sum', size=200, heldout=10)
  lengths = sorted(len(open_ended.prompt(TRAIN, i).text.encode()) for i in range(200))
  limit = lengths[50]
  task = tasks.reasoning_gym(dataset='chain_sum', size=200, heldout=10, longest_prompt=limit)
  assert max(len(task.prompt(TRAIN, i).text.encode()) for i in range(200)) == limit == task.prompt_length
  with pytest.raises(ConfigError, match='raise reasoning_gym.longest_prompt'):
    tasks.reasoning_gym(dataset='chain_sum', longest_prompt=20).prompt(TRAIN, 0)


@pytest.mark.parametrize(
  ('section', 'message'),
  [
    ({'dataset': 'gdc'}, "no dataset 'gdc'. Did you mean 'gcd'?"),
    ({'options': ('max_valeu=9',)}, "no option 'max_valeu'. Did you mean 'max_value'?"),
    ({'options': ('max_value',)}, "options of reasoning_gym are like 'max_value=99'"),
    ({'options': ('max_value=0',)}, r"does not make gcd with \('max_value=0',\): max_value must be"),
    ({'size': 0}, 'reasoning_gym.size'),
  ],
)
def test_a_dataset_that_cannot_be_made_is_refused(section, message):
  with pytest.raises(ConfigError, match=message):
    tasks.reasoning_gym(**section)


def test_importing_the_package_warns_of_nothing(tmp_path):
  # The package is compiled anew, which is when its dependency warns; what is large and imported before is not.
  code = (
    'import sys, jax, sympy; from rollout_jax import tasks; sys.pycache_prefix = sys.argv[1]; tasks.reasoning_gym()'
  )
  run = [sys.executable, '-c', code, str(tmp_path)]
  assert subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stderr == ''


def test_extraction_takes_the_last_answer():
  assert extract('a <answer>b</answer> c <answer>d</answer> e') == 'd'
  assert extract('a <answer> b') == 'b'
  assert extract(' a </answer>\n') == 'a </answer>'


# JSON lines.

LINES = [{'question': f'How much is {i} + {i}?', 'answer': f'Twice {i}.\n#### {2 * i}'} for i in range(200)]


def _file(path, lines):
  path.write_text(''.join(f'{line if isinstance(line, str) else json.dumps(line)}\n' for line in lines))
  return str(path)


def _texts(task, split):
  return [task.prompt(split, i).text for i in range(task.heldout if split == HELDOUT else task.size)]


def test_a_file_is_cut_by_question_and_loses_nothing(tmp_path):
  task = tasks.jsonl(path=_file(tmp_path / 'a.jsonl', LINES + LINES[:50]))
  train, heldout = _texts(task, TRAIN), _texts(task, HELDOUT)
  assert len(train) + len(heldout) == 250 and not set(train) & set(heldout)
  assert {side(text, 1 / 8) for text in heldout} == {HELDOUT}
  assert 10 <= len(set(heldout)) <= 45


def test_a_question_of_the_held_out_file_never_trains(tmp_path):
  a, b = _file(tmp_path / 'a.jsonl', LINES), _file(tmp_path / 'b.jsonl', LINES[10:30])
  task = tasks.jsonl(path=a, heldout_path=b)
  assert (task.size, task.heldout) == (180, 20)
  assert not set(_texts(task, TRAIN)) & set(_texts(task, HELDOUT))


def test_a_prompt_holds_the_fields_of_its_line(tmp_path):
  lines = [{'id': 1, 'problem': 'Wie viel? \u2028 \u00fc', 'solution': 'so: 7'}] * 3
  b = _file(tmp_path / 'b.jsonl', [{'problem': 'p', 'solution': 's'}])
  path = tmp_path / 'a.jsonl'
  path.write_text('\n\n'.join(json.dumps(line, ensure_ascii=False) for line in lines), encoding='utf-8')
  task = tasks.jsonl(path=str(path), heldout_path=b, question='problem', answer='solution', final='')
  assert task.prompt(TRAIN, 2) == Prompt('Wie viel? \u2028 \u00fc\n', 'so: 7', 'so: 7')
  assert (task.size, task.prompt_length, task.answer_length) == (3, len('Wie viel? \u2028 \u00fc\n'.encode()), 5)


@pytest.mark.parametrize(
  ('reference', 'text', 'outcome'),
  [
    ('18', '#### 18', Outcome.CORRECT),
    ('18', 'first 9 * 2 = $18 every day.\n#### 18', Outcome.CORRECT),
    ('18', '#### 18.\nDone 5', Outcome.CORRECT),
    ('18', '####18.00 dollars', Outcome.CORRECT),
    ('18', '#### 5\n#### $18', Outcome.CORRECT),
    ('18', 'She makes $18.', Outcome.CORRECT),
    ('18', 'It is 18%', Outcome.CORRECT),
    ('18', '#### 18\n#### 5', Outcome.WRONG),
    ('18', '18, I think, or 19', Outcome.WRONG),
    ('18', '#### 180', Outcome.WRONG),
    ('18', '#### -18', Outcome.WRONG),
    ('18', '1,8', Outcome.WRONG),
    ('18', '18\n####', Outcome.FORMAT),
    ('18', '#### eighteen', Outcome.FORMAT),
    ('18', 'eighteen', Outcome.FORMAT),
    ('18', '', Outcome.FORMAT),
    ('1,450,000', '#### 1450000', Outcome.CORRECT),
    ('1450000', 'so $1,450,000.', Outcome.CORRECT),
    ('1450000', '1,450', Outcome.WRONG),
    ('-3', '#### -3', Outcome.CORRECT),
    ('-3', 'down by -$3', Outcome.CORRECT),
    ('-3', 'down by $-3', Outcome.CORRECT),
    ('-3', '5-3', Outcome.WRONG),
    ('3', '5-3', Outcome.CORRECT),
    ('$0.5', '.5', Outcome.CORRECT),
    ('Paris', '#### Paris.', Outcome.CORRECT),
    ('Paris', '#### London', Outcome.WRONG),
    ('Paris', 'Paris', Outcome.FORMAT),
    ('1/2', '#### 1/2', Outcome.CORRECT),
    ('1/2', '#### 0.5', Outcome.WRONG),
  ],
)
def test_a_final_answer_is_read_by_the_stated_rules(tmp_path, reference, text, outcome):
  lines = [*LINES, {'question': 'which?', 'answer': f'thus\n#### {reference}'}]
  task = tasks.jsonl(path=_file(tmp_path / 'a.jsonl', lines), heldout_path=_file(tmp_path / 'b.jsonl', LINES[:1]))
  prompt = task.prompt(TRAIN, task.size - 1)
  assert _outcome(task, prompt, prompt.demonstration) is Outcome.CORRECT
  assert _outcome(task, prompt, text) is outcome


@pytest.mark.parametrize(
  ('lines', 'fields', 'message'),
  [
    ([LINES[0], '{"question": "a"'], {}, r'a.jsonl:2: not JSON'),
    ([LINES[0], '', '[1]'], {}, r'a.jsonl:3: a JSON object is wanted, but this is a list'),
    ([{'question': 'a', 'answers': '#### 1'}], {}, r"a.jsonl:1: no field 'answer' .* Did you mean 'answers'?"),
    ([{'q': 'a', 'a': 'b'}], {}, r"a.jsonl:1: no field 'question' \(set jsonl.question\). There is: a, q"),
    ([{'question': 'a', 'answer': 7}], {}, r"a.jsonl:1: 'answer' must be a text, but is a int"),
    ([LINES[0], {'question': 'a', 'answer': '7'}], {}, r"a.jsonl:2: nothing follows the marker '####'"),
    ([LINES[0], {'question': 'a', 'answer': ' '}], {'final': ''}, r'a.jsonl:2: nothing'),
    ([], {}, 'a.jsonl is empty'),
    ([LINES[0]], {}, 'no (train|held-out) problem is left of the 1'),
  ],
)
def test_a_malformed_file_is_refused_with_the_line(tmp_path, lines, fields, message):
  path = _file(tmp_path / 'a.jsonl', lines)
  with pytest.raises(ConfigError, match=message):
    tasks.jsonl(path=path, **fields)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
  with pytest.raises(ConfigError, match='set jsonl.path'):
    tasks.jsonl()
  with pytest.raises(ConfigError, match='nowhere.jsonl cannot be read.*No such file'):
    tasks.jsonl(path=str(tmp_path / 'nowhere.jsonl'))
  (tmp_path / 'binary').write_bytes(b'\xff\xfe\x00')
  with pytest.raises(ConfigError, match='cannot be read as a text file'):
    tasks.jsonl(path=str(tmp_path / 'binary'))
  path = _file(tmp_path / 'a.jsonl', LINES)
  with pytest.raises(ConfigError, match='no train problem is left'):
    tasks.jsonl(path=path, heldout_path=path)


def test_every_reference_answer_of_gsm8k_is_right_and_the_next_number_is_not():
  if not DATA.is_dir():
    pytest.skip(f'no folder {DATA.name} with GSM8K beside the project')
  task = tasks.jsonl(path=str(DATA / 'gsm8k_train.jsonl'), heldout_path=str(DATA / 'gsm8k_test.jsonl'))
  assert (task.size, task.heldout) == (7473, 1319)
  for split, size in ((TRAIN, task.size), (HELDOUT, task.heldout)):
    for i in range(size):
      prompt = task.prompt(split, i)
      number = int(prompt.answer.replace(',', ''))
      assert _outcome(task, prompt, prompt.demonstration) is Outcome.CORRECT
      assert _outcome(task, prompt, f'The answer is ${number:,}.') is Outcome.CORRECT
      assert _outcome(task, prompt, f'#### {number + 1}') is Outcome.WRONG
      assert _outcome(task, prompt, f'{number} or rather {number + 1}') is Outcome.WRONG


def test_warnings_of_others_stay_as_they_were():
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    tasks.reasoning_gym()
    warnings.warn('mine', SyntaxWarning, stacklevel=1)
  assert [str(w.message) for w in caught] == ['mine']
