"""What a step leaves behind: its line of metrics, its books, and some of its rows in words.

Seconds of a step by the host's clock. None of them includes tracing or compiling, evaluation, or writing a checkpoint:
t/rollout      a round, from drawing prompts to its last verdict
t/decode       of this, admitting rows and decoding them, until the slots' status is known
t/reward_wait  of this, waiting for verdicts that were due
t/host         packing the batch and sending it to the device
t/update       the training step, beside which the line of the step before is written
t/step         the sum of t/rollout, t/host and t/update
t/compile      tracing and compiling (or reading the compilation cache) during the step
idle/train     share of t/step in which no training step ran; idle/rollout: share in which no round did. Both parts share the
               devices, so this says who waits for whom, not that devices are idle
rate/decoded   decoded tokens per second of t/rollout
t/verify       seconds of the verifiers' work, in their own processes
total/...      sums over the run so far: decoded and trained tokens, t/step as seconds and times devices as device_seconds,
               t/compile as compile_seconds
len/trained    trained tokens per row with a trained token: far from len/mean, lengths are selected
tok/prefill_cached     prompt tokens that were copied from a prefill instead of computed
tok/trained_effective  trained tokens at which the loss has a gradient, by loss/effective
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_jax.build import Parts
from rollout_jax.ledger import Ledger
from rollout_jax.rollout.collect import Round, Usage
from rollout_jax.rollout.measure import measure
from rollout_jax.types import Outcome, Report

TRAIN = 'train'


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
  """A step whose report is still on the device."""

  step: int
  report: Any
  reward_PG: Any
  result: Round
  times: dict[str, float]


class Record(NamedTuple):
  """A step in numbers, its books, and the run's sums with it."""

  metrics: dict[str, Any]
  ledger: Ledger
  totals: dict[str, float]


def record(parts: Parts, pending: Pending, report: Report, before: Ledger, totals: Mapping[str, float]) -> Record:
  """The record of a step from its fetched report, `before` and `totals` being those of the run so far.

  Raises LedgerError if the books do not balance.
  """
  counts = {name: float(mean.total / max(mean.count, 1e-9)) for name, mean in report.items()}
  ledger = balance(pending.result, counts, before)
  ledger.check(f'step {pending.step}')
  usage, times = pending.result.usage, pending.times
  seconds = times['t/rollout'] + times['t/update'] + times['t/host']
  spent = {
    'decoded': usage.decoded,
    'trained': ledger.trained,
    'seconds': seconds,
    'device_seconds': seconds * parts.base.mesh.size,
    'compile_seconds': times['t/compile'],
  }
  totals = {name: totals.get(name, 0) + value for name, value in spent.items()}
  metrics = {
    **{name: value for name, value in counts.items() if not name.startswith(('ledger/', 'dropped/'))},
    **measure(pending.result, pending.step - 1),
    'len/trained': ledger.trained / max(ledger.rows_trained, 1),
    **{name.replace('.', '/'): value for name, value in ledger.to_dict().items()},
    'tok/prefill_cached': ledger.prefill_requested - ledger.prefill_computed,
    'tok/trained_effective': round(counts['loss/effective'] * ledger.trained),
    **times,
    't/step': seconds,
    'idle/train': 1 - times['t/update'] / seconds,
    'idle/rollout': 1 - times['t/rollout'] / seconds,
    'rate/decoded': usage.decoded / max(times['t/rollout'], 1e-9),
    **{f'total/{name}': value for name, value in totals.items()},
    'prompts': [group.prompt for group in pending.result.groups],
  }
  return Record(metrics, ledger, totals)


def balance(result: Round, counts: Mapping[str, float], before: Ledger) -> Ledger:
  """The ledger of a step: what the round says came in, what the training step says went out, row by row and token by token."""
  usage = result.usage
  verdicts = [v.outcome for group in result.groups for v in group.verdicts]
  unjudged = {
    f'verifier_{outcome.name.lower()}': verdicts.count(outcome) for outcome in (Outcome.ERROR, Outcome.TIMEOUT)
  }
  dropped = {name.removeprefix('dropped/'): round(n) for name, n in counts.items() if name.startswith('dropped/')}
  ledger = before.following().add(
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
  return ledger.close(held=0, pending=0)  # a round ends with no row under way


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


def rollout_times(usage: Usage, seconds: float, compiling: float) -> dict[str, float]:
  """The times of a round that took `seconds` on the host, batch included, beside `compiling`; all compiling is the round's."""
  rollout = max(usage.seconds - compiling, 0.0)
  return {
    't/rollout': rollout,
    't/decode': max(usage.decode_seconds - compiling, 0.0),
    't/reward_wait': usage.reward_wait_seconds,
    't/verify': usage.verify_seconds,
    't/host': max(seconds - rollout, 0.0),
    't/compile': compiling,
  }
