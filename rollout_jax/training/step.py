"""The training step: one jitted function from a collected batch to new parameters and a report.

Order: reward, filter, select, advantage -> score the kept rows -> correct -> epochs x minibatches of microbatches ->
curriculum and tables. Nothing here depends on which methods a chain holds.

A token outside the policy's own top-k, top-p or min-p set (it was sampled by an older one) has no log-prob there: it is
masked before anything is counted. What a step reports, each a mean over kept tokens unless said:

  loss/total          the minimised sum, over updates that were applied
  loss/effective      share of kept tokens at which the loss has a gradient: an advantage or a KL, not held by a clip
  policy/entropy      of the sampling distribution where the tokens were drawn
  gap/mean, ratio     |learner - behaviour log-prob| and exp of it, signed, at the first update: on policy 0 and 1
  gap/above_X         share of tokens whose gap is more than X; gap/outside: share that was masked as above
  update/norm         gradient norm before clipping, over updates that were applied
  update/applied, not_finite, empty   share of the step's updates that were applied, skipped, or had no kept token
  update/bad_in_a_row                 skipped updates in a row so far
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax

from rollout_jax import keys, masked
from rollout_jax.training.microbatch import fold
from rollout_jax.training.score import Scorer, score_rows
from rollout_jax.training.state import TrainState
from rollout_jax.transforms.chain import Chain
from rollout_jax.types import Array, ConfigError, Curriculum, Loss, Mean, PyTree, Report, RolloutBatch, Source, Tokens


@flax.struct.dataclass
class Rows:
  """What a loss needs of each row, [B, ...]; a microbatch is some of these rows."""

  tokens_BT: Array
  prompt_B: Array  # tokens of the prompt
  keep_BT: Array
  correction_BT: Array
  advantage_BT: Array
  behaviour_logp_BT: Array
  proximal_logp_BT: Array | None
  reference_logp_BT: Array | None
  weight_B: Array  # the aggregation's weight of each token of the row


class Objective(NamedTuple):
  """What is minimised: the loss per token, and `row_weight(kept_PG, original_PG) -> weight_PG` of a minibatch."""

  loss: Loss
  row_weight: Callable[[Array, Array], Array]


class Schedule(NamedTuple):
  """How often a batch is used: epochs over it, minibatches (optimizer steps) an epoch, rows a microbatch, and the run's seed."""

  epochs: int
  minibatches: int
  micro: int
  seed: int


