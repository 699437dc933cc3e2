"""Any dataset of the package reasoning-gym, in bytes, scored by its own scorer; here sums and products.

python -m experiments.train --config=configs/reasoning_gym.py --workdir=runs/gym --config.reasoning_gym.dataset=gcd
"""

from configs import base


def get_config():
  config = base.get_config()
  config.task = 'reasoning_gym'
  config.reasoning_gym.dataset = 'basic_arithmetic'
  config.reasoning_gym.longest_prompt, config.reasoning_gym.longest_answer = 95, 15
  config.rollout.prompt_length, config.rollout.answer_length = 96, 16
  config.sft.steps = 400
  return config
