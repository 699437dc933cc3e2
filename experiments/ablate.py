r"""Runs a config and its forks over seeds, all from one shared warm start, and prints a table of means and spreads.

  python -m experiments.ablate --config=configs/evidence.py --forks=configs/pods.py,configs/dynamic.py \
    --seeds=3 --out=runs/ablation

Runs go one after another. The same command goes on where it was cut: what is finished is not run again, and refused if it
was made with another config. Ctrl-C and SIGTERM let the run under way save and end. Each fork should
start from the same task and model as the config, since the warm start is the config's.
"""

import json
import pathlib
import signal
import subprocess
import sys

from absl import flags

from experiments import cli
from rollout_jax.types import ConfigError

FORKS = flags.DEFINE_list('forks', [], 'Config files to compare with --config, separated by commas.')
SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each, with seeds 0, 1, ...', lower_bound=1)
OUT = flags.DEFINE_string('out', None, 'The folder for all runs, the table and the plot.')


def main() -> None:
  from rollout_jax import report
  from rollout_jax.writers import say, write_json

  overrides = cli.overrides(sys.argv[1:])
  out, files = _checked()
  warm = out / 'warm_start'
  _python('experiments.sft', files['base'], warm, overrides)
  runs: dict[str, list[dict]] = {}
  for name, file in files.items():
    runs[name] = []
    for seed in range(SEEDS.value):
      folder = out / name / str(seed)
      say(f'\n{name}, seed {seed} -> {folder}')
      _python('experiments.train', file, folder, [*overrides, f'--config.warm_start={warm}', f'--config.seed={seed}'])
      runs[name].append(json.loads((folder / 'summary.json').read_text()))
  table = report.table(runs)
  write_json(out / 'runs.json', runs)
  (out / 'table.md').write_text(table + '\n')
  report.plot(runs, out / 'curves.png')
  say(f'\n{table}\n\nmeans ± standard deviations over seeds; curves in {out / "curves.png"}')


def _checked() -> tuple[pathlib.Path, dict[str, str]]:
  """The output folder, and the config files by name, the base first."""
  if cli.CONFIG.value is None or OUT.value is None:
    raise ConfigError('--config and --out are both needed: the config to start from and the folder for the results.')
  base = cli.config_argument(sys.argv)
  files = {'base': base}
  for fork in FORKS.value:
    path = pathlib.Path(fork.partition(':')[0])
    if not path.is_file():
      raise ConfigError(f'--forks: there is no file {fork}.')
    if path.stem in {*files, 'warm_start'}:
      raise ConfigError(
        f'--forks: the folder {path.stem} in --out is taken already; copy {fork} to a file of another name.'
      )
    files[path.stem] = fork
  return pathlib.Path(OUT.value), files


def _python(module: str, config: str, folder: pathlib.Path, overrides: list[str]) -> None:
  """Runs a main of this folder in a process of its own, so that no run inherits anything from the one before."""
  command = [sys.executable, '-m', module, f'--config={config}', f'--workdir={folder}', *overrides]
  process = subprocess.Popen(command)
  # Ctrl-C reaches the run by itself, SIGTERM does not; both let it save.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
  code = process.wait()
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  if code:
    raise ConfigError(f'{module} on {config} ended with code {code}; the same command goes on from there.')
  if not (folder / 'summary.json').exists():
    raise ConfigError(f'{module} on {config} was stopped; the same command goes on from there.')


if __name__ == '__main__':
  cli.run(main)
