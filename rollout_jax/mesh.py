"""Device meshes, and which mesh axis each logical axis of an array is cut over.

A mesh always has the three axes `data` (copies of the parameters), `fsdp` (parameters cut, gathered before use) and
`tensor` (Megatron: heads, feed-forward and vocabulary). Arrays name their dimensions by logical axes, `RULES` translates.
The partitioner (GSPMD) places what is not constrained: axis types are Auto.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rollout_jax.types import Array, ConfigError, PyTree

AXES = ('data', 'fsdp', 'tensor')

RULES: dict[str, str | tuple[str, ...]] = {
  'batch': ('data', 'fsdp'),
  'slots': ('data', 'fsdp'),
  'embed': 'fsdp',
  'vocab': 'tensor',
  'kv_heads': 'tensor',
  'mlp': 'tensor',
}


def make_mesh(shape: Sequence[int]) -> Mesh:
  """A mesh over the first data * fsdp * tensor devices; one entry may be -1: as many as there are devices for."""
  devices = jax.devices()
  known = math.prod(size for size in shape if size != -1)
  sizes = tuple(len(devices) // known if size == -1 and known > 0 else size for size in shape)
  size = math.prod(sizes)
  if len(sizes) != len(AXES) or min(sizes) < 1 or size > len(devices) or (-1 in shape and size != len(devices)):
    raise ConfigError(
      f'a mesh wants three sizes (data, fsdp, tensor) whose product is at most the {len(devices)} available device(s); '
      f'one may be -1 if the others divide that number. Got {tuple(shape)}: change it, or start with more devices.'
    )
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:size])


def sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None) -> NamedSharding:
  """Where an array with these logical axes lives. With `shape`, refuses a dimension that the mesh does not divide."""
  for axis, size in zip(axes, shape or (), strict=shape is not None):
    if axis is not None and size % _ways(mesh, axis):
      raise ConfigError(
        f'axis {axis!r} has size {size}, which the mesh axis {RULES[axis]!r} of size {_ways(mesh, axis)} does not '
        f'divide. Change the mesh {dict(mesh.shape)}, or the size.'
      )
  return NamedSharding(mesh, _spec(axes))


def shardings(mesh: Mesh, axes: PyTree, shapes: PyTree) -> PyTree:
  """`sharding` for a tree of arrays: `shapes` holds arrays or ShapeDtypeStructs, `axes` their logical axes."""
  return jax.tree.map(lambda leaf, names: sharding(mesh, names, leaf.shape), shapes, axes)


def replicated(mesh: Mesh) -> NamedSharding:
  """The same value on every device."""
  return NamedSharding(mesh, PartitionSpec())


def constrain(x: Array, *axes: str | None) -> Array:
  """`x`, cut over the mesh set by `jax.set_mesh`; the identity if none is set.

  A dimension that the mesh does not divide stays whole: a prefill may hold fewer rows than there are devices.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  fitting = tuple(
    axis if axis is not None and size % _ways(mesh, axis) == 0 else None
    for axis, size in zip(axes, x.shape, strict=True)
  )
  return jax.lax.with_sharding_constraint(x, _spec(fitting))


def _spec(axes: tuple[str | None, ...]) -> PartitionSpec:
  return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def _ways(mesh: Mesh | jax.sharding.AbstractMesh, axis: str) -> int:
  """Into how many parts the mesh cuts a logical axis."""
  rule = RULES[axis]
  return math.prod(mesh.shape[name] for name in ((rule,) if isinstance(rule, str) else rule))
