"""What is refused in a config before anything is built, and what is worth a warning."""

from ml_collections import ConfigDict

from rollout_jax import curricula, losses, schedulers, tasks, transforms
from rollout_jax.models.transformer import REMAT
from rollout_jax.resolve import sections
from rollout_jax.tasks.base import Task
from rollout_jax.types import ConfigError

METHODS = (transforms, losses, curricula, schedulers, tasks)
# The smallest value of each number: below it a run would hang, divide by zero, or keep no checkpoint.
LEAST = {
  0: """seed rollout.lag rollout.halvings rollout.length_step pack.length pack.logits optimizer.warmup optimizer.clip
  sft.steps sft.demonstrations sft.warmup evaluation.every evaluation.samples verifier.delay log.rollouts""".split(),
  1: """steps rollout.prompts rollout.group rollout.prompt_length rollout.answer_length rollout.slots
  rollout.prefill rollout.chunk
  rollout.refill epochs minibatches microbatch optimizer.bad_updates sft.batch sft.microbatch evaluation.problems
  checkpoint.every
  checkpoint.keep""".split(),
}


def check_sizes(config: ConfigDict, task: Task, shards: int) -> None:
  """Refuses lengths that the task does not fit and numbers of rows that the mesh does not divide."""
  r = config.rollout
  if task.prompt_length > r.prompt_length:
    raise ConfigError(
      f'rollout.prompt_length is {r.prompt_length}, but prompts of task {config.task} have up to {task.prompt_length} tokens: '
      f'raise it to {task.prompt_length}, or make the problems smaller.'
    )
  if config.sft.steps and task.answer_length + 1 > r.answer_length:
    raise ConfigError(
      f'rollout.answer_length is {r.answer_length}, but demonstrations of task {config.task} have up to '
      f'{task.answer_length + 1} tokens with the end token: raise it to {task.answer_length + 1}.'
    )
  if config.evaluation.problems > task.heldout:
    raise ConfigError(
      f'evaluation.problems is {config.evaluation.problems}, but task {config.task} holds out {task.heldout}: lower it.'
    )
  sizes = ('rollout.slots', r.slots), ('microbatch', config.microbatch), ('sft.microbatch', config.sft.microbatch)
  for name, size in sizes:
    if size % shards:
      raise ConfigError(
        f'{name} is {size}, but rows are cut over data * fsdp = {shards} devices: make it a multiple of {shards}, '
        f'or change mesh.train {tuple(config.mesh.train)}.'
      )


def check_numbers(config: ConfigDict) -> None:
  """Refuses a number below its smallest value."""
  for low, names in LEAST.items():
    for name in names:
      value = config
      for part in name.split('.'):
        value = value[part]
      if value < low:
        raise ConfigError(f'{name} must be at least {low}, but is {value}.')


def unused_changes(config: ConfigDict) -> list[str]:
  """Fields of methods that were changed although nothing uses the method, such as `pods.m = 2`."""
  used = {config.task, config.loss, config.curriculum, config.scheduler, *config.transforms}
  return [
    f'{name}.{field} = {config[name][field]!r}'
    for name, section in sections(*METHODS).items()
    for field, default in section.items()
    if name not in used and config[name][field] != default
  ]


def check_names(config: ConfigDict) -> None:
  """Refuses a name that is not one of those that its field knows."""
  if config.pack.remat not in REMAT:
    raise ConfigError(f'pack.remat must be one of {", ".join(REMAT)}, but is {config.pack.remat!r}.')


def check_pairs(config: ConfigDict) -> None:
  """Refuses a scheduler that refills groups by another rule than the filter that then masks them."""
  if config.scheduler != 'dynamic':
    return
  if 'drop_degenerate' not in config.transforms:
    raise ConfigError(
      "scheduler 'dynamic' leaves groups without signal in the batch for the filter drop_degenerate to mask: add it to "
      f'transforms, which are {tuple(config.transforms)}.'
    )
  for field in ('low', 'high'):
    if config.dynamic[field] != config.drop_degenerate[field]:
      raise ConfigError(
        f'dynamic.{field} is {config.dynamic[field]}, but drop_degenerate.{field} is {config.drop_degenerate[field]}: what '
        'one of them calls a group with signal, the other throws away. Set both alike.'
      )