def make_train_step(
  *,
  scorer: Scorer,
  chain: Chain,
  objective: Objective,
  curriculum: Curriculum,
  tx: optax.GradientTransformation,
  schedule: Schedule,
  score_proximal: bool,
  score_reference: bool,
) -> Callable[[TrainState, dict[str, PyTree], RolloutBatch], tuple[TrainState, tuple[Report, Array]]]:
  """The function (state, frozen, batch) -> (state, (report, reward_PG)), to be jitted with `state` donated.

  `reward_PG` are the rewards of the rows as collected.

  `frozen['reference']` is read if `score_reference`. With one update per batch and no member that reads the proximal
  log-probs, `score_proximal` may be false: the loss then sees the learner's own, with the gradient stopped.
  """

  def train_step(state: TrainState, frozen: dict[str, PyTree], collected: RolloutBatch):
    extra = {'version': state.step}
    rewarded = chain.reward(collected, state.transform_state, **extra)
    batch, transform_state, report = chain.before_score(collected, state.transform_state, **extra)
    live_B = _rows(jnp.any(batch.keep_PGT > 0, axis=2))
    _check_group(scorer, batch)
    rows = _rows(batch.tokens_PGT), _prompt_lengths(batch), live_B, schedule.micro
    if score_proximal or scorer.filters:
      logp_BT, inside_BT = score_rows(scorer, state.params['policy'], *rows)
      report['gap/outside'] = masked.average(1 - inside_BT, _rows(batch.keep_PGT * batch.exists_PG[:, :, None]))
      batch = batch.replace(keep_PGT=batch.keep_PGT * inside_BT.reshape(batch.shape))
      if score_proximal:
        batch = batch.replace(proximal_logp_PGT=logp_BT.reshape(batch.shape))
    if score_reference:
      logp_BT, _ = score_rows(scorer, frozen['reference'], *rows)
      batch = batch.replace(reference_logp_PGT=logp_BT.reshape(batch.shape))
    batch, transform_state, corrected = chain.after_score(batch, transform_state, **extra)
    state, learned = _learn(state, batch)
    learned['update/bad_in_a_row'] = masked.count(state.bad)
    transform_state = chain.observe(collected, transform_state)
    curriculum_state = curriculum.update(collected, state.curriculum_state)
    state = state.replace(step=state.step + 1, transform_state=transform_state, curriculum_state=curriculum_state)
    report = {**report, **corrected, **learned, **_ledger(collected, batch)}
    return state, (report, rewarded.reward_PG)

  def _learn(state: TrainState, batch: RolloutBatch) -> tuple[TrainState, Report]:
    """Epochs times minibatches of optimizer steps; prompts are dealt to minibatches by a permutation named by step and epoch."""
    prompts = batch.shape[0]
    live_P = jnp.any(batch.keep_PGT > 0, axis=(1, 2))
    numbers = jnp.arange(schedule.epochs * schedule.minibatches)

    def update(state: TrainState, number: Array) -> tuple[TrainState, Report]:
      epoch, mini = number // schedule.minibatches, number % schedule.minibatches
      key = keys.wrap(keys.named(schedule.seed, 'minibatch', state.step, epoch))
      order_P = jax.random.permutation(key, prompts)
      order_P = order_P[jnp.argsort(~live_P[order_P], stable=True)]
      # Deal like cards, so that each minibatch gets its share of the live prompts.
      mine_p = lax.dynamic_index_in_dim(order_P.reshape(-1, schedule.minibatches), mini, axis=1, keepdims=False)
      return _update(state, jax.tree.map(lambda x: x[mine_p], batch))

    if len(numbers) == 1:
      return _update(state, batch)
    state, reports = lax.scan(update, state, numbers)
    return state, _first_update(reports)

  def _update(state: TrainState, batch: RolloutBatch) -> tuple[TrainState, Report]:
    """One optimizer step on one minibatch; nothing changes if no token is kept, or if something is not finite."""
    _check_group(scorer, batch)
    keep_PGT = batch.keep_PGT * batch.exists_PG[:, :, None]
    kept_PG = jnp.sum(keep_PGT, axis=2)
    live_B = _rows(kept_PG > 0)
    rows = Rows(
      tokens_BT=_rows(batch.tokens_PGT),
      prompt_B=_prompt_lengths(batch),
      keep_BT=_rows(keep_PGT),
      correction_BT=_rows(batch.correction_PGT),
      advantage_BT=_rows(batch.advantage_PGT),
      behaviour_logp_BT=_rows(batch.behaviour_logp_PGT),
      proximal_logp_BT=_rows(batch.proximal_logp_PGT),
      reference_logp_BT=_rows(batch.reference_logp_PGT),
      weight_B=_rows(objective.row_weight(kept_PG, batch.original_PG)),
    )
    rows = jax.lax.stop_gradient(rows)
    known_BT = rows.behaviour_logp_BT if rows.proximal_logp_BT is None else rows.proximal_logp_BT
    scalars = objective.loss.prepare(_flatten(rows, known_BT))

    def of_microbatch(rows: Rows) -> tuple[Array, PyTree, Report]:
      value = lambda params: _weighted_loss(params, rows, scalars)
      (loss, report), gradient = jax.value_and_grad(value, has_aux=True)(state.params['policy'])
      return loss, gradient, report

    loss, gradient, report = fold(of_microbatch, rows, live_B, schedule.micro, scorer.together)
    return _apply(state, loss, gradient, jnp.any(live_B), report)

  def _weighted_loss(params: PyTree, rows: Rows, scalars: PyTree) -> tuple[Array, Report]:
    learner_BT, _, entropy_BT = scorer.score(params, rows.tokens_BT, rows.prompt_B)
    tokens = _flatten(rows, learner_BT)
    weight_n = rows.weight_B[tokens.row_n] * tokens.coefficient_n

    def weighted(learner_n: Array) -> tuple[Array, Report]:
      loss_n, report = objective.loss.value(tokens.replace(learner_logp_n=learner_n), scalars)
      return masked.total(loss_n, weight_n), report

    slope_n = jax.grad(weighted, has_aux=True)(lax.stop_gradient(tokens.learner_logp_n))[0]
    loss, report = weighted(tokens.learner_logp_n)
    report = {
      **report,
      **_gap(tokens),
      'policy/entropy': masked.average(entropy_BT.reshape(-1), tokens.keep_n),
      'loss/effective': masked.average(slope_n != 0, tokens.keep_n),
    }
    return loss, report

  def _apply(
    state: TrainState, loss: Array, gradient: PyTree, any_kept: Array, report: Report
  ) -> tuple[TrainState, Report]:
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    apply = any_kept & finite
    safe = jax.tree.map(lambda g: jnp.where(finite, g, 0), gradient)
    change, opt_state = tx.update(safe, state.opt_state['policy'], state.params['policy'])
    params = optax.apply_updates(state.params['policy'], change)
    choose = lambda new, old: jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)
    one = jnp.ones((), jnp.float32)
    report = {
      **report,
      'loss/total': Mean(jnp.where(apply, loss, 0.0), apply.astype(jnp.float32)),
      'update/norm': Mean(jnp.where(apply, norm, 0.0), apply.astype(jnp.float32)),
      'update/applied': Mean(apply.astype(jnp.float32), one),
      'update/not_finite': Mean((~finite).astype(jnp.float32), one),
      'update/empty': Mean((~any_kept).astype(jnp.float32), one),
    }
    bad = jnp.where(finite, 0, state.bad + 1)
    return (
      state.replace(
        update=state.update + apply,
        bad=bad,
        params={'policy': choose(params, state.params['policy'])},
        opt_state={'policy': choose(opt_state, state.opt_state['policy'])},
      ),
      report,
    )

  return train_step


