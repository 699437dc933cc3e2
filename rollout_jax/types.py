"""The dimension key and the types that every part shares.

Axes, written as suffixes of array names:

  P prompts in a batch     G rollouts per prompt    B rows (P * G)       T tokens of a row (prompt and answer)
  S decode slots           J rows in one transfer   E end tokens         W tokens per decode forward
  R packed rows, prompts   L tokens of these        n flat tokens        N prompts of a task
  V vocabulary             D width                  H query heads        K key/value heads
  C head channels          F feed-forward width     A tokens of an answer

One look tells which world a type belongs to: a `flax.struct.dataclass` holds arrays of fixed shape and lives on the
device, a frozen dataclass lives on the host, and a `NamedTuple` is a bundle of pure functions.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
PyTree = Any


class Source(enum.IntEnum):
  """Where a token of a row came from. The loss reads `DECODED` tokens only."""

  PAD = 0
  PROMPT = 1
  DECODED = 2
  REUSED = 3
  TOOL = 4


class Stop(enum.IntEnum):
  """Why a row ended."""

  NONE = 0
  EOS = 1
  LENGTH = 2
  BUDGET = 3
  ABORT = 4
  REPEAT = 5


class Outcome(enum.IntEnum):
  """What the verifier found. `ERROR` and `TIMEOUT` say nothing about the row: it is kept out of the loss."""

  WRONG = 0
  CORRECT = 1
  FORMAT = 2  # no answer could be read from the text
  ERROR = 3  # the verifier raised or returned nonsense
  TIMEOUT = 4


class Correctness(enum.StrEnum):
  """What a method does to the distribution that is trained on (survey arXiv 2609.25463, section 6.3)."""

  EXACT = 'exact'  # samples keep the current policy's distribution
  CORRECTED = 'corrected'  # unbiased for a stated, modified objective
  EMPIRICAL = 'empirical'  # no guarantee


class Phase(enum.IntEnum):
  """The order of the members of a chain. It never decreases along the chain."""

  REWARD = 0
  FILTER = 1
  SELECT = 2
  ADVANTAGE = 3
  CORRECT = 4


@flax.struct.dataclass
class Mean:
  """An average that still adds up over microbatches, steps and hosts."""

  total: Array
  count: Array

  def __add__(self, other: 'Mean') -> 'Mean':
    return Mean(self.total + other.total, self.count + other.count)

  def value(self) -> Array:
    """total / count; zero where nothing was counted."""
    return self.total / jnp.maximum(self.count, 1e-9)


Report = dict[str, Mean]


@flax.struct.dataclass
class RolloutBatch:
  """One batch of groups, of fixed shape. P is the scheduler's capacity; groups that were never rolled out do not exist.

  Filters only multiply `keep_PGT` and `stat_PG`, corrections only multiply `correction_PGT`, shaping only adds to
  `reward_PG`; `advantage_PGT`, `proximal_logp_PGT`, `reference_logp_PGT` and `value_PGT` have one writer each. The loss
  coefficient of a token is exists * keep * correction. Rows are left-aligned: prompt, answer, padding. What was sampled
  is never changed afterwards.
  """

  # Who.
  prompt_P: Array  # int32, index of the prompt in the task; -1 where the group does not exist
  visit_P: Array  # int32, how often the prompt was drawn before
  rollout_PG: Array  # int32
  # What was sampled.
  tokens_PGT: Array  # int32
  source_PGT: Array  # int8, Source
  behaviour_logp_PGT: Array  # float32, log-prob under the policy that sampled, with its numerics; 0 elsewhere
  version_PGT: Array  # int32, policy version that sampled the token; -1 elsewhere
  stop_PG: Array  # int8, Stop
  exists_PG: Array  # bool, false: never rolled out (padding of unequal groups and of short batches)
  # Judged.
  verdict_PG: Array  # int8, Outcome
  reward_PG: Array  # float32, zero as collected
  # Decided.
  stat_PG: Array  # float32 0/1, counts in group statistics
  keep_PGT: Array  # float32 0/1, is in the loss; as collected: exists and decoded and judged
  correction_PGT: Array  # float32, positive weight
  # Filled on the way; None until the one writer has written.
  original_PG: Array | None = (
    None  # float32, tokens in the loss before the first filter; rows that a selector removed stay
  )
  proximal_logp_PGT: Array | None = None
  reference_logp_PGT: Array | None = None
  value_PGT: Array | None = None
  advantage_PGT: Array | None = None
  turn_PGT: Array | None = None
  reward_PGT: Array | None = None

  @property
  def shape(self) -> tuple[int, int, int]:
    """(P, G, T)."""
    P, G, T = self.tokens_PGT.shape
    return P, G, T


@flax.struct.dataclass
class Tokens:
  """The flat view that a loss sees: a token per entry, in any order, and the row that it belongs to.

  A loss never sees P, G, T or how rows were packed, and a row is never split over two views. `keep_n` is exists * keep,
  `coefficient_n` is exists * keep * correction; every log-prob is finite where `keep_n` is zero.
  """

  learner_logp_n: Array
  proximal_logp_n: Array
  behaviour_logp_n: Array
  advantage_n: Array
  keep_n: Array
  coefficient_n: Array
  row_n: Array  # int32 in [0, rows)
  rows: int = flax.struct.field(pytree_node=False)
  reference_logp_n: Array | None = None

  def per_row(self, x_n: Array) -> Array:
    """Sum of `x_n` over each row, [rows]."""
    return jax.ops.segment_sum(x_n, self.row_n, self.rows)


# Bundles of functions.


@dataclasses.dataclass(frozen=True)
class Spec:
  """What a chain's checker must know of a member before anything compiles. Field names are those of `RolloutBatch`."""

  name: str
  phase: Phase
  reads: frozenset[str] = frozenset()
  writes: frozenset[str] = frozenset()
  # Members that cannot stand in the same chain, each with the reason in one sentence.
  forbids: Mapping[str, str] = dataclasses.field(default_factory=dict)
  group_size: Callable[[int], int] = lambda group: group  # G before -> G after; raises ValueError if G cannot work
  correctness: Correctness = Correctness.EXACT


