"""Law 5 and what a training step promises: gradients that depend on the kept tokens alone, and steps that are skipped whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax.distribution import distribution
from rollout_jax.losses.aggregation import DENOMINATORS, MODES
from rollout_jax.transforms import combine_rewards, drop_degenerate, group_advantage, pods, tis
from rollout_jax.types import ConfigError, Outcome, Source
from tests import machines, tiny
from tests.machines import Trainer

P, G = tiny.P, tiny.G
pytestmark = pytest.mark.usefixtures('quick_compile')  # a training step for each variant: compiling is all it costs


def change(trainer, batch, reference=False):
  """The parameters' change, as one vector, and the last report."""
  state = trainer.start()
  before = flat(state.params['policy'])
  state, report = trainer(state, batch, {'reference': trainer.start(seed=1).params['policy']} if reference else None)
  return flat(state.params['policy']) - before, report


def flat(params):
  return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(params)])


def naive_gradient(batch, mode, denominator):
  """The gradient of the policy loss by the book: one padded forward over all rows, no microbatch, on policy."""
  from rollout_jax import keys

  correct_PG = np.asarray(batch.verdict_PG == Outcome.CORRECT, np.float32)
  spread = correct_PG.std(axis=1, ddof=1, keepdims=True)
  advantage_PG = (correct_PG - correct_PG.mean(axis=1, keepdims=True)) / (spread + 1e-6)
  alive_P = spread[:, 0] > 0
  decoded_BT = np.asarray(batch.keep_PGT).reshape(P * G, -1)
  kept_BT = decoded_BT * np.repeat(alive_P, G)[:, None]
  n_B, o_B = kept_BT.sum(1), decoded_BT.sum(1)
  rows = {'kept': (n_B > 0).sum(), 'original': (o_B > 0).sum(), 'constant': P * G}[denominator]
  own_B = {'kept': n_B, 'original': o_B, 'constant': n_B}[denominator]
  tokens = {'kept': n_B.sum(), 'original': o_B.sum(), 'constant': P * G * tiny.T}[denominator]
  weight_B = {
    'token_mean': np.full(P * G, 1 / tokens),
    'seq_mean_token_mean': 1 / (rows * np.maximum(own_B, 1)),
    'seq_mean_token_sum': np.full(P * G, 1 / rows),
    'constant_length': np.full(P * G, 1 / (rows * tiny.T)),
  }[mode]
  scale_BT = jnp.asarray(kept_BT * weight_B[:, None] * advantage_PG.reshape(-1)[:, None])

  def loss(params):
    tokens_BT = jnp.asarray(batch.tokens_PGT.reshape(P * G, -1))
    position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None, :], tokens_BT.shape)
    logits_BTV = machines.POLICY.logits(params, machines.POLICY.hidden(params, tokens_BT, position_BT))
    logp_BTV = jax.nn.log_softmax(logits_BTV)[:, :-1]
    logp_BT = jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=2)[:, :, 0]
    return -jnp.sum(logp_BT * scale_BT[:, 1:])

  return flat(jax.grad(loss)(machines.POLICY.init(keys.named(0, 'init'))))


CORRECT = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('denominator', DENOMINATORS)
def test_gradient_is_the_naive_one_in_every_aggregation(mode, denominator):
  batch = machines.batch(correct=CORRECT)
  moved, _ = change(Trainer(mode=mode, denominator=denominator), batch)
  np.testing.assert_allclose(-moved, naive_gradient(batch, mode, denominator), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
  'how',
  [
    dict(micro=1),
    dict(micro=3),
    dict(micro=16),
    dict(room=3 * tiny.T, micro=2),
    dict(chunk=10),
    dict(room=2 * tiny.T, chunk=7, remat='products'),
    dict(remat='layers'),
  ],
  ids=str,
)
def test_gradient_does_not_change_with_microbatches_packing_chunks_of_logits_or_rematerialisation(how):
  batch = machines.batch(correct=CORRECT)
  expected, report = change(Trainer(kind='k3', beta=0.1), batch, reference=True)
  moved, packed = change(Trainer(kind='k3', beta=0.1, **how), batch, reference=True)
  np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=2e-6)
  alike = lambda report: {name: value for name, value in report.items() if not name.startswith('packing/')}
  assert alike(packed) == pytest.approx(alike(report), rel=1e-4, abs=1e-5)


