"""Trains a policy by RL.

  python -m experiments.train --config=configs/quickstart.py --workdir=runs/first --config.seed=1

Any field of configs/base.py can be given as --config.FIELD=VALUE. The same command resumes a run that was cut.
"""

from experiments import cli


def main() -> None:
  config, workdir = cli.config_and_workdir()
  from rollout_jax.run import run

  run(config, workdir)


if __name__ == '__main__':
  cli.run(main)
