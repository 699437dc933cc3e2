"""The small run that ablations compare forks of: countdown, a warm start shared by all, at most 3 minutes on 2 CPU cores.

python -m experiments.ablate --config=configs/evidence.py --forks=configs/pods.py,configs/dynamic.py --seeds=3 --out=runs/ablation
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.steps = 240
  config.evaluation.every = 40
  return config
