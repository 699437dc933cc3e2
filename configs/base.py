"""Every field that there is, with its default. A fork imports this file, changes the answer, and says why in its docstring.

    from configs import base

    def get_config():
      config = base.get_config()
      config.transforms = ('combine_rewards', 'group_advantage')
      return config

Sections of methods come from the signatures of the functions themselves: `--config.pods.m=4` always works.
"""

from ml_collections import ConfigDict

from rollout_jax import curricula, losses, schedulers, tasks, transforms
from rollout_jax.distribution import distribution
from rollout_jax.models.transformer import Shape
from rollout_jax.resolve import fields, sections


def get_config() -> ConfigDict:
  """The defaults: a small character model on the gcd task, synchronous GRPO."""
  shape = {'layers': 3, 'width': 128, 'heads': 4, 'kv_heads': 4, 'head_width': 32, 'feed_forward': 384}
  rest = {name: f.default for name, f in Shape.__dataclass_fields__.items() if name not in (*shape, 'vocab_size')}
  config = {
    'seed': 0,
    'steps': 200,  # training steps: rounds of rollout, each followed by one call of the training step
    'task': 'gcd',  # a function of rollout_jax/tasks, or a dotted path of your own
    'warm_start': '',  # folder of a run of experiments.sft; empty: the run makes its own (sft.steps)
    'model': {**shape, **rest},  # vocabulary comes from the task's tokenizer
    'mesh': {'train': (1, 1, 1)},  # devices by (data, fsdp, tensor); one entry may be -1
    'rollout': {
      'prompts': 16,  # P: prompts of a batch
      'group': 8,  # G: rollouts of each
      'prompt_length': 32,  # most tokens of a prompt
      'answer_length': 64,  # most tokens of an answer, end token included
      'slots': 64,  # rows that decode at once
      'halvings': 2,  # times the slots may be halved when few rows are left; each is a program more to compile
      'length_step': 0,  # key/value caches grow in steps of so many tokens with the longest row; 0: always whole
      'compile_first': False,  # compile every program of the decoder before the first step, not on its first use
      'prefill': 16,  # prompts per prefill
      'chunk': 16,  # most decode forwards between two looks at the slots
      'refill': 8,  # free slots that end a chunk early while rows wait
      'lag': 0,  # steps between the policy that samples and the one that trains; 0: on policy
    },
    'scheduler': 'synchronous',
    'curriculum': 'uniform',
    'transforms': ('combine_rewards', 'drop_degenerate', 'group_advantage'),  # in this order
    'loss': 'ppo_clip',
    'kl': {'kind': 'none', 'beta': 0.0},  # to the warm start: none, k1, k2, k3
    'aggregation': {'mode': 'token_mean', 'denominator': 'kept', 'constant': 64.0},
    'epochs': 1,  # times a batch is used
    'minibatches': 1,  # optimizer steps per epoch
    'microbatch': 32,  # packed rows per forward and backward
    'share_prompts': False,  # compute a group's prompt once, not with each row
    'pack': {
      'length': 0,  # tokens of a packed row; 0: of the longest row (with share_prompts: prompt and all answers of a group)
      'logits': 0,  # columns of packed rows whose logits are made at once, answers only; 0: all
      'remat': 'none',  # what the backward pass computes anew: none, products (all but them), layers (everything)
    },
    'optimizer': {
      'name': 'adamw',
      'learning_rate': 3e-4,
      'warmup': 0,  # updates of linear warm-up
      'decay': 'constant',  # constant, cosine, linear
      'decay_steps': 0,  # updates until the end of the decay; 0: the whole run
      'decay_to': 0.1,  # learning rate at its end, as a share
      'clip': 1.0,  # largest global norm of the gradient; 0: no clipping
      'options': {'b2': 0.98, 'weight_decay': 0.0},  # keyword arguments of the optax optimizer
      'bad_updates': 10,  # skipped updates in a row (loss or gradient not finite) that stop the run
    },
    'sft': {
      'steps': 0,  # updates on demonstrations before RL, if there is no warm_start
      'batch': 128,  # demonstrations per update
      'microbatch': 32,  # rows of demonstrations, packed, per forward and backward
      'demonstrations': 0,  # use the first this many train prompts; 0: all
      'learning_rate': 2e-3,
      'warmup': 20,
      'decay_to': 0.1,  # cosine decay over sft.steps ends at this share
    },
    'evaluation': {
      'every': 0,  # steps between evaluations; 0: before and after only
      'problems': 512,  # first this many held-out prompts
      'samples': 0,  # rollouts of each for mean@k and pass@k, beside the greedy one; 0: none
    },
    'verifier': {
      'workers': 1,
      'limit_s': 5.0,  # wall-clock seconds for one row
      'error_budget': 0.5,  # share of recent rows whose verification may fail before the run stops
      'delay': 1,  # chunks until a verdict reaches the scheduler
    },
    'checkpoint': {'every': 20, 'keep': 2},
    'log': {
      'rollouts': 2,  # rows per step that are written to rollouts.jsonl
      'gap_alarm': 0.05,  # mean |sampled - scored log-prob| on policy that is worth a warning
    },
    'distribution': {name: value for name, value in fields(distribution).items() if name != 'greedy'},
  }
  return ConfigDict({**config, **sections(transforms, losses, curricula, schedulers, tasks)})
