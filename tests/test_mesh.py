import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rollout_jax import mesh
from rollout_jax.types import ConfigError


def test_one_entry_may_stand_for_the_rest():
  assert dict(mesh.make_mesh((-1, 2, 2)).shape) == {'data': 2, 'fsdp': 2, 'tensor': 2}
  assert dict(mesh.make_mesh((1, 1, -1)).shape) == {'data': 1, 'fsdp': 1, 'tensor': 8}


def test_a_mesh_may_leave_devices_unused():
  assert mesh.make_mesh((1, 1, 2)).devices.ravel().tolist() == jax.devices()[:2]


@pytest.mark.parametrize('shape', [(2, 2, 4), (-1, 3, 1), (-1, -1, 1), (0, 1, 1), (-1, 16, 1), (2, 2), (-2, 1, 1)])
def test_an_impossible_mesh_is_refused_with_the_devices_there_are(shape):
  with pytest.raises(ConfigError, match=r'the 8 available device\(s\)') as error:
    mesh.make_mesh(shape)
  assert str(shape) in str(error.value)


def test_axes_translate_by_the_rules():
  grid = mesh.make_mesh((2, 2, 2))
  assert mesh.sharding(grid, ('batch', None)).spec == PartitionSpec(('data', 'fsdp'), None)
  assert mesh.sharding(grid, ('embed', 'kv_heads', None), (4, 2, 3)).spec == PartitionSpec('fsdp', 'tensor', None)
  assert mesh.replicated(grid).is_fully_replicated


def test_a_size_that_the_mesh_does_not_divide_is_refused_by_name():
  with pytest.raises(ConfigError, match=r"axis 'kv_heads' has size 3, which the mesh axis 'tensor' of size 2"):
    mesh.sharding(mesh.make_mesh((2, 2, 2)), ('embed', 'kv_heads'), (4, 3))
  with pytest.raises(ConfigError, match=r"axis 'slots' has size 6, .* of size 4"):
    mesh.shardings(mesh.make_mesh((2, 2, 2)), {'a': ('slots',)}, {'a': np.zeros(6)})


def test_constrain_cuts_under_a_mesh_and_does_nothing_without():
  x = jnp.arange(24.0).reshape(4, 6)
  assert mesh.constrain(x, 'batch', 'mlp') is x
  grid = mesh.make_mesh((2, 2, 2))
  with jax.set_mesh(grid):
    y = jax.jit(lambda x: mesh.constrain(x * 2, 'batch', 'mlp'))(x)
    z = jax.jit(lambda x: mesh.constrain(x * 2, 'batch', 'mlp'))(x[:3])
  assert y.sharding.is_equivalent_to(mesh.sharding(grid, ('batch', 'mlp')), 2)
  assert z.sharding.is_equivalent_to(mesh.sharding(grid, (None, 'mlp')), 2)  # three rows stay whole
  np.testing.assert_array_equal(y, 2 * x)
