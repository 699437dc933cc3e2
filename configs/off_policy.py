"""Samples are one step old (Async-RLHF, arXiv 2410.18252): truncated importance sampling corrects, old rows are left out.

python -m experiments.train --config=configs/off_policy.py --workdir=runs/off_policy
"""

from configs import evidence


def get_config():
  config = evidence.get_config()
  config.rollout.lag = 1
  config.limit_staleness.limit = 2
  config.transforms = ('combine_rewards', 'limit_staleness', 'drop_degenerate', 'group_advantage', 'tis')
  return config
