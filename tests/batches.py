"""Hand-made batches and token views for tests of transforms, losses and curricula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rollout_jax.types import Array, Outcome, Report, RolloutBatch, Source, Stop, Tokens, Transform

P, G, T = 4, 8, 6  # the shape of `mixed`; group 3 does not exist
VERSION = 10  # the policy version that trains it


def of_rewards(reward_PG, *, stat_PG=None, correct_PG=None, **fields) -> RolloutBatch:
  """A batch with these rewards: two tokens a row, the first a prompt. Rows outside `stat_PG` are out of the loss too."""
  reward_PG = np.asarray(reward_PG, np.float32)
  stat_PG = np.ones_like(reward_PG) if stat_PG is None else np.asarray(stat_PG, np.float32)
  correct_PG = reward_PG >= 1 if correct_PG is None else np.asarray(correct_PG)
  shape_PG, shape_PGT = reward_PG.shape, (*reward_PG.shape, 2)
  source_PGT = np.broadcast_to(np.array([Source.PROMPT, Source.DECODED], np.int8), shape_PGT)
  batch = dict(
    prompt_P=np.arange(shape_PG[0], dtype=np.int32),
    visit_P=np.zeros(shape_PG[0], np.int32),
    rollout_PG=np.broadcast_to(np.arange(shape_PG[1], dtype=np.int32), shape_PG),
    tokens_PGT=np.ones(shape_PGT, np.int32),
    source_PGT=source_PGT,
    behaviour_logp_PGT=np.where(source_PGT == Source.DECODED, -1.0, 0.0).astype(np.float32),
    version_PGT=np.where(source_PGT == Source.DECODED, 0, -1).astype(np.int32),
    stop_PG=np.full(shape_PG, Stop.EOS, np.int8),
    exists_PG=np.ones(shape_PG, bool),
    verdict_PG=np.where(correct_PG, Outcome.CORRECT, Outcome.WRONG).astype(np.int8),
    reward_PG=reward_PG,
    stat_PG=stat_PG,
    keep_PGT=(source_PGT == Source.DECODED) * stat_PG[:, :, None],
    correction_PGT=np.ones(shape_PGT, np.float32),
  )
  return RolloutBatch(**{name: jnp.asarray(x) for name, x in (batch | fields).items()})


def mixed(seed: int = 0) -> RolloutBatch:
  """A scored batch with everything in it: ragged rows, rows and a group that do not exist, errors, several versions."""
  rng = np.random.default_rng(seed)
  exists_PG = rng.random((P, G)) < 0.9
  exists_PG[3] = False
  length_PG = rng.integers(2, T + 1, (P, G)) * exists_PG
  place_T = np.arange(T)
  source_PGT = np.where(place_T < 1, Source.PROMPT, Source.DECODED) * (place_T < length_PG[:, :, None])
  verdict_PG = rng.choice([Outcome.WRONG, Outcome.CORRECT, Outcome.FORMAT], (P, G)).astype(np.int8)
  verdict_PG[rng.random((P, G)) < 0.1] = Outcome.ERROR
  verdict_PG[0, 0] = Outcome.TIMEOUT
  judged_PG = exists_PG & (verdict_PG < Outcome.ERROR)
  decoded_PGT = source_PGT == Source.DECODED
  logp = lambda: (-rng.gamma(2.0, 1.0, (P, G, T)) * decoded_PGT).astype(np.float32)
  return RolloutBatch(
    prompt_P=jnp.array([5, 2, 7, -1], jnp.int32),
    visit_P=jnp.zeros(P, jnp.int32),
    rollout_PG=jnp.broadcast_to(jnp.arange(G, dtype=jnp.int32), (P, G)),
    tokens_PGT=jnp.asarray(rng.integers(1, 9, (P, G, T)) * (source_PGT > 0), jnp.int32),
    source_PGT=jnp.asarray(source_PGT, jnp.int8),
    behaviour_logp_PGT=jnp.asarray(logp()),
    version_PGT=jnp.asarray(np.where(decoded_PGT, rng.integers(4, VERSION + 1, (P, G, T)), -1), jnp.int32),
    stop_PG=jnp.full((P, G), Stop.EOS, jnp.int8),
    exists_PG=jnp.asarray(exists_PG),
    verdict_PG=jnp.asarray(verdict_PG),
    reward_PG=jnp.asarray(rng.integers(0, 5, (P, G)) / 4, jnp.float32),
    stat_PG=jnp.asarray(judged_PG, jnp.float32),
    keep_PGT=jnp.asarray(decoded_PGT & judged_PG[:, :, None], jnp.float32),
    correction_PGT=jnp.ones((P, G, T), jnp.float32),
    proximal_logp_PGT=jnp.asarray(logp()),
    reference_logp_PGT=jnp.asarray(logp()),
  )


def masked_out(batch: RolloutBatch) -> RolloutBatch:
  """The batch with every row out of the loss and of the statistics, as if nothing had been rolled out."""
  zero = jnp.zeros_like
  return batch.replace(exists_PG=zero(batch.exists_PG), stat_PG=zero(batch.stat_PG), keep_PGT=zero(batch.keep_PGT))


def arrays(batch: RolloutBatch) -> dict[str, np.ndarray]:
  """The fields that are there, by name, as numpy arrays."""
  fields = ((f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch))
  return {name: np.asarray(x) for name, x in fields if x is not None}


def reordered(batch: RolloutBatch, order_P: np.ndarray, order_G: np.ndarray) -> RolloutBatch:
  """The batch with its prompts and its rollouts in another order."""
  changed = {}
  for name, x in arrays(batch).items():
    x = x[order_P]
    changed[name] = jnp.asarray(x[:, order_G] if name.rsplit('_', 1)[1].startswith('PG') else x)
  return batch.replace(**changed)


def of_tokens(learner_n, *, proximal_n=None, advantage_n=1.0, keep_n=None, row_n=None, rows=1, reference_n=None):
  """A token view in which everything not given is on policy, kept, and in one row."""
  learner_n = jnp.asarray(learner_n, jnp.float32)
  full = lambda x, other: jnp.broadcast_to(jnp.asarray(other if x is None else x, jnp.float32), learner_n.shape)
  keep_n = full(keep_n, 1.0)
  return Tokens(
    learner_logp_n=learner_n,
    proximal_logp_n=full(proximal_n, learner_n),
    behaviour_logp_n=full(proximal_n, learner_n),
    advantage_n=full(advantage_n, 1.0),
    keep_n=keep_n,
    coefficient_n=keep_n,
    row_n=jnp.zeros(learner_n.shape, jnp.int32) if row_n is None else jnp.asarray(row_n, jnp.int32),
    rows=rows,
    reference_logp_n=full(reference_n, learner_n),
  )


def plain(member: Transform, batch: RolloutBatch) -> tuple[RolloutBatch, Report]:
  """The batch after a transform that was never used before, and its report."""
  after, _, report = member.update(batch, member.init(), version=jnp.int32(VERSION))
  return after, report


def applied(member: Transform, batch: RolloutBatch) -> tuple[RolloutBatch, Report]:
  """`plain` under jit."""
  return jax.jit(functools.partial(plain, member))(batch)


def value(mean) -> Array:
  """The number that a Mean stands for."""
  return np.asarray(mean.value())
