import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax.models.transformer import Shape, transformer
from rollout_jax.types import ConfigError
from tests import tiny

VARIANTS = {
  'grouped': {},
  'qwen2': dict(qkv_bias=True, rope_theta=1e6),
  'qwen3': dict(qk_norm=True, tied=False, head_width=12),
  'llama': dict(heads=9, kv_heads=3, tied=False, norm_eps=1e-5),
  'multi_head': dict(kv_heads=4),
  'multi_query': dict(kv_heads=1, heads=3),
}
EVERYTHING = dict(qk_norm=True, qkv_bias=True, tied=False)
B, T = 4, 12


@functools.cache
def make(**changes):
  """A policy and parameters in which no scale is one and no bias zero."""
  policy = transformer(Shape(**tiny.MODEL | changes))
  noise = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: (x.astype(jnp.float32) + 0.1 * noise.standard_normal(x.shape)).astype(x.dtype),
    jax.jit(policy.init)(jax.random.PRNGKey(1)),
  )
  return policy, params


def forward(policy, params, tokens, position, segment=None):
  return jax.jit(lambda params, *inputs: policy.logits(params, policy.hidden(params, *inputs)))(
    params, jnp.asarray(tokens), jnp.asarray(position), None if segment is None else jnp.asarray(segment)
  )


def example(seed=0, rows=B, length=T):
  tokens = np.random.default_rng(seed).integers(0, tiny.MODEL['vocab_size'], (rows, length))
  return tokens.astype(np.int32), np.tile(np.arange(length, dtype=np.int32), (rows, 1))


# The naive forward: one row, one token, one head at a time, in float64.


def naive_norm(x, norm, shape):
  return x / np.sqrt(np.mean(x * x) + shape.norm_eps) * norm['scale']


def naive_rope(x, position, shape):
  half = shape.head_width // 2
  out = np.zeros_like(x)
  for i in range(half):
    angle = position * shape.rope_theta ** (-2 * i / shape.head_width)
    out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
    out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
  return out


def naive_attention(streams, block, shape):
  group = shape.heads // shape.kv_heads
  keys, values, out = {}, {}, []
  for t, stream in enumerate(streams):
    x = naive_norm(stream, block['attention_norm'], shape)
    qkv = np.einsum('d,dkjc->kjc', x, block['attention']['qkv']) + block['attention'].get('bias', 0.0)
    total = np.zeros(shape.width)
    for h in range(shape.heads):
      k, g = divmod(h, group)
      query, keys[k, t], values[k, t] = qkv[k, g], qkv[k, group], qkv[k, group + 1]
      if shape.qk_norm:
        query = naive_norm(query, block['attention']['q_norm'], shape)
        keys[k, t] = naive_norm(keys[k, t], block['attention']['k_norm'], shape)
      query, keys[k, t] = naive_rope(query, t, shape), naive_rope(keys[k, t], t, shape)
      score = np.array([query @ keys[k, s] for s in range(t + 1)]) / math.sqrt(shape.head_width)
      chance = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
      total += sum(chance[s] * values[k, s] for s in range(t + 1)) @ block['attention']['out'][k, g]
    out.append(total)
  return out


def naive_feed_forward(stream, block, shape):
  x = naive_norm(stream, block['feed_forward_norm'], shape)
  gate, up = np.einsum('d,djf->jf', x, block['feed_forward']['gate_up'])
  return (gate / (1 + np.exp(-gate)) * up) @ block['feed_forward']['down']


def naive_logits(params, tokens, shape):
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  streams = [params['embedding'][token] for token in tokens]
  for i in range(shape.layers):
    block = params[f'block_{i}']
    streams = [a + b for a, b in zip(streams, naive_attention(streams, block, shape), strict=True)]
    streams = [a + naive_feed_forward(a, block, shape) for a in streams]
  head = params['embedding'] if shape.tied else params['head']
  return np.stack([head @ naive_norm(stream, params['norm'], shape) for stream in streams])


@pytest.mark.parametrize('variant', VARIANTS)
def test_forward_equals_naive_numpy(variant):
  policy, params = make(**VARIANTS[variant])
  tokens, position = example()
  logits = forward(policy, params, tokens, position)
  assert logits.dtype == jnp.float32
  for row in range(2):
    np.testing.assert_allclose(logits[row], naive_logits(params, tokens[row], policy.shape), atol=1e-4, rtol=1e-4)


# With a cache.


