"""How much memory a run will want on each device, before anything runs; what cannot fit is refused by the field to change.

Parameters, moments, gradients and caches are exact: they are counted from their shapes and shardings. Activations are an
estimate from above, of what the backward pass keeps of each layer (models/transformer.py, REMAT) and of one microbatch's
logits; XLA often needs less.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tabulate import tabulate

from rollout_jax.decoding import programs
from rollout_jax.decoding.buckets import Bucket, Ladder
from rollout_jax.models.transformer import Policy, Shape
from rollout_jax.types import ConfigError, PyTree

GIB = 2**30
LOGITS = 3  # copies of a microbatch's float32 logits: themselves, their exponentials, their gradient


class Item(NamedTuple):
  """Something that lies on every device: its bytes there, over which mesh axes it is cut, and what makes it smaller."""

  name: str
  bytes: int
  cut: str
  field: str


class Training(NamedTuple):
  """The sizes of a training step: packed rows of `length` tokens, `micro` at a time, `chunk` columns of logits (0: all)."""

  micro: int
  length: int
  chunk: int
  remat: str


def plan(
  policy: Policy, state: PyTree, placed: PyTree, mesh: Mesh, *, copies: int, ladder: Ladder, training: Training
) -> list[Item]:
  """What a run holds at its peak. `state` are the shapes of the TrainState and `placed` where it lies; `copies` are served."""
  params = _resident(state.params, placed.params)
  largest = Bucket(ladder.slots[-1], ladder.lengths[-1])
  empty = lambda: programs.empty(policy, largest, largest.length)
  slots = _resident(jax.eval_shape(empty), programs.shardings(empty, mesh))
  rows, tensor = mesh.shape['data'] * mesh.shape['fsdp'], mesh.shape['tensor']
  each = training.micro // rows
  layers = each * training.length * _kept(policy.shape, training, tensor)
  columns = training.chunk or training.length
  logits = LOGITS * each * columns * (policy.shape.vocab_size // tensor) * 4
  return [
    Item('parameters', params, 'fsdp, tensor', 'model, mesh.train'),
    Item('moments', _resident(state.opt_state, placed.opt_state), 'fsdp, tensor', 'optimizer.name, mesh.train'),
    Item('gradients (sum and new)', 2 * params, 'fsdp, tensor', 'model, mesh.train'),
    Item('served and frozen copies', copies * params, 'fsdp, tensor', 'rollout.lag, kl'),
    Item('slots (keys, values, rows)', slots, 'data, fsdp, tensor', 'rollout.slots, rollout.answer_length'),
    Item('activations of a microbatch', layers, 'data, fsdp, tensor', 'microbatch, pack.remat'),
    Item('logits of a microbatch', logits, 'data, fsdp, tensor', 'microbatch, pack.logits'),
  ]


def check(items: Sequence[Item], room: int | None) -> None:
  """Raises ConfigError if the items need more than `room` bytes of a device (None: not known)."""
  total = sum(item.bytes for item in items)
  if room is not None and total > room:
    largest = max(items, key=lambda item: item.bytes)
    raise ConfigError(
      f'this run needs about {total / GIB:.1f} GiB on each device, which has {room / GIB:.1f} GiB. The largest part are the '
      f'{largest.name}, {largest.bytes / GIB:.1f} GiB: lower them by {largest.field}.\n{table(items, room)}'
    )


def table(items: Sequence[Item], room: int | None) -> str:
  """The items with their MiB per device, and their sum."""
  rows = [(item.name, f'{item.bytes / 2**20:,.1f}', item.cut) for item in items]
  total = sum(item.bytes for item in items)
  rows.append(('sum', f'{total / 2**20:,.1f}', 'unknown room' if room is None else f'of {room / 2**20:,.0f}'))
  return tabulate(rows, headers=('memory', 'MiB a device', 'cut over'), colalign=('left', 'right', 'left'))


def room(device: jax.Device) -> int | None:
  """Bytes that a device has for arrays: as its own statistics say, or this machine's memory over its devices; None if unknown."""
  stats = device.memory_stats()
  if stats and 'bytes_limit' in stats:
    return stats['bytes_limit']
  if device.platform == 'cpu':
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // jax.local_device_count()
  return None


def _resident(shapes: PyTree, placed: PyTree) -> int:
  """Bytes of a tree on one device."""
  size = lambda leaf, sharding: leaf.dtype.itemsize * _product(sharding.shard_shape(leaf.shape))
  return sum(jax.tree.leaves(jax.tree.map(size, shapes, placed)))


def _product(sizes: Sequence[int]) -> int:
  product = 1
  for size in sizes:
    product *= size
  return product


def _kept(shape: Shape, training: Training, tensor: int) -> int:
  """Bytes that the layers keep of one token for the backward pass, `tensor` ways cut where the layers are."""
  width = jnp.dtype(shape.dtype).itemsize
  heads = shape.heads // tensor
  qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_width // tensor
  products = qkv + heads * shape.head_width + shape.width + 2 * shape.feed_forward // tensor + shape.width
  attention = 2 * 4 * heads * training.length  # scores and weights, float32
  elementwise = 4 * (6 * shape.width + 2 * qkv) + width * 3 * shape.feed_forward // tensor
  kept = {
    'none': width * products + attention + elementwise,
    'products': width * products,
    'layers': width * shape.width,
  }[training.remat]
  once = (
    0 if training.remat == 'none' else width * products + attention + elementwise
  )  # the layer that is computed anew
  return shape.layers * kept + once
