"""Learns Euclid's algorithm by RL: answers are worked, so their length varies with the difficulty.

python -m experiments.train --config=configs/gcd.py --workdir=runs/gcd

So far it learns the train prompts far better than held-out ones: see the results in README.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.task = 'gcd'
  config.rollout.prompt_length, config.rollout.answer_length = 10, 76
  config.microbatch = 32
  config.sft.steps = 100
  config.optimizer.learning_rate = 3e-4
  config.steps = 500
  config.checkpoint.every = config.evaluation.every = 50
  return config
