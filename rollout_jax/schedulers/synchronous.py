"""Synchronous: one round rolls out P prompts, waits for every row, and trains on all of them. The baseline.

Config: `scheduler='synchronous'`.
"""

from rollout_jax.schedulers.base import Plan, Scheduler, State, complete, fresh, settled_row


def synchronous(prompts: int, group: int) -> Scheduler:
  """Draws `prompts` prompts at once; the round is over when all of their rows have settled."""

  def plan(state: State) -> tuple[State, Plan]:
    if state['drawn'] < prompts:
      return {**state, 'drawn': prompts}, Plan(draw=prompts - state['drawn'])
    if len(complete(state, group)) == prompts:
      return fresh(), Plan(done=True)
    return state, Plan()

  return Scheduler(fresh, plan, settled_row, capacity=prompts)
