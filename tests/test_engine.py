import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout_jax import keys, mesh
from rollout_jax.decoding.buckets import Bucket, ladder
from rollout_jax.decoding.engine import engine
from rollout_jax.decoding.rows import extend, pack_prompts, prompt_row, to_device, to_host
from rollout_jax.distribution import distribution
from rollout_jax.models.transformer import Shape, transformer
from rollout_jax.types import ConfigError, Request, Source, Stop
from tests import tiny
from tests.naive import Naive

END = (1, 5)
PAD = 0
PROMPT_LENGTHS = (1, 5, 12, tiny.PROMPT)
LIMITS = (30, 34, tiny.T, 20)
SHARP = {'temperature': 0.7, 'top_p': 0.9}

POLICY = transformer(Shape(**tiny.MODEL))


@functools.cache
def params_of(seed: int):
  # Weights of twice the usual size make distributions that are far from uniform.
  params = jax.jit(POLICY.init)(keys.named(seed, 'params'))
  return jax.tree.map(lambda x: x if x.ndim == 1 else 2 * x, params)


@functools.cache
def settings_of(name: str):
  return distribution(**{'plain': {}, 'sharp': SHARP}[name])


@functools.cache
def engine_of(name: str = 'plain', slots: int = tiny.SLOTS, end: tuple = END, axes: tuple = (1, 1, 1)):
  sizes = dict(ladder=ladder_of(slots), prompt_length=tiny.PROMPT)
  return engine(POLICY, settings_of(name), **sizes, end_tokens=end, mesh=mesh.make_mesh(axes))