HOLES = np.array([[0, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)


@pytest.mark.parametrize(
  ('settings', 'together'),
  [
    (dict(micro=3, kind='k3', beta=0.1, epochs=2, minibatches=2, name='adamw', rate=1e-3, chunk=20), 4),
    (dict(micro=2, room=6 * tiny.T, sampling=distribution(temperature=1.2, top_p=0.9)), 4),
    (dict(micro=4, members=(combine_rewards(), drop_degenerate(), pods(m=2), group_advantage())), 2),
  ],
)
def test_gradient_does_not_change_when_the_rows_of_a_group_share_their_prompt(settings, together):
  batch = machines.batch(correct=CORRECT, exists=HOLES)
  there_PG1 = batch.exists_PG[:, :, None]
  batch = batch.replace(
    tokens_PGT=np.where(there_PG1, batch.tokens_PGT, 0), source_PGT=np.where(there_PG1, batch.source_PGT, Source.PAD)
  )
  results = []
  for rows in (1, together):
    trainer = Trainer(together=rows, **settings)
    state, report = trainer(trainer.start(), batch, {'reference': trainer.start(seed=1).params['policy']})
    results.append((flat(state.params['policy']) - flat(trainer.start().params['policy']), report))
  (expected, report), (moved, shared) = results
  assert np.abs(expected).max() > 1e-4
  np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=2e-6)
  room = settings.get('room')
  alone, once = (
    report.pop('packing/rows') * report.pop('packing/filled') * (room or rows * tiny.T)
    for rows, report in ((1, report), (together, shared))
  )
  assert once < 0.95 * alone  # places that hold a token
  assert report == pytest.approx(shared, rel=1e-4, abs=1e-5)


def test_sharing_prompts_refuses_groups_of_another_size_than_it_was_made_for():
  trainer = Trainer(together=4, members=(combine_rewards(), drop_degenerate(), pods(m=2), group_advantage()))
  with pytest.raises(ConfigError, match='groups of 4 rows, but 2 are scored'):
    trainer(trainer.start(), machines.batch(correct=CORRECT))


def test_gradient_does_not_change_with_padding_or_the_pad_id():
  expected, _ = change(Trainer(), machines.batch(correct=CORRECT))
  for other in (machines.batch(correct=CORRECT, length=tiny.T + 9), machines.batch(correct=CORRECT, pad=7)):
    moved, _ = change(Trainer(), other)
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=2e-6)


def test_gradient_does_not_change_with_the_order_of_prompts_and_rollouts():
  batch, trainer = machines.batch(correct=CORRECT), Trainer()
  expected, _ = change(trainer, batch)
  moved, _ = change(trainer, machines.reordered(batch, np.array([2, 0, 3, 1]), np.array([3, 1, 0, 2])))
  np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=2e-6)


