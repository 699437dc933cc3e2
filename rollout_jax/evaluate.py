"""Accuracy on held-out prompts, by the same engine and verifiers that training uses."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from rollout_jax.rollout.collect import Desk, Round, collect
from rollout_jax.schedulers import synchronous
from rollout_jax.types import Outcome, PyTree

HELDOUT = 'heldout'


def pass_at_k(n: int, c: int, k: int) -> float:
  """Unbiased estimate of the chance that one of k samples is correct, from c correct ones of n (arXiv 2107.03374, 2.1)."""
  if n - c < k:
    return 1.0
  return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def evaluate(
  desk: Desk,
  params: PyTree,
  version: int,
  *,
  problems: int,
  samples: int,
  progress: Callable[[int], None] = lambda rows: None,
) -> tuple[np.ndarray, Round]:
  """Rolls out each of the first `problems` held-out prompts `samples` times.

  Returns whether each row is correct, bool [problems, samples] (a row that was not judged counts as not correct), and the
  round. The keys of the rows depend on `desk.seed` and the prompt only, so that every evaluation draws alike.
  """
  scheduler = synchronous(problems, samples)
  draw = lambda n: [(index, 0) for index in range(n)]
  _, result = collect(
    desk,
    params,
    version,
    split=HELDOUT,
    group=samples,
    scheduler=scheduler,
    state=scheduler.init(),
    draw=draw,
    progress=progress,
  )
  correct = [[verdict.outcome == Outcome.CORRECT for verdict in group.verdicts] for group in result.groups]
  return np.array(correct, bool), result


def summarise(greedy_P1: np.ndarray, sampled_PG: np.ndarray | None) -> Mapping[str, float]:
  """Greedy accuracy with its standard error, and with samples the mean over k and the unbiased pass@1, 2, 4 ... k."""
  accuracy = float(greedy_P1.mean())
  report = {'greedy': accuracy, 'greedy_stderr': math.sqrt(accuracy * (1 - accuracy) / len(greedy_P1))}
  if sampled_PG is None:
    return report
  n = sampled_PG.shape[1]
  passed = sampled_PG.sum(axis=1)
  report[f'mean@{n}'] = float(sampled_PG.mean())
  powers = [2**i for i in range(n.bit_length()) if 2**i <= n]
  return report | {f'pass@{k}': float(np.mean([pass_at_k(n, int(c), k) for c in passed])) for k in powers}
