"""Problems of reasoning-gym in few characters, for a character model that starts from nothing.

gcd and countdown are the problems of the datasets of that name, product those of `products` with a one-digit factor; the
wording is gone and each has a worked demonstration:

  gcd 28 10>     18 10;08 10;08 02;06 02;04 02;02 02#2              Euclid; lengths vary with difficulty
  8 19 18:9>     8+19-18                                            countdown; many right answers, all accepted
  32*4=          120+8#128

What counts as one problem: for gcd and product the pair in either order, for countdown the numbers in any order with the
target. A hash of that puts a quarter of all problems on the held-out side, the same quarter for every seed. Train
and held-out prompts are drawn alike, one by one, each from its side: a small set of problems has repeats on both.
"""

import bisect
import random
import re
import string
from collections.abc import Callable, Sequence

from rollout_jax.tasks.base import HELDOUT, TRAIN, Prompt, Task, check_range, side
from rollout_jax.types import ConfigError, Outcome, Verdict

# 62 characters: with padding and the end token a vocabulary of 64, shared by the compact tasks and so by their policies.
ALPHABET = string.ascii_lowercase + string.digits + '\n !#%&()*+,-./:;<=>?[]^{|}'
SHARE = 1 / 4
TRIES = 10_000  # draws for one prompt, after which its side counts as used up
LONGEST = 200  # characters of an expression that are looked at

_EXPRESSION = re.compile(r'[1-9][0-9]*(?:[+*-][1-9][0-9]*)*')
_RESULT = re.compile(r'[0-9]{1,12}')

Draw = Callable[[random.Random], tuple[str, Prompt]]


