r"""Measures decoding or training on this machine, against our own naive versions and against the machine's limits.

  python -m experiments.bench --suite=decode --out=runs/bench
  python -m experiments.bench --suite=train

Jobs run in turn, `--repeats` times; figures are medians with their range, compiling apart. Only ratios inside one run mean
something: run it on a quiet machine. What the columns mean stands in rollout_jax/bench/decode.py and train.py.
"""

import pathlib

from absl import flags

from experiments import cli

SUITE = flags.DEFINE_enum('suite', 'decode', ['decode', 'train'], 'What to measure.')
WORKLOADS = flags.DEFINE_list('workloads', ['equal', 'ragged', 'long_tail'], 'Workloads of the suite decode.')
DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'Of parameters and caches.')
REPEATS = flags.DEFINE_integer('repeats', 5, 'Times each job is measured.', lower_bound=1)
OUT = flags.DEFINE_string('out', None, 'A folder for SUITE.json; none: the table alone.')


def main() -> None:
  import jax
  from tabulate import tabulate

  from rollout_jax.bench.decode import decode
  from rollout_jax.bench.train import train
  from rollout_jax.bench.workloads import workloads
  from rollout_jax.resolve import nearest
  from rollout_jax.run import origin
  from rollout_jax.types import ConfigError
  from rollout_jax.writers import make_folder, say, write_json

  for name in WORKLOADS.value:
    if name not in workloads():
      raise ConfigError(f'--workloads: there is no workload {name}. {nearest(name, workloads())}')
  limits = None
  if SUITE.value == 'decode':
    rows, limits = decode(DTYPE.value, WORKLOADS.value, REPEATS.value)
  else:
    rows = train(DTYPE.value, REPEATS.value)
  say(tabulate([{name: _cell(value) for name, value in row.items()} for row in rows], headers='keys'))
  for name, value in (limits or {}).items():
    say(f'{name}: {_cell(value)}')
  if OUT.value:
    found = {'suite': SUITE.value, 'dtype': DTYPE.value, 'rows': rows, 'limits': limits, **origin(jax.devices()[:1])}
    make_folder(OUT.value)
    write_json(pathlib.Path(OUT.value) / f'{SUITE.value}.json', found)


def _cell(value: object) -> object:
  if isinstance(value, list):
    return ' to '.join(f'{each:,.3g}' if each < 1000 else f'{each:,.0f}' for each in value)
  if isinstance(value, float):
    return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'
  return value


if __name__ == '__main__':
  cli.run(main)
