"""The overlay that makes any config small enough for a test: tiny model, task and sizes, so that programs are shared."""

from ml_collections import ConfigDict

from tests import tiny


def shrink(config: ConfigDict, **changes) -> ConfigDict:
  """The config on the product task with the tiny shapes for two steps; `changes` are dotted fields with __ for a dot."""
  small = {
    'steps': 2,
    'task': 'product',
    'warm_start': '',
    'sft.steps': 0,
    'rollout.prompts': tiny.P,
    'rollout.group': tiny.G,
    'rollout.prompt_length': tiny.PROMPT,
    'rollout.answer_length': tiny.T - tiny.PROMPT,
    'rollout.slots': tiny.SLOTS,
    'rollout.prefill': tiny.P,
    'rollout.chunk': 8,
    'rollout.refill': 2,
    'microbatch': 8,
    'sft.microbatch': 8,
    'evaluation.problems': 8,
    'evaluation.every': 0,
    'checkpoint.every': 2,
    'product.max_number': 30,
    'product.heldout': 8,
    **{f'model.{name}': value for name, value in tiny.MODEL.items() if name != 'vocab_size'},
    **{name.replace('__', '.'): value for name, value in changes.items()},
  }
  config = ConfigDict(config.to_dict())
  for name, value in small.items():
    section, _, field = name.rpartition('.')
    target = config
    for part in section.split('.') if section else ():
      target = target[part]
    target[field] = value
  config.pods.m = min(config.pods.m, tiny.G // 2) if 'pods' in config.transforms else config.pods.m
  return config
