"""Fine-tuning: cut and resumed it gives the same parameters, it never saves what is not finite, and whom its result suits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from rollout_jax import keys, warm_start
from rollout_jax.build import build_base, build_sft, ingredients
from rollout_jax.packing import first_fit
from rollout_jax.training.sft import Packed, make_sft_step
from rollout_jax.training.state import init_state
from rollout_jax.types import ConfigError, Stopped
from tests import machines, tiny
from tests.overlay import shrink


def config(**changes):
  return shrink(base.get_config(), sft__steps=4, sft__batch=8, sft__warmup=1, **changes)


def tune(folder, settings, stop=lambda: False):
  made, (tx, plan) = build_base(settings), build_sft(settings)
  with jax.set_mesh(made.mesh):
    return warm_start.fine_tune(made, tx, plan, warm_start.random_params(made, 0), folder, ingredients(settings), stop)


def test_fine_tuning_that_is_stopped_after_each_update_ends_with_the_same_parameters(tmp_path):
  whole = tune(tmp_path / 'whole', config())
  for _ in range(3):
    with pytest.raises(Stopped):
      tune(tmp_path / 'cut', config(), stop=lambda: True)
  cut = tune(tmp_path / 'cut', config(), stop=lambda: True)  # a stop at the last update finds the result saved
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, cut), jax.tree.map(np.array, whole))


@pytest.mark.usefixtures('quick_compile')
def test_an_update_is_the_gradient_of_the_mean_over_learned_tokens_whatever_the_microbatch_and_the_packing():
  policy, tx, room = machines.POLICY, optax.sgd(1.0), 12
  rng = np.random.default_rng(0)
  sequences = [rng.integers(1, tiny.MODEL['vocab_size'], size=length) for length in (5, 12, 3, 7, 4)]
  asked = 2
  fresh = policy.init(keys.named(0, 'init'))

  @jax.jit
  def naive(params):
    alone_BT = np.stack([np.pad(ids, (0, room - len(ids))) for ids in sequences])
    position_BT = jnp.broadcast_to(jnp.arange(room)[None], alone_BT.shape)
    logp_BTV = jax.nn.log_softmax(policy.logits(params, policy.hidden(params, jnp.asarray(alone_BT), position_BT)))
    total = sum(logp_BTV[b, t - 1, ids[t]] for b, ids in enumerate(sequences) for t in range(asked, len(ids)))
    return -total / sum(len(ids) - asked for ids in sequences)

  def rows(places):
    packed = Packed(*(np.zeros((6, room), kind) for kind in (np.int32, np.int32, np.int32, np.float32)))
    for number, (ids, (row, start)) in enumerate(zip(sequences, places, strict=True), start=1):
      end = start + len(ids)
      packed.tokens_RL[row, start:end], packed.position_RL[row, start:end] = ids, np.arange(len(ids))
      packed.segment_RL[row, start:end] = number
      packed.keep_RL[row, start + asked : end] = 1
    return packed

  expected = jax.tree.map(lambda x, g: x - g, fresh, jax.jit(jax.grad(naive))(fresh))
  alone = [(row, 0) for row in (0, 1, 2, 3, 5)]
  for places, micro in ((alone, 6), (alone, 4), (first_fit([len(ids) for ids in sequences], room), 4)):
    state, loss = jax.jit(make_sft_step(policy, tx, micro))(init_state(fresh, tx), rows(places))
    assert float(loss) == pytest.approx(float(naive(fresh)), rel=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    jax.tree.map(close, state.params['policy'], expected)


def test_first_fit_fills_rows_without_overlap_and_leaves_none_that_another_could_take_whole():
  assert first_fit([5, 12, 3, 7, 4], 12) == [(1, 7), (0, 0), (2, 4), (1, 0), (2, 0)]
  rng = np.random.default_rng(0)
  for _ in range(50):
    lengths = rng.integers(1, 13, size=rng.integers(1, 20)).tolist()
    places, taken = first_fit(lengths, 12), {}
    for length, (row, start) in zip(lengths, places, strict=True):
      span = {(row, start + i) for i in range(length)}
      assert start + length <= 12 and not span & taken.keys()
      taken |= dict.fromkeys(span)
    used = sorted(sum(1 for row, _ in taken if row == r) for r in {row for row, _ in places})
    assert len(used) == 1 or used[0] + used[1] > 12


def test_demonstrations_are_packed_whole_each_a_segment_with_its_answer_and_end_to_learn():
  made, (_, plan) = build_base(config()), build_sft(config())
  packed = warm_start.demonstrations(made, plan, 3)
  found = []
  for row in range(plan.batch):
    for segment in range(1, packed.segment_RL[row].max() + 1):
      mine = packed.segment_RL[row] == segment
      ids, learned = packed.tokens_RL[row, mine], packed.keep_RL[row, mine]
      asked = len(ids) - int(learned.sum())
      assert learned[asked:].all() and ids[-1] in made.tokenizer.end_tokens
      found.append((made.tokenizer.decode(ids[:asked]), made.tokenizer.decode(ids[asked:-1])))
  wanted = []
  for b in range(plan.batch):
    epoch, place = divmod(3 * plan.batch + b, made.task.size)
    prompt = made.task.prompt('train', int(warm_start._order(plan.seed, epoch, made.task.size)[place]))
    wanted.append((prompt.text, prompt.demonstration))
  assert sorted(found) == sorted(wanted)
  assert not packed.keep_RL[packed.segment_RL == 0].any()


def test_fine_tuning_that_diverges_says_so_and_leaves_no_result(tmp_path):
  with pytest.raises(ConfigError, match=r'sft\.learning_rate'):
    tune(tmp_path, config(sft__learning_rate=1e30))
  assert not (tmp_path / 'params').exists()


def test_a_warm_start_suits_a_fork_with_another_number_of_prompts_but_not_other_problems(tmp_path):
  tune(tmp_path, config())
  for changes, suits in ((dict(product__size=24), True), (dict(product__max_number=40), False)):
    other = config(**changes)
    made = build_base(other)
    with jax.set_mesh(made.mesh):
      if suits:
        assert warm_start.load(made, tmp_path, ingredients(other)) is not None
      else:
        with pytest.raises(ConfigError, match='max_number: 30 -> 40'):
          warm_start.load(made, tmp_path, ingredients(other))
