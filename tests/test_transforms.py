"""The laws that every transform keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_jax import transforms
from rollout_jax.types import ConfigError, Phase
from tests import batches
from tests.batches import plain, value

pytestmark = pytest.mark.usefixtures('quick_compile')  # many small programs: compiling is all that they cost

MEMBERS = {name: getattr(transforms, name)() for name in transforms.__all__} | {
  'combine_rewards shaped': transforms.combine_rewards(correct=2.0, wrong=-1.0, malformed=-0.5),
  'drop_degenerate narrow': transforms.drop_degenerate(low=0.2, high=0.5),
  'group_advantage batch': transforms.group_advantage(scope='batch'),
  'group_advantage dr_grpo': transforms.group_advantage(scope='none'),
  'group_advantage rloo': transforms.group_advantage(scope='none', leave_one_out=True),
  'group_advantage raw': transforms.group_advantage(ddof=0, singleton='raw'),
  'limit_staleness strict': transforms.limit_staleness(limit=1),
  'pods pair': transforms.pods(m=2),
  'pods all': transforms.pods(m=batches.G),
  'tis sequence': transforms.tis(level='sequence', cap=5.0),
}
FILTERED = {'keep_PGT', 'stat_PG'}


JITTED = {name: jax.jit(functools.partial(plain, member)) for name, member in MEMBERS.items()}


def by_rollout(batch, order_P=None):
  """The fields with rows in the order of their rollout numbers, and groups in the order given."""
  fields = batches.arrays(batch)
  order_PG = np.argsort(fields['rollout_PG'], axis=1)
  for name, x in fields.items():
    if name.rsplit('_', 1)[1].startswith('PG'):
      x = np.take_along_axis(x, order_PG.reshape(*order_PG.shape, *(1,) * (x.ndim - 2)), axis=1)
    fields[name] = x if order_P is None else x[order_P]
  return fields


def assert_close(one, other):
  assert one.keys() == other.keys()
  for name in one:
    np.testing.assert_allclose(one[name], other[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize('name', MEMBERS)
def test_jit_changes_nothing(name):
  batch = batches.mixed()
  (after, report), (fast, fast_report) = plain(MEMBERS[name], batch), JITTED[name](batch)
  assert_close(batches.arrays(after), batches.arrays(fast))
  assert_close({k: value(v) for k, v in report.items()}, {k: value(v) for k, v in fast_report.items()})


@pytest.mark.parametrize('name', MEMBERS)
@settings(max_examples=4, deadline=None)
@given(order_P=st.permutations(range(batches.P)), order_G=st.permutations(range(batches.G)), seed=st.integers(0, 9))
def test_order_of_prompts_and_of_rollouts_changes_nothing(name, order_P, order_G, seed):
  batch = batches.mixed(seed)
  after, report = JITTED[name](batch)
  other, other_report = JITTED[name](batches.reordered(batch, np.array(order_P), np.array(order_G)))
  assert_close(by_rollout(after, np.array(order_P)), by_rollout(other))
  assert_close({k: value(v) for k, v in report.items()}, {k: value(v) for k, v in other_report.items()})


@pytest.mark.parametrize('name', MEMBERS)
def test_everything_is_finite_when_nothing_is_kept(name):
  after, report = JITTED[name](batches.masked_out(batches.mixed()))
  for field, x in batches.arrays(after).items():
    assert np.isfinite(x).all(), field
  for key, mean in report.items():
    assert np.isfinite(value(mean)), key


@pytest.mark.parametrize('name', MEMBERS)
@pytest.mark.parametrize('seed', range(3))
def test_only_declared_fields_change_and_only_as_their_phase_may(name, seed):
  spec, batch = MEMBERS[name].spec, batches.mixed(seed)
  fields = batches.arrays(JITTED[name](batch)[0])
  assert fields['stat_PG'].shape == (batches.P, spec.group_size(batches.G))
  before = batches.arrays(batch)
  left_PG = fields['rollout_PG']  # as collected, a row's rollout number is its place in the group
  for field, x in fields.items():
    if field in spec.writes:
      continue
    old = before[field]
    if field.rsplit('_', 1)[1].startswith('PG'):
      old = np.take_along_axis(old, left_PG.reshape(*left_PG.shape, *(1,) * (old.ndim - 2)), axis=1)
    np.testing.assert_array_equal(x, old, err_msg=field)
  if spec.phase == Phase.FILTER:
    assert spec.writes <= FILTERED
    for field in FILTERED:
      assert np.isin(fields[field], [0, 1]).all() and (fields[field] <= before[field]).all(), field
  if 'correction_PGT' in spec.writes:
    assert (fields['correction_PGT'] > 0).all()


@pytest.mark.parametrize('name', MEMBERS)
def test_nothing_outside_the_loss_reaches_what_is_kept(name):
  batch = batches.mixed()
  poison = lambda x: jnp.where(batch.keep_PGT > 0, x, jnp.nan)
  poisoned = batch.replace(
    behaviour_logp_PGT=poison(batch.behaviour_logp_PGT),
    proximal_logp_PGT=poison(batch.proximal_logp_PGT),
    reward_PG=jnp.where(batch.stat_PG > 0, batch.reward_PG, jnp.nan),
  )
  (clean, report), (dirty, dirty_report) = JITTED[name](batch), JITTED[name](poisoned)
  kept_PGT = np.asarray(clean.keep_PGT)
  for field, x in batches.arrays(clean).items():
    if field.endswith('_PGT'):
      np.testing.assert_array_equal(np.where(kept_PGT > 0, x, 0), np.where(kept_PGT > 0, getattr(dirty, field), 0))
  assert_close({k: value(v) for k, v in report.items()}, {k: value(v) for k, v in dirty_report.items()})


@pytest.mark.parametrize('name', [n for n, m in MEMBERS.items() if m.spec.phase == Phase.CORRECT])
def test_correction_is_the_identity_when_behaviour_is_proximal(name):
  batch = batches.mixed()
  batch = batch.replace(proximal_logp_PGT=batch.behaviour_logp_PGT)
  after, report = JITTED[name](batch)
  np.testing.assert_array_equal(after.correction_PGT, batch.correction_PGT)
  np.testing.assert_array_equal(after.keep_PGT, batch.keep_PGT)
  area = MEMBERS[name].spec.name
  assert value(report[f'{area}/ess']) == 1 and value(report[f'{area}/kl']) == value(report[f'{area}/chi2']) == 0


@pytest.mark.parametrize(
  'make, field',
  [
    (lambda: transforms.drop_degenerate(low=0.5, high=0.5), 'low'),
    (lambda: transforms.limit_staleness(limit=-1), 'limit'),
    (lambda: transforms.pods(m=1), 'pods.m'),
    (lambda: transforms.group_advantage(scope='groups'), 'scope'),
    (lambda: transforms.group_advantage(singleton='one'), 'singleton'),
    (lambda: transforms.group_advantage(ddof=2), 'ddof'),
    (lambda: transforms.tis(level='row'), 'tis.level'),
    (lambda: transforms.tis(cap=0.5), 'tis.cap'),
  ],
)
def test_argument_that_cannot_work_is_refused_by_name(make, field):
  with pytest.raises(ConfigError, match=field):
    make()
