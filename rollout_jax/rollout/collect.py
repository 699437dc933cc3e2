"""The one host loop that rolls out: it runs a scheduler's plan on the engine's slots until a round is over.

Continuous batching: rows wait in a queue, free slots are refilled between chunks, finished rows come down once and go to
the verifiers while the others decode. The device never waits for the host: chunk n + 1 is started before the status of
chunk n is read, so what the host learns of a chunk takes effect two chunks later. (A chunk that was started in vain ends
at once, by what the device knows.) Every decision rests on replicated facts: the slots' status, the scheduler's state
and counters. No clock and no verifier's speed takes part in one.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from rollout_jax import keys
from rollout_jax.decoding.engine import Engine
from rollout_jax.decoding.programs import DecodeState, Status
from rollout_jax.decoding.rows import Rows, pack_prompts, prompt_row, to_device, to_host
from rollout_jax.fetch import Fetcher
from rollout_jax.rollout.verify import Verifier
from rollout_jax.schedulers.base import Scheduler, State
from rollout_jax.types import Group, PyTree, Request, Row, Verdict

Draw = Callable[[int], Sequence[tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class Desk:
  """What stands around an engine: prompts in, verdicts out. `prompt(split, index)` gives ids, `text(ids)` an answer's text."""

  engine: Engine
  prompt: Callable[[str, int], Sequence[int]]
  text: Callable[[Sequence[int]], str]
  verifier: Verifier
  fetcher: Fetcher
  seed: int
  pad: int
  length: int  # most tokens of a row
  prompt_length: int  # tokens that a prefill holds
  budget: Callable[[Request], int]  # most tokens of a row's answer, end token included
  prefill: int  # prompts per prefill
  chunk: int  # most decode steps between two looks at the slots
  refill: int  # free slots that end a chunk early while rows wait
  delay: int  # chunks after which a row's verdict reaches the scheduler


@dataclasses.dataclass
class Usage:
  """What a round used: counts of tokens and forwards, and seconds of the host's clock."""

  issued: int = 0  # rows that were asked for
  chunks: int = 0
  forwards: int = 0  # decode forwards, each over all slots of its bucket
  slot_steps: int = 0  # the sum of their slots: what the static shapes cost
  decoded: int = 0  # tokens that were sampled
  prefill_requested: int = 0  # prompt tokens that had to be in the cache
  prefill_computed: int = 0  # of these, really computed: rows of a group that enter together share one prefill
  ended: list[int] = dataclasses.field(default_factory=list)  # forwards until each row finished
  decode_seconds: float = 0.0  # prefill, insert and generate, until their status is known
  reward_wait_seconds: float = 0.0  # waiting for verdicts that were due
  verify_seconds: float = 0.0  # the verifiers' work, in their own processes
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
  """The groups of one round in the order in which they were drawn, and what they used."""

  groups: tuple[Group, ...]
  usage: Usage


@dataclasses.dataclass(eq=False)
class _Seat:
  """A row that is under way, and what is known of it."""

  request: Request
  position: int  # of its group in the round
  length: int = 0  # tokens, prompt included, by the last status that was read
  ended: bool = False
  due: int = 0  # the chunk before which its verdict is due


@dataclasses.dataclass
class _Table:
  """The engine's slots and who sits in them, and what is on its way from the device."""

  slots: DecodeState
  seats: list[_Seat | None]
  flying: collections.deque[tuple[list[_Seat | None], Status]] = dataclasses.field(default_factory=collections.deque)
  landing: list[tuple[list[_Seat], Rows]] = dataclasses.field(default_factory=list)

  @property
  def free(self) -> int:
    """Slots without a row, as far as known."""
    return self.seats.count(None)


