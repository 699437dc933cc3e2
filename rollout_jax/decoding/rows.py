"""Rows on their way between host and slots: `types.Row` with true lengths, `Rows` with fixed shapes."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import numpy as np

from rollout_jax.packing import first_fit
from rollout_jax.types import Array, ConfigError, Request, Row, Source, Stop

Either = Array | np.ndarray


@flax.struct.dataclass
class Rows:
  """J rows as arrays of fixed shape, padded to the engine's length T. On the device or, as numpy, on the host."""

  tokens_JT: Either  # int32
  source_JT: Either  # int8, Source
  logp_JT: Either  # float32
  version_JT: Either  # int32
  length_J: Either  # int32
  limit_J: Either  # int32
  key_J2: Either  # uint32, row keys
  stop_J: Either  # int8, Stop


def to_device(rows: Sequence[Row], keys: np.ndarray, slots: int, length: int, pad: int) -> Rows:
  """Numpy `Rows` of J = slots for insert or resume; row j has the row key `keys[j]`, what is left is padding."""
  for row in rows:
    if not 0 < len(row.tokens_T) < row.limit <= length:
      raise ConfigError(
        f'A row of {len(row.tokens_T)} tokens (prompt {row.request.prompt}) with its limit at {row.limit} cannot be '
        f'decoded in slots of {length} tokens: it wants 0 < tokens < limit <= slot. Shorten the prompt, or raise '
        'rollout.answer_length or the limit.'
      )
  tokens_JT = np.full((slots, length), pad, np.int32)
  source_JT = np.full((slots, length), Source.PAD, np.int8)
  logp_JT = np.zeros((slots, length), np.float32)
  version_JT = np.full((slots, length), -1, np.int32)
  length_J, limit_J = np.zeros((2, slots), np.int32)
  key_J2 = np.zeros((slots, 2), np.uint32)
  for j, row in enumerate(rows):
    n = len(row.tokens_T)
    tokens_JT[j, :n], source_JT[j, :n] = row.tokens_T, row.source_T
    logp_JT[j, :n], version_JT[j, :n] = row.logp_T, row.version_T
    length_J[j], limit_J[j], key_J2[j] = n, row.limit, keys[j]
  stop_J = np.full(slots, Stop.NONE, np.int8)
  return Rows(tokens_JT, source_JT, logp_JT, version_JT, length_J, limit_J, key_J2, stop_J)


def to_host(rows: Rows, requests: Sequence[Request]) -> list[Row]:
  """The first rows of fetched `Rows`, one for each request, cut to their true lengths."""
  return [
    Row(
      request=request,
      tokens_T=np.array(rows.tokens_JT[j, :n]),
      source_T=np.array(rows.source_JT[j, :n]),
      logp_T=np.array(rows.logp_JT[j, :n]),
      version_T=np.array(rows.version_JT[j, :n]),
      limit=int(rows.limit_J[j]),
      stop=Stop(int(rows.stop_J[j])),
    )
    for j, (request, n) in enumerate(zip(requests, rows.length_J.tolist(), strict=False))
  ]


def prompt_row(request: Request, ids: Sequence[int], limit: int) -> Row:
  """The row of a request before anything was sampled."""
  n = len(ids)
  return Row(
    request=request,
    tokens_T=np.asarray(ids, np.int32),
    source_T=np.full(n, Source.PROMPT, np.int8),
    logp_T=np.zeros(n, np.float32),
    version_T=np.full(n, -1, np.int32),
    limit=limit,
  )


def prefill_rows(most: int) -> tuple[int, ...]:
  """How many rows a prefill may have: `most`, its half and its quarter, where these are whole. Ascending."""
  return tuple(most // part for part in (4, 2, 1) if most % part == 0)


class Packed(NamedTuple):
  """Prompts for a prefill, several to a row; numpy arrays [R, L]. Segment 0 is padding."""

  tokens_RL: Either
  position_RL: Either
  segment_RL: Either


def pack_prompts(
  prompts: Sequence[Sequence[int]], most: int, prompt_length: int, pad: int
) -> tuple[Packed, list[tuple[int, int]]]:
  """Up to `most` prompts in rows of `prompt_length` tokens by first fit, and the row and start of each.

  The number of rows is the smallest of `prefill_rows(most)` that holds them: short prompts do not pay for long ones.
  """
  for ids in prompts:
    if not 0 < len(ids) <= prompt_length:
      raise ConfigError(
        f'A prompt of {len(ids)} tokens does not fit the prefill bucket of {prompt_length} tokens. '
        'Raise rollout.prompt_length, or choose a task with shorter prompts.'
      )
  places = first_fit([len(ids) for ids in prompts], prompt_length)
  used = 1 + max(row for row, _ in places)
  rows = next(size for size in prefill_rows(most) if size >= used)
  packed = Packed(*(np.full((rows, prompt_length), fill, np.int32) for fill in (pad, 0, 0)))
  for ids, (row, start) in zip(prompts, places, strict=True):
    here = row, slice(start, start + len(ids))
    packed.tokens_RL[here], packed.position_RL[here] = ids, np.arange(len(ids))
    packed.segment_RL[here] = packed.segment_RL[row].max() + 1
  return packed, places


def extend(row: Row, ids: Sequence[int]) -> Row:
  """The row with a tool's reply behind it, unfinished again. If no room is left, the row as it was, stopped by LENGTH."""
  n = len(ids)
  if len(row.tokens_T) + n >= row.limit:
    return dataclasses.replace(row, stop=Stop.LENGTH)
  return dataclasses.replace(
    row,
    tokens_T=np.concatenate([row.tokens_T, np.asarray(ids, np.int32)]),
    source_T=np.concatenate([row.source_T, np.full(n, Source.TOOL, np.int8)]),
    logp_T=np.concatenate([row.logp_T, np.zeros(n, np.float32)]),
    version_T=np.concatenate([row.version_T, np.full(n, -1, np.int32)]),
    stop=Stop.NONE,
  )
