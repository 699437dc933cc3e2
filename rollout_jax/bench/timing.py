"""Seconds of several jobs, measured in turn in one run: machines drift, so only ratios inside a run mean something."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from rollout_jax.clock import Clock
from rollout_jax.writers import progress


@dataclasses.dataclass(frozen=True)
class Timing:
  """What a job took: seconds of each repeat, of compiling before the first, and what its last call returned."""

  seconds: Sequence[float]
  compile_seconds: float
  result: Any

  @property
  def median(self) -> float:
    return statistics.median(self.seconds)

  @property
  def best(self) -> float:
    return min(self.seconds)

  def to_dict(self) -> dict[str, float]:
    """Median, best and worst seconds, and those of compiling."""
    return {'median': self.median, 'best': self.best, 'worst': max(self.seconds), 'compile': self.compile_seconds}


class Job(NamedTuple):
  """`run(prepare())` is done each time, and `run` is timed."""

  run: Callable[[Any], Any]
  prepare: Callable[[], Any] = lambda: None


def interleave(jobs: Mapping[str, Job], repeats: int) -> dict[str, Timing]:
  """Runs each job once to compile it, then all of them in turn, `repeats` times. A job's arrays are waited for."""
  clock = Clock()
  compiling, results = {}, {}
  seconds: dict[str, list[float]] = {name: [] for name in jobs}
  with progress('measuring', len(jobs) * (repeats + 1)) as advance:
    for name, job in jobs.items():
      clock.lap()
      jax.block_until_ready(job.run(job.prepare()))
      compiling[name] = clock.lap()[1]
      advance(1)
    for _ in range(repeats):
      for name, job in jobs.items():
        prepared = jax.block_until_ready(job.prepare())
        began = time.perf_counter()
        results[name] = jax.block_until_ready(job.run(prepared))
        seconds[name].append(time.perf_counter() - began)
        advance(1)
  clock.close()
  return {name: Timing(seconds[name], compiling[name], results[name]) for name in jobs}
