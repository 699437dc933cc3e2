import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rollout_jax import mesh
from rollout_jax.models.cache import Cache
from rollout_jax.models.transformer import Block, Shape, transformer
from rollout_jax.types import ConfigError
from tests import tiny
from tests.test_transformer import EVERYTHING, B, T, example, make


def test_parameters_are_cut_along_their_axes():
  policy, _ = make(**EVERYTHING)
  grid = mesh.make_mesh((2, 2, 2))
  params = jax.jit(policy.init, out_shardings=mesh.shardings(grid, policy.axes, policy.shapes))(jax.random.PRNGKey(1))
  local = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, params)
  assert local['embedding'] == local['head'] == (32, 16)
  block = local['block_1']
  assert block['attention']['qkv'] == (16, 1, 4, 8)
  assert block['attention']['out'] == (1, 2, 8, 16)
  assert block['attention']['bias'] == (1, 4, 8)
  assert block['feed_forward'] == dict(gate_up=(16, 2, 32), down=(32, 16))
  assert block['attention_norm']['scale'] == (32,)


@pytest.mark.parametrize(
  ('change', 'axis'),
  [
    (dict(kv_heads=1), 'kv_heads'),
    (dict(vocab_size=63), 'vocab'),
    (dict(feed_forward=65), 'mlp'),
    (dict(width=33), 'embed'),
  ],
)
def test_a_shape_that_the_mesh_does_not_divide_is_refused_by_axis(change, axis):
  policy = transformer(Shape(**tiny.MODEL | change))
  with pytest.raises(ConfigError, match=f'axis {axis!r}'):
    mesh.shardings(mesh.make_mesh((2, 2, 2)), policy.axes, policy.shapes)


def test_eight_devices_give_the_logits_gradients_and_cached_steps_of_one():
  policy, params = make(**EVERYTHING)
  tokens, position = example()

  def run(params, tokens, position):
    cached, _ = policy.hidden(params, tokens, position, cache=policy.new_cache(B, T))

    def loss(params):
      logits = policy.logits(params, policy.hidden(params, tokens, position))
      return jnp.sin(logits).sum(), logits

    return *jax.grad(loss, has_aux=True)(params), cached

  alone = jax.jit(run)(params, tokens, position)
  grid = mesh.make_mesh((2, 2, 2))
  rows, cut = mesh.sharding(grid, ('batch', None)), mesh.shardings(grid, policy.axes, policy.shapes)
  with jax.set_mesh(grid):
    inputs = jax.device_put(params, cut), jax.device_put(tokens, rows), jax.device_put(position, rows)
    together = jax.jit(run, out_shardings=(cut, None, None))(*inputs)
  for one, eight in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
    # Entries are sums with cancellation: rounding is measured against the largest of the array.
    np.testing.assert_allclose(np.asarray(eight), np.asarray(one), atol=3e-6 * float(jnp.abs(one).max()), rtol=0)


def collectives(text):
  """(operation, groups of devices) of each collective in compiled HLO."""
  found = re.finditer(r'(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(.*', text)
  return [(match[1], groups(match[0])) for match in found]


def groups(line):
  """The groups of devices of a collective, sorted; XLA writes them in three notations."""

  def numbers(text):
    return [int(i) for i in text.split(',')]

  def devices(dims, turn):
    ids = np.arange(math.prod(numbers(dims))).reshape(numbers(dims))
    return ids.transpose(numbers(turn)) if turn else ids

  iota = r'\[([\d,]+)\](?:T\(([\d,]+)\))?'
  if found := re.search(r'replica_groups=\{(\{[\d,{}]*\})\}', line):
    ids = [numbers(ids) for ids in re.findall(r'\{([\d,]+)\}', found[1])]
  elif found := re.search(rf'replica_groups=\[([\d,]+)\]<={iota}', line):
    ids = devices(*found.groups()[1:]).reshape(numbers(found[1])).tolist()
  else:
    found = re.search(rf'replica_groups=mesh\[(.*?)\](?:, device_ids=\({iota}\))? \{{(.*?)\}}', line)
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
    inner = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", found[4])]
    ids = devices(found[2] or str(math.prod(sizes.values())), found[3]).reshape(list(sizes.values()))
    ids = np.moveaxis(ids, inner, range(-len(inner), 0))
    ids = ids.reshape(-1, math.prod(ids.shape[-len(inner) :])).tolist()
  return sorted(map(tuple, ids))


