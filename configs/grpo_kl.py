"""GRPO as published (arXiv 2402.03300): a mean over each answer first, and a KL penalty (k3) to the warm start.

python -m experiments.train --config=configs/grpo_kl.py --workdir=runs/grpo_kl
"""

from configs import evidence


def get_config():
  config = evidence.get_config()
  config.transforms = ('combine_rewards', 'group_advantage')
  config.aggregation.mode = 'seq_mean_token_mean'
  config.kl.kind, config.kl.beta = 'k3', 0.04
  return config
