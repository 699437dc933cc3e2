"""What the benchmarks decode: rows whose lengths are fixed beforehand, so that every engine does the same work.

`equal`      64 rows: 8 prompts of 32 tokens, 8 rollouts each, 128 new tokens each
`ragged`     256 prompts of 32 tokens, lengths log-normal (median 30, sigma 0.8) from 4 to 128 tokens
`long_tail`  512 prompts of 32 tokens, lengths log-normal of coefficient of variation 1, mean 32, up to 512 tokens

The model is of the Qwen2 kind: 4 layers, width 256, 8 query and 2 key/value heads, feed-forward 704, vocabulary 1,024,
tied; 3.08 million random weights. Nothing ends a row but its length.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence

import jax
import numpy as np

from rollout_jax import keys
from rollout_jax.decoding.buckets import ladder
from rollout_jax.decoding.engine import engine
from rollout_jax.distribution import distribution
from rollout_jax.fetch import Fetcher
from rollout_jax.mesh import make_mesh
from rollout_jax.models.transformer import Policy, Shape, transformer
from rollout_jax.rollout.collect import Desk, Round, collect
from rollout_jax.schedulers import synchronous
from rollout_jax.types import Outcome, PyTree, Verdict

SHAPE = dict(
  vocab_size=1024,
  layers=4,
  width=256,
  heads=8,
  kv_heads=2,
  head_width=32,
  feed_forward=704,
  qkv_bias=True,
  rope_theta=1e6,
)
PROMPT = 32


@dataclasses.dataclass(frozen=True)
class Workload:
  """Prompts, rollouts of each, and how many tokens each row decodes: budget_N[prompt]."""

  name: str
  group: int
  slots: int
  budget_N: Sequence[int]

  @property
  def tokens(self) -> int:
    """Tokens that are decoded in all."""
    return self.group * sum(self.budget_N)

  @property
  def bound(self) -> int:
    """Forwards that no order of the rows can do without: slots are full, or the longest row decodes."""
    return max(-(-self.tokens // self.slots), max(self.budget_N))


def workloads() -> dict[str, Workload]:
  """The workloads by name."""
  ragged = np.clip(np.random.default_rng(0).lognormal(3.4, 0.8, 256).astype(int), 4, 128).tolist()
  return {
    'equal': Workload('equal', 8, 64, [128] * 8),
    'ragged': Workload('ragged', 1, 64, ragged),
    'long_tail': Workload('long_tail', 1, 64, lognormal(512, mean=32, cv=1.0, most=512)),
  }


def lognormal(count: int, *, mean: float, cv: float, most: int) -> list[int]:
  """Log-normal lengths of this mean and coefficient of variation, from 1 to `most`."""
  sigma = np.sqrt(np.log(1 + cv**2))
  drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
  return np.clip(np.round(drawn), 1, most).astype(int).tolist()


class Instant:
  """A verifier that finds every row wrong at once: what is measured is decoding."""

  seconds = 0.0

  def submit(self, key: Hashable, split: str, index: int, text: str) -> None:
    pass

  def flush(self) -> None:
    pass

  def wait(self, keys: Iterable[Hashable]) -> dict[Hashable, Verdict]:
    return dict.fromkeys(keys, Verdict(Outcome.WRONG))


def desk(policy: Policy, work: Workload, **changes) -> Desk:
  """A desk for this workload; `changes` are the settings of the engine and the loop, as of `SETTINGS`."""
  settings = SETTINGS | changes
  length = PROMPT + max(work.budget_N)
  slots = ladder(slots=work.slots, halvings=settings['halvings'], length=length, length_step=settings['length_step'])
  prompt_NL = np.random.default_rng(1).integers(1, policy.shape.vocab_size, (len(work.budget_N), PROMPT))
  return Desk(
    engine=engine(
      policy,
      distribution(**settings['sampling']),
      ladder=slots,
      prompt_length=PROMPT,
      end_tokens=(),
      mesh=make_mesh((1, 1, 1)),
    ),
    prompt=lambda split, index: prompt_NL[index].tolist(),
    text=lambda ids: '',
    verifier=Instant(),
    fetcher=Fetcher(),
    seed=0,
    pad=0,
    length=length,
    prompt_length=PROMPT,
    budget=lambda request: work.budget_N[request.prompt],
    prefill=settings['prefill'],
    chunk=settings['chunk'],
    refill=settings['refill'],
    delay=0,
  )


SETTINGS = dict(halvings=3, length_step=32, prefill=16, chunk=16, refill=8, sampling={})
# One batch after another, each at full width until its longest row has ended: what a loop without slots does.
STATIC = dict(halvings=0, length_step=0, prefill=64, chunk=10_000, refill=10_000)


def runner(desk: Desk, params: PyTree, work: Workload, *, longest_first: bool = False) -> Callable[[], Round]:
  """A function that decodes the workload once."""
  order = range(len(work.budget_N))
  if longest_first:
    order = sorted(order, key=lambda i: -work.budget_N[i])
  scheduler = synchronous(len(work.budget_N), work.group)

  def run() -> Round:
    drawn = iter(order)
    return collect(
      desk,
      params,
      0,
      split='train',
      group=work.group,
      scheduler=scheduler,
      state=scheduler.init(),
      draw=lambda n: [(next(drawn), 0) for _ in range(n)],
    )[1]

  return run


def policy_and_params(dtype: str = 'float32') -> tuple[Policy, PyTree]:
  """The model of the benchmarks with random weights."""
  policy = transformer(Shape(**SHAPE, dtype=dtype))
  return policy, jax.jit(policy.init)(keys.named(0, 'bench'))
