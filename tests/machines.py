"""A tiny policy and a training step for tests, with one switch for each thing that a test varies."""

import jax
import jax.numpy as jnp
import numpy as np

from rollout_jax import keys
from rollout_jax.curricula import uniform
from rollout_jax.distribution import distribution
from rollout_jax.losses import ppo_clip
from rollout_jax.losses.aggregation import row_weight
from rollout_jax.losses.kl import add, kl
from rollout_jax.mesh import make_mesh, replicated, sharding, shardings
from rollout_jax.models.transformer import Shape, transformer
from rollout_jax.training.optimizer import optimizer
from rollout_jax.training.score import scorer
from rollout_jax.training.state import init_state, state_shardings
from rollout_jax.training.step import Objective, Schedule, make_train_step
from rollout_jax.transforms import chain as chains
from rollout_jax.transforms import combine_rewards, drop_degenerate, group_advantage
from rollout_jax.types import Outcome, RolloutBatch, Source, Stop
from tests import tiny

POLICY = transformer(Shape(**tiny.MODEL))
PLAIN = distribution()
CHAIN = (combine_rewards(), drop_degenerate(), group_advantage())


class Trainer:
  """A jitted training step on a mesh, and states for it. `rate` is SGD's learning rate: one step shows the gradient."""

  def __init__(
    self,
    *,
    mesh=(1, 1, 1),
    members=CHAIN,
    loss=None,
    kind='none',
    beta=0.0,
    mode='token_mean',
    denominator='kept',
    epochs=1,
    minibatches=1,
    micro=4,
    together=1,
    room=0,
    chunk=0,
    remat='none',
    sampling=PLAIN,
    rate=1.0,
    name='sgd',
  ):
    self.mesh = make_mesh(mesh)
    loss = add(ppo_clip() if loss is None else loss, kl(kind=kind, beta=beta))
    chain, curriculum = chains.chain(*members), uniform(100, tiny.P)
    tx = optimizer(
      name, learning_rate=rate, warmup=0, decay='constant', decay_steps=0, decay_to=1.0, clip=0.0, options={}
    )
    scores = chains.reads_score(members, loss, epochs * minibatches)
    step = make_train_step(
      scorer=scorer(POLICY, sampling, length=room or together * tiny.T, together=together, chunk=chunk, remat=remat),
      chain=chain,
      objective=Objective(loss, row_weight(mode, denominator, constant=float(tiny.T))),
      curriculum=curriculum,
      tx=tx,
      schedule=Schedule(epochs, minibatches, micro, seed=0),
      score_proximal=scores.proximal,
      score_reference=scores.reference,
    )
    make = lambda params: init_state(params, tx, chain.init(), curriculum.init())
    self.placed = state_shardings(POLICY, tx, self.mesh, jax.eval_shape(make, POLICY.shapes))
    self.make = jax.jit(make, out_shardings=self.placed)
    self.step = jax.jit(step, donate_argnums=0, out_shardings=(self.placed, replicated(self.mesh)))

  def start(self, seed=0):
    """A state at step 0 with parameters named by the seed."""
    lay = shardings(self.mesh, POLICY.axes, POLICY.shapes)
    with jax.set_mesh(self.mesh):
      return self.make(jax.jit(POLICY.init, out_shardings=lay)(keys.named(seed, 'init')))

  def __call__(self, state, batch, frozen=None):
    """(state, report as floats) after one step."""
    with jax.set_mesh(self.mesh):
      placed = jax.device_put(batch, sharding(self.mesh, ('batch',)))
      state, (report, _) = self.step(state, {} if frozen is None else frozen, placed)
    return state, {name: float(mean.value()) for name, mean in report.items()}