def test_one_device_and_eight_that_share_prompts_give_the_same_steps():
  batch = machines.batch(correct=CORRECT)
  settings = dict(kind='k3', beta=0.1, epochs=2, minibatches=2, name='adamw', rate=1e-3)
  results = []
  for mesh, together in (((1, 1, 1), 1), ((2, 2, 2), 4)):  # test_run.py has eight without sharing
    trainer = Trainer(mesh=mesh, together=together, **settings)
    frozen = {'reference': trainer.start(seed=1).params['policy']}
    state = trainer.start()
    for _ in range(2):
      state, report = trainer(state, batch, frozen)
    results.append((flat(state.params['policy']), report))
  (one, report), (eight, report_eight) = results
  np.testing.assert_allclose(eight, one, rtol=1e-3, atol=1e-5)
  assert report.keys() == report_eight.keys()
  for name, value in report.items():
    if not name.startswith('packing/'):
      assert report_eight[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_moments_lie_like_their_parameters():
  trainer = Trainer(mesh=(2, 2, 2), name='adamw')
  state, _ = trainer(trainer.start(), machines.batch())
  params = jax.tree.leaves(state.params['policy'])
  moments = [x for x in jax.tree.leaves(state.opt_state['policy']) if x.ndim]
  assert len(moments) == 2 * len(params)
  placed = sorted(str((x.shape, x.sharding.spec)) for x in params)
  assert sorted(str((x.shape, x.sharding.spec)) for x in moments) == sorted(placed * 2)
  assert any('tensor' in x for x in placed) and any('fsdp' in x for x in placed)


@pytest.mark.parametrize('settings', [{}, dict(epochs=2, minibatches=2)])
def test_a_batch_without_a_kept_token_changes_nothing(settings):
  nothing = machines.batch(exists=np.zeros((P, G), bool))
  trainer = Trainer(name='adamw', members=(*machines.CHAIN, tis()), kind='k2', beta=0.1, **settings)
  state = trainer.start()
  before = jax.tree.map(np.array, (state.params, state.opt_state))
  state, report = trainer(state, nothing, {'reference': trainer.start().params['policy']})
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, (state.params, state.opt_state)), before)
  assert all(np.isfinite(value) for value in report.values())
  assert report['update/empty'] == 1 and report['update/applied'] == 0
  assert int(state.update) == 0 and int(state.step) == 1


def test_a_minibatch_without_a_kept_token_is_no_update():
  correct = np.zeros((P, G), bool)
  correct[1, :2] = True  # one informative group, two minibatches
  trainer = Trainer(minibatches=2, name='adamw', rate=1e-3)
  state, report = trainer(trainer.start(), machines.batch(correct=correct))
  assert int(state.update) == 1 and report['update/applied'] == 0.5 and report['update/empty'] == 0.5


def test_an_update_that_is_not_finite_is_skipped_and_counted():
  trainer = Trainer(name='adamw', rate=1e-3, members=(*machines.CHAIN, tis()))
  batch = machines.batch(correct=CORRECT)
  poison = batch.replace(behaviour_logp_PGT=np.where(batch.keep_PGT > 0, np.nan, batch.behaviour_logp_PGT))
  state = trainer.start()
  before = jax.tree.map(np.array, (state.params, state.opt_state))
  for bad in (1, 2):
    state, report = trainer(state, poison)
    assert report['update/bad_in_a_row'] == bad and report['update/not_finite'] == 1
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, (state.params, state.opt_state)), before)
  state, report = trainer(state, batch)
  assert report['update/bad_in_a_row'] == 0 and int(state.update) == 1


@pytest.mark.parametrize(
  'sampling', [distribution(), distribution(temperature=0.7), distribution(temperature=1.3, top_p=0.9)]
)
def test_the_first_ratio_on_policy_is_one(sampling):
  logp = lambda tokens_BT: machines.full_forward(
    machines.POLICY.init(machines.keys.named(0, 'init')), tokens_BT, sampling
  )
  trainer = Trainer(sampling=sampling, epochs=2, minibatches=2)
  _, report = trainer(trainer.start(), machines.batch(correct=CORRECT, logp=logp))
  assert report['gap/mean'] < 1e-5 and report['gap/ratio'] == pytest.approx(1, abs=1e-5)


def test_the_policy_moves_towards_rewarded_tokens():
  batch, trainer = machines.batch(correct=CORRECT), Trainer(rate=0.1)
  state, before = trainer.start(), machines.on_policy(batch.tokens_PGT.reshape(P * G, -1))
  for _ in range(5):
    state, report = trainer(state, batch)
  after = machines.full_forward(state.params['policy'], batch.tokens_PGT.reshape(P * G, -1))
  gain_PG = ((after - before) * batch.keep_PGT.reshape(P * G, -1)).sum(1).reshape(P, G)
  assert gain_PG[0][CORRECT[0]].mean() > gain_PG[0][~CORRECT[0]].mean()
  assert gain_PG[2][CORRECT[2]].mean() > gain_PG[2][~CORRECT[2]].mean()
  assert report['gap/mean'] > 1e-4  # the behaviour log-probs are those of the start


