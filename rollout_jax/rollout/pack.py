"""From the groups of a round to one batch of fixed shape: masks come from lengths and sources, never from token ids."""

from collections.abc import Sequence

import numpy as np

from rollout_jax.types import Group, Outcome, RolloutBatch, Source, Stop


def pack(groups: Sequence[Group], *, capacity: int, group: int, length: int, pad: int) -> RolloutBatch:
  """A batch of numpy arrays with room for `capacity` groups of `group` rows of `length` tokens, rows left-aligned.

  Groups and rows that are not there do not exist: masks zero, prompt -1. A row whose verifier failed or ran out of time
  exists, but counts neither in statistics nor in the loss.
  """
  shape_PG, shape_PGT = (capacity, group), (capacity, group, length)
  prompt_P = np.full((capacity,), -1, np.int32)
  visit_P = np.zeros((capacity,), np.int32)
  rollout_PG = np.zeros(shape_PG, np.int32)
  tokens_PGT = np.full(shape_PGT, pad, np.int32)
  source_PGT = np.full(shape_PGT, Source.PAD, np.int8)
  logp_PGT = np.zeros(shape_PGT, np.float32)
  version_PGT = np.full(shape_PGT, -1, np.int32)
  stop_PG = np.full(shape_PG, Stop.NONE, np.int8)
  exists_PG = np.zeros(shape_PG, bool)
  verdict_PG = np.full(shape_PG, Outcome.WRONG, np.int8)
  for p, members in enumerate(groups):
    prompt_P[p], visit_P[p] = members.prompt, members.visit
    for g, (row, verdict) in enumerate(zip(members.rows, members.verdicts, strict=True)):
      n = len(row.tokens_T)
      rollout_PG[p, g], stop_PG[p, g], exists_PG[p, g] = row.request.rollout, row.stop, True
      verdict_PG[p, g] = verdict.outcome
      tokens_PGT[p, g, :n], source_PGT[p, g, :n] = row.tokens_T, row.source_T
      logp_PGT[p, g, :n], version_PGT[p, g, :n] = row.logp_T, row.version_T
  judged_PG = exists_PG & ~np.isin(verdict_PG, (Outcome.ERROR, Outcome.TIMEOUT))
  decoded_PGT = source_PGT == Source.DECODED
  return RolloutBatch(
    prompt_P=prompt_P,
    visit_P=visit_P,
    rollout_PG=rollout_PG,
    tokens_PGT=tokens_PGT,
    source_PGT=source_PGT,
    behaviour_logp_PGT=logp_PGT,
    version_PGT=version_PGT,
    stop_PG=stop_PG,
    exists_PG=exists_PG,
    verdict_PG=verdict_PG,
    reward_PG=np.zeros(shape_PG, np.float32),
    stat_PG=judged_PG.astype(np.float32),
    keep_PGT=(judged_PG[:, :, None] & decoded_PGT).astype(np.float32),
    correction_PGT=np.ones(shape_PGT, np.float32),
  )