class Transform(NamedTuple):
  """A pure step on a batch, inside the jitted training step.

  init() -> state; update(batch, state, **extra) -> (batch, state, Report); observe(batch, state) -> state sees the batch
  as collected, before any filter. `extra` holds `version` (int32 scalar: the version being trained). A member ignores what
  it does not need.
  """

  init: Callable[[], PyTree]
  update: Callable[..., tuple[RolloutBatch, PyTree, Report]]
  observe: Callable[[RolloutBatch, PyTree], PyTree]
  spec: Spec


class Loss(NamedTuple):
  """A policy loss. `prepare(tokens) -> scalars` runs once on the whole minibatch; `value(tokens, scalars) -> (loss_n, Report)`.

  `loss_n` is to be minimised and is not yet weighted: the training step multiplies by `coefficient_n` and by the
  aggregation's weight of the row, and sums.
  """

  prepare: Callable[[Tokens], PyTree]
  value: Callable[[Tokens, PyTree], tuple[Array, Report]]
  reads: frozenset[str] = frozenset()


class Curriculum(NamedTuple):
  """Which prompts run. Jitted, on the device, in the checkpoint.

  init() -> state; sample(state, key) -> (state, prompt_P); update(batch, state) -> state sees the batch as collected.
  """

  init: Callable[[], PyTree]
  sample: Callable[[PyTree, Array], tuple[PyTree, Array]]
  update: Callable[[RolloutBatch, PyTree], PyTree]
  correctness: Correctness = Correctness.EXACT


# Host.


@dataclasses.dataclass(frozen=True)
class Request:
  """One rollout to run. The three numbers name its key (law 1)."""

  prompt: int
  visit: int
  rollout: int


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """What was sampled for one request, as numpy arrays of its true length (prompt and answer, no padding).

  `limit` is the length at which the row must stop. A row with stop NONE is unfinished (parked) and can be resumed.
  """

  request: Request
  tokens_T: np.ndarray
  source_T: np.ndarray
  logp_T: np.ndarray
  version_T: np.ndarray
  limit: int
  stop: Stop = Stop.NONE

  @property
  def decoded(self) -> int:
    """Number of tokens that the policy sampled."""
    return int((self.source_T == Source.DECODED).sum())

  @property
  def answer_T(self) -> np.ndarray:
    """Ids after the prompt, end token included."""
    return self.tokens_T[int((self.source_T == Source.PROMPT).sum()) :]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """A verifier's finding on one row, and for ERROR and TIMEOUT what went wrong."""

  outcome: Outcome
  detail: str = ''


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """The rollouts of one prompt, each with its verdict."""

  prompt: int
  visit: int
  rows: tuple[Row, ...]
  verdicts: tuple[Verdict, ...]


class ConfigError(ValueError):
  """Bad input from the user. The message says what was wanted, what came and what to change."""


class Stopped(Exception):
  """The user asked to stop; everything is saved."""
