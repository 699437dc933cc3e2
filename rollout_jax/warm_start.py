"""Supervised fine-tuning on a task's demonstrations: a from-scratch policy learns enough for RL to have something to improve.

A warm start is a folder: `params/` holds the result, `checkpoints/` where a run that was cut goes on, `config.json` what it
was made of. Many runs of RL can start from one.
"""

import functools
import math
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from rollout_jax import keys
from rollout_jax.build import Base
from rollout_jax.fetch import Fetcher
from rollout_jax.mesh import replicated, sharding, shardings
from rollout_jax.packing import first_fit
from rollout_jax.resolve import flatten_diff
from rollout_jax.training.checkpoint import Checkpointer
from rollout_jax.training.sft import Packed, Plan, make_sft_step
from rollout_jax.training.state import TrainState, init_state, state_shardings
from rollout_jax.types import ConfigError, PyTree, Stopped
from rollout_jax.writers import make_folder, progress, read_json, say, write_json

EVERY = 100  # updates between two checkpoints


def fine_tune(
  base: Base,
  tx: optax.GradientTransformation,
  plan: Plan,
  params: PyTree,
  folder: pathlib.Path,
  made_of: Mapping[str, Any],
  stop: Callable[[], bool],
) -> PyTree:
  """The parameters after `plan`, from `params`; also left in `folder`/params. Goes on where an earlier call was cut.

  Raises ConfigError if the folder holds something else, or if the task has no demonstrations.
  """
  claim(folder, made_of)
  done = load(base, folder, made_of)
  if done is not None:
    return done
  make = lambda params: init_state(params, tx)
  lay = state_shardings(base.policy, tx, base.mesh, jax.eval_shape(make, base.policy.shapes))
  state = jax.jit(make, out_shardings=lay)(params)
  step_function = jax.jit(
    make_sft_step(base.policy, tx, plan.micro), donate_argnums=0, out_shardings=(lay, replicated(base.mesh))
  )
  with Checkpointer(folder / 'checkpoints', keep=1) as checkpoints:
    found = checkpoints.restore({'state': state})
    first = 0
    if found is not None:
      first, state = found[0], found[1]['state']
    state = _updates(base, step_function, plan, state, first, checkpoints, stop)
    params = state.params['policy']
  write_params(params, folder / 'params', plan.steps)
  return params


def _updates(
  base: Base,
  step_function: Callable,
  plan: Plan,
  state: TrainState,
  first: int,
  checkpoints: Checkpointer,
  stop: Callable[[], bool],
) -> TrainState:
  fetcher, loss = Fetcher(), None
  where = sharding(base.mesh, ('batch', None))
  with progress('fine-tuning', plan.steps) as advance:
    advance(first)
    for step in range(first, plan.steps):
      state, loss = step_function(state, jax.device_put(demonstrations(base, plan, step), where))
      advance(1)
      last, stopped = step + 1 == plan.steps, stop()
      if (step + 1) % EVERY == 0 or stopped or last:
        _check_finite(float(fetcher('loss', loss)), step + 1)
      if ((step + 1) % EVERY == 0 or stopped) and not last:
        checkpoints.save(step + 1, {'state': state}, {})
      if stopped and not last:  # after the last update the result is saved instead
        raise Stopped(f'fine-tuning stopped at update {step + 1} of {plan.steps}')
  if loss is not None:
    say(f'fine-tuning: loss {float(fetcher("loss", loss)):.3f} per token after {plan.steps} updates')
  return state


def _check_finite(loss: float, updates: int) -> None:
  if not math.isfinite(loss):
    raise ConfigError(
      f'The loss of fine-tuning is {loss} after {updates} updates: lower sft.learning_rate or raise sft.warmup, and choose '
      'another workdir.'
    )


