"""What a round was like, in numbers: lengths, outcomes, occupancy, staleness. Every name is defined here.

len/mean, std, p50, p90, p99, max   tokens of an answer, end token included, over finished rows
len/cv                              std / mean: how ragged the round was
len/correct, len/incorrect          mean length of rows with that outcome (incorrect: WRONG and FORMAT)
len/truncated                       share of rows that stopped at their limit
reward/accuracy                     share of judged rows that are CORRECT (ERROR and TIMEOUT are not judged)
verdict/wrong .. verdict/timeout    number of rows by outcome
group/informative                   share of groups whose judged rows are neither all correct nor all incorrect
group/pass_0, _low, _high, _1        share of groups with a pass rate of 0, below 1/2, from 1/2 on, and of 1
engine/forwards, engine/chunks      decode forwards (each over all slots), and looks at the slots
bubble/frac                         share of slot-steps that gave no token: 0 when every slot gave one in every forward
bubble/tail_80, bubble/tail_95      share of the round's forwards that ran after 80 % (95 %) of its rows had finished
lag/mean, lag/max                   trained version - version of the token, over decoded tokens
lag/span                            largest number of versions in one row
lag/histogram                       list: decoded tokens of lag 0, 1, 2 ...
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollout_jax.rollout.collect import Round
from rollout_jax.types import Outcome, Source, Stop


def measure(result: Round, version: int) -> Mapping[str, Any]:
  """The numbers of the list above for a round that is about to train `version`."""
  rows = [row for group in result.groups for row in group.rows]
  outcomes = np.array([v.outcome for group in result.groups for v in group.verdicts])
  lengths = np.array([len(row.answer_T) for row in rows], np.float64)
  judged = ~np.isin(outcomes, (Outcome.ERROR, Outcome.TIMEOUT))
  correct = outcomes == Outcome.CORRECT
  stops = np.array([row.stop for row in rows])
  return {
    'len/mean': _mean(lengths),
    'len/std': float(lengths.std()),
    'len/cv': float(lengths.std() / max(lengths.mean(), 1e-9)),
    **{f'len/p{q}': float(np.percentile(lengths, q)) for q in (50, 90, 99)},
    'len/max': float(lengths.max()),
    'len/correct': _mean(lengths[correct]),
    'len/incorrect': _mean(lengths[judged & ~correct]),
    'len/truncated': _mean(stops == Stop.LENGTH),
    'reward/accuracy': _mean(correct[judged]),
    **{f'verdict/{outcome.name.lower()}': int((outcomes == outcome).sum()) for outcome in Outcome},
    **_groups(result),
    **_engine(result),
    **_lag(result, version),
  }


def _mean(x: np.ndarray) -> float:
  return float(x.mean()) if len(x) else 0.0


def _groups(result: Round) -> Mapping[str, float]:
  rates = []
  for group in result.groups:
    judged = [v for v in group.verdicts if v.outcome not in (Outcome.ERROR, Outcome.TIMEOUT)]
    if judged:
      rates.append(np.mean([v.outcome == Outcome.CORRECT for v in judged]))
  rate = np.array(rates)
  return {
    'group/informative': _mean((rate > 0) & (rate < 1)),
    'group/pass_0': _mean(rate == 0),
    'group/pass_low': _mean((rate > 0) & (rate < 0.5)),
    'group/pass_high': _mean((rate >= 0.5) & (rate < 1)),
    'group/pass_1': _mean(rate == 1),
  }


def _engine(result: Round) -> Mapping[str, float]:
  usage = result.usage
  ended = sorted(usage.ended)
  tail = lambda share: 1 - ended[math.ceil(share * len(ended)) - 1] / usage.forwards if ended else 0.0
  return {
    'engine/forwards': usage.forwards,
    'engine/chunks': usage.chunks,
    'bubble/frac': 1 - usage.decoded / max(usage.slot_steps, 1),
    'bubble/tail_80': tail(0.80),
    'bubble/tail_95': tail(0.95),
  }


def _lag(result: Round, version: int) -> Mapping[str, Any]:
  versions = [row.version_T[row.source_T == Source.DECODED] for group in result.groups for row in group.rows]
  lag = version - np.concatenate(versions)
  return {
    'lag/mean': _mean(lag),
    'lag/max': float(lag.max(initial=0)),
    'lag/span': max(len(np.unique(v)) for v in versions),
    'lag/histogram': np.bincount(lag).tolist(),
  }
