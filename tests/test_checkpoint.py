import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rollout_jax.training.checkpoint import Checkpointer
from rollout_jax.types import ConfigError
from rollout_jax.writers import WriteError

ROOT = pathlib.Path(__file__).parent.parent
HOST = {'queue': [[3, 0, 1], [4, 1, 0]], 'logp': [float(np.float32(-1 / 3))], 'name': 'dynamic'}


def _mesh(*shape):
  return jax.make_mesh(shape, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)


def _state(seed=0, mesh=None):
  """A tree with what a run's state has: optax's tuples, keys, counts, several dtypes, host arrays, an empty array."""
  lay = NamedSharding(mesh or _mesh(2, 2, 2), PartitionSpec('fsdp', 'tensor'))
  weight = jax.device_put(np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32), lay)
  params = {'layers': [{'weight': weight}], 'half': jnp.full(3, seed, jnp.bfloat16)}
  return {
    'params': params,
    'opt_state': optax.adamw(1e-3).init(params),
    'key': jnp.array([seed, 7], jnp.uint32),
    'step': jnp.int32(seed),
    'keep': jnp.array([True, False]),
    'stop': jnp.zeros(4, jnp.int8),
    'visits_N': np.arange(5, dtype=np.int32) + seed,
    'none': None,
    'empty': jnp.zeros((0, 3)),
  }


def _assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert (x.dtype, x.shape, type(x)) == (y.dtype, y.shape, type(y))
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    if isinstance(y, jax.Array):
      assert x.sharding.is_equivalent_to(y.sharding, y.ndim)


def _saved(folder, steps, keep=9):
  with Checkpointer(folder, keep=keep) as checkpoints:
    for step in steps:
      checkpoints.save(step, _state(step), HOST | {'step': step})


def _restored(folder):
  with Checkpointer(folder, keep=9) as checkpoints:
    return checkpoints.restore(_state())


def _largest(folder):
  return max((path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
  _saved(tmp_path / 'checkpoints', [3])
  step, arrays, host = _restored(tmp_path / 'checkpoints')
  assert (step, host) == (3, HOST | {'step': 3})
  _assert_equal(arrays, _state(3))


def test_a_template_of_shapes_and_shardings_is_enough(tmp_path):
  _saved(tmp_path, [3])
  describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x
  with Checkpointer(tmp_path, keep=9) as checkpoints:
    _, arrays, _ = checkpoints.restore(jax.tree.map(describe, _state()))
  _assert_equal(arrays, _state(3))


@pytest.mark.parametrize('shape', [(1, 1, 1), (1, 2, 4), (4, 2, 1)])
def test_a_checkpoint_comes_back_on_another_mesh(tmp_path, shape):
  _saved(tmp_path, [3])
  with Checkpointer(tmp_path, keep=9) as checkpoints:
    _, arrays, _ = checkpoints.restore(_state(0, _mesh(*shape)))
  _assert_equal(arrays, _state(3, _mesh(*shape)))


def test_without_a_checkpoint_there_is_none_and_no_folder_is_made(tmp_path):
  assert _restored(tmp_path / 'absent') is None
  assert not (tmp_path / 'absent').exists()


def test_the_newest_stay_and_the_oldest_go(tmp_path):
  _saved(tmp_path, [1, 2, 10, 11], keep=2)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['00000010', '00000011']


def test_going_back_and_saving_removes_what_came_later(tmp_path):
  _saved(tmp_path, [1, 2, 3], keep=3)
  _saved(tmp_path, [2], keep=2)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['00000001', '00000002']


def _truncate(folder):
  os.truncate(_largest(folder / 'arrays'), 100)


def _flip(folder):
  path = _largest(folder / 'arrays')
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def _delete(folder):
  _largest(folder / 'arrays').unlink()


def _garbage(folder):
  (folder / 'host.json').write_bytes(bytes(range(256)))


def _unseal(folder):
  (folder / 'whole.json').unlink()


def _break_seal(folder):
  (folder / 'whole.json').write_text('{"arr')


DAMAGES = {
  _truncate: 'has 100 bytes instead of',
  _flip: 'has other content than was written',
  _delete: 'is missing',
  _garbage: 'host.json has 256 bytes',
  _unseal: 'has no whole.json',
  _break_seal: 'whole.json cannot be read',
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_newest_is_named_and_the_one_before_it_restored(tmp_path, capsys, damage):
  _saved(tmp_path, [1, 2])
  damage(tmp_path / '00000002')
  step, arrays, host = _restored(tmp_path)
  assert (step, host['step']) == (1, 1)
  _assert_equal(arrays, _state(1))
  (line,) = capsys.readouterr().out.splitlines()
  assert '00000002 is damaged and passed over' in line and DAMAGES[damage] in line


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
  _saved(tmp_path, [1, 2])
  _truncate(tmp_path / '00000002')
  _saved(tmp_path, [2], keep=2)
  assert _restored(tmp_path)[0] == 2
  assert sorted(path.name for path in tmp_path.iterdir()) == ['00000001', '00000002']


def test_if_all_are_damaged_the_run_does_not_start_anew_in_silence(tmp_path):
  _saved(tmp_path, [1, 2])
  _truncate(tmp_path / '00000001')
  _delete(tmp_path / '00000002')
  with pytest.raises(ConfigError, match='Each of the 2 checkpoints'):
    _restored(tmp_path)


def test_what_a_killed_save_left_is_no_checkpoint_and_goes(tmp_path):
  _saved(tmp_path, [1])
  shutil.copytree(tmp_path / '00000001', tmp_path / 'partial.00000002')
  assert _restored(tmp_path)[0] == 1
  _saved(tmp_path, [3])
  assert sorted(path.name for path in tmp_path.iterdir()) == ['00000001', '00000003']


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'step': jnp.zeros(2, jnp.int32)}, r"\['step'\] as \[\[\], 'int32'\], but this config needs \[\[2\], 'int32'\]"),
    ({'step': jnp.float32(0)}, "needs .*'float32'"),
    ({'stepp': jnp.int32(0)}, r"holds no \['stepp'\].* Did you mean"),
    ({'stop': None}, r"holds \['stop'\], which this config does not use"),
  ],
)
def test_a_checkpoint_of_another_config_is_refused(tmp_path, change, message):
  _saved(tmp_path, [1])
  with Checkpointer(tmp_path, keep=9) as checkpoints, pytest.raises(ConfigError, match=message):
    checkpoints.restore(_state() | change)


