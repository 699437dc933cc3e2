"""A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU; the layout of Qwen2/2.5, Qwen3 and Llama 3.

Written as Flax NNX modules and split once: everybody else sees `Policy`, a bundle of functions of a nested dict of arrays.
One description per weight (`weight`, `constant`) gives its shape, initialisation and logical axes. The same forward
serves training and scoring (no cache), prefill and decode (with a cache).

Megatron layout: the first product of a pair is cut by columns over `tensor`, the second by rows, so a block sums over
`tensor` twice. Query heads are stored beside the key/value head that they share, [D, K, G + 2, C], so one product makes
q, k and v and its cut over K leaves each device whole groups; gate and up are one product too (both faster on CPU).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from rollout_jax import mesh
from rollout_jax.models import cache as kv
from rollout_jax.types import Array, ConfigError, PyTree

# What the backward pass keeps of each layer: everything, the products with weights, or the layer's input alone.
REMAT = {
  'none': None,
  'products': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  'layers': jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes and options of a transformer. `dtype` is that of the parameters and of the products."""

  vocab_size: int
  layers: int
  width: int
  heads: int
  kv_heads: int
  head_width: int
  feed_forward: int
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  qk_norm: bool = False
  qkv_bias: bool = False
  tied: bool = True
  dtype: str = 'float32'

  def __post_init__(self):
    for name in ('vocab_size', 'layers', 'width', 'heads', 'kv_heads', 'head_width', 'feed_forward'):
      if getattr(self, name) < 1:
        raise ConfigError(f'model.{name} must be at least 1, got {getattr(self, name)}.')
    if self.heads % self.kv_heads:
      raise ConfigError(
        f'model.heads ({self.heads}) must be a multiple of model.kv_heads ({self.kv_heads}): '
        'equally many query heads share each key/value head. Change one of them.'
      )
    if self.head_width % 2:
      raise ConfigError(f'model.head_width must be even (RoPE turns pairs of channels), got {self.head_width}.')
    if self.dtype not in ('float32', 'bfloat16'):
      raise ConfigError(f"model.dtype must be 'float32' or 'bfloat16', got {self.dtype!r}.")


class Policy(NamedTuple):
  """A transformer as pure functions of its parameters, a nested dict of arrays.

  init(key uint32[2]) -> params
  hidden(params, tokens_BT, position_BT, segment_BT=None, branch_BT=None, cache=None, remat='none') -> hidden_BTD, or
    (hidden_BTD, cache) with a cache
  prefix(params, tokens_BT, position_BT, segment_BT) -> Cache of these tokens alone, [B, K, T, C]
  logits(params, hidden_..D) -> float32 logits_..V
  new_cache(slots, length) -> Cache
  `shapes` and `axes` describe the parameters: trees of ShapeDtypeStruct and of tuples of logical axes.

  Without a cache a token attends to itself and to earlier entries of its row, within an equal segment if segments are
  given (padding is a segment of its own), and within it only branch 0 and its own if branches are given; positions only
  turn the channels. `remat` names what the backward pass computes anew (`REMAT`). With a cache tokens are W per row, stored at
  `position`, and a token attends to every cache entry up to its position.
  """

  init: Callable[[Array], PyTree]
  hidden: Callable[..., Array | tuple[Array, kv.Cache]]
  prefix: Callable[[PyTree, Array, Array, Array | None], kv.Cache]
  logits: Callable[[PyTree, Array], Array]
  new_cache: Callable[[int, int], kv.Cache]
  axes: PyTree
  shapes: PyTree
  shape: Shape


def transformer(shape: Shape) -> Policy:
  """The policy of this shape."""

  def build(key: Array) -> Transformer:
    return Transformer(shape, nnx.Rngs(params=key))

  def init(key: Array) -> PyTree:
    return nnx.to_pure_dict(nnx.state(build(key)))

  definition, state = nnx.split(nnx.eval_shape(lambda: build(jax.random.PRNGKey(0))))

  def hidden(params, tokens_BT, position_BT, segment_BT=None, branch_BT=None, cache=None, remat='none'):
    model = nnx.merge(definition, params)
    x_BTD, after = model.hidden(tokens_BT, position_BT, segment_BT, branch_BT, cache, remat)
    return x_BTD if cache is None else (x_BTD, after)

  def prefix(params, tokens_BT, position_BT, segment_BT):
    return nnx.merge(definition, params).hidden(tokens_BT, position_BT, segment_BT)[1]

  def logits(params: PyTree, hidden: Array) -> Array:
    return nnx.merge(definition, params).logits(hidden)

  def new_cache(slots: int, length: int) -> kv.Cache:
    return kv.empty(shape.layers, (slots, shape.kv_heads, length, shape.head_width), shape.dtype)

  axes = nnx.to_pure_dict(nnx.map_state(lambda _, variable: variable.get_metadata('axes'), state))
  return Policy(init, hidden, prefix, logits, new_cache, axes, nnx.to_pure_dict(state), shape)


