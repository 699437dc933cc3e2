"""Eight fake CPU devices, a compilation cache that outlives the process, and rank promotion as an error.

The settings go through the environment, before JAX is imported, so that programs started by a test have them too.
"""

import os
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
CACHE = os.environ.get('ROLLOUT_JAX_CACHE', str(ROOT / '.cache' / 'jax'))
DEVICES = '--xla_force_host_platform_device_count=8'

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {DEVICES}'.strip()
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
os.environ['JAX_COMPILATION_CACHE_DIR'] = CACHE
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture
def quick_compile():
  """Compiles at XLA's optimisation level 0 while the test runs: for tests that compile much and compute little."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='session')
def verifier():
  """Worker processes of the task that tiny runs share."""
  from configs import base
  from rollout_jax.build import build_verifier
  from tests.overlay import shrink

  with build_verifier(shrink(base.get_config())) as shared:
    yield shared


@pytest.fixture
def machine(verifier, tmp_path):
  """Makes a `runner.Machine` of a config (the base if none is given) with the tests' overlay and changes."""
  from configs import base
  from rollout_jax.build import build
  from rollout_jax.clock import Clock
  from tests.overlay import shrink
  from tests.runner import Machine

  clock = Clock()

  def make(folder='run', config=None, **changes):
    return Machine(
      build(shrink(base.get_config() if config is None else config, **changes), verifier), tmp_path / folder, clock
    )

  yield make
  clock.close()