def test_a_folder_under_a_file_is_refused_with_the_reason(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(WriteError, match='Cannot save the checkpoint of step 1 in .*Not a directory'):
    _saved(tmp_path / 'file' / 'checkpoints', [1])


def _program(code, *args, **options):
  command = [sys.executable, '-c', textwrap.dedent(code), *map(str, args)]
  return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


FULL = """
  import resource, sys
  import numpy as np
  from rollout_jax.training.checkpoint import Checkpointer
  from rollout_jax.writers import WriteError
  noise_N = np.random.default_rng(0).normal(size=50_000)
  with Checkpointer(sys.argv[1], keep=1) as checkpoints:
    checkpoints.save(1, {'x': noise_N[:100]}, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
      checkpoints.save(2, {'x': noise_N}, {})
    except WriteError as error:
      print(error)
"""


def test_a_full_disk_loses_nothing_that_was_saved_and_is_said_in_one_line(tmp_path):
  out, err = _program(FULL, tmp_path).communicate(timeout=120)
  assert 'Cannot save the checkpoint of step 2' in out and 'File too large. Free some space' in out
  assert len(out.splitlines()) == 1 and err == ''
  assert [path.name for path in tmp_path.iterdir()] == ['00000001']
  with Checkpointer(tmp_path, keep=1) as checkpoints:
    step, arrays, _ = checkpoints.restore({'x': np.zeros(100)})
  np.testing.assert_array_equal(arrays['x'], np.random.default_rng(0).normal(size=50_000)[:100])
  assert step == 1


ENDLESS = """
  import sys
  import numpy as np
  from rollout_jax.training.checkpoint import Checkpointer
  with Checkpointer(sys.argv[1], keep=1) as checkpoints:
    for step in range(1, 10_000):
      checkpoints.save(step, {'x': np.full(1000, step)}, {'step': step})
      print(step, flush=True)
"""


@pytest.mark.parametrize('saves', [1, 4])
def test_a_kill_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path, saves):
  program = _program(ENDLESS, tmp_path)
  for _ in range(saves):
    said = int(program.stdout.readline())
  program.send_signal(signal.SIGKILL)
  program.communicate(timeout=60)
  with Checkpointer(tmp_path, keep=1) as checkpoints:
    step, arrays, host = checkpoints.restore({'x': np.zeros(1000, int)})
  assert step >= said and host == {'step': step} and (arrays['x'] == step).all()


def test_host_facts_are_plain_json(tmp_path):
  _saved(tmp_path, [1])
  assert json.loads((tmp_path / '00000001' / 'host.json').read_text()) == HOST | {'step': 1}
