"""Problems from a file with one JSON object per line, such as GSM8K as it is published.

  --config.task=jsonl --config.jsonl.path=gsm8k_train.jsonl --config.jsonl.heldout_path=gsm8k_test.jsonl

The prompt is the question and a line break, the demonstration the whole answer. The final answer is what follows the last
`final` marker on its line (GSM8K: ####); with an empty marker the whole answer field is final.

Held out are the lines of `heldout_path`; without one, a hash of the question holds out an eighth of `path`. A train line
whose question is also held out is dropped.

Rules of the verdict. A number may carry $ and commas between groups of three digits; what follows it (a full stop, a unit,
%) is ignored.
- The reference is a number: it is compared, by value, with the first number after the last marker on its line; in a text
  without the marker, with the last number of the text. No number: FORMAT.
- It is not: what follows the last marker on its line must be the same text, white space and a final full stop aside; a
  text without the marker is FORMAT. With an empty marker the whole text is compared.
"""

import json
import pathlib
import re
from collections.abc import Iterator
from decimal import Decimal

from rollout_jax.resolve import nearest
from rollout_jax.tasks.base import HELDOUT, Prompt, Task, side
from rollout_jax.types import ConfigError, Outcome, Verdict

SHARE = 1 / 8

_NUMBER = re.compile(
  r'(?:(?<![\w.)\]])(-))?(?:\$(-?))?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)'
)


def jsonl(
  *, path: str = '', heldout_path: str = '', question: str = 'question', answer: str = 'answer', final: str = '####'
) -> Task:
  """Problems of the file `path`: the fields named `question` and `answer` of each line."""
  if not path:
    raise ConfigError('the task jsonl wants a file: set jsonl.path, such as --config.jsonl.path=gsm8k_train.jsonl.')
  lines = list(_read(path, question, answer, final))
  if heldout_path:
    heldout = list(_read(heldout_path, question, answer, final))
  else:
    heldout = [prompt for prompt in lines if side(prompt.text, SHARE) == HELDOUT]
  apart = {prompt.text for prompt in heldout}
  train = [prompt for prompt in lines if prompt.text not in apart]
  for name, prompts in (('train', train), ('held-out', heldout)):
    if not prompts:
      raise ConfigError(
        f'no {name} problem is left of the {len(lines)} in {path}: give more, or set jsonl.heldout_path.'
      )
  both = [*train, *heldout]
  return Task(
    size=len(train),
    heldout=len(heldout),
    prompt=lambda split, index: (heldout if split == HELDOUT else train)[index],
    verify=lambda prompt, text: _verify(prompt.answer, text, final),
    alphabet=None,
    prompt_length=max(len(prompt.text.encode()) for prompt in both),
    answer_length=max(len((prompt.demonstration or '').encode()) for prompt in both),
  )


def _read(path: str, question: str, answer: str, final: str) -> Iterator[Prompt]:
  """The problems of a file. Raises ConfigError with the line's number where it cannot be read."""
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f'{path} cannot be read as a text file: {error}') from error
  if not text.strip():
    raise ConfigError(f'{path} is empty, but the task jsonl wants one JSON object per line.')
  for number, line in enumerate(text.split('\n'), 1):
    if line.strip():
      yield _prompt(f'{path}:{number}', line, question, answer, final)


def _prompt(where: str, line: str, question: str, answer: str, final: str) -> Prompt:
  try:
    entry = json.loads(line)
  except ValueError as error:
    raise ConfigError(f'{where}: not JSON ({error}), but the task jsonl wants one JSON object per line.') from error
  if not isinstance(entry, dict):
    raise ConfigError(f'{where}: a JSON object is wanted, but this is a {type(entry).__name__}.')
  for field, name in (('question', question), ('answer', answer)):
    if name not in entry:
      raise ConfigError(f'{where}: no field {name!r} (set jsonl.{field}). {nearest(name, entry)}')
    if not isinstance(entry[name], str):
      raise ConfigError(f'{where}: {name!r} must be a text, but is a {type(entry[name]).__name__}.')
  reference = _after(entry[answer], final)
  if not reference:
    raise ConfigError(
      f'{where}: nothing follows the marker {final!r} in {answer!r} (set jsonl.final, which may be empty).'
    )
  return Prompt(f'{entry[question]}\n', reference, entry[answer])


def _after(text: str, final: str) -> str:
  """What follows the last marker on its line; without a marker in use, all of the text. '' if it is not there."""
  if not final:
    return _tidy(text)
  return _tidy(text.rpartition(final)[2].partition('\n')[0]) if final in text else ''


def _tidy(text: str) -> str:
  return text.strip().removesuffix('.').rstrip()


def _numbers(text: str) -> list[Decimal]:
  found = _NUMBER.findall(text)
  return [Decimal(f'{"-" if minus or inner else ""}{digits.replace(",", "")}') for minus, inner, digits in found]


def _verify(reference: str, text: str, final: str) -> Verdict:
  told = _after(text, final)
  if not re.fullmatch(f'{_NUMBER.pattern}%?', reference):
    if not told:
      return Verdict(Outcome.FORMAT)
    return Verdict(Outcome.CORRECT if told == reference else Outcome.WRONG)
  numbers = _numbers(told)[:1] if final and final in text else _numbers(text)[-1:]
  if not numbers:
    return Verdict(Outcome.FORMAT)
  return Verdict(Outcome.CORRECT if numbers == _numbers(reference) else Outcome.WRONG)
