"""RLOO (arXiv 2402.14740): REINFORCE with the mean reward of a prompt's other answers as the baseline.

python -m experiments.train --config=configs/rloo.py --workdir=runs/rloo
"""

from configs import evidence


def get_config():
  config = evidence.get_config()
  config.loss = 'reinforce'
  config.group_advantage.scope, config.group_advantage.leave_one_out = 'none', True
  config.aggregation.mode = 'seq_mean_token_sum'
  return config
