"""Pass-rate history: draw more often the prompts that the policy solves about half of the time.

A Beta table holds what was seen of each prompt; a prompt's weight is the learnability p (1 - p) of its expected pass
rate p (Foster et al., arXiv 2502.12272; the table and its decay are MoPPS's, arXiv 2507.04632). Prompts are drawn
without replacement in proportion to their weights by Gumbel-top-k. A prompt that was never seen has p = 1/2, the
largest weight, so the whole task is tried first. Left out: MoPPS's Thompson draw of p and its target of 1/2.

Config: `curriculum='pass_rate'`, section `pass_rate`.
"""

import flax.struct
import jax
import jax.numpy as jnp

from rollout_jax import posterior
from rollout_jax.keys import wrap
from rollout_jax.types import Array, ConfigError, Correctness, Curriculum, Outcome, RolloutBatch


@flax.struct.dataclass
class History:
  """What was seen of each prompt, and how many draws were made."""

  table: posterior.Beta
  draw: Array  # int32


def pass_rate(size: int, prompts: int, *, decay: float = 0.5, prior: float = 1.0) -> Curriculum:
  """Draws `prompts` different prompts with weights p (1 - p); `decay` is what an old count is worth at the next visit.

  Only judged rows of the batch as collected count. A draw is named by (key, its number): `sample` takes the same key at
  every call.
  """
  if prompts > size:
    raise ConfigError(
      f'curriculum pass_rate draws without replacement: {prompts} prompts per round of a task with {size}.'
    )
  if not 0 <= decay <= 1 or prior <= 0:
    raise ConfigError(f'pass_rate needs 0 <= decay <= 1 and prior > 0, but got decay={decay}, prior={prior}.')

  def init() -> History:
    return History(posterior.prior_table(size, prior), jnp.zeros((), jnp.int32))

  def sample(state: History, key: Array) -> tuple[History, Array]:
    rate_N = posterior.mean(state.table)
    noise_N = jax.random.gumbel(jax.random.fold_in(wrap(key), state.draw), (size,))
    _, prompt_P = jax.lax.top_k(jnp.log(rate_N) + jnp.log1p(-rate_N) + noise_N, prompts)
    return state.replace(draw=state.draw + 1), prompt_P.astype(jnp.int32)

  def update(batch: RolloutBatch, state: History) -> History:
    counted_PG = batch.stat_PG * batch.exists_PG
    correct_PG = counted_PG * (batch.verdict_PG == Outcome.CORRECT)
    success_P, failure_P = jnp.sum(correct_PG, axis=1), jnp.sum(counted_PG - correct_PG, axis=1)
    table = posterior.observe(state.table, batch.prompt_P, success_P, failure_P, decay=decay, prior=prior)
    return state.replace(table=table)

  return Curriculum(init, sample, update, Correctness.EMPIRICAL)
