import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_jax.ledger import FLOWS, Ledger, LedgerError

# One step by hand. A row parked earlier with 3 tokens goes on, 5 rows are issued. Three rows are trained, the parked one
# among them: 30 tokens, 4 of them masked. One row of 9 tokens is stale, one is cut and thrown away after 5, one is parked
# with 7. So 30 - 3 + 9 + 5 + 7 = 48 tokens were decoded.
STEP = (
  Ledger(held_before=3, held=3, pending_before=1, pending=1)
  .add(decoded=48, prefill_requested=40, prefill_computed=8, padded=11, issued=5)
  .add(trained=26, filtered=4, rows_trained=3)
  .add(filtered=9, dropped={'stale': 1})
  .add(aborted_dropped=5, dropped={'aborted': 1})
  .close(held=7, pending=1)
)


def test_a_step_worked_by_hand_balances():
  STEP.check()


def test_the_record_has_the_published_names():
  assert STEP.to_dict() == {
    'tok.decoded': 48,
    'tok.reused': 0,
    'tok.trained': 26,
    'tok.filtered': 13,
    'tok.aborted_dropped': 5,
    'tok.prefill_requested': 40,
    'tok.prefill_computed': 8,
    'tok.padded': 11,
    'rows.issued': 5,
    'rows.trained': 3,
    'tok.held_before': 3,
    'tok.held': 7,
    'rows.pending_before': 1,
    'rows.pending': 1,
    'rows.dropped.aborted': 1,
    'rows.dropped.stale': 1,
  }


@pytest.mark.parametrize(
  'name', ['decoded', 'reused', 'trained', 'filtered', 'aborted_dropped', 'issued', 'rows_trained']
)
def test_one_lost_token_or_row_breaks_the_balance(name):
  with pytest.raises(LedgerError):
    STEP.add(**{name: 1}).check()


@pytest.mark.parametrize('stock', [{'held': 8, 'pending': 1}, {'held': 7, 'pending': 2}])
def test_a_wrong_stock_breaks_the_balance(stock):
  with pytest.raises(LedgerError):
    STEP.close(**stock).check()


def test_an_uncounted_drop_breaks_the_balance():
  with pytest.raises(LedgerError):
    STEP.add(dropped={'surplus': 1}).check()


def test_the_error_prints_the_whole_balance():
  with pytest.raises(LedgerError) as error:
    STEP.add(decoded=2).check('step 7')
  message = str(error.value)
  assert 'does not balance at step 7: 50 tokens came in, 48 went out' in message
  assert all(name in message for name in STEP.to_dict())


def test_counts_that_cancel_out_are_refused_when_negative():
  with pytest.raises(LedgerError, match='tok.filtered is negative'):
    Ledger().add(filtered=-2, trained=2).check()


def test_more_prefill_than_was_asked_for_is_refused():
  with pytest.raises(LedgerError, match='9 tokens were prefilled, 8 were asked for'):
    Ledger().add(prefill_requested=8, prefill_computed=9).check()


def test_a_misspelt_flow_is_refused():
  with pytest.raises(TypeError, match="'train' is not a flow"):
    Ledger().add(train=3)
  with pytest.raises(TypeError):
    Ledger().add(held=3)


def test_a_ledger_comes_back_from_json():
  line = json.loads(json.dumps({'step': 3, 'loss': 0.5} | STEP.to_dict()))
  assert Ledger.from_dict(line) == STEP


@st.composite
def steps(draw, before=None):
  """A balanced step that starts with the given stocks."""
  held_before, pending_before = before
  out = {name: draw(st.integers(0, 50)) for name in ('trained', 'filtered', 'aborted_dropped')}
  held = draw(st.integers(0, held_before + 60))
  decoded = max(0, sum(out.values()) + held - held_before)
  out['filtered'] += decoded - (sum(out.values()) + held - held_before)
  dropped = draw(st.dictionaries(st.sampled_from(['stale', 'surplus', 'dead_group']), st.integers(0, 5)))
  rows = draw(st.integers(0, 9))
  pending = pending_before + draw(st.integers(0, 9))
  issued = rows + sum(dropped.values()) + pending - pending_before
  opened = Ledger(held_before=held_before, pending_before=pending_before)
  return opened.add(decoded=decoded, **out, issued=issued, rows_trained=rows, dropped=dropped).close(
    held=held, pending=pending
  )


@given(st.data())
def test_the_total_of_balanced_steps_balances(data):
  total = Ledger()
  each = []
  for _ in range(data.draw(st.integers(1, 6))):
    step = data.draw(steps(before=(total.held, total.pending)))
    step.check()
    each.append(step)
    total = total + step
  total.check()
  assert total.held_before == total.pending_before == 0
  for name in FLOWS:
    assert getattr(total, name) == sum(getattr(step, name) for step in each)


def test_ledgers_that_do_not_follow_each_other_do_not_add_up():
  assert (STEP + STEP.following()).held == STEP.held
  with pytest.raises(LedgerError, match='ends with 7 tokens held'):
    STEP + dataclasses.replace(STEP.following(), held_before=6)


def test_the_following_ledger_is_empty_and_starts_at_the_end():
  following = STEP.following()
  following.check()
  assert (following.held_before, following.held, following.pending_before, following.pending) == (7, 7, 1, 1)
  assert all(getattr(following, name) == 0 for name in FLOWS) and not following.dropped
