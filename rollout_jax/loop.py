"""The outer loop of RL: round, batch, step, line, checkpoint. What makes a run resumable is here."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rollout_jax.build import Parts
from rollout_jax.clock import Clock
from rollout_jax.ledger import Ledger
from rollout_jax.record import TRAIN, Pending, record, rollout_times, sample_rows
from rollout_jax.rollout.collect import Round, collect
from rollout_jax.rollout.pack import pack
from rollout_jax.training.checkpoint import Checkpointer
from rollout_jax.training.publish import copy
from rollout_jax.training.state import TrainState
from rollout_jax.types import PyTree
from rollout_jax.writers import Writers, say


class DivergedError(RuntimeError):
  """Too many updates in a row had a loss or a gradient that is not finite."""


@dataclasses.dataclass
class Run:
  """Where a run stands: what a checkpoint holds, and nothing else that could change what comes next."""

  step: int  # training steps done
  state: TrainState
  served: list[PyTree]  # parameters of the last lag + 1 versions, oldest first; at lag 0 empty: the state's are served
  visits_N: np.ndarray  # int32, how often each train prompt was drawn
  scheduler_state: dict[str, Any]
  backlog: list[int]  # prompts that the curriculum has given and that were not rolled out yet
  ledger: Ledger  # of the whole run
  totals: dict[str, float]  # seconds over the whole run
  curve: list[dict[str, float]]  # one entry per evaluation


def start(parts: Parts, params: PyTree) -> Run:
  """A run at step 0 from these parameters."""
  state = parts.init(params)
  return Run(
    step=0,
    state=state,
    served=[copy(state.params['policy']) for _ in range(parts.lag + 1)] if parts.lag else [],
    visits_N=np.zeros(parts.base.task.size, np.int32),
    scheduler_state=parts.scheduler.init(),
    backlog=[],
    ledger=Ledger(),
    totals={},
    curve=[],
  )


def save(run: Run, checkpoints: Checkpointer) -> None:
  """Writes the run's checkpoint of its step."""
  arrays = {'state': run.state, 'served': run.served, 'visits_N': run.visits_N}
  host = {name: getattr(run, name) for name in ('step', 'scheduler_state', 'backlog', 'totals', 'curve')}
  host['ledger'] = run.ledger.to_dict()
  checkpoints.save(run.step, arrays, host)


def restore(parts: Parts, fresh: Run, checkpoints: Checkpointer) -> Run | None:
  """The newest whole checkpoint as a run; `fresh` gives shapes and shardings. None if there is no checkpoint."""
  found = checkpoints.restore({'state': fresh.state, 'served': fresh.served, 'visits_N': fresh.visits_N})
  if found is None:
    return None
  _, arrays, host = found
  return Run(**arrays, **{**host, 'ledger': Ledger.from_dict(host['ledger'])})


def train(
  parts: Parts,
  run: Run,
  *,
  steps: int,
  frozen: dict[str, PyTree],
  writers: Writers,
  checkpoints: Checkpointer,
  clock: Clock,
  stop: Callable[[], bool],
  evaluate: Callable[[Run], None],
) -> None:
  """Takes `run` to `steps` training steps, or to the first step after which `stop()` is true; it is saved in either case.

  `evaluate(run)` is called every `parts.evaluate_every` steps. A step's report is fetched while the next step's work is
  on the device; its line is on disk before the checkpoint of that step is.
  """
  pending: Pending | None = None
  saved, stopping = run.step, stop()
  while run.step < steps and not stopping:
    clock.lap()
    result, batch = roll_out(parts, run)
    times = rollout_times(result.usage, *clock.lap())
    run.state, (report, reward_PG) = parts.train_step(run.state, frozen, batch)
    if pending is not None:
      write_line(parts, run, pending, writers)
    parts.fetcher.wait(run.state.step)
    times['t/update'], compiled = clock.lap()
    times['t/compile'] += compiled
    run.step += 1
    publish(parts, run)
    pending = Pending(run.step, report, reward_PG, result, times)
    stopping = stop()  # asked once a step: a signal may come between any two lines
    last = run.step == steps or stopping
    due = parts.evaluate_every and run.step % parts.evaluate_every == 0
    if last or due or run.step % parts.checkpoint_every == 0:
      write_line(parts, run, pending, writers)
      pending = None
      if due:
        evaluate(run)
      save(run, checkpoints)
      saved = run.step
  if saved != run.step:
    raise AssertionError('a run ends at a checkpoint')


def roll_out(parts: Parts, run: Run) -> tuple[Round, PyTree]:
  """One round with the served policy, and its batch on the device."""
  served = run.served[0] if parts.lag else run.state.params['policy']
  version = max(run.step - parts.lag, 0)
  run.scheduler_state, result = collect(
    parts.desk,
    served,
    version,
    split=TRAIN,
    group=parts.group,
    scheduler=parts.scheduler,
    state=run.scheduler_state,
    draw=functools.partial(draw, parts, run),
  )
  batch = pack(result.groups, capacity=parts.capacity, group=parts.group, length=parts.desk.length, pad=parts.desk.pad)
  return result, jax.device_put(batch, parts.batch_sharding)


def draw(parts: Parts, run: Run, count: int) -> list[tuple[int, int]]:
  """The next `count` prompts of the curriculum, each with the number of times it was drawn before."""
  while len(run.backlog) < count:
    curriculum_state, prompt_P = parts.sample(run.state.curriculum_state)
    run.state = run.state.replace(curriculum_state=curriculum_state)
    run.backlog.extend(int(p) for p in parts.fetcher('prompts', prompt_P))
  drawn = []
  for prompt in run.backlog[:count]:
    drawn.append((prompt, int(run.visits_N[prompt])))
    run.visits_N[prompt] += 1
  del run.backlog[:count]
  return drawn


def publish(parts: Parts, run: Run) -> None:
  """Serves the new parameters; with lag, the oldest of the last lag + 1 versions is the one that samples."""
  if parts.lag:
    run.served = [*run.served[1:], copy(run.state.params['policy'])]


def write_line(parts: Parts, run: Run, pending: Pending, writers: Writers) -> None:
  """Fetches a step's report, checks the books, and writes the step's line and some of its rows."""
  report, reward_PG = parts.fetcher('report', (pending.report, pending.reward_PG))
  step = record(parts, pending, report, run.ledger, run.totals)
  run.ledger, run.totals = run.ledger + step.ledger, step.totals
  writers.step(pending.step, step.metrics, sample_rows(parts, pending.result, reward_PG))
  bad, gap = step.metrics['update/bad_in_a_row'], step.metrics['gap/mean']
  if not parts.lag and gap > parts.gap_alarm:
    say(f'warning: sampled and scored log-probs differ by {gap:.2g} on average (log.gap_alarm is {parts.gap_alarm:g})')
  if bad >= parts.bad_updates:
    raise DivergedError(
      f'The last {bad:.0f} updates were skipped because the loss or the gradient was not finite. '
      'Lower optimizer.learning_rate or optimizer.clip, or look at rollouts.jsonl; the last checkpoint is from before.'
    )
