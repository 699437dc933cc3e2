"""Euclid's algorithm, where the warm start knows two habits: to work an answer out to its end, and to stop early.

python -m experiments.train --config=configs/gcd.py --workdir=runs/gcd

Six in ten demonstrations stop after three subtractions, where there are more, and take the smaller number for the divisor,
which is right for less than three pairs in ten. The warm start imitates that; RL learns in some ten steps that it pays to
go on, and answers get longer. Six minutes on one CPU core; held-out greedy accuracy goes from 0.26-0.33 to 0.72-0.76 (three
seeds); see the results in README.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.task = 'gcd'
  config.gcd.hasty = 0.6
  config.rollout.group, config.rollout.slots, config.microbatch = 8, 128, 2
  config.rollout.prompt_length, config.rollout.answer_length = 10, 51
  config.sft.steps, config.sft.decay_to = 200, 0.3
  config.steps = 100
  config.checkpoint.every = config.evaluation.every = 20
  return config
