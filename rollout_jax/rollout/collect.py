"""The one host loop that rolls out: it runs a scheduler's plan on the engine's slots until a round is over.

Continuous batching: rows wait in a queue, free slots are refilled between chunks, finished rows come down once and go to
the verifiers while the others decode. Every decision rests on replicated facts: the slots' status, the scheduler's state
and counters. No clock and no verifier's speed takes part in one.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from rollout_jax import keys
from rollout_jax.decoding.engine import Engine
from rollout_jax.decoding.rows import to_device, to_host
from rollout_jax.fetch import Fetcher
from rollout_jax.rollout.verify import Verifier
from rollout_jax.schedulers.base import Scheduler, State
from rollout_jax.types import Group, PyTree, Request, Row, Source, Verdict

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
  decode_seconds: float = 0.0  # prefill, insert and generate, until their status is known
  reward_wait_seconds: float = 0.0  # waiting for verdicts that were due
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
  """The groups of one round in the order in which they were drawn, and what they used."""

  groups: tuple[Group, ...]
  usage: Usage


@dataclasses.dataclass(frozen=True)
class _Seat:
  """A row that is under way: its request, the place of its group in the round, and the chunk at which its verdict is due."""

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
  start, usage = time.perf_counter(), Usage()
  waiting: collections.deque[_Seat] = collections.deque()
  judging: list[_Seat] = []
  drawn: list[tuple[int, int]] = []
  rows: dict[Request, Row] = {}
  verdicts: dict[Request, Verdict] = {}
  seats: list[_Seat | None] = [None] * desk.slots
  slots = desk.engine.init()
  while True:
    for seat in sorted((s for s in judging if s.due <= usage.chunks), key=lambda s: (s.position, s.request.rollout)):
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
    while waiting and None in seats:
      slots = _admit(desk, params, slots, seats, waiting, split, usage)
    if any(seats):
      slots, ended = _advance(desk, params, version, slots, seats, bool(waiting), usage)
      usage.decode_seconds += time.perf_counter() - began
      for row, seat in ended:
        rows[seat.request] = row
        desk.verifier.submit(seat.request, split, seat.request.prompt, desk.text(row.answer_T))
        judging.append(dataclasses.replace(seat, due=usage.chunks + desk.delay))
      desk.verifier.flush()
      progress(len(ended))
    usage.chunks += 1
  usage.seconds = time.perf_counter() - start
  return state, Round(tuple(_group(p, v, group, rows, verdicts) for p, v in drawn), usage)


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
  usage: Usage,
) -> PyTree:
  """Moves rows from the queue into free slots, as many as one prefill of `desk.prefill` distinct prompts serves."""
  free = [s for s, seat in enumerate(seats) if seat is None]
  prompts: dict[int, Sequence[int]] = {}
  admitted: list[_Seat] = []
  while waiting and len(admitted) < len(free):
    index = waiting[0].request.prompt
    if index not in prompts and len(prompts) == desk.prefill:
      break
    prompts.setdefault(index, ())
    admitted.append(waiting.popleft())
  prompts = {index: desk.prompt(split, index) for index in prompts}
  order = {index: n for n, index in enumerate(prompts)}
  take = [order[seat.request.prompt] for seat in admitted]
  fresh = [_prompt_row(desk, seat.request, prompts[seat.request.prompt]) for seat in admitted]
  prefixes = [_prompt_row(desk, Request(index, 0, 0), ids) for index, ids in prompts.items()]
  slots = desk.engine.admit(params, slots, prefixes, take, fresh, free[: len(admitted)])
  for slot, seat in zip(free, admitted, strict=False):
    seats[slot] = seat
  usage.prefill_requested += sum(len(row.tokens_T) for row in fresh)
  usage.prefill_computed += sum(len(ids) for ids in prompts.values())
  return slots


def _prompt_row(desk: Desk, request: Request, ids: Sequence[int]) -> Row:
  """The row of a request before anything was sampled."""
  n = len(ids)
  return Row(
    request=request,
    tokens_T=np.asarray(ids, np.int32),
    source_T=np.full(n, Source.PROMPT, np.int8),
    logp_T=np.zeros(n, np.float32),
    version_T=np.full(n, -1, np.int32),
    limit=min(n + desk.answer_length, desk.length),
  )
