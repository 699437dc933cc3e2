"""Learns a task's demonstrations by supervised fine-tuning; runs of RL start from the folder it leaves.

  python -m experiments.sft --config=configs/quickstart.py --workdir=runs/warm
  python -m experiments.train --config=configs/quickstart.py --workdir=runs/a --config.warm_start=runs/warm

With --config.warm_start it goes on from another one: fine-tuning simply continued, to compare RL with.
"""

from experiments import cli


def main() -> None:
  config, workdir = cli.config_and_workdir()
  from rollout_jax.run import fine_tune

  fine_tune(config, workdir)


if __name__ == '__main__':
  cli.run(main)
