"""GSM8K as it is published, in bytes, from scratch: shows the plumbing of a JSONL task, not a result (no such model learns it).

  python -m experiments.train --config=configs/gsm8k.py --workdir=runs/gsm8k \
    --config.jsonl.path=gsm8k_train.jsonl --config.jsonl.heldout_path=gsm8k_test.jsonl
"""

from configs import base


def get_config():
  config = base.get_config()
  config.task = 'jsonl'
  config.rollout.prompt_length, config.rollout.answer_length = 1024, 512
  config.rollout.prompts, config.rollout.slots, config.microbatch = 4, 16, 4
  config.sft.steps, config.sft.batch, config.sft.microbatch, config.steps = 20, 8, 4, 20
  config.evaluation.problems = 32
  return config
