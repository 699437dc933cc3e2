"""Packing inside the step: every token that is needed has one place, units stay whole, and rows are few (law 8)."""

import functools

import jax
import numpy as np
import pytest

from rollout_jax.training.packing import cuts, first_fit, pack_rows

WIDTH, PROMPTS, GROUP = 12, 5, 4


def example(seed, together):
  """Prompt lengths and cuts of rows, some of them dead, and their layout as numpy."""
  rng = np.random.default_rng(seed)
  prompt_B = np.repeat(rng.integers(1, 5, PROMPTS), GROUP)
  cut_B = np.where(rng.random(PROMPTS * GROUP) < 0.3, 0, prompt_B + rng.integers(1, WIDTH - 4, PROMPTS * GROUP))
  cut_B[GROUP : 2 * GROUP] = 0
  pack = jax.jit(functools.partial(pack_rows, width=WIDTH, length=4 + together * (WIDTH - 4), together=together))
  return prompt_B, cut_B, jax.device_get(pack(prompt_B, cut_B))


@pytest.mark.parametrize('together', [1, GROUP])
@pytest.mark.parametrize('seed', range(4))
def test_every_needed_token_has_one_place_behind_those_that_it_follows(seed, together):
  prompt_B, cut_B, layout = example(seed, together)
  places, found = layout.places, {}
  for r, token_L in enumerate(layout.token_RL):
    for at in np.flatnonzero(token_L):
      b, t = divmod(int(token_L[at]) - 1, WIDTH)
      assert (b, t) not in found and places.position_RL[r, at] == t
      assert places.segment_RL[r, at] == b // together + 1
      found[b, t] = r, int(at)
  for b, (prompt, cut) in enumerate(zip(prompt_B.tolist(), cut_B.tolist(), strict=True)):
    mine = {t for row, t in found if row == b}
    answer = set(range(prompt, cut)) if cut else set()
    assert mine in (answer, set(range(cut))) if together > 1 else mine == set(range(cut))
    for t in sorted(answer):
      r, at = found[b, t]
      before = at - 1 if places.before_RL is None else int(places.before_RL[r, at])
      owner, earlier = divmod(int(layout.token_RL[r, before]) - 1, WIDTH)
      assert earlier == t - 1 and (owner == b or (t == prompt and owner // together == b // together))
      if together > 1:
        assert places.branch_RL[r, at] == b % together + 1
  dead = {b for b in range(len(cut_B)) if not cut_B[b]}
  assert not dead & {b for b, _ in found}
  if together > 1:  # one prompt for each unit that lives
    leaders = [b for b, t in found if t == 0]
    assert sorted(b // together for b in leaders) == sorted({b // together for b in range(len(cut_B)) if cut_B[b]})


def test_used_rows_come_first_and_are_as_few_as_first_fit_gives():
  row_U, start_U = jax.device_get(jax.jit(functools.partial(first_fit, room=12))(np.array([5, 12, 3, 0, 7, 4])))
  assert list(zip(row_U.tolist(), start_U.tolist(), strict=True))[:3] == [(1, 7), (0, 0), (2, 4)]
  assert list(zip(row_U.tolist(), start_U.tolist(), strict=True))[4:] == [(1, 0), (2, 0)]
  _, cut_B, layout = example(0, 1)
  used_R = layout.token_RL.any(axis=1)
  assert used_R.sum() < (cut_B > 0).sum() and used_R[: used_R.sum()].all()
  assert (layout.token_RL[: used_R.sum(), 0] > 0).all()


def test_there_and_back():
  _, cut_B, layout = example(1, 1)
  x_BT = np.random.default_rng(0).standard_normal((len(cut_B), WIDTH)).astype(np.float32)
  back_BT = layout.put(layout.take(x_BT), x_BT.shape)
  np.testing.assert_array_equal(back_BT, np.where(np.arange(WIDTH) < cut_B[:, None], x_BT, 0))


def test_a_row_is_needed_up_to_its_last_kept_token():
  assert cuts(np.array([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])).tolist() == [4, 0, 5]
