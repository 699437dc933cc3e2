"""The one host loop that rolls out: it runs a scheduler's plan on the engine's slots until a round is over.

Continuous batching: rows wait in a queue, free slots are refilled between chunks, finished rows come down once and go to
the verifiers while the others decode. Every decision rests on replicated facts: the slots' status, the scheduler's state
and counters. No clock and no verifier's speed takes part in one.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from rollout_jax import keys
from rollout_jax.decoding.engine import Engine
from rollout_jax.decoding.rows import pad_prompts, prompt_row, to_device, to_host
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
  slots: int
  length: int  # tokens that a slot holds
  prompt_length: int  # tokens that a prefill holds
  answer_length: int  # most tokens of an answer, end token included
  prefill: int  # prompts per prefill
  chunk: int  # most decode steps between two looks at the slots
  refill: int  # free slots that end a chunk early while rows wait
  delay: int  # chunks after which a row's verdict reaches the scheduler


@dataclasses.dataclass
class Usage:
  """What a round used: counts of tokens and forwards, and seconds of the host's clock."""

  issued: int = 0  # rows that were asked for
  chunks: int = 0
  forwards: int = 0  # decode forwards, each over all slots
  slot_steps: int = 0  # forwards * slots: what the static shape costs
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


@dataclasses.dataclass(frozen=True)
class _Seat:
  """A row that is under way: its request, the place of its group in the round, and before which chunk its verdict is due."""

  request: Request
  position: int
  due: int = 0


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
  seats: list[_Seat | None] = [None] * desk.slots
  lengths = [0] * desk.slots
  slots = desk.engine.init()
  for now in itertools.count():  # chunks so far, and the waits for verdicts when nothing is left to decode
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
    while _refills(desk, seats, waiting):
      slots = _admit(desk, params, slots, seats, waiting, split, lengths, usage)
    if any(seats):
      slots, ended = _advance(desk, params, version, slots, seats, bool(waiting), lengths, usage)
      usage.decode_seconds += time.perf_counter() - began
      usage.chunks += 1
      for row, seat in ended:
        rows[seat.request] = row
        desk.verifier.submit(seat.request, split, seat.request.prompt, desk.text(row.answer_T))
        judging.append(dataclasses.replace(seat, due=now + 1 + desk.delay))
      desk.verifier.flush()
      progress(len(ended))
    elif not judging:
      raise RuntimeError(f'The scheduler neither draws nor ends the round, and no row is under way: {state}')
  usage.seconds = time.perf_counter() - start
  usage.verify_seconds += desk.verifier.seconds
  return state, Round(tuple(_group(p, v, group, rows, verdicts) for p, v in drawn), usage)


def _refills(desk: Desk, seats: list[_Seat | None], waiting: collections.deque[_Seat]) -> bool:
  """Whether to fill slots now: a prefill is worth its price for `refill` rows, for the last ones, or if nothing else runs."""
  free = seats.count(None)
  return bool(waiting) and free >= min(desk.refill, len(waiting), desk.slots)


def _verdict(desk: Desk, request: Request, usage: Usage) -> Verdict:
  began = time.perf_counter()
  verdict = desk.verifier.wait([request])[request]
  usage.reward_wait_seconds += time.perf_counter() - began
  return verdict


def _group(prompt: int, visit: int, group: int, rows: dict[Request, Row], verdicts: dict[Request, Verdict]) -> Group:
  requests = [Request(prompt, visit, g) for g in range(group)]
  return Group(prompt, visit, tuple(rows[r] for r in requests), tuple(verdicts[r] for r in requests))


def _admit(
  desk: Desk,
  params: PyTree,
  slots: PyTree,
  seats: list[_Seat | None],
  waiting: collections.deque[_Seat],
  split: str,
  lengths: list[int],
  usage: Usage,
) -> PyTree:
  """Moves rows from the queue into free slots, as many as one prefill of `desk.prefill` distinct prompts serves."""
  free = [s for s, seat in enumerate(seats) if seat is None]
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
  order = {index: n for n, index in enumerate(prompts)}
  prefix = desk.engine.prefill(params, pad_prompts(list(ids.values()), desk.prefill, desk.prompt_length, desk.pad))
  fresh = [
    prompt_row(s.request, ids[s.request.prompt], min(len(ids[s.request.prompt]) + desk.answer_length, desk.length))
    for s in admitted
  ]
  rows = to_device(fresh, keys.row_keys(desk.seed, [s.request for s in admitted]), desk.slots, desk.length, desk.pad)
  take = [order[s.request.prompt] for s in admitted]
  slots = desk.engine.insert(slots, prefix, take, free[: len(admitted)], rows)
  for slot, seat in zip(free, admitted, strict=False):
    seats[slot] = seat
    lengths[slot] = len(ids[seat.request.prompt])
  usage.prefill_requested += sum(len(row.tokens_T) for row in fresh)
  usage.prefill_computed += sum(map(len, ids.values()))
  return slots


def _advance(
  desk: Desk,
  params: PyTree,
  version: int,
  slots: PyTree,
  seats: list[_Seat | None],
  more: bool,
  lengths: list[int],
  usage: Usage,
) -> tuple[PyTree, list[tuple[Row, _Seat]]]:
  """Decodes a chunk and takes out the rows that ended; with `more` rows waiting, it returns early to refill."""
  free = seats.count(None)
  until_free = min(free + desk.refill, desk.slots) if more else desk.slots
  slots, status = desk.engine.generate(params, version, slots, desk.chunk, until_free)
  status = desk.fetcher('status', status)
  took = {s: int(status.length_S[s]) - lengths[s] for s, seat in enumerate(seats) if seat is not None}
  grown = took.values()
  usage.decoded += sum(grown)
  before = usage.forwards
  usage.forwards += max(grown)
  usage.slot_steps += max(grown) * desk.slots
  lengths[:] = status.length_S.tolist()
  ended = [s for s, seat in enumerate(seats) if seat is not None and not status.live_S[s]]
  if not ended:
    return slots, []
  taken = desk.fetcher('rows', desk.engine.collect(slots, ended))
  rows = to_host(taken, [seats[s].request for s in ended])
  finished = [(row, seats[s]) for row, s in zip(rows, ended, strict=True)]
  for s in ended:
    usage.ended.append(before + took[s])
    seats[s] = None
  return slots, finished
