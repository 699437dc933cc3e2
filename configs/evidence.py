r"""The small run that ablations compare forks of: quickstart cut short, at most 3 minutes on 2 CPU cores.

  python -m experiments.ablate --config=configs/evidence.py \
    --forks=configs/pods.py,configs/dynamic.py --seeds=3 --out=runs/ablation

Alone on 2 CPU cores a run takes 1.5 to 2.8 minutes by the machine, a warm start of its own included; seed 0 goes from
0.29 to 0.40 or 0.44.
"""

from configs import quickstart


def get_config():
  config = quickstart.get_config()
  config.rollout.group, config.rollout.slots = 8, 128
  config.steps = 400
  config.checkpoint.every = config.evaluation.every = 50
  return config
