"""Every dataset of the package reasoning-gym by name, with its own scorer.

The prompt is the dataset's question and a line break, the demonstration its answer (where it has one). A problem is
held out if a hash of its question says so (a quarter of them); an index whose problem lies on the other side, or is too
long, gets the next one of a row of seeds, so any prompt is drawn without its predecessors and no two indices share one.

Rules of the verdict:
- The answer is what stands between the last <answer> and </answer>; without the tag it is the whole text. Outer white
  space is dropped; nothing left means FORMAT.
- CORRECT needs the full score of 1. The package's default scorer gives partial credit to any text that contains the
  answer, which would teach a policy to list candidates: such a text is WRONG.
- A scorer that raises on the text, though it reads the dataset's own answer, could not read the text: FORMAT
  (prime_factorization). One that raises on both is broken: it raises here too, and the row becomes an ERROR.

Scorers that are known to be weak stay as they are: game_of_life_halting accepts any text, time_intervals some junk. A few
evaluate the text with sympy, which runs it as code: verify only texts of policies that you would run code of.
"""

import ast
import contextlib
import dataclasses
import functools
import io
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from rollout_jax.resolve import nearest
from rollout_jax.tasks.base import Prompt, Task, check_range, side
from rollout_jax.types import ConfigError, Outcome, Verdict

SHARE = 1 / 4
TRIES = 256  # seeds for one index
STRIDE = 1_000_003  # between these seeds: datasets draw problem i from seed + i, so near seeds give the same problems

# Not to be had: a run could not be resumed, and its verifiers would judge other problems than were asked.
REFUSED = {
  'composite': 'it mixes other datasets; name one of them',
  'codeio': 'it runs code that draws numbers without a seed, so a problem is not the same twice',
}
# These walk through a Python set of texts, whose order changes from process to process.
HASHED = ('isomorphic_strings', 'knight_swap', 'polynomial_multiplication', 'ransom_note', 'word_ladder')

# What a scorer meets when it reads junk.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


def reasoning_gym(
  *,
  dataset: str = 'gcd',
  options: tuple[str, ...] = (),
  size: int = 4096,
  heldout: int = 512,
  seed: int = 0,
  longest_prompt: int = 1024,
  longest_answer: int = 256,
) -> Task:
  """Problems of `dataset`, made with `options` such as ('max_value=99',); longer ones (in bytes) are passed over."""
  check_range('reasoning_gym.size', size, 1, STRIDE)
  check_range('reasoning_gym.heldout', heldout, 1, STRIDE)
  chosen = _options(dataset, options)

  @functools.lru_cache(maxsize=TRIES)
  def source(attempt: int) -> Any:
    try:
      fields = {'seed': seed + attempt * STRIDE, 'size': max(size, heldout), **chosen}
      return _package().create_dataset(dataset, **fields)
    except (AssertionError, TypeError, ValueError) as error:
      raise ConfigError(f'reasoning-gym does not make {dataset} with {options}: {error}') from error

  @functools.lru_cache(maxsize=4096)
  def prompt(split: str, index: int) -> Prompt:
    for attempt in range(TRIES):
      with _alone(f'{seed} {attempt} {index}'):
        entry = source(attempt)[index]
      question, answer = entry['question'], entry['answer']
      fits = len(question.encode()) < longest_prompt and len(str(answer).encode()) <= longest_answer
      if fits and side(question, SHARE) == split:
        return Prompt(f'{question}\n', answer or '', answer, entry)
    raise ConfigError(
      f'none of {TRIES} problems of {dataset} is of at most {longest_prompt} bytes with an answer of at most '
      f'{longest_answer} and on the {split} side: raise reasoning_gym.longest_prompt or longest_answer.'
    )

  def verify(prompt: Prompt, text: str) -> Verdict:
    answer, entry, score = extract(text), prompt.problem, source(0).score_answer
    if not answer:
      return Verdict(Outcome.FORMAT)
    try:
      right = score(answer, entry) >= 1
    except UNREADABLE as error:
      score(entry['answer'], entry)
      return Verdict(Outcome.FORMAT, f'{type(error).__name__}: {error}')
    return Verdict(Outcome.CORRECT if right else Outcome.WRONG)

  source(0)
  return Task(size, heldout, prompt, verify, None, longest_prompt, longest_answer)


def extract(text: str) -> str:
  """The answer in a text: between the last <answer> and </answer>, or all of it."""
  if '<answer>' in text:
    text = text.rpartition('<answer>')[2].partition('</answer>')[0]
  return text.strip()


@functools.cache
def _package() -> Any:
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', SyntaxWarning)  # of its dependency cellpylib, whenever that is compiled anew
    import reasoning_gym
  return reasoning_gym


def _options(dataset: str, options: Sequence[str]) -> dict[str, Any]:
  """('max_value=99',) -> {'max_value': 99}, checked against the dataset's own config."""
  datasets = _package().factory.DATASETS
  if dataset in REFUSED:
    raise ConfigError(f'reasoning_gym.dataset cannot be {dataset!r}: {REFUSED[dataset]}.')
  if dataset not in datasets:
    raise ConfigError(f'reasoning-gym has no dataset {dataset!r}. {nearest(dataset, datasets)}')
  if dataset in HASHED and sys.flags.hash_randomization:
    raise ConfigError(
      f'reasoning-gym draws the problems of {dataset} in the order of a Python set, which changes from process to '
      'process: set the environment variable PYTHONHASHSEED=0 and start again.'
    )
  known = {f.name for f in dataclasses.fields(datasets[dataset][1])} - {'seed', 'size'}
  chosen = {}
  for option in options:
    name, _, value = option.partition('=')
    if name not in known:
      raise ConfigError(f'{dataset} of reasoning-gym has no option {name!r}. {nearest(name, known)}')
    try:
      chosen[name] = ast.literal_eval(value)
    except (SyntaxError, ValueError) as error:
      raise ConfigError(f"options of reasoning_gym are like 'max_value=99', but one is {option!r}.") from error
  return chosen


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
  """Draws nothing from outside and leaves nothing there: list_functions uses Python's global generator, bf prints dots."""
  state = random.getstate()
  random.seed(name)
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    random.setstate(state)
