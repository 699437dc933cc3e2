"""PODS (arXiv 2504.13818): roll out 16 answers a prompt, train on the 8 whose rewards differ most.

python -m experiments.train --config=configs/pods.py --workdir=runs/pods
"""

from configs import evidence


def get_config():
  config = evidence.get_config()
  config.rollout.group = 16
  config.pods.m = 8
  config.transforms = ('combine_rewards', 'drop_degenerate', 'pods', 'group_advantage')
  return config
