"""Several updates per batch: 2 epochs of 2 minibatches, held together by the clipped ratio with a dual clip.

python -m experiments.train --config=configs/several_updates.py --workdir=runs/several
"""

from configs import evidence


def get_config():
  config = evidence.get_config()
  config.epochs, config.minibatches = 2, 2
  config.ppo_clip.dual = 3.0
  return config