def gcd(
  *,
  max_number: int = 99,
  max_divisor: int = 5,
  max_steps: int = 8,
  hasty: float = 0.0,
  patience: int = 3,
  size: int = 65536,
  heldout: int = 512,
  seed: int = 0,
) -> Task:
  """Greatest common divisor of two numbers from 1 to `max_number`; the answer stands after the last #.

  The divisor is drawn first, evenly from 1 to `max_divisor` (before the pairs go to their sides, so each side is a little
  off), so that no one answer is right for most pairs: of two numbers drawn at will, six in ten pairs have 1. Then any pair
  that has it and of which Euclid's subtraction makes equal numbers in at most `max_steps` steps. Few steps leave few
  pairs: by default 910 in either order, of which 261 are held out. Numbers are written with equally many digits, so that
  digits which are subtracted stand equally far apart everywhere. A share `hasty` of the demonstrations stops after
  `patience` steps and takes the smaller number for the divisor, which is right for some pairs only: a policy that imitates
  both habits can learn by RL which one pays.
  """
  check_range('gcd.max_number', max_number, 5, 999)
  check_range('gcd.max_divisor', max_divisor, 1, max_number)
  check_range('gcd.max_steps', max_steps, 2, 99)
  check_range('gcd.hasty', hasty, 0, 1)
  if hasty:
    check_range('gcd.patience', patience, 0, max_steps)
  digits = len(str(max_number))
  pairs = _coprime(max_number, max_steps)
  larger = [max(pair) for pair in pairs]

  def draw(rng: random.Random) -> tuple[str, Prompt]:
    divisor = rng.randint(1, max_divisor)
    a, b = (divisor * x for x in pairs[rng.randrange(bisect.bisect(larger, max_number // divisor))])
    steps = _subtractions(a, b)
    taken = steps[:patience] if rng.random() < hasty else steps
    write = lambda pair: ' '.join(f'{x:0{digits}}' for x in pair)
    demonstration = ';'.join(map(write, taken)) + f'#{min([(a, b), *taken][-1])}'
    return f'{min(a, b)} {max(a, b)}', Prompt(f'gcd {write((a, b))}>', str(divisor), demonstration)

  longest = len(f'gcd {max_number} {max_number}>'), max_steps * (2 * digits + 2) + digits
  return _task('gcd', draw, _verify_result, longest, size, heldout, seed)


def product(*, max_number: int = 99, size: int = 65536, heldout: int = 64, seed: int = 0) -> Task:
  """A number from 2 to `max_number` times a digit from 2 to 9; the answer stands after the last #."""
  check_range('product.max_number', max_number, 9, 99999)

  def draw(rng: random.Random) -> tuple[str, Prompt]:
    a, b = rng.randint(2, max_number), rng.randint(2, 9)
    return f'{min(a, b)} {max(a, b)}', Prompt(f'{a}*{b}=', str(a * b), _by_parts(a, b))

  longest = len(f'{max_number}*9='), len(_by_parts(max_number, 9))
  return _task('product', draw, _verify_result, longest, size, heldout, seed)


def countdown(
  *,
  numbers: int = 3,
  max_number: int = 20,
  max_target: int = 99,
  size: int = 65536,
  heldout: int = 512,
  seed: int = 0,
) -> Task:
  """An expression with + - * that uses each of the numbers exactly once and equals the target, 1 to `max_target`."""
  check_range('countdown.numbers', numbers, 2, 6)
  check_range('countdown.max_number', max_number, 5, 999)
  check_range('countdown.max_target', max_target, 5, 9999)

  def draw(rng: random.Random) -> tuple[str, Prompt]:
    target = 0
    while not 1 <= target <= max_target:
      used = [rng.randint(1, max_number) for _ in range(numbers)]
      signs = rng.choices('+-*', k=numbers - 1)
      target = _value(used, signs)
    expression = str(used[0]) + ''.join(f'{sign}{x}' for sign, x in zip(signs, used[1:], strict=True))
    shown = ' '.join(map(str, rng.sample(used, numbers)))
    key = f'{sorted(used)}={target}'
    return key, Prompt(f'{shown}:{target}>', expression, expression, (sorted(used), target))

  digits = len(str(max_number))
  longest = numbers * (digits + 1) + len(str(max_target)) + 1, numbers * (digits + 1) - 1
  return _task('countdown', draw, _verify_expression, longest, size, heldout, seed)


def _task(
  name: str,
  draw: Draw,
  verify: Callable[[Prompt, str], Verdict],
  longest: tuple[int, int],
  size: int,
  heldout: int,
  seed: int,
) -> Task:
  check_range(f'{name}.size', size, 1, 2**31 - 1)
  check_range(f'{name}.heldout', heldout, 1, 2**31 - 1)

  def prompt(split: str, index: int) -> Prompt:
    rng = random.Random(f'{seed} {split} {index}')
    for _ in range(TRIES):
      key, drawn = draw(rng)
      if side(key, SHARE) == split:
        return drawn
    raise ConfigError(f'{name} has hardly a problem on the {split} side at this difficulty: raise {name}.max_number.')

  for split in (TRAIN, HELDOUT):
    prompt(split, 0)
  return Task(size, heldout, prompt, verify, ALPHABET, *longest)


def _verify_result(prompt: Prompt, text: str) -> Verdict:
  """What stands after the last # is compared as written; FORMAT if that is not a number."""
  result = text.rpartition('#')[2] if '#' in text else ''
  if not _RESULT.fullmatch(result):
    return Verdict(Outcome.FORMAT)
  return Verdict(Outcome.CORRECT if result == prompt.answer else Outcome.WRONG)


def _verify_expression(prompt: Prompt, text: str) -> Verdict:
  """The whole text must be numbers joined by + - *, nothing else: no spaces, signs, brackets or leading zeros."""
  if len(text) > LONGEST or not _EXPRESSION.fullmatch(text):
    return Verdict(Outcome.FORMAT)
  numbers, target = prompt.problem
  used = [int(x) for x in re.findall('[0-9]+', text)]
  right = sorted(used) == numbers and _value(used, re.findall('[+*-]', text)) == target
  return Verdict(Outcome.CORRECT if right else Outcome.WRONG)


def _value(numbers: Sequence[int], signs: Sequence[str]) -> int:
  """The value of numbers joined by + - *, by our own arithmetic: a policy's text is never evaluated as code."""
  total, term = 0, numbers[0]
  for sign, x in zip(signs, numbers[1:], strict=True):
    if sign == '*':
      term *= x
    else:
      total, term = total + term, x if sign == '+' else -x
  return total + term


def _coprime(most_number: int, most_steps: int) -> list[tuple[int, int]]:
  """The pairs without a common divisor that subtraction makes equal in at most `most_steps` steps, by the larger number."""
  found = level = [(1, 1)]
  for _ in range(most_steps):
    level = [pair for a, b in level for pair in ((a + b, b), (a, a + b)) if max(pair) <= most_number]
    found = found + level
  return sorted(found, key=max)


def _subtractions(a: int, b: int) -> list[tuple[int, int]]:
  """The pairs of Euclid's first method, the larger number less the smaller until they are equal.

  Every step is a subtraction of what stands right before it, so what is learned of one pair carries over to others.
  """
  steps = []
  while a != b:
    a, b = (a - b, b) if a > b else (a, b - a)
    steps.append((a, b))
  return steps


def _by_parts(a: int, b: int) -> str:
  tens, ones = divmod(a, 10)
  return f'{tens * 10 * b}+{ones * b}#{a * b}'
