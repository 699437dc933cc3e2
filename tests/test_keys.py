import jax
import jax.numpy as jnp
import numpy as np

from rollout_jax import keys
from rollout_jax.types import Request


def test_a_key_is_the_same_inside_and_outside_jit():
  outside = keys.named(3, 'round', 7, 'draw')
  inside = jax.jit(lambda n: keys.named(3, 'round', n, 'draw'))(jnp.int32(7))
  assert outside.dtype == jnp.uint32 and outside.shape == (2,)
  np.testing.assert_array_equal(outside, inside)


def test_every_name_and_its_place_matters():
  made = [keys.named(0), keys.named(1), keys.named(0, 1), keys.named(0, 1, 2), keys.named(0, 2, 1), keys.named(0, 'a')]
  assert len({tuple(np.asarray(k).tolist()) for k in made}) == len(made)


def test_keys_do_not_depend_on_the_default_generator():
  key = keys.named(5, 'x')
  with jax.default_prng_impl('rbg'):
    np.testing.assert_array_equal(key, keys.named(5, 'x'))


def test_row_keys_on_the_host_equal_row_key_on_the_device():
  requests = [Request(prompt=p, visit=v, rollout=r) for p in (0, 1, 2**31, 2**32 - 1) for v in (0, 9) for r in (0, 3)]
  for seed in (0, 1, 12345, 2**32 - 1):
    want_J2 = [keys.row_key(seed, r.prompt, r.rollout, r.visit) for r in requests]
    np.testing.assert_array_equal(keys.row_keys(seed, requests), np.stack(want_J2))
  assert keys.row_keys(0, []).shape == (0, 2)


def test_row_key_and_draw_key_map_over_rows():
  prompt_B = jnp.arange(5)
  key_B2 = jax.vmap(keys.row_key, (None, 0, None, None))(0, prompt_B, 1, 2)
  np.testing.assert_array_equal(key_B2[3], keys.row_key(0, 3, 1, 2))
  drawn_B2 = jax.vmap(keys.draw_key)(key_B2, prompt_B)
  np.testing.assert_array_equal(drawn_B2[3], keys.draw_key(key_B2[3], 3))
  assert len(np.unique(np.asarray(drawn_B2), axis=0)) == 5
