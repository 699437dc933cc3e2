"""Dynamic sampling: replace groups without signal until P informative ones are there (DAPO, arXiv 2503.14476, section 3.2).

A group whose rows are all right or all wrong gives a group-relative advantage of zero. DAPO samples further batches until P
groups are informative and cuts the surplus. Here each group that settles without signal is replaced by one new prompt, so
there never is a surplus: every row that is started is finished and judged, and no answer is favoured for being short.
Left out: the over-sampled batches. The number of prompts of a round is bounded by `max_factor` * P; at the bound the round
ends with fewer informative groups, and the loss counts what is there (behaviours U25). The groups without signal stay in the
batch, where the curriculum sees them and `drop_degenerate` masks them: use the two together.

Config: `scheduler='dynamic'` (configs/dynamic.py).
"""

import math

import numpy as np

from rollout_jax.schedulers.base import Plan, Scheduler, State, complete, fresh, settled_row
from rollout_jax.signal import informative
from rollout_jax.types import ConfigError, Correctness, Outcome

UNJUDGED = (Outcome.ERROR, Outcome.TIMEOUT)


def dynamic(prompts: int, group: int, *, max_factor: float = 3.0, low: float = 0.0, high: float = 1.0) -> Scheduler:
  """Draws `prompts`, then one more for each group with a pass rate outside (low, high), at most max_factor * prompts in all.

  Raises ConfigError if the bound is below one batch or a group has one row.
  """
  if max_factor < 1.0:
    raise ConfigError(f'dynamic.max_factor must be at least 1 (one batch of prompts), but is {max_factor}.')
  if group < 2:
    raise ConfigError(
      f'scheduler dynamic compares the rollouts of a prompt: rollout.group must be at least 2, but is {group}.'
    )
  bound = math.floor(max_factor * prompts)

  def has_signal(outcomes: list[int]) -> bool:
    outcome_PG = np.array([outcomes])
    correct_PG = (outcome_PG == Outcome.CORRECT).astype(np.float32)
    judged_PG = (~np.isin(outcome_PG, UNJUDGED)).astype(np.float32)
    return bool(informative(correct_PG, judged_PG, low, high)[0])

  def plan(state: State) -> tuple[State, Plan]:
    finished = complete(state, group)
    outstanding = state['drawn'] - len(finished)
    missing = prompts - sum(map(has_signal, finished)) - outstanding
    draw = min(missing, bound - state['drawn'])
    if draw > 0:
      return {**state, 'drawn': state['drawn'] + draw}, Plan(draw=draw)
    if outstanding == 0:
      return fresh(), Plan(done=True)
    return state, Plan()

  return Scheduler(fresh, plan, settled_row, capacity=bound, correctness=Correctness.EMPIRICAL)