def _rows(x: Array | None) -> Array | None:
  """[P, G, ...] -> [B, ...]."""
  return None if x is None else x.reshape(-1, *x.shape[2:])


def _check_group(scorer: Scorer, batch: RolloutBatch) -> None:
  if scorer.together > 1 and batch.shape[1] != scorer.together:
    raise ConfigError(
      f'share_prompts was made for groups of {scorer.together} rows, but {batch.shape[1]} are scored: a member that selects '
      'rows stands behind one that reads scores, or does not declare group_size. Set share_prompts=False.'
    )


def _prompt_lengths(batch: RolloutBatch) -> Array:
  """Tokens in front of the first one that is not the prompt's, [B]."""
  return jnp.sum(jnp.cumprod(_rows(batch.source_PGT) == Source.PROMPT, axis=1), axis=1)


def _flatten(rows: Rows, learner_BT: Array) -> Tokens:
  count, length = rows.tokens_BT.shape
  flat = lambda x_BT: None if x_BT is None else x_BT.reshape(-1)
  proximal_BT = lax.stop_gradient(learner_BT) if rows.proximal_logp_BT is None else rows.proximal_logp_BT
  return Tokens(
    learner_logp_n=flat(learner_BT),
    proximal_logp_n=flat(proximal_BT),
    behaviour_logp_n=flat(rows.behaviour_logp_BT),
    reference_logp_n=flat(rows.reference_logp_BT),
    advantage_n=flat(rows.advantage_BT),
    keep_n=flat(rows.keep_BT),
    coefficient_n=flat(rows.keep_BT * rows.correction_BT),
    row_n=jnp.repeat(jnp.arange(count), length),
    rows=count,
  )


def _gap(tokens: Tokens) -> Report:
  """How far the learner's log-probs are from those that were recorded while sampling (behaviours U10, U11)."""
  gap_n = tokens.learner_logp_n - tokens.behaviour_logp_n
  size_n = jnp.abs(gap_n)
  ratio_n = jnp.exp(jnp.clip(gap_n, -20.0, 20.0))
  return {
    'gap/mean': masked.average(size_n, tokens.keep_n),
    'gap/ratio': masked.average(ratio_n, tokens.keep_n),
    'gap/above_0.001': masked.average(size_n > 1e-3, tokens.keep_n),
    'gap/above_0.1': masked.average(size_n > 1e-1, tokens.keep_n),
  }


def _first_update(reports: Report) -> Report:
  """Sums reports over the updates of a batch; the gap is that of the first update, before the policy moved."""
  return {
    name: jax.tree.map((lambda x: x[0]) if name.startswith('gap/') else (lambda x: x.sum(0)), mean)
    for name, mean in reports.items()
  }


def _ledger(collected: RolloutBatch, batch: RolloutBatch) -> Report:
  """Counts for the token ledger: what was decoded into the batch, and what of it has a weight in the loss."""
  decoded_PGT = (collected.source_PGT == Source.DECODED) & collected.exists_PG[:, :, None]
  trained_PGT = batch.exists_PG[:, :, None] * batch.keep_PGT * batch.correction_PGT > 0
  return {
    'ledger/decoded': masked.count(decoded_PGT),
    'ledger/trained': masked.count(trained_PGT),
    'ledger/rows': masked.count(collected.exists_PG),
    'ledger/trained_rows': masked.count(jnp.any(trained_PGT, axis=2)),
  }
