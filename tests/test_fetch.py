import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from rollout_jax.fetch import Fetcher

LIBRARY = pathlib.Path(__file__).parent.parent / 'rollout_jax'
WAYS_TO_THE_HOST = {'device_get', 'item', 'block_until_ready', 'copy_to_host_async', 'process_allgather', '_value'}


def _fetches(path):
  """Line numbers of a file where an array could come to the host by a way of its own."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Attribute) and node.attr in WAYS_TO_THE_HOST:
      yield node.lineno
    if isinstance(node, ast.ImportFrom) and any(alias.name in WAYS_TO_THE_HOST for alias in node.names):
      yield node.lineno


def test_fetches_are_counted_by_what_they_are_for():
  fetcher = Fetcher()
  fetcher('status', jnp.ones(3))
  fetcher('status', (jnp.ones(3), jnp.ones(2)))
  fetcher('report', {})
  assert fetcher.counts == {'status': 2, 'report': 1}


def test_a_tree_comes_back_whole_in_numpy():
  tree = {'a': jnp.arange(3), 'b': (jnp.float32(1.5), np.int8(2)), 'c': None}
  fetched = Fetcher()('tree', tree)
  assert jax.tree.structure(fetched) == jax.tree.structure(tree)
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(fetched))
  jax.tree.map(np.testing.assert_array_equal, fetched, tree)


def test_what_was_fetched_survives_the_donation_of_its_source():
  source = jnp.arange(5)
  fetched = Fetcher()('source', source)
  jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(source)
  np.testing.assert_array_equal(fetched, np.arange(5))
  fetched[0] = 7


def test_a_fetch_passes_the_transfer_guard():
  with jax.transfer_guard_device_to_host('disallow_explicit'):
    assert Fetcher()('guarded', jnp.arange(2)).tolist() == [0, 1]


def test_the_library_fetches_in_fetch_py_alone_and_waits_where_it_times():
  found = {str(path.relative_to(LIBRARY)): lines for path in LIBRARY.rglob('*.py') if (lines := [*_fetches(path)])}
  assert set(found) == {'fetch.py', 'bench/timing.py'}, found  # a stopwatch waits for what it times
