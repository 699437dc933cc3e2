"""Learns countdown (make a number from three others) by RL from a warm start that is well short of mastery.

bash scripts/quickstart.sh
"""

from configs import base


def get_config():
  config = base.get_config()
  config.task = 'countdown'
  config.rollout.prompt_length = 16
  config.rollout.answer_length = 16
  config.sft.steps = 400
  config.steps = 400
  return config