def ladder_of(slots: int):
  return ladder(slots=slots, halvings=1, length=tiny.T, length_step=tiny.T // 2)


@functools.cache
def naive_of(name: str = 'plain'):
  return Naive(POLICY, settings_of(name), tiny.T, tiny.P * tiny.G)


@functools.cache
def requested():
  """P * G rows with prompts of mixed lengths and mixed limits, and their keys."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(6, 64, size=n) for n in PROMPT_LENGTHS]
  requests = [Request(p, 2, g) for p in range(tiny.P) for g in range(tiny.G)]
  return [prompt_row(r, prompts[r.prompt], LIMITS[r.prompt]) for r in requests], keys.row_keys(7, requests)


@functools.cache
def expected(name: str = 'plain'):
  rows, row_keys = requested()
  return naive_of(name).sample(params_of(0), rows, row_keys, END)


def admit(e, params, state, rows, row_keys, into, pad=PAD):
  """Rows into slots, each distinct prompt prefilled once."""
  prompts = {row.request.prompt: row.tokens_T for row in rows}
  packed, places = pack_prompts(list(prompts.values()), tiny.P, tiny.PROMPT, pad)
  prefix = e.prefill(params, packed)
  place = dict(zip(prompts, places, strict=True))
  return e.insert(
    state,
    prefix,
    [place[row.request.prompt] for row in rows],
    into,
    to_device(rows, row_keys, slots_of(state), tiny.T, pad),
  )


def slots_of(state):
  return len(state.live_S)


def fetch_rows(e, state, slots, rows):
  return to_host(jax.device_get(e.collect(state, slots)), [row.request for row in rows])


def drive(e, params, rows, row_keys, *, chunk=5, order=None, pad=PAD, hop=False):
  """Continuous batching over a queue; gives the rows in the order they came. `hop` parks and resumes after each chunk."""
  state = e.init()
  waiting = list(range(len(rows)) if order is None else order)
  seats = [None] * slots_of(state)
  done = {}
  with jax.transfer_guard_host_to_device('disallow'):
    while waiting or any(s is not None for s in seats):
      free = [s for s, seat in enumerate(seats) if seat is None]
      enter, waiting = waiting[: len(free)], waiting[len(free) :]
      if enter:
        into = free[: len(enter)]
        state = admit(e, params, state, [rows[i] for i in enter], [row_keys[i] for i in enter], into, pad)
        for slot, i in zip(into, enter, strict=True):
          seats[slot] = i
      state, status = e.generate(params, 0, state, chunk, len(seats))
      live_S = jax.device_get(status.live_S)
      ended = [s for s, seat in enumerate(seats) if seat is not None and not live_S[s]]
      for slot, row in zip(ended, fetch_rows(e, state, ended, [rows[seats[s]] for s in ended]), strict=True):
        done[seats[slot]], seats[slot] = row, None
      state = e.release(state, ended)
      if hop:
        state, seats = hop_seats(e, params, state, seats, rows, row_keys, pad)
  return [done[i] for i in range(len(rows))]


def hop_seats(e, params, state, seats, rows, row_keys, pad):
  """Parks every live row and resumes it in the mirrored slot, through the host."""
  live = [s for s, seat in enumerate(seats) if seat is not None]
  state, parked = e.park(state, live)
  moved = to_host(jax.device_get(parked), [rows[seats[s]].request for s in live])
  assert all(row.stop == Stop.NONE for row in moved)
  into = [len(seats) - 1 - s for s in live]
  again = to_device(moved, [row_keys[seats[s]] for s in live], len(seats), tiny.T, pad)
  state = e.resume(params, state, again, into)
  mirrored = [None] * len(seats)
  for s, t in zip(live, into, strict=True):
    mirrored[t] = seats[s]
  return state, mirrored


def assert_bit_equal(rows, others):
  for row, other in zip(rows, others, strict=True):
    for name in ('tokens_T', 'source_T', 'logp_T', 'version_T'):
      np.testing.assert_array_equal(getattr(row, name), getattr(other, name))
    assert (row.request, row.limit, row.stop) == (other.request, other.limit, other.stop)


# Laws 1, 2 and 3.


@pytest.mark.parametrize('name', ['plain', 'sharp'])
def test_engine_equals_the_naive_sampler_for_mixed_prompts_and_a_queue_longer_than_the_slots(name):
  rows, row_keys = requested()
  got, want = drive(engine_of(name), params_of(0), rows, row_keys), expected(name)
  assert naive_of(name).differing(params_of(0), want, got, row_keys) <= 1
  assert {Stop.EOS, Stop.LENGTH} == {row.stop for row in got}
  for row, came in zip(rows, got, strict=True):
    n = len(row.tokens_T)
    np.testing.assert_array_equal(came.tokens_T[:n], row.tokens_T)
    assert (came.source_T[:n] == Source.PROMPT).all() and (came.source_T[n:] == Source.DECODED).all()
    assert (came.logp_T[:n] == 0).all() and (came.version_T[:n] == -1).all() and (came.version_T[n:] == 0).all()


@pytest.mark.parametrize(
  'change',
  [
    {'chunk': 1},
    {'chunk': 100},
    {'order': tuple(reversed(range(tiny.P * tiny.G)))},
    {'order': tuple(np.random.default_rng(1).permutation(tiny.P * tiny.G).tolist())},
    {'slots': 4},
    {'axes': (2, 2, 2)},
    {'hop': True},
  ],
  ids=str,
)
def test_samples_do_not_depend_on_how_they_are_scheduled(change):
  """On chunk, admission order, number of slots, device count, or park and resume (law 1)."""
  rows, row_keys = requested()
  e = engine_of(slots=change.get('slots', tiny.SLOTS), axes=change.get('axes', (1, 1, 1)))
  params = params_of(0)
  if 'axes' in change:
    params = jax.device_put(params, mesh.shardings(mesh.make_mesh(change['axes']), POLICY.axes, POLICY.shapes))
  how = {k: v for k, v in change.items() if k in ('chunk', 'order', 'hop')}
  got = drive(e, params, rows, row_keys, **how)
  assert naive_of().differing(params_of(0), expected(), got, row_keys) <= 1


def test_equal_shapes_are_bit_equal():
  rows, row_keys = requested()
  once, again = (drive(engine_of(), params_of(0), rows, row_keys) for _ in range(2))
  assert_bit_equal(once, again)


def test_rollouts_and_visits_of_one_prompt_sample_different_rows():
  requests = [Request(2, visit, rollout) for visit in (0, 1) for rollout in range(4)]
  rows = [prompt_row(request, requested()[0][8].tokens_T, tiny.T) for request in requests]
  got = drive(engine_of(end=(63,)), params_of(0), rows, keys.row_keys(7, requests))
  assert len({tuple(row.tokens_T.tolist()) for row in got}) == len(got)


@pytest.mark.parametrize('name', ['plain', 'sharp'])
def test_sampled_log_probs_equal_the_scorer_s_so_the_first_ratio_is_one(name):
  rows, row_keys = requested()
  got = drive(engine_of(name), params_of(0), rows, row_keys)
  scored, inside = naive_of(name).score(params_of(0), got)
  for row, logp_T, inside_T in zip(got, scored, inside, strict=True):
    decoded_T = row.source_T == Source.DECODED
    np.testing.assert_allclose(np.exp(logp_T - row.logp_T)[decoded_T], 1, atol=1e-4)
    assert inside_T[decoded_T].all()


# Ends.


def test_every_end_token_ends_a_row_and_stays_in_it_exactly_once():
  rows, row_keys = requested()
  got = drive(engine_of(), params_of(0), rows, row_keys)
  ended = [row for row in got if row.stop == Stop.EOS]
  assert {int(row.tokens_T[-1]) for row in ended} == set(END)
  for row in got:
    assert np.isin(row.answer_T, END).sum() == (row.stop == Stop.EOS)
    assert row.stop == Stop.EOS or len(row.tokens_T) == row.limit


def test_an_end_token_that_is_not_in_the_set_does_not_end_a_row():
  rows, row_keys = requested()
  both = drive(engine_of(), params_of(0), rows, row_keys)
  one = drive(engine_of(end=END[:1]), params_of(0), rows, row_keys)
  longer = [len(o.tokens_T) > len(b.tokens_T) for o, b in zip(one, both, strict=True)]
  assert longer == [int(b.tokens_T[-1]) == END[1] and len(b.tokens_T) < b.limit for b in both]
  assert any(longer)


def test_an_end_token_at_the_limit_counts_as_an_end():
  rows, row_keys = requested()
  i, short = next((i, r) for i, r in enumerate(expected()) if r.stop == Stop.EOS and len(r.answer_T) > 2)
  for spare, stop in ((0, Stop.EOS), (-1, Stop.LENGTH)):
    limit = len(short.tokens_T) + spare
    row = prompt_row(rows[i].request, rows[i].tokens_T, limit)
    (got,) = drive(engine_of(), params_of(0), [row], row_keys[i : i + 1])
    assert got.stop == stop and len(got.tokens_T) == limit


def test_the_pad_id_means_nothing():
  """A pad that is an end token, an ordinary id or a prompt's id gives the same rows bit for bit (U1)."""
  rows, row_keys = requested()
  runs = [drive(engine_of(), params_of(0), rows, row_keys, pad=pad) for pad in (PAD, END[0], int(rows[5].tokens_T[0]))]
  assert_bit_equal(runs[0], runs[1])
  assert_bit_equal(runs[0], runs[2])


# Versions and programs.


def test_each_token_carries_the_version_that_sampled_it_and_parameters_count_from_then_on():
  rows, row_keys = requested()
  e = engine_of(end=(63,))  # the rows live on
  rows, row_keys = rows[: tiny.SLOTS], row_keys[: tiny.SLOTS]
  state = admit(e, params_of(0), e.init(), rows, row_keys, range(tiny.SLOTS))
  state, _ = e.generate(params_of(0), 3, state, 4, tiny.SLOTS)
  state, _ = e.generate(params_of(1), 7, state, 2, tiny.SLOTS)
  got = fetch_rows(e, state, range(tiny.SLOTS), rows)
  old, _ = naive_of().score(params_of(0), got)
  for row, came, logp_T in zip(rows, got, old, strict=True):
    n = len(row.tokens_T)
    assert came.version_T[n:].tolist() == [3, 3, 3, 3, 7, 7]
    np.testing.assert_allclose(came.logp_T[n : n + 4], logp_T[n : n + 4], atol=1e-4)
    assert np.abs(came.logp_T[n + 4 :] - logp_T[n + 4 :]).max() > 1e-2


def test_nothing_is_compiled_twice_for_other_parameters_versions_steps_rows_or_slots():
  e = engine(
    POLICY,
    distribution(),
    ladder=ladder_of(8),
    prompt_length=tiny.PROMPT,
    end_tokens=END,
    mesh=mesh.make_mesh((1, 1, 1)),
  )
  rows, row_keys = requested()
  for seed in (0, 1):
    state = e.init()
    for n in (3, 2):
      state = admit(e, params_of(seed), state, rows[:n], row_keys[:n], range(n, 2 * n))
      state, _ = e.generate(params_of(seed), seed + n, state, n, n)
      state, parked = e.park(state, [n])
      again = to_device(to_host(jax.device_get(parked), [rows[0].request]), row_keys, 8, tiny.T, PAD)
      state = e.resume(params_of(seed), state, again, [0])
      fetch_rows(e, state, [0, n], rows[:2])
      state = e.release(state, range(8))
      state = e.resize(state, state.bucket, range(n))
  assert {name: program._cache_size() for name, program in e.programs.items()} == dict.fromkeys(e.programs, 1)


# Slots and buckets.


def test_rows_that_move_to_another_bucket_go_on_as_if_they_had_stayed():
  """Fewer slots and shorter caches while they last, then more of both: the rows of the naive sampler (laws 1 and 2)."""
  rows, row_keys = requested()
  numbers = [8, 9, 1, 6]  # two of them outgrow the short cache
  few, keys_of_few = [rows[i] for i in numbers], row_keys[numbers]
  e = engine_of()
  state = admit(e, params_of(0), e.init(), few, keys_of_few, [1, 3, 6, 7])
  state, _ = e.generate(params_of(0), 0, state, 2, tiny.SLOTS)
  state = e.resize(state, Bucket(tiny.SLOTS // 2, tiny.T // 2), [7, 1, 6, 3])
  assert state.bucket == (tiny.SLOTS // 2, tiny.T // 2)
  state, status = e.generate(params_of(0), 0, state, 1000, tiny.SLOTS)
  live_S, length_S, _ = jax.device_get(status)
  assert live_S.any() and length_S.max() == tiny.T // 2 + 1  # the longest row waits for a longer cache
  state, status = e.generate(params_of(0), 0, state, 1000, tiny.SLOTS)
  assert int(jax.device_get(status.forwards)) == 0
  state = e.resize(state, Bucket(tiny.SLOTS, tiny.T), range(4))
  state, _ = e.generate(params_of(0), 0, state, 1000, tiny.SLOTS)
  order = [few[i] for i in (3, 0, 2, 1)]
  got = fetch_rows(e, state, range(4), order)
  want = [expected()[numbers[i]] for i in (3, 0, 2, 1)]
  assert naive_of().differing(params_of(0), want, got, keys_of_few[[3, 0, 2, 1]]) <= 1


def test_packed_prompts_share_prefill_rows_and_none_sees_another():
  rows, _ = requested()
  prompts = [rows[i].tokens_T for i in (0, 4, 8, 12)]  # of 1, 5, 12 and 16 tokens
  packed, places = pack_prompts(prompts, 4, tiny.PROMPT, PAD)
  assert packed.tokens_RL.shape == (4, tiny.PROMPT) and len({row for row, _ in places}) == 3
  together = jax.device_get(engine_of().prefill(params_of(0), packed))
  for ids, (row, start) in zip(prompts, places, strict=True):
    alone = jax.device_get(engine_of().prefill(params_of(0), pack_prompts([ids], 4, tiny.PROMPT, PAD)[0]))
    n = len(ids)
    for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
      np.testing.assert_allclose(x[row, :, start : start + n], y[0, :, :n], atol=1e-5)


def test_a_prefill_has_no_more_rows_than_its_prompts_fill():
  assert pack_prompts([[7] * 4] * 8, 8, 16, PAD)[0].tokens_RL.shape == (2, 16)
  assert pack_prompts([[7] * 4] * 9, 8 + 1, 16, PAD)[0].tokens_RL.shape == (9, 16)  # odd: there is no half of it
  assert pack_prompts([[7]], 8, 16, PAD)[0].tokens_RL.shape == (2, 16)  # a quarter is the least


def test_a_chunk_ends_after_its_steps_or_once_enough_slots_are_free():
  rows, row_keys = requested()
  rows, row_keys = rows[: tiny.SLOTS], row_keys[: tiny.SLOTS]
  lengths = sorted(len(row.tokens_T) - len(start.tokens_T) for row, start in zip(expected(), rows, strict=False))
  e = engine_of()

  def chunk(steps, until_free):
    state = admit(e, params_of(0), e.init(), rows, row_keys, range(tiny.SLOTS))
    live_S, length_S, forwards = jax.device_get(e.generate(params_of(0), 0, state, steps, until_free)[1])
    assert forwards == max(length_S - [len(row.tokens_T) for row in rows])
    return int((~live_S).sum()), int(forwards)

  assert chunk(1, 8) == (sum(n <= 1 for n in lengths), 1)
  assert chunk(0, 8)[1] == 0
  for until_free in (1, 3, 8):
    free, steps = chunk(1000, until_free)
    assert free >= until_free and steps == lengths[until_free - 1]
  assert chunk(1000, 99) == chunk(1000, 8)  # with no live slot there is nothing to wait for


def test_free_and_finished_slots_stand_still_while_others_decode():
  rows, row_keys = requested()
  e = engine_of()
  state = admit(e, params_of(0), e.init(), rows[:6], row_keys[:6], [0, 1, 2, 4, 5, 6])
  state, status = e.generate(params_of(0), 0, state, 1000, 5)
  still = [s for s, live in enumerate(jax.device_get(status.live_S).tolist()) if not live]
  assert 3 in still and len(still) >= 5
  before = [jax.device_get(x)[still].copy() for x in row_arrays(state)]
  state, _ = e.generate(params_of(0), 1, state, 3, 8)
  for x, y in zip(before, row_arrays(state), strict=True):
    np.testing.assert_array_equal(x, jax.device_get(y)[still])


def row_arrays(state):
  columns = (state.tokens_ST, state.source_ST, state.logp_ST, state.version_ST)
  return columns + (state.cursor_S, state.limit_S, state.key_S2, state.live_S, state.stop_S)


def test_a_slot_s_previous_tenant_leaves_nothing_behind():
  """Not even one whose parameters were broken: a cache full of nan."""
  rows, row_keys = requested()
  e, broken = engine_of(), jax.tree.map(lambda x: x * jnp.nan, params_of(0))
  long = [prompt_row(row.request, row.tokens_T, tiny.T) for row in rows[: tiny.SLOTS]]
  state = admit(e, broken, e.init(), long, row_keys, range(tiny.SLOTS))
  state, _ = e.generate(broken, 9, state, 1000, tiny.SLOTS)
  assert np.isnan(jax.device_get(state.cache.v[0])).any()
  state = e.release(state, range(tiny.SLOTS))
  state = admit(e, params_of(0), state, rows[:4], row_keys[:4], [3, 2, 1, 0])
  fresh = admit(e, params_of(0), e.init(), rows[:4], row_keys[:4], [3, 2, 1, 0])
  for reused, new in zip(jax.tree.leaves(state.cache), jax.tree.leaves(fresh.cache), strict=True):
    np.testing.assert_array_equal(jax.device_get(reused)[:4], jax.device_get(new)[:4])
  state, _ = e.generate(params_of(0), 0, state, 1000, tiny.SLOTS)
  fresh, _ = e.generate(params_of(0), 0, fresh, 1000, tiny.SLOTS)
  assert_bit_equal(fetch_rows(e, state, [3, 2, 1, 0], rows[:4]), fetch_rows(e, fresh, [3, 2, 1, 0], rows[:4]))


def test_a_resumed_row_keeps_its_history():
  rows, row_keys = requested()
  e = engine_of(end=(63,))
  state = admit(e, params_of(0), e.init(), rows[:2], row_keys[:2], [5, 2])
  state, _ = e.generate(params_of(0), 3, state, 6, tiny.SLOTS)
  state, parked = e.park(state, [2, 5])
  first = to_host(jax.device_get(parked), [rows[1].request, rows[0].request])
  assert not jax.device_get(state.live_S).any()
  state = e.resume(params_of(1), state, to_device(first, row_keys[[1, 0]], tiny.SLOTS, tiny.T, PAD), [0, 1])
  state, _ = e.generate(params_of(1), 4, state, 3, tiny.SLOTS)
  for before, after in zip(first, fetch_rows(e, state, [0, 1], first), strict=True):
    n = len(before.tokens_T)
    assert len(after.tokens_T) == n + 3 and after.version_T[n:].tolist() == [4, 4, 4]
    for name in ('tokens_T', 'source_T', 'logp_T', 'version_T'):
      np.testing.assert_array_equal(getattr(after, name)[:n], getattr(before, name))


def test_a_row_with_a_tool_s_reply_goes_on_as_a_full_forward_over_the_same_ids_does():
  rows, row_keys = requested()
  e = engine_of()
  state = admit(e, params_of(0), e.init(), rows[8:12], row_keys[8:12], range(4))
  state, _ = e.generate(params_of(0), 0, state, 3, tiny.SLOTS)
  state, parked = e.park(state, range(4))
  reply = [40, 41, 42]
  extended = [extend(row, reply) for row in to_host(jax.device_get(parked), [row.request for row in rows[8:12]])]
  state = e.resume(params_of(0), state, to_device(extended, row_keys[8:12], tiny.SLOTS, tiny.T, PAD), range(4))
  state, _ = e.generate(params_of(0), 0, state, 1000, tiny.SLOTS)
  got = fetch_rows(e, state, range(4), extended)
  want = naive_of().sample(params_of(0), extended, row_keys[8:12], END)
  assert naive_of().differing(params_of(0), want, got, row_keys[8:12]) == 0
  for row in got:
    tool_T = row.source_T == Source.TOOL
    assert row.tokens_T[tool_T].tolist() == reply
    assert (row.logp_T[tool_T] == 0).all() and (row.version_T[tool_T] == -1).all()


def test_a_reply_that_leaves_no_room_ends_the_row_by_length():
  row = prompt_row(Request(0, 0, 0), [7, 8, 9], limit=6)
  assert len(extend(row, [1, 2]).tokens_T) == 5 and extend(row, [1, 2]).stop == Stop.NONE
  full = extend(row, [1, 2, 3])
  assert full.stop == Stop.LENGTH and full.tokens_T.tolist() == [7, 8, 9]


# Bad input.


def test_a_prompt_longer_than_the_bucket_is_refused_by_name():
  with pytest.raises(ConfigError, match='17 tokens.*16 tokens.*rollout.prompt_length'):
    pack_prompts([[7] * 17], 2, 16, PAD)


@pytest.mark.parametrize('tokens, limit', [(8, 8), (9, 8), (3, tiny.T + 1), (0, 8)])
def test_a_row_without_room_is_refused(tokens, limit):
  row = prompt_row(Request(0, 0, 0), [7] * tokens, limit)
  with pytest.raises(ConfigError, match=f'{tokens} tokens.*limit at {limit}'):
    to_device([row], keys.row_keys(0, [row.request]), tiny.SLOTS, tiny.T, PAD)


@pytest.mark.parametrize(
  'change, field',
  [
    ({'slots': 0}, 'rollout.slots'),
    ({'prompt_length': tiny.T}, 'rollout.prompt_length'),
    ({'end_tokens': (-1,)}, 'End tokens'),
    ({'end_tokens': (1, 64)}, 'End tokens'),
    ({'slots': 6, 'mesh': (2, 2, 2)}, 'slots'),
  ],
  ids=str,
)
def test_sizes_that_cannot_work_are_refused_by_name(change, field):
  sizes = dict(slots=tiny.SLOTS, prompt_length=tiny.PROMPT, end_tokens=END, mesh=(1, 1, 1)) | change
  sizes['ladder'] = ladder(slots=sizes.pop('slots'), halvings=0, length=tiny.T, length_step=0)
  sizes['mesh'] = mesh.make_mesh(sizes['mesh'])
  with pytest.raises(ConfigError, match=field):
    engine(POLICY, distribution(), **sizes)
