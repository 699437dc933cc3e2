"""Scores a warm start or the newest checkpoint of a run on held-out problems, greedily and by samples.

python -m experiments.evaluate --config=configs/quickstart.py --workdir=runs/first --config.evaluation.samples=8
"""

from experiments import cli


def main() -> None:
  config, workdir = cli.config_and_workdir()
  from rollout_jax.run import evaluate_folder

  evaluate_folder(config, workdir)


if __name__ == '__main__':
  cli.run(main)