def batch(*, seed=0, length=tiny.T, pad=0, exists=None, correct=None, logp=None) -> RolloutBatch:
  """Ragged rows of random tokens with random verdicts; longer `length` adds padding only. Behaviour log-probs are `logp`'s.

  `logp(tokens_BT) -> logp_BT` defaults to the tiny policy with seed 0, so that the batch is on policy for it.
  """
  rng = np.random.default_rng(seed)
  P, G, T = tiny.P, tiny.G, tiny.T
  prompt_P = rng.integers(3, 9, P)
  total_PG = prompt_P[:, None] + rng.integers(1, 20, (P, G))
  place_T = np.arange(T)
  real_PGT = place_T < total_PG[:, :, None]
  asked_PGT = np.broadcast_to(place_T < prompt_P[:, None, None], (P, G, T))
  drawn_PGT = rng.integers(1, tiny.MODEL['vocab_size'], (P, G, T))
  drawn_PGT = np.where(asked_PGT, drawn_PGT[:, :1], drawn_PGT)  # a group has one prompt
  tokens_PGT = np.where(real_PGT, drawn_PGT, pad).astype(np.int32)
  source_PGT = np.where(real_PGT, np.where(asked_PGT, Source.PROMPT, Source.DECODED), Source.PAD).astype(np.int8)
  exists_PG = np.ones((P, G), bool) if exists is None else np.asarray(exists)
  correct_PG = rng.random((P, G)) < 0.5 if correct is None else np.asarray(correct)
  decoded_PGT = source_PGT == Source.DECODED
  logp_PGT = (on_policy if logp is None else logp)(tokens_PGT.reshape(-1, T)).reshape(P, G, T) * decoded_PGT
  wide = lambda x_PGT, fill: np.pad(x_PGT, ((0, 0), (0, 0), (0, length - T)), constant_values=fill)
  keep_PGT = (decoded_PGT & exists_PG[:, :, None]).astype(np.float32)
  return RolloutBatch(
    prompt_P=np.arange(P, dtype=np.int32),
    visit_P=np.zeros(P, np.int32),
    rollout_PG=np.broadcast_to(np.arange(G, dtype=np.int32), (P, G)).copy(),
    tokens_PGT=wide(tokens_PGT, pad),
    source_PGT=wide(source_PGT, Source.PAD),
    behaviour_logp_PGT=wide(logp_PGT.astype(np.float32), 0),
    version_PGT=wide(np.where(decoded_PGT, 0, -1).astype(np.int32), -1),
    stop_PG=np.full((P, G), Stop.EOS, np.int8),
    exists_PG=exists_PG,
    verdict_PG=np.where(correct_PG, Outcome.CORRECT, Outcome.WRONG).astype(np.int8),
    reward_PG=np.zeros((P, G), np.float32),
    stat_PG=exists_PG.astype(np.float32),
    keep_PGT=wide(keep_PGT, 0),
    correction_PGT=np.ones((P, G, length), np.float32),
  )


def full_forward(params, tokens_BT, sampling=PLAIN) -> np.ndarray:
  """Log-probs of the tokens by one plain forward, [B, T]; the first is zero."""
  tokens_BT = jnp.asarray(tokens_BT)
  B, T = tokens_BT.shape
  position_BT = jnp.broadcast_to(jnp.arange(T)[None, :], (B, T))
  logits_BTV = POLICY.logits(params, POLICY.hidden(params, tokens_BT, position_BT))
  logp_BT, _ = sampling.score(logits_BTV[:, :-1], tokens_BT[:, 1:])
  return np.pad(np.asarray(logp_BT), ((0, 0), (1, 0)))


def on_policy(tokens_BT) -> np.ndarray:
  """Log-probs under the tiny policy with seed 0."""
  return full_forward(POLICY.init(keys.named(0, 'init')), tokens_BT)


def reordered(batch: RolloutBatch, order_P, order_G) -> RolloutBatch:
  """The batch with its prompts and its rollouts in another order."""
  return jax.tree.map(lambda x: x[order_P] if x.ndim == 1 else x[order_P][:, order_G], batch)
