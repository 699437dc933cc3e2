"""A curriculum by pass-rate history: prompts that are solved about half of the time come first.

python -m experiments.train --config=configs/pass_rate.py --workdir=runs/pass_rate
"""

from configs import evidence


def get_config():
  config = evidence.get_config()
  config.curriculum = 'pass_rate'
  config.countdown.size = 2048  # few enough to be seen again
  return config
