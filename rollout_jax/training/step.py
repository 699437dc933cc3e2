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
  packing/rows        packed rows that were forwarded; packing/filled: share of their places that hold a token
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
from rollout_jax.training.packing import Layout, Places, cuts
from rollout_jax.training.score import Scorer, score_rows
from rollout_jax.training.state import TrainState
from rollout_jax.transforms.chain import Chain
from rollout_jax.types import Array, ConfigError, Curriculum, Loss, Mean, PyTree, Report, RolloutBatch, Source, Tokens


@flax.struct.dataclass
class Columns:
  """What a loss needs of each token, [B, T], or [R, L] once rows are packed."""

  tokens: Array
  row: Array  # its row of the minibatch
  keep: Array
  correction: Array
  advantage: Array
  behaviour_logp: Array
  proximal_logp: Array | None
  reference_logp: Array | None
  weight: Array  # the aggregation's weight of each token of the row


class Objective(NamedTuple):
  """What is minimised: the loss per token, and `row_weight(kept_PG, original_PG) -> weight_PG` of a minibatch."""

  loss: Loss
  row_weight: Callable[[Array, Array], Array]


class Schedule(NamedTuple):
  """How often a batch is used: epochs, minibatches (optimizer steps) an epoch, packed rows a microbatch, and the seed."""

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
    _check_group(scorer, batch)
    rows = _rows(batch.tokens_PGT), _prompt_lengths(batch), cuts(_rows(batch.keep_PGT)), schedule.micro
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
    B, T = kept_PG.size, batch.shape[2]
    each = lambda x_B: jnp.broadcast_to(x_B[:, None], (B, T))
    columns = Columns(
      tokens=_rows(batch.tokens_PGT),
      row=each(jnp.arange(B)),
      keep=_rows(keep_PGT),
      correction=_rows(batch.correction_PGT),
      advantage=_rows(batch.advantage_PGT),
      behaviour_logp=_rows(batch.behaviour_logp_PGT),
      proximal_logp=_rows(batch.proximal_logp_PGT),
      reference_logp=_rows(batch.reference_logp_PGT),
      weight=each(_rows(objective.row_weight(kept_PG, batch.original_PG))),
    )
    columns = lax.stop_gradient(columns)
    known = columns.behaviour_logp if columns.proximal_logp is None else columns.proximal_logp
    scalars = objective.loss.prepare(_flatten(columns, known, B))
    layout = scorer.layout(_prompt_lengths(batch), cuts(columns.keep), T)

    def of_microbatch(rows: Layout) -> tuple[Array, PyTree, Report]:
      mine = jax.tree.map(rows.take, columns)
      value = lambda params: _weighted_loss(params, mine, rows.places, scalars, B)
      (loss, report), gradient = jax.value_and_grad(value, has_aux=True)(state.params['policy'])
      return loss, gradient, report

    used_R = layout.token_RL[:, 0] > 0
    loss, gradient, report = fold(of_microbatch, layout, used_R, schedule.micro)
    report['packing/rows'] = masked.count(used_R)
    report['packing/filled'] = masked.average(
      layout.token_RL > 0, jnp.broadcast_to(used_R[:, None], layout.token_RL.shape)
    )
    return _apply(state, loss, gradient, jnp.any(used_R), report)

  def _weighted_loss(
    params: PyTree, columns: Columns, places: Places, scalars: PyTree, rows: int
  ) -> tuple[Array, Report]:
    learner_mL, _, entropy_mL = scorer.score(params, columns.tokens, places)
    tokens = _flatten(columns, learner_mL, rows)
    weight_n = columns.weight.reshape(-1) * tokens.coefficient_n

    def weighted(learner_n: Array) -> tuple[Array, Report]:
      loss_n, report = objective.loss.value(tokens.replace(learner_logp_n=learner_n), scalars)
      return masked.total(loss_n, weight_n), report

    slope_n = jax.grad(weighted, has_aux=True)(lax.stop_gradient(tokens.learner_logp_n))[0]
    loss, report = weighted(tokens.learner_logp_n)
    report = {
      **report,
      **_gap(tokens),
      'policy/entropy': masked.average(entropy_mL.reshape(-1), tokens.keep_n),
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


def _flatten(columns: Columns, learner: Array, rows: int) -> Tokens:
  flat = lambda x: None if x is None else x.reshape(-1)
  proximal = lax.stop_gradient(learner) if columns.proximal_logp is None else columns.proximal_logp
  return Tokens(
    learner_logp_n=flat(learner),
    proximal_logp_n=flat(proximal),
    behaviour_logp_n=flat(columns.behaviour_logp),
    reference_logp_n=flat(columns.reference_logp),
    advantage_n=flat(columns.advantage),
    keep_n=flat(columns.keep),
    coefficient_n=flat(columns.keep * columns.correction),
    row_n=flat(columns.row),
    rows=rows,
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