@pytest.mark.parametrize('W', [1, 3])
def test_cached_decoding_of_ragged_rows_equals_the_full_forward(W):
  policy, params = make(**EVERYTHING)
  tokens, position = example()
  full = jax.jit(policy.hidden)(params, tokens, position)
  step = jax.jit(lambda *inputs, cache: policy.hidden(*inputs, cache=cache))
  stale = jax.tree.map(lambda x: x + 1e3, policy.new_cache(B, T))  # a former tenant's keys and values
  length = np.array([1, 4, 6, 9])
  prefilled, cache = step(params, tokens, position, cache=stale)  # writes rubbish behind each row's length, too
  np.testing.assert_allclose(prefilled, full, atol=1e-5)
  cache = jax.tree.map(lambda x: jnp.where(np.arange(T)[:, None] < length[:, None, None, None], x, 1e3), cache)
  for start in range(0, 3, W):
    at = length[:, None] + start + np.arange(W)
    hidden, cache = step(params, np.take_along_axis(tokens, at, 1), at.astype(np.int32), cache=cache)
    np.testing.assert_allclose(hidden, np.take_along_axis(np.asarray(full), at[:, :, None], 1), atol=1e-5)


def test_cache_has_one_array_per_layer_of_slots_heads_tokens_channels():
  policy = transformer(Shape(**tiny.MODEL, dtype='bfloat16'))
  cache = policy.new_cache(tiny.SLOTS, tiny.T)
  assert [x.shape for x in cache.k] == [x.shape for x in cache.v] == [(tiny.SLOTS, 2, tiny.T, 8)] * 2
  assert {x.dtype.name for x in jax.tree.leaves(cache)} == {'bfloat16'}


# Rows with padding, rows with several sequences.


def test_padding_at_either_side_changes_no_logits_at_real_tokens():
  policy, params = make(**EVERYTHING)
  tokens, position = example(length=T - 3)
  plain = forward(policy, params, tokens, position)
  pad, zero = np.full((B, 3), 7, np.int32), np.zeros((B, 3), np.int32)
  right = [np.concatenate(pair, 1) for pair in ((tokens, pad), (position, zero), (zero[:, :1] + 1 + 0 * tokens, zero))]
  left = [np.concatenate(pair, 1) for pair in ((pad, tokens), (zero, position), (zero, zero[:, :1] + 1 + 0 * tokens))]
  np.testing.assert_allclose(forward(policy, params, *left)[:, 3:], plain, atol=1e-5)
  np.testing.assert_allclose(forward(policy, params, *right)[:, :-3], plain, atol=1e-5)
  unmasked = forward(policy, params, *right[:2])  # padding at the right needs no segments
  np.testing.assert_allclose(unmasked[:, :-3], plain, atol=1e-5)


def test_sequences_packed_in_a_row_give_the_logits_they_give_apart():
  policy, params = make(**EVERYTHING)
  tokens, position = example()
  apart = (
    forward(policy, params, tokens[:, :5], position[:, :5]),
    forward(policy, params, tokens[:, 5:], position[:, :7]),
  )
  position = np.concatenate([position[:, :5], position[:, :7]], 1)
  packed = forward(policy, params, tokens, position, np.repeat(np.array([[3, 1]], np.int32), [5, 7], 1).repeat(B, 0))
  np.testing.assert_allclose(packed, np.concatenate(apart, 1), atol=1e-5)


def test_bfloat16_stays_near_float32_and_gives_float32_logits():
  policy, params = make(**EVERYTHING, dtype='bfloat16')
  exact = transformer(dataclasses.replace(policy.shape, dtype='float32'))
  tokens, position = example()
  hidden = jax.jit(policy.hidden)(params, tokens, position)
  logits = forward(policy, params, tokens, position)
  assert {x.dtype.name for x in jax.tree.leaves(params)} == {'bfloat16'}
  assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
  wide = forward(exact, jax.tree.map(lambda x: x.astype(jnp.float32), params), tokens, position)
  assert 0 < float(jnp.abs(logits - wide).mean()) < 0.02 * float(wide.std())


# Parameters.


def test_initialisation_depends_on_the_key_alone_and_starts_near_uniform():
  policy, _ = make(**EVERYTHING)
  init = jax.jit(policy.init)
  one, again, other = (init(jax.random.PRNGKey(seed)) for seed in (1, 1, 2))
  assert jax.tree.all(jax.tree.map(np.array_equal, one, again))
  assert not np.array_equal(one['embedding'], other['embedding'])
  assert not np.array_equal(one['block_0']['attention']['qkv'], one['block_1']['attention']['qkv'])
  assert forward(policy, one, *example()).std() < 1.5
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), one)
  assert jax.tree.all(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), shapes, policy.shapes))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(heads=5), r'model.heads \(5\) must be a multiple of model.kv_heads \(2\)'),
    (dict(head_width=7), 'model.head_width must be even'),
    (dict(layers=0), 'model.layers must be at least 1, got 0'),
    (dict(dtype='float16'), "'float32' or 'bfloat16', got 'float16'"),
  ],
)
def test_an_impossible_shape_is_refused(change, message):
  with pytest.raises(ConfigError, match=message):
    Shape(**tiny.MODEL | change)
