"""Euclid's algorithm, where the warm start knows two habits: to work an answer out, and to guess it.

python -m experiments.train --config=configs/gcd.py --workdir=runs/gcd

About half of the demonstrations are terse, so lengths range from 3 to about 60 tokens. RL makes the policy better on
held-out pairs (0.55 to 0.64 in one run) by the cheaper habit: after 50 steps it nearly always guesses. See the results in
README. A longer warm start, or pairs that are harder to guess (gcd.max_number), may turn that round; neither was tried.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.task = 'gcd'
  config.gcd.hasty = 0.6
  config.rollout.group, config.rollout.slots = 8, 128
  config.rollout.prompt_length, config.rollout.answer_length = 10, 51
  config.sft.steps, config.sft.decay_to = 200, 0.3
  config.steps = 200
  config.checkpoint.every = config.evaluation.every = 25
  return config
