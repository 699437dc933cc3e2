"""The training state: arrays only, and how they lie on the mesh."""

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from rollout_jax.mesh import replicated, shardings
from rollout_jax.models.transformer import Policy
from rollout_jax.training.optimizer import opt_state_like
from rollout_jax.types import Array, PyTree


@flax.struct.dataclass
class TrainState:
  """Everything that a step changes. Networks are named: the one that learns is 'policy'."""

  step: Array  # int32, training steps done; also the version of the policy that these parameters are
  update: Array  # int32, optimizer steps that were applied
  bad: Array  # int32, updates in a row that were skipped because the loss or the gradient was not finite
  params: dict[str, PyTree]
  opt_state: dict[str, PyTree]
  transform_state: PyTree
  curriculum_state: PyTree


def init_state(
  params: PyTree, tx: optax.GradientTransformation, transform_state: PyTree = (), curriculum_state: PyTree = ()
) -> TrainState:
  """A state at step 0. Call it inside jit: no two leaves may share a buffer, since steps donate them."""
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    update=jnp.zeros((), jnp.int32),
    bad=jnp.zeros((), jnp.int32),
    params={'policy': params},
    opt_state={'policy': tx.init(params)},
    transform_state=transform_state,
    curriculum_state=curriculum_state,
  )


def state_shardings(policy: Policy, tx: optax.GradientTransformation, mesh: Mesh, state: TrainState) -> TrainState:
  """Shardings of a whole state: moments lie like their parameters, everything else is replicated.

  `state` may be abstract (jax.eval_shape). Raises ConfigError if the mesh does not divide an axis.
  """
  params = shardings(mesh, policy.axes, policy.shapes)
  everywhere = replicated(mesh)
  return jax.tree.map(lambda _: everywhere, state).replace(
    params={'policy': params},
    opt_state={'policy': opt_state_like(tx, policy.shapes, params, everywhere)},
  )
