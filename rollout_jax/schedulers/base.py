"""The contract of a scheduler: it says what to draw next and when a round is over, from replicated facts only.

One fixed loop (`rollout/collect.py`) runs every scheduler. It calls `plan` before each chunk of decoded tokens and `settle`
for every row, in the order of (group, rollout), exactly `delay` chunks after the row ended, so that neither the speed of a
verifier nor a clock ever changes a decision. States are plain dicts of numbers, lists and strings: they go into the
checkpoint as JSON.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from rollout_jax.types import Correctness, Verdict

State = dict


@dataclasses.dataclass(frozen=True)
class Plan:
  """What the loop does next: draw this many prompts (each is rolled out `group` times), or end the round."""

  draw: int = 0
  done: bool = False


class Scheduler(NamedTuple):
  """init() -> state at the start of a run; plan(state) -> (state, Plan); settle(state, position, verdict) -> state.

  `position` is the number of the group in this round's order of drawing. `capacity` is the largest number of groups
  that a round can hold: the batch has this many, whatever was rolled out.
  """

  init: Callable[[], State]
  plan: Callable[[State], tuple[State, Plan]]
  settle: Callable[[State, int, Verdict], State]
  capacity: int
  correctness: Correctness = Correctness.EXACT


def settled_row(state: State, position: int, verdict: Verdict) -> State:
  """The state with one more verdict, `state['verdicts'][position]` holding the outcomes of the group so far."""
  verdicts = dict(state['verdicts'])
  verdicts[str(position)] = [*verdicts.get(str(position), []), int(verdict.outcome)]
  return {**state, 'verdicts': verdicts}


def complete(state: State, group: int) -> list[list[int]]:
  """Outcomes of the groups whose every row has settled."""
  return [outcomes for outcomes in state['verdicts'].values() if len(outcomes) == group]


def fresh() -> State:
  """The state at the start of a round."""
  return {'drawn': 0, 'verdicts': {}}
