"""The planner's bytes are those of the arrays themselves, and what cannot fit names the field to change."""

import jax
import pytest

from configs import base
from rollout_jax import loop, planner, warm_start
from rollout_jax.build import build
from rollout_jax.types import ConfigError
from tests.overlay import shrink


@pytest.mark.parametrize('axes', [(1, 1, 1), (2, 2, 2)])
def test_what_is_planned_is_what_lies_on_each_device(verifier, axes):
  parts = build(shrink(base.get_config(), mesh__train=axes, rollout__lag=1), verifier)
  planned = {item.name: item.bytes for item in parts.memory}
  with jax.set_mesh(parts.base.mesh):
    run = loop.start(parts, warm_start.random_params(parts.base, 0))
    slots = parts.desk.engine.init()
  here = parts.base.mesh.devices.flat[0]

  def resident(tree):
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards if shard.device == here]
    return sum(shard.data.nbytes for shard in shards)

  assert planned['parameters'] == resident(run.state.params)
  assert planned['moments'] == resident(run.state.opt_state)
  assert planned['served and frozen copies'] == resident(run.served)
  assert planned['slots (keys, values, rows)'] == resident(slots)


@pytest.mark.parametrize('remat', ['none', 'products', 'layers'])
def test_activations_are_an_estimate_from_above_that_follows_what_is_kept(verifier, remat):
  """Against what XLA says that the compiled step needs."""
  parts = build(shrink(base.get_config(), microbatch=16, pack__length=96, pack__remat=remat), verifier)
  planned = {item.name: item.bytes for item in parts.memory}
  guess = (
    planned['activations of a microbatch'] + planned['logits of a microbatch'] + planned['gradients (sum and new)']
  )
  with jax.set_mesh(parts.base.mesh):
    state = jax.eval_shape(parts.init, parts.base.policy.shapes)
    _, batch = loop.roll_out(parts, loop.start(parts, warm_start.random_params(parts.base, 0)))
    needed = parts.train_step.lower(state, {}, batch).compile().memory_analysis().temp_size_in_bytes
  assert 0.3 * guess < needed < 1.5 * guess


def test_what_cannot_fit_is_refused_by_the_largest_part(verifier, monkeypatch):
  monkeypatch.setattr(planner, 'room', lambda device: 2**20)
  with pytest.raises(ConfigError, match='GiB on each device.*The largest part are the slots.*rollout.slots'):
    build(shrink(base.get_config(), rollout__slots=4096), verifier)
