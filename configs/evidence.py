r"""The small run that ablations compare forks of: quickstart cut short, at most 3 minutes on 2 CPU cores.

  python -m experiments.ablate --config=configs/evidence.py \
    --forks=configs/pods.py,configs/dynamic.py --seeds=3 --out=runs/ablation

A run took 2.4 minutes on one CPU core, after the warm start that all of them share; seed 0 went from 0.31 to 0.42.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.rollout.group, config.rollout.slots = 8, 128
  config.steps = 400
  config.checkpoint.every = config.evaluation.every = 50
  return config
