"""Tiny runs for tests, to be driven step by step."""

import dataclasses
import json
import pathlib

import jax

from rollout_jax import loop, warm_start
from rollout_jax.build import Parts
from rollout_jax.clock import Clock
from rollout_jax.training.checkpoint import Checkpointer
from rollout_jax.writers import Writers

SHOWN = ('accuracy {reward/accuracy:.2f}',)
TIMES = ('t/', 'rate/', 'idle/', 'total/seconds', 'total/device_seconds', 'total/compile_seconds')


@dataclasses.dataclass
class Machine:
  """The parts of a run with a folder, to be driven step by step."""

  parts: Parts
  folder: pathlib.Path
  clock: Clock

  def go(self, steps, until=None):
    """Takes the run in the folder to `steps`, or stops after `until` steps; returns the run."""
    parts = self.parts
    with jax.set_mesh(parts.base.mesh), Checkpointer(self.folder / 'checkpoints', keep=2) as checkpoints:
      fresh = loop.start(parts, warm_start.random_params(parts.base, 0))
      state = loop.restore(parts, fresh, checkpoints)
      writers = Writers(self.folder, steps=steps, shown=SHOWN, resume_step=0 if state is None else state.step)
      state = fresh if state is None else state
      loop.train(
        parts,
        state,
        steps=steps,
        frozen={'reference': warm_start.random_params(parts.base, 1)},
        writers=writers,
        checkpoints=checkpoints,
        clock=self.clock,
        stop=lambda: until is not None and state.step >= until,
        evaluate=lambda run: None,
      )
      writers.close()
      return state


def lines(folder):
  """Lines of metrics.jsonl without what a clock says."""
  found = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
  return [{name: x for name, x in line.items() if not name.startswith(TIMES)} for line in found]
