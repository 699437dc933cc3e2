"""What the machine could do at best, measured at the shapes of the work: the products of a decode forward and nothing else.

A step's floor is the time of its matrix products, run one after another, plus the time to read the cache once: on the
machines met so far the two do not overlap.
"""

import jax
import jax.numpy as jnp
from jax import lax

from rollout_jax.bench.timing import Job
from rollout_jax.models.transformer import Policy
from rollout_jax.types import Array

STEPS = 32


def products(policy: Policy, rows: int) -> Job:
  """A job: `STEPS` times the products of one forward of `rows` tokens with every weight."""
  s = policy.shape
  q, kv = s.heads * s.head_width, s.kv_heads * s.head_width
  sizes = [(s.width, q + 2 * kv), (q, s.width), (s.width, 2 * s.feed_forward), (s.feed_forward, s.width)] * s.layers
  sizes.append((s.width, s.vocab_size))
  weights = [jnp.full(size, 1e-3, s.dtype) for size in sizes]
  widest = max(max(size) for size in sizes)

  @jax.jit
  def run(weights: list[Array], x_BD: Array) -> Array:
    def step(_, x_BD: Array) -> Array:
      for w in weights:
        y = x_BD[:, : w.shape[0]] @ w
        x_BD = lax.dynamic_update_slice(x_BD, y, (0, 0))
      return x_BD

    return lax.fori_loop(0, STEPS, step, x_BD)

  x_BD = jnp.ones((rows, widest), s.dtype)
  return Job(lambda _: run(weights, x_BD))


def read(policy: Policy, slots: int, length: int) -> Job:
  """A job: `STEPS` times the sum of all keys and values of a cache."""
  cache = policy.new_cache(slots, length)
  flat = [x.reshape(-1, 128) for x in jax.tree.leaves(cache)]

  @jax.jit
  def run(flat: list[Array], start: Array) -> Array:
    def step(_, total: Array) -> Array:
      return total + sum(jnp.sum(x + total[None].astype(x.dtype), axis=0) for x in flat).astype(jnp.float32)

    return lax.fori_loop(0, STEPS, step, start)

  return Job(lambda _: run(flat, jnp.zeros(128)))


def flops(policy: Policy, rows: int) -> float:
  """Floating-point operations of `products`, of one step."""
  s = policy.shape
  q, kv = s.heads * s.head_width, s.kv_heads * s.head_width
  block = s.width * (q + 2 * kv) + q * s.width + 3 * s.width * s.feed_forward
  return 2.0 * rows * (s.layers * block + s.width * s.vocab_size)