# Weights.


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float, dtype: str) -> nnx.Param:
  """A weight drawn from a normal distribution. The key `axes` is ours: flax's own would shard eagerly."""
  return nnx.Param((std * jax.random.normal(rngs.params(), shape)).astype(dtype), axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: str) -> nnx.Param:
  """A weight that starts at one value (scales and biases)."""
  return nnx.Param(jnp.full(shape, value, dtype), axes=axes)


def gathered(param: nnx.Param) -> Array:
  """The weight's value, whole along `embed`: fsdp cuts storage, never a product."""
  axes = param.get_metadata('axes')
  return mesh.constrain(param[...], *(None if axis == 'embed' else axis for axis in axes))


# Modules.


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, in float32."""

  def __init__(self, width: int, eps: float, dtype: str):
    self.scale = constant(1.0, (width,), (None,), dtype)
    self.eps = eps

  def __call__(self, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
    scale = self.scale[...].astype(jnp.float32)
    return (wide * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))).astype(x.dtype)


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions, optional per-head q/k-norm (Qwen3) and q/k/v bias (Qwen2)."""

  def __init__(self, shape: Shape, rngs: nnx.Rngs):
    D, K, G, C = shape.width, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_width
    self.theta = shape.rope_theta
    out_std = (shape.heads * C * 2 * shape.layers) ** -0.5
    self.qkv = weight(rngs, (D, K, G + 2, C), ('embed', 'kv_heads', None, None), D**-0.5, shape.dtype)
    self.out = weight(rngs, (K, G, C, D), ('kv_heads', None, None, 'embed'), out_std, shape.dtype)
    if shape.qkv_bias:
      self.bias = constant(0.0, (K, G + 2, C), ('kv_heads', None, None), shape.dtype)
    if shape.qk_norm:
      self.q_norm = RMSNorm(C, shape.norm_eps, shape.dtype)
      self.k_norm = RMSNorm(C, shape.norm_eps, shape.dtype)

  def __call__(self, x_BTD: Array, position_BT: Array, mask_BTT: Array, layer: tuple[Array, Array] | None):
    """The sum over heads, [B, T, D], and the keys and values [B, K, T, C] that were attended to."""
    qkv_BTKJC = jnp.einsum('btd,dkjc->btkjc', x_BTD, gathered(self.qkv))
    if hasattr(self, 'bias'):
      qkv_BTKJC = qkv_BTKJC + self.bias[...][None, None]
    q_BTKGC, k_BTKC, v_BTKC = qkv_BTKJC[..., :-2, :], qkv_BTKJC[..., -2, :], qkv_BTKJC[..., -1, :]
    if hasattr(self, 'q_norm'):
      q_BTKGC, k_BTKC = self.q_norm(q_BTKGC), self.k_norm(k_BTKC)
    q_BTKGC, k_BTKC = (rotate(x, position_BT, self.theta) for x in (q_BTKGC, k_BTKC))
    if layer is None:
      layer = k_BTKC.swapaxes(1, 2), v_BTKC.swapaxes(1, 2)
    else:
      layer = kv.write(layer[0], k_BTKC, position_BT), kv.write(layer[1], v_BTKC, position_BT)
    mixed_BTKGC = kv.attend(q_BTKGC, *layer, mask_BTT)
    # One long axis: with three to sum over, XLA turns the weight around in every step.
    rows, columns = mixed_BTKGC.reshape(x_BTD.shape[:2] + (-1,)), gathered(self.out).reshape(-1, x_BTD.shape[2])
    return rows @ columns, layer


class FeedForward(nnx.Module):
  """SwiGLU: down(silu(gate(x)) * up(x))."""

  def __init__(self, shape: Shape, rngs: nnx.Rngs):
    D, F = shape.width, shape.feed_forward
    self.gate_up = weight(rngs, (D, 2, F), ('embed', None, 'mlp'), D**-0.5, shape.dtype)
    self.down = weight(rngs, (F, D), ('mlp', 'embed'), (F * 2 * shape.layers) ** -0.5, shape.dtype)

  def __call__(self, x_BTD: Array) -> Array:
    both_BTJF = jnp.einsum('btd,djf->btjf', x_BTD, gathered(self.gate_up))
    inner_BTF = jax.nn.silu(both_BTJF[:, :, 0]) * both_BTJF[:, :, 1]
    return jnp.einsum('btf,fd->btd', inner_BTF, gathered(self.down))