def test_only_microbatches_with_kept_rows_run():
  """The loop's bound counts live rows: rows of dead groups cost nothing (law 8)."""
  from rollout_jax.training.microbatch import order_rows

  live_B = jnp.asarray(np.repeat(CORRECT.any(1) & ~CORRECT.all(1), G))
  order_Mm, count = order_rows(live_B, 3)
  assert int(count) == 3 and order_Mm.shape == (6, 3)  # 8 of 16 rows live, in microbatches of 3
  assert sorted(np.asarray(order_Mm).ravel()[:8].tolist()) == np.flatnonzero(live_B).tolist()
  assert (np.asarray(order_Mm).ravel()[16:] == 16).all()


def test_effective_tokens_are_those_at_which_the_loss_has_a_gradient():
  batch = machines.batch(correct=CORRECT)
  kept_P = batch.keep_PGT.sum((1, 2))
  signal_P = CORRECT.any(1) & ~CORRECT.all(1)
  _, report = change(Trainer(members=(combine_rewards(), group_advantage())), batch)
  assert report['loss/effective'] == pytest.approx(kept_P[signal_P].sum() / kept_P.sum())
  trainer = Trainer(members=(combine_rewards(), group_advantage()), kind='k2', beta=0.1)
  _, report = trainer(trainer.start(), batch, {'reference': trainer.start(seed=1).params['policy']})
  assert report['loss/effective'] == 1  # the penalty pulls everywhere


def test_the_ledger_counts_what_a_chain_takes_out():
  members = (combine_rewards(), drop_degenerate(), pods(m=2), group_advantage())
  batch = machines.batch(correct=CORRECT)
  _, report = change(Trainer(members=members), batch)
  assert report['ledger/rows'] == 16 and report['ledger/trained_rows'] == 4
  assert report['dropped/drop_degenerate'] == 8 and report['dropped/pods'] == 4
  assert (
    report['ledger/decoded'] == batch.keep_PGT.sum() and 0 < report['ledger/trained'] < report['ledger/decoded'] / 2
  )


def test_learning_rate_zero_changes_nothing_and_stays_on_policy():
  trainer = Trainer(name='adamw', rate=0.0)
  state, report = trainer(trainer.start(), machines.batch(correct=CORRECT))
  state, report = trainer(state, machines.batch(correct=CORRECT))
  np.testing.assert_array_equal(flat(state.params['policy']), flat(trainer.start().params['policy']))
  assert report['gap/mean'] < 1e-5


def test_a_token_outside_the_sampling_set_leaves_numerator_and_denominator_alike():
  """Behaviours U3: random tokens lie mostly outside the top 8; leaving them out by hand gives the same step."""
  narrow = distribution(top_k=8)
  batch = machines.batch(correct=CORRECT)
  params = machines.POLICY.init(machines.keys.named(0, 'init'))
  tokens_BT = jnp.asarray(batch.tokens_PGT.reshape(P * G, -1))
  position_BT = jnp.broadcast_to(jnp.arange(tiny.T)[None, :], tokens_BT.shape)
  logits_BTV = machines.POLICY.logits(params, machines.POLICY.hidden(params, tokens_BT, position_BT))
  inside_BT = np.asarray(narrow.score(logits_BTV[:, :-1], tokens_BT[:, 1:])[1])
  inside_PGT = np.pad(inside_BT, ((0, 0), (1, 0)), constant_values=True).reshape(batch.tokens_PGT.shape)
  by_hand = batch.replace(keep_PGT=batch.keep_PGT * inside_PGT)
  for mode in ('token_mean', 'seq_mean_token_mean'):
    expected, _ = change(Trainer(sampling=narrow, mode=mode), by_hand)
    moved, report = change(Trainer(sampling=narrow, mode=mode), batch)
    np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=2e-6)
    assert 0.5 < report['gap/outside'] < 1 and np.isfinite(report['loss/total'])
    assert report['ledger/trained'] < report['ledger/decoded'] / 2
