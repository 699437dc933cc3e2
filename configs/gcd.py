"""Learns Euclid's algorithm by RL: answers are worked, so their length varies with the difficulty.

python -m experiments.train --config=configs/gcd.py --workdir=runs/gcd
"""

from configs import base


def get_config():
  config = base.get_config()
  config.task = 'gcd'
  config.rollout.prompt_length = 16
  config.rollout.answer_length = 80
  config.sft.steps = 200
  config.steps = 150
  return config