def collect(
  desk: Desk,
  params: PyTree,
  version: int,
  *,
  split: str,
  group: int,
  scheduler: Scheduler,
  state: State,
  draw: Draw,
  progress: Callable[[int], None] = lambda rows: None,
) -> tuple[State, Round]:
  """Runs `scheduler` to the end of one round with `params`; every token is stamped with `version`.

  `draw(n)` gives n pairs (prompt, visit), `progress(rows)` hears of every `rows` that finished. Returns the scheduler's
  state for the next round, and the round.
  """
  start, usage = time.perf_counter(), Usage(verify_seconds=-desk.verifier.seconds)
  waiting: collections.deque[_Seat] = collections.deque()
  judging: list[_Seat] = []
  drawn: list[tuple[int, int]] = []
  rows: dict[Request, Row] = {}
  verdicts: dict[Request, Verdict] = {}
  table: _Table | None = None
  for now in itertools.count():  # chunks so far, and the looks when nothing is left to decode
    for seat in sorted((s for s in judging if s.due <= now), key=lambda s: (s.position, s.request.rollout)):
      judging.remove(seat)
      verdicts[seat.request] = _verdict(desk, seat.request, usage)
      state = scheduler.settle(state, seat.position, verdicts[seat.request])
    state, plan = scheduler.plan(state)
    if plan.done:
      break
    for prompt, visit in draw(plan.draw) if plan.draw else ():
      waiting.extend(_Seat(Request(prompt, visit, g), len(drawn)) for g in range(group))
      drawn.append((prompt, visit))
      usage.issued += group
    began = time.perf_counter()
    table = _fit(desk, table, len(waiting))
    while _refills(desk, table, waiting):
      _admit(desk, params, table, waiting, split, usage)
    decodes = any(table.seats)
    if decodes:
      _dispatch(desk, params, version, table, bool(waiting))
    ended = _look(desk, table, usage, ahead=decodes)
    usage.decode_seconds += time.perf_counter() - began
    for row, seat in ended:
      rows[seat.request] = row
      desk.verifier.submit(seat.request, split, seat.request.prompt, desk.text(row.answer_T))
      seat.due = now + 1 + desk.delay
      judging.append(seat)
    desk.verifier.flush()
    progress(len(ended))
    if not (decodes or table.flying or ended or judging):
      raise RuntimeError(f'The scheduler neither draws nor ends the round, and no row is under way: {state}')
  usage.seconds = time.perf_counter() - start
  usage.verify_seconds += desk.verifier.seconds
  return state, Round(tuple(_group(p, v, group, rows, verdicts) for p, v in drawn), usage)


def _fit(desk: Desk, table: _Table | None, waiting: int) -> _Table:
  """The table in the bucket that its rows and those that wait want; rows move together, in order."""
  if table is None:
    bucket = desk.engine.ladder.holding(waiting, desk.prompt_length + desk.chunk)
    return _Table(desk.engine.init(bucket), [None] * bucket.slots)
  taken = [(slot, seat) for slot, seat in enumerate(table.seats) if seat is not None]
  longest = max((seat.length for _, seat in taken), default=0)
  if waiting:
    longest = max(longest, desk.prompt_length)
  now = table.slots.bucket
  # Each chunk in flight may have added to the rows since they were looked at, and so will the next one.
  bucket = desk.engine.ladder.fit(now, len(taken) + waiting, longest, (len(table.flying) + 1) * desk.chunk)
  if bucket != now:
    table.slots = desk.engine.resize(table.slots, bucket, [slot for slot, _ in taken])
    seats = [seat for _, seat in taken]
    table.seats = [*seats, *[None] * (bucket.slots - len(seats))]
  return table


def _refills(desk: Desk, table: _Table, waiting: collections.deque[_Seat]) -> bool:
  """Whether to fill slots now: a prefill is worth its price for `refill` rows, for the last ones, or if nothing else runs."""
  return bool(waiting) and table.free >= min(desk.refill, len(waiting), len(table.seats))


def _verdict(desk: Desk, request: Request, usage: Usage) -> Verdict:
  began = time.perf_counter()
  verdict = desk.verifier.wait([request])[request]
  usage.reward_wait_seconds += time.perf_counter() - began
  return verdict


