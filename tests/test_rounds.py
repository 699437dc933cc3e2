"""From rows to a batch, and from a round to its numbers, on a hand-made round."""

import dataclasses

import numpy as np
import pytest

from rollout_jax.evaluate import pass_at_k, summarise
from rollout_jax.record import rollout_times
from rollout_jax.rollout.collect import Round, Usage
from rollout_jax.rollout.measure import measure
from rollout_jax.rollout.pack import pack
from rollout_jax.types import Group, Outcome, Request, Row, Source, Stop, Verdict

PAD = 0


def row(prompt, rollout, answer, *, asked=2, stop=Stop.EOS, version=3):
  n = asked + len(answer)
  decoded = np.arange(n) >= asked
  return Row(
    request=Request(prompt, 0, rollout),
    tokens_T=np.array([9] * asked + answer, np.int32),
    source_T=np.where(decoded, Source.DECODED, Source.PROMPT).astype(np.int8),
    logp_T=np.where(decoded, -0.5, 0).astype(np.float32),
    version_T=np.where(decoded, version, -1).astype(np.int32),
    limit=8,
    stop=stop,
  )


def hand_made():
  """Two groups of two: right and wrong answers of 2 and 4 tokens; a right one of 1 token beside a verifier that hung."""
  first = Group(4, 0, (row(4, 0, [5, 1]), row(4, 1, [5, 6, 7, 1])), (Verdict(Outcome.CORRECT), Verdict(Outcome.WRONG)))
  second = Group(
    7,
    1,
    (row(7, 0, [1]), row(7, 1, [5, PAD, 6, 5, 5], stop=Stop.LENGTH, version=2)),
    (Verdict(Outcome.CORRECT), Verdict(Outcome.TIMEOUT, 'limit of 1 s')),
  )
  usage = Usage(issued=4, chunks=2, forwards=5, slot_steps=20, decoded=12, prefill_requested=8, prefill_computed=4)
  usage.ended.extend([1, 2, 4, 5])
  return Round((first, second), usage)


def test_masks_come_from_lengths_and_never_from_ids():
  batch = pack(hand_made().groups, capacity=3, group=2, length=8, pad=PAD)
  assert batch.keep_PGT[0].tolist() == [[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]]
  assert batch.source_PGT[1, 1].tolist() == [1, 1, 2, 2, 2, 2, 2, 0]  # a pad id inside an answer is an answer's token
  other = pack(hand_made().groups, capacity=3, group=2, length=8, pad=1)  # pad = end token
  np.testing.assert_array_equal(other.keep_PGT, batch.keep_PGT)
  np.testing.assert_array_equal(other.source_PGT, batch.source_PGT)


def test_a_row_whose_verifier_failed_exists_but_counts_nowhere():
  batch = pack(hand_made().groups, capacity=2, group=2, length=8, pad=PAD)
  assert batch.exists_PG.all()
  assert batch.stat_PG.tolist() == [[1, 1], [1, 0]] and batch.keep_PGT[1, 1].sum() == 0


def test_groups_that_are_not_there_do_not_exist():
  batch = pack(hand_made().groups, capacity=3, group=2, length=8, pad=PAD)
  assert batch.prompt_P.tolist() == [4, 7, -1] and not batch.exists_PG[2].any() and batch.keep_PGT[2].sum() == 0


def test_every_metric_of_a_hand_made_round():
  metrics = measure(hand_made(), version=4)
  expected = {
    'len/mean': 3.0,
    'len/std': np.sqrt((1 + 1 + 4 + 4) / 4),
    'len/p50': 3.0,
    'len/max': 5.0,
    'len/correct': 1.5,
    'len/incorrect': 4.0,
    'len/truncated': 0.25,
    'reward/accuracy': 2 / 3,
    'verdict/correct': 2,
    'verdict/wrong': 1,
    'verdict/timeout': 1,
    'verdict/error': 0,
    'group/informative': 0.5,
    'group/pass_0': 0.0,
    'group/pass_low': 0.0,
    'group/pass_high': 0.5,
    'group/pass_1': 0.5,
    'engine/forwards': 5,
    'bubble/frac': 0.4,
    'bubble/tail_80': 0.0,  # four rows: 80 % of them are all four
    'lag/mean': (7 * 1 + 5 * 2) / 12,
    'lag/max': 2.0,
    'lag/span': 1,
    'lag/histogram': [0, 7, 5],
  }
  for name, value in expected.items():
    assert metrics[name] == pytest.approx(value), name


def test_the_tail_is_what_runs_after_most_rows_have_finished():
  long = dataclasses.replace(hand_made().usage, forwards=100, ended=[30] * 10 + [50] * 6 + [60, 70, 90, 100])
  metrics = measure(Round(hand_made().groups, long), version=4)
  assert metrics['bubble/tail_80'] == pytest.approx(0.5) and metrics['bubble/tail_95'] == pytest.approx(0.1)


def test_the_times_of_a_round_leave_compiling_out():
  usage = Usage(seconds=10.0, decode_seconds=8.0, reward_wait_seconds=0.5, verify_seconds=3.0)
  warm = {'t/rollout': 10.0, 't/decode': 8.0, 't/reward_wait': 0.5, 't/verify': 3.0, 't/host': 1.0, 't/compile': 0.0}
  assert rollout_times(usage, 11.0, 0.0) == warm
  first = {'t/rollout': 4.0, 't/decode': 2.0, 't/reward_wait': 0.5, 't/verify': 3.0, 't/host': 1.0, 't/compile': 6.0}
  assert rollout_times(usage, 5.0, 6.0) == first  # 11 seconds, of which 6 went into compiling


def test_pass_at_k_is_the_chance_that_k_of_n_hold_a_correct_one():
  from itertools import combinations

  for n, c in ((5, 2), (6, 1), (4, 4), (4, 0)):
    for k in range(1, n + 1):
      draws = list(combinations([1] * c + [0] * (n - c), k))
      assert pass_at_k(n, c, k) == pytest.approx(np.mean([max(d) for d in draws]))


def test_summary_of_an_evaluation():
  scores = summarise(np.array([[1], [0], [1], [1]], bool), np.array([[1, 0], [0, 0], [1, 1], [1, 0]], bool))
  assert scores['greedy'] == 0.75 and scores['greedy_stderr'] == pytest.approx(np.sqrt(0.75 * 0.25 / 4))
  assert scores['mean@2'] == 0.5 == scores['pass@1'] and scores['pass@2'] == 0.75