class Block(nnx.Module):
  """Attention, then feed-forward, each behind a norm and added to the stream, which is whole on each `tensor` device."""

  def __init__(self, shape: Shape, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(shape.width, shape.norm_eps, shape.dtype)
    self.attention = Attention(shape, rngs)
    self.feed_forward_norm = RMSNorm(shape.width, shape.norm_eps, shape.dtype)
    self.feed_forward = FeedForward(shape, rngs)

  def __call__(self, x_BTD: Array, position_BT: Array, mask_BTT: Array, layer: tuple[Array, Array] | None):
    mixed_BTD, layer = self.attention(self.attention_norm(x_BTD), position_BT, mask_BTT, layer)
    x_BTD = mesh.constrain(x_BTD + mixed_BTD, 'batch', None, None)
    x_BTD = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
    return mesh.constrain(x_BTD, 'batch', None, None), layer


class Transformer(nnx.Module):
  """Embedding, blocks, final norm, head."""

  def __init__(self, shape: Shape, rngs: nnx.Rngs):
    self.layers = shape.layers
    table = (shape.vocab_size, shape.width), ('vocab', 'embed'), shape.width**-0.5, shape.dtype
    self.embedding = weight(rngs, *table)
    if not shape.tied:
      self.head = weight(rngs, *table)
    for i in range(shape.layers):
      setattr(self, f'block_{i}', Block(shape, rngs))  # a string per layer: the parameters' names are the checkpoint's
    self.norm = RMSNorm(shape.width, shape.norm_eps, shape.dtype)

  def hidden(
    self,
    tokens_BT: Array,
    position_BT: Array,
    segment_BT: Array | None = None,
    branch_BT: Array | None = None,
    cache: kv.Cache | None = None,
    remat: str = 'none',
  ) -> tuple[Array, kv.Cache]:
    x_BTD = mesh.constrain(gathered(self.embedding)[tokens_BT], 'batch', None, None)
    mask_BTT = (
      causal(tokens_BT, segment_BT, branch_BT) if cache is None else kv.visible(position_BT, cache.k[0].shape[2])
    )
    layers = [None] * self.layers if cache is None else list(zip(cache.k, cache.v, strict=True))
    for i, layer in enumerate(layers):
      block = getattr(self, f'block_{i}')
      if remat != 'none':
        block = jax.checkpoint(block, policy=REMAT[remat])
      x_BTD, layers[i] = block(x_BTD, position_BT, mask_BTT, layer)
    return self.norm(x_BTD), kv.Cache(*zip(*layers, strict=True))

  def logits(self, hidden: Array) -> Array:
    """Float32 logits over the vocabulary, for hidden states of any leading axes."""
    table_VD = gathered(self.head if hasattr(self, 'head') else self.embedding)
    logits = jnp.einsum('...d,vd->...v', hidden, table_VD, preferred_element_type=jnp.float32)
    return mesh.constrain(logits, *('batch', None, None)[: hidden.ndim - 1], 'vocab')


def causal(tokens_BT: Array, segment_BT: Array | None, branch_BT: Array | None) -> Array:
  """Which entries of its row each token may read, [B, T, T]: itself and earlier ones, of its own segment and branch or 0."""
  T = tokens_BT.shape[1]
  mask_BTT = jnp.tril(jnp.ones((1, T, T), bool))
  if segment_BT is not None:
    mask_BTT = mask_BTT & (segment_BT[:, :, None] == segment_BT[:, None, :])
  if branch_BT is not None:
    mask_BTT = mask_BTT & ((branch_BT[:, :, None] == branch_BT[:, None, :]) | (branch_BT[:, None, :] == 0))
  return mask_BTT


def rotate(x: Array, position_BT: Array, theta: float) -> Array:
  """x [B, T, ..., C] with channel pairs (i, i + C/2) turned by position * theta^(-2i/C), in float32."""
  half = x.shape[-1] // 2
  frequency_C = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  position = position_BT.astype(jnp.float32).reshape(position_BT.shape + (1,) * (x.ndim - 2))
  angle = position * frequency_C.reshape((1,) * (x.ndim - 1) + (half,))
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  left, right = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