def _group(prompt: int, visit: int, group: int, rows: dict[Request, Row], verdicts: dict[Request, Verdict]) -> Group:
  requests = [Request(prompt, visit, g) for g in range(group)]
  return Group(prompt, visit, tuple(rows[r] for r in requests), tuple(verdicts[r] for r in requests))


def _admit(
  desk: Desk, params: PyTree, table: _Table, waiting: collections.deque[_Seat], split: str, usage: Usage
) -> None:
  """Moves rows from the queue into free slots, as many as one prefill of `desk.prefill` distinct prompts serves."""
  free = [s for s, seat in enumerate(table.seats) if seat is None]
  prompts: list[int] = []
  admitted: list[_Seat] = []
  while waiting and len(admitted) < len(free):
    index = waiting[0].request.prompt
    if index not in prompts and len(prompts) == desk.prefill:
      break
    if index not in prompts:
      prompts.append(index)
    admitted.append(waiting.popleft())
  ids = {index: desk.prompt(split, index) for index in prompts}
  packed, places = pack_prompts(list(ids.values()), desk.prefill, desk.prompt_length, desk.pad)
  prefix = desk.engine.prefill(params, packed)
  fresh = [
    prompt_row(s.request, ids[s.request.prompt], min(len(ids[s.request.prompt]) + desk.budget(s.request), desk.length))
    for s in admitted
  ]
  row_keys = keys.row_keys(desk.seed, [s.request for s in admitted])
  rows = to_device(fresh, row_keys, len(table.seats), desk.length, desk.pad)
  place = dict(zip(prompts, places, strict=True))
  into = free[: len(admitted)]
  table.slots = desk.engine.insert(table.slots, prefix, [place[s.request.prompt] for s in admitted], into, rows)
  for slot, seat in zip(into, admitted, strict=True):
    table.seats[slot] = seat
    seat.length = len(ids[seat.request.prompt])
  usage.prefill_requested += sum(len(row.tokens_T) for row in fresh)
  usage.prefill_computed += sum(map(len, ids.values()))


def _dispatch(desk: Desk, params: PyTree, version: int, table: _Table, more: bool) -> None:
  """Starts a chunk. It ends early when slots can be refilled, or when so few rows are left that they fit fewer slots."""
  slots = len(table.seats)
  until_free = min(table.free + desk.refill, slots) if more else slots - desk.engine.ladder.shrinks_at(slots)
  table.slots, status = desk.engine.generate(params, version, table.slots, desk.chunk, until_free)
  table.flying.append((list(table.seats), status))


def _look(desk: Desk, table: _Table, usage: Usage, *, ahead: bool) -> list[tuple[Row, _Seat]]:
  """Reads the oldest chunk's status and takes down the rows that ended, while the chunk just started runs (`ahead`).

  Rows that a status shows as ended are gathered behind the chunk that runs, and fetched at the next look.
  """
  arriving, table.landing = table.landing, []
  if len(table.flying) > ahead:
    _read(desk, table, usage)
  if not ahead:  # the device is idle
    arriving, table.landing = arriving + table.landing, []
  finished = []
  for seats, rows in arriving:
    finished += zip(to_host(desk.fetcher('rows', rows), [seat.request for seat in seats]), seats, strict=True)
  return finished


def _read(desk: Desk, table: _Table, usage: Usage) -> None:
  seats, status = table.flying.popleft()
  status = desk.fetcher('status', status)
  before, ended = usage.forwards, []
  usage.chunks += 1
  usage.forwards += int(status.forwards)
  usage.slot_steps += int(status.forwards) * len(seats)
  for seat, live, length in zip(seats, status.live_S.tolist(), status.length_S.tolist(), strict=True):
    if seat is None or seat.ended:
      continue
    grown, seat.length = length - seat.length, length
    usage.decoded += grown
    if not live:
      seat.ended = True
      usage.ended.append(before + grown)
      ended.append(seat)
  if ended:
    slot_of = {seat: slot for slot, seat in enumerate(table.seats)}
    at = [slot_of[seat] for seat in ended]
    table.landing.append((ended, desk.engine.collect(table.slots, at)))
    for slot in at:
      table.seats[slot] = None