def demonstrations(base: Base, plan: Plan, step: int) -> Packed:
  """The demonstrations of an update, packed: a new order each epoch, answer and end token in the loss.

  Rows are as long as those of RL: demonstrations share one if they fit into it together, which long ones never do.
  """
  shards = base.mesh.shape['data'] * base.mesh.shape['fsdp']
  shape_RL = -(-plan.batch // shards) * shards, base.length
  packed = Packed(
    tokens_RL=np.full(shape_RL, base.tokenizer.pad, np.int32),
    position_RL=np.zeros(shape_RL, np.int32),
    segment_RL=np.zeros(shape_RL, np.int32),
    keep_RL=np.zeros(shape_RL, np.float32),
  )
  numbers = range(step * plan.batch, (step + 1) * plan.batch)
  drawn = [_demonstration(base, plan, number) for number in numbers]
  places = first_fit([len(ids) for _, ids in drawn], base.length)
  for (asked, ids), (row, start) in zip(drawn, places, strict=True):
    end = start + len(ids)
    packed.tokens_RL[row, start:end] = ids
    packed.position_RL[row, start:end] = np.arange(len(ids))
    packed.segment_RL[row, start:end] = packed.segment_RL[row].max() + 1
    packed.keep_RL[row, start + max(asked, 1) : end] = 1  # nothing predicts a first token
  return packed


def _demonstration(base: Base, plan: Plan, number: int) -> tuple[int, list[int]]:
  """How many tokens the prompt of demonstration `number` has, and all its tokens."""
  task, tokenizer = base.task, base.tokenizer
  size = min(plan.demonstrations or task.size, task.size)
  index = int(_order(plan.seed, number // size, size)[number % size])
  prompt = task.prompt('train', index)
  if prompt.demonstration is None:
    raise ConfigError(
      'This task has no demonstrations to fine-tune on: set sft.steps=0, or warm_start to the folder of a policy.'
    )
  asked = tokenizer.encode(prompt.text)
  ids = [*asked, *tokenizer.encode(prompt.demonstration), tokenizer.end_tokens[0]]
  if len(ids) > base.length:
    raise ConfigError(
      f'Demonstration {index} has {len(ids)} tokens with its prompt, a row has {base.length}: raise rollout.answer_length.'
    )
  return len(asked), ids


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
  """The order of an epoch, named by seed and epoch."""
  return np.random.default_rng([zlib.crc32(b'demonstrations'), seed, epoch]).permutation(size)


def load(base: Base, folder: pathlib.Path, made_of: Mapping[str, Any]) -> PyTree | None:
  """The parameters of a finished warm start, laid out on the mesh; None if there are none yet.

  Raises ConfigError if they are of another model or task than `made_of` says; how many prompts the task has may differ.
  """
  if not (folder / 'params').exists():
    return None
  difference = flatten_diff(_subject(read_json(folder / 'config.json')), _subject(made_of))
  if difference:
    raise ConfigError(f'warm_start {folder} is of another model or task, there -> here:\n  ' + '\n  '.join(difference))
  return read_params(base, folder / 'params')


def read_params(base: Base, folder: pathlib.Path) -> PyTree | None:
  """The parameters that `write_params` left in a folder, laid out on the mesh; None if there are none."""
  lay = shardings(base.mesh, base.policy.axes, base.policy.shapes)
  template = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), base.policy.shapes, lay)
  with Checkpointer(folder, keep=1) as result:
    found = result.restore({'policy': template})
  return None if found is None else found[1]['policy']


def write_params(params: PyTree, folder: pathlib.Path, step: int) -> None:
  """Leaves parameters in a folder of their own."""
  with Checkpointer(folder, keep=1) as result:
    result.save(step, {'policy': params}, {})


def _subject(made_of: Mapping[str, Any]) -> Mapping[str, Any]:
  """The model and the problems that it knows."""
  task = {name: value for name, value in made_of['task'].items() if name not in ('size', 'heldout')}
  return {'task': task, 'model': made_of['model']}


def random_params(base: Base, seed: int) -> PyTree:
  """Freshly initialised parameters, laid out on the mesh."""
  lay = shardings(base.mesh, base.policy.axes, base.policy.shapes)
  return jax.jit(base.policy.init, out_shardings=lay)(keys.named(seed, 'init'))


def claim(folder: pathlib.Path, made_of: Mapping[str, Any]) -> None:
  """Writes what a folder is made of, or raises ConfigError with the difference if it was made of something else."""
  path = folder / 'config.json'
  if not path.exists():
    make_folder(folder)
    write_json(path, made_of)
    return
  difference = flatten_diff(read_json(path), dict(made_of))
  if difference:
    lines = '\n  '.join(difference)
    raise ConfigError(
      f'{folder} holds the run of another config. What differs, there -> here:\n  {lines}\n'
      'Choose another folder, or the config that it was made with.'
    )
