"""The outer loop of RL: round, batch, step, line, checkpoint. What makes a run resumable and its books balance is here.

Seconds of a step by the host's clock. None of them includes tracing or compiling, evaluation, or writing a checkpoint:
t/rollout      a round, from drawing prompts to its last verdict
t/decode       of this, admitting rows and decoding them, until the slots' status is known
t/reward_wait  of this, waiting for verdicts that were due
t/host         packing the batch and sending it to the device
t/update       the training step, beside which the line of the step before is written
t/step         the sum of t/rollout, t/host and t/update
t/compile      tracing and compiling (or reading the compilation cache) during the step
rate/decoded   decoded tokens per second of t/rollout
total/...      sums over the run so far: decoded and trained tokens, t/step as seconds and times devices as device_seconds,
               t/compile as compile_seconds
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rollout_jax.build import Parts
from rollout_jax.clock import Clock
from rollout_jax.ledger import Ledger
from rollout_jax.rollout.collect import Round, Usage, collect
from rollout_jax.rollout.measure import measure
from rollout_jax.rollout.pack import pack
from rollout_jax.training.checkpoint import Checkpointer
from rollout_jax.training.publish import copy
from rollout_jax.training.state import TrainState
from rollout_jax.types import Outcome, PyTree
from rollout_jax.writers import Writers

TRAIN = 'train'


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
  totals: dict[str, float]  # sums over the run: tokens, seconds
  curve: list[dict[str, float]]  # one entry per evaluation


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
  """A step whose report is still on the device."""

  step: int
  report: Any
  reward_PG: Any
  result: Round
  times: dict[str, float]


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
    totals={},
    curve=[],
  )


def save(run: Run, checkpoints: Checkpointer) -> None:
  """Writes the run's checkpoint of its step."""
  arrays = {'state': run.state, 'served': run.served, 'visits_N': run.visits_N}
  host = {name: getattr(run, name) for name in ('step', 'scheduler_state', 'backlog', 'totals', 'curve')}
  checkpoints.save(run.step, arrays, host)


def restore(parts: Parts, fresh: Run, checkpoints: Checkpointer) -> Run | None:
  """The newest whole checkpoint as a run; `fresh` gives shapes and shardings. None if there is no checkpoint."""
  found = checkpoints.restore({'state': fresh.state, 'served': fresh.served, 'visits_N': fresh.visits_N})
  if found is None:
    return None
  _, arrays, host = found
  return Run(**arrays, **host)


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
      record(parts, run, pending, writers)
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
      record(parts, run, pending, writers)
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


def rollout_times(usage: Usage, seconds: float, compiling: float) -> dict[str, float]:
  """The times of a round that took `seconds` on the host, batch included, beside `compiling`; all compiling is the round's."""
  rollout = max(usage.seconds - compiling, 0.0)
  return {
    't/rollout': rollout,
    't/decode': max(usage.decode_seconds - compiling, 0.0),
    't/reward_wait': usage.reward_wait_seconds,
    't/host': max(seconds - rollout, 0.0),
    't/compile': compiling,
  }


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


def record(parts: Parts, run: Run, pending: Pending, writers: Writers) -> None:
  """Fetches a step's report, checks the ledger, and writes the step's line and some of its rows."""
  report, reward_PG = parts.fetcher('report', (pending.report, pending.reward_PG))
  metrics = {name: float(mean.total / max(mean.count, 1e-9)) for name, mean in report.items()}
  ledger = balance(pending.result, metrics)
  ledger.check(f'step {pending.step}')
  metrics = {name: value for name, value in metrics.items() if not name.startswith(('ledger/', 'dropped/'))}
  usage, times = pending.result.usage, pending.times
  busy = times['t/rollout'] + times['t/update']
  metrics |= measure(pending.result, pending.step - 1)
  metrics |= {name.replace('.', '/'): value for name, value in ledger.to_dict().items()}
  metrics |= times | {
    't/step': busy + times['t/host'],
    'rate/decoded': usage.decoded / max(times['t/rollout'], 1e-9),
  }
  totals = {
    'decoded': usage.decoded,
    'trained': ledger.trained,
    'seconds': metrics['t/step'],
    'device_seconds': metrics['t/step'] * parts.base.mesh.size,
    'compile_seconds': times['t/compile'],
  }
  run.totals = {name: run.totals.get(name, 0) + value for name, value in totals.items()}
  metrics |= {f'total/{name}': value for name, value in run.totals.items()}
  metrics['prompts'] = [group.prompt for group in pending.result.groups]
  writers.step(pending.step, metrics, sample_rows(parts, pending.result, reward_PG))
  if metrics['update/bad_in_a_row'] >= parts.bad_updates:
    raise DivergedError(
      f'The last {metrics["update/bad_in_a_row"]:.0f} updates were skipped because the loss or the gradient was not finite. '
      'Lower optimizer.learning_rate or optimizer.clip, or look at rollouts.jsonl; the last checkpoint is from before.'
    )


def balance(result: Round, counts: dict[str, float]) -> Ledger:
  """The ledger of a step: what the round says came in, what the training step says went out, row by row and token by token."""
  usage = result.usage
  verdicts = [v.outcome for group in result.groups for v in group.verdicts]
  unjudged = {
    f'verifier_{outcome.name.lower()}': verdicts.count(outcome) for outcome in (Outcome.ERROR, Outcome.TIMEOUT)
  }
  dropped = {name.removeprefix('dropped/'): round(n) for name, n in counts.items() if name.startswith('dropped/')}
  return Ledger().add(
    decoded=usage.decoded,
    trained=round(counts['ledger/trained']),
    filtered=round(counts['ledger/decoded'] - counts['ledger/trained']),
    prefill_requested=usage.prefill_requested,
    prefill_computed=usage.prefill_computed,
    padded=usage.slot_steps - usage.decoded,
    issued=usage.issued,
    rows_trained=round(counts['ledger/trained_rows']),
    dropped={**unjudged, **dropped},
  )


def sample_rows(parts: Parts, result: Round, reward_PG: np.ndarray) -> Sequence[dict[str, Any]]:
  """The first rows of the round in words, for rollouts.jsonl: people debug RL by reading samples."""
  lines = []
  for p, group in enumerate(result.groups):
    for row, verdict, reward in zip(group.rows, group.verdicts, reward_PG[p], strict=True):
      if len(lines) == parts.logged_rows:
        return lines
      lines.append(
        {
          **dataclasses.asdict(row.request),
          'prompt_text': parts.base.task.prompt(TRAIN, group.prompt).text,
          'text': parts.desk.text(row.answer_T),
          'verdict': verdict.outcome.name.lower(),
          'detail': verdict.detail,
          'reward': float(reward),
          'stop': row.stop.name.lower(),
          'tokens': row.decoded,
          'versions': sorted({int(v) for v in row.version_T if v >= 0}),
        }
      )
  return lines