def test_groups_are_read_in_every_notation():
  assert groups('replica_groups={{0,1},{2,3}}, x') == [(0, 1), (2, 3)]
  assert groups('replica_groups=[2,2]<=[4], x') == [(0, 1), (2, 3)]
  assert groups('replica_groups=[2,2]<=[2,2]T(1,0), x') == [(0, 2), (1, 3)]
  assert groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, x") == [(0, 2), (1, 3)]
  assert groups("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x") == [(0, 1, 2, 3)]
  assert groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x") == [(0, 1), (2, 3)]


def placed(grid, tree, axes):
  """The tree's shapes on the mesh."""
  where = mesh.shardings(grid, axes, tree)
  return jax.tree.map(lambda x, cut: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), tree, where)


def inputs(grid, shape, cached):
  """What a block takes, as shapes on the mesh: stream, positions, mask, and the layer's cache."""
  S, W = tiny.SLOTS, 1 if cached else T

  def abstract(size, axes, dtype=jnp.float32):
    return placed(grid, jax.ShapeDtypeStruct(size, dtype), axes)

  layer = (abstract((S, shape.kv_heads, T, shape.head_width), ('slots', 'kv_heads', None, None)),) * 2
  stream = abstract((S, W, shape.width), ('batch', None, None))
  ids, mask = abstract((S, W), ('batch', None), jnp.int32), abstract((S, W, T), ('batch', None, None), jnp.bool)
  return stream, ids, mask, layer if cached else None


def check_sums(grid, found, sums, weights):
  """`sums` all-reduces over tensor, an all-gather over fsdp of each of the weights, and nothing else."""
  tensor = [tuple(row) for row in np.arange(grid.size).reshape(-1, 2).tolist()]
  assert [where for name, where in found if name == 'all-reduce'] == [tensor] * sums
  gathers = [where for name, where in found if name == 'all-gather']
  assert len(gathers) == (weights if grid.shape['fsdp'] > 1 else 0)
  assert all((0, 2) in where for where in gathers)
  assert len(found) == sums + len(gathers)


@pytest.mark.parametrize('cached', [False, True])
@pytest.mark.parametrize('layout', [(1, 1, 2), (2, 2, 2)])
def test_a_block_sums_over_tensor_twice_and_gathers_nothing_but_its_weights(layout, cached):
  shape, grid = Shape(**tiny.MODEL, qk_norm=True, qkv_bias=True), mesh.make_mesh(layout)
  definition, state = nnx.split(nnx.eval_shape(lambda: Block(shape, nnx.Rngs(0))))
  axes = nnx.to_pure_dict(nnx.map_state(lambda _, variable: variable.get_metadata('axes'), state))
  params = placed(grid, nnx.to_pure_dict(state), axes)
  with jax.set_mesh(grid):
    block = jax.jit(lambda params, *rest: nnx.merge(definition, params)(*rest))
    text = block.lower(params, *inputs(grid, shape, cached)).compile().as_text()
  check_sums(grid, collectives(text), sums=2, weights=4)


@pytest.mark.parametrize('cached', [False, True])
def test_the_whole_forward_sums_once_more_for_the_embedding_and_not_for_the_head(cached):
  policy, _ = make(**EVERYTHING)
  grid, layers = mesh.make_mesh((2, 2, 2)), policy.shape.layers

  def forward(params, tokens, position, layer):
    cache = None if layer is None else Cache((layer[0],) * layers, (layer[1],) * layers)
    hidden = policy.hidden(params, tokens, position, cache=cache)
    return policy.logits(params, hidden if cache is None else hidden[0])

  _, ids, _, layer = inputs(grid, policy.shape, cached)
  with jax.set_mesh(grid):
    lowered = jax.jit(forward).lower(placed(grid, policy.shapes, policy.axes), ids, ids, layer)
  check_sums(grid, collectives(lowered.compile().as_text()), sums=1 + 2 * layers, weights=2 + 4 * layers)
