"""Dr. GRPO (arXiv 2503.20783): no deviation in the advantage, and a constant in place of each answer's length.

python -m experiments.train --config=configs/dr_grpo.py --workdir=runs/dr_grpo
"""

from configs import evidence


def get_config():
  config = evidence.get_config()
  config.group_advantage.scope = 'none'
  config.aggregation.mode, config.aggregation.denominator = 'constant_length', 'constant'
  config.aggregation.constant = float(config.rollout.answer_length)
  config.transforms = ('combine_rewards', 'group_advantage')
  return config
