"""Dynamic sampling (DAPO, arXiv 2503.14476): groups without signal are replaced until there are P with signal; clip-higher.

python -m experiments.train --config=configs/dynamic.py --workdir=runs/dynamic
"""

from configs import evidence


def get_config():
  config = evidence.get_config()
  config.scheduler = 'dynamic'
  config.ppo_clip.high = 0.28
  return config
