"""A whole run in a folder: warm start, evaluation, RL, evaluation, summary; stopped at any moment, the same call goes on.

config.json   what the run was made with     run.json         versions, hardware, methods and their correctness classes
warm_start/   supervised fine-tuning         metrics.jsonl    one line per step      rollouts.jsonl   a few rows per step
checkpoints/  where the run goes on          summary.json     what came of it        tensorboard/     the curves
"""

import contextlib
import pathlib
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
from ml_collections import ConfigDict

from rollout_jax import loop, planner, warm_start
from rollout_jax.build import Base, Parts, build, build_sft, build_verifier, ingredients
from rollout_jax.clock import Clock
from rollout_jax.decoding.listing import compile_listed, listed
from rollout_jax.decoding.rows import prefill_rows
from rollout_jax.evaluate import evaluate, summarise
from rollout_jax.rollout.collect import Desk
from rollout_jax.training.checkpoint import Checkpointer
from rollout_jax.types import ConfigError, PyTree, Stopped
from rollout_jax.writers import Writers, alone, plain, progress, read_json, say, write_json

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'reasoning-gym')
SHOWN = (
  'accuracy {reward/accuracy:.2f}',
  'signal {group/informative:.2f}',
  'len {len/mean:.0f} (max {len/max:.0f})',
  'entropy {policy/entropy:.2f}',
  'gap {gap/mean:.0e}',
  '{rate/decoded:k} tok/s',
  'rollout {t/rollout:.2f} s',
  'update {t/update:.2f} s',
)


def run(config: ConfigDict, workdir: str) -> Mapping[str, Any] | None:
  """Runs or resumes `config` in `workdir` and returns the summary; None if it was asked to stop before the end.

  Raises ConfigError for anything in the config or the folder that cannot work.
  """
  folder = pathlib.Path(workdir)
  if (folder / 'summary.json').exists():
    warm_start.claim(folder, plain(config.to_dict()))
    say(f'{folder} holds this run, finished.')
    return read_json(folder / 'summary.json')
  clock = Clock()
  with (
    contextlib.closing(clock),
    contextlib.ExitStack() as held,
    build_verifier(config) as verifier,
    _stop_signals() as stop,
  ):
    parts = build(config, verifier)
    held.enter_context(alone(folder))
    warm_start.claim(folder, plain(config.to_dict()))
    say(planner.table(parts.memory, planner.room(parts.base.mesh.devices.flat[0])))
    say(_listing(parts.desk))
    for change in parts.header['changed_but_unused']:
      say(f'warning: {change} was set, but nothing in this config uses it')
    with (
      jax.set_mesh(parts.base.mesh),
      Checkpointer(folder / 'checkpoints', keep=config.checkpoint.keep) as checkpoints,
    ):
      return _run(config, folder, parts, checkpoints, clock, stop)
  return None


def _run(
  config: ConfigDict,
  folder: pathlib.Path,
  parts: Parts,
  checkpoints: Checkpointer,
  clock: Clock,
  stop: Callable[[], bool],
) -> Mapping[str, Any]:
  began = time.perf_counter()
  params = warm_start.read_params(parts.base, folder / 'start')
  if params is None:
    params = initial(config, parts.base, folder, stop)
    warm_start.write_params(params, folder / 'start', 0)
  if config.rollout.compile_first:
    compile_decoders(parts, params)
  frozen = {'reference': loop.copy(params)} if parts.reference else {}
  fresh = loop.start(parts, params)
  state = loop.restore(parts, fresh, checkpoints)
  writers = Writers(folder, steps=config.steps, shown=SHOWN, resume_step=0 if state is None else state.step)
  warm_seconds = time.perf_counter() - began

  def score(state: loop.Run) -> None:
    state.curve.append(_evaluated(config, parts, state))

  with contextlib.closing(writers):
    writers.header(header(config, parts, folder, state))
    if state is None:
      state = fresh
      score(state)
      loop.save(state, checkpoints)
    else:
      say(f'resumed {folder} at step {state.step} of {config.steps}')
    with jax.transfer_guard_host_to_device('disallow'):  # every copy to the device is one that somebody asked for
      loop.train(
        parts,
        state,
        steps=config.steps,
        frozen=frozen,
        writers=writers,
        checkpoints=checkpoints,
        clock=clock,
        stop=stop,
        evaluate=score,
      )
    if state.step < config.steps:
      raise Stopped(f'stopped at step {state.step} of {config.steps}')
    if state.curve[-1]['step'] != state.step:
      score(state)
    summary = _summary(state, warm_seconds, time.perf_counter() - began)
    writers.summary(summary)
  before, after = summary['accuracy']['before'], summary['accuracy']['after']
  say(f'held-out accuracy {before:.3f} -> {after:.3f} in {state.step} steps; everything is in {folder}')
  return summary


def compile_decoders(parts: Parts, params: PyTree) -> None:
  """Compiles every program that training's and evaluation's decoders may need, so that no step waits for one."""
  desks = parts.desk, parts.greedy
  with progress('compiling the decoders', sum(sum(_listed(desk).values()) for desk in desks)) as advance:
    for desk in desks:
      compile_listed(desk.engine, params, prefill=desk.prefill, prompt_length=desk.prompt_length, advance=advance)


def _listed(desk: Desk) -> Mapping[str, int]:
  return listed(desk.engine.ladder, desk.prefill)


def _listing(desk: Desk) -> str:
  """What the console says of the decoder's shapes."""
  ladder, sizes = desk.engine.ladder, _listed(desk)
  return (
    f'decoder: at most {sum(sizes.values())} programs, for {_either(ladder.slots)} slots, caches of '
    f'{_either(ladder.lengths)} tokens and prefills of {_either(prefill_rows(desk.prefill))} rows'
  )


def _either(sizes: Sequence[int]) -> str:
  return ' or '.join(map(str, sizes)) if len(sizes) < 5 else f'{sizes[0]}, {sizes[1]} ... {sizes[-1]}'


def fine_tune(config: ConfigDict, workdir: str) -> Mapping[str, Any] | None:
  """Supervised fine-tuning alone, in `workdir`, with held-out accuracy before and after; a warm start for many runs.

  None if it was asked to stop before the end.
  """
  folder = pathlib.Path(workdir)
  if (folder / 'summary.json').exists():
    warm_start.claim(folder, ingredients(config))
    say(f'{folder} holds this fine-tuning, finished.')
    return read_json(folder / 'summary.json')
  with contextlib.ExitStack() as held, build_verifier(config) as verifier, _stop_signals() as stop:
    parts = build(config, verifier)
    tx, plan = build_sft(config)
    if not plan.steps:
      raise ConfigError('sft.steps is 0: there is nothing to do. Give --config.sft.steps=N.')
    held.enter_context(alone(folder))
    warm_start.claim(folder, ingredients(config))
    with jax.set_mesh(parts.base.mesh):
      params = initial(config, parts.base, None, stop)
      before = _scores(config, parts, params, 0)
      began = time.perf_counter()
      params = warm_start.fine_tune(parts.base, tx, plan, params, folder, ingredients(config), stop)
      seconds = time.perf_counter() - began
      after = _scores(config, parts, params, plan.steps)
    summary = {
      'accuracy': {'before': before['greedy'], 'after': after['greedy']},
      'steps': plan.steps,
      'scores': {'before': before, 'after': after},
      'minutes': {'total': seconds / 60},
    }
    write_json(folder / 'summary.json', summary)
    return summary
  return None


def evaluate_folder(config: ConfigDict, workdir: str) -> Mapping[str, float]:
  """Held-out scores of the newest checkpoint of a run, or of a warm start."""
  folder = pathlib.Path(workdir)
  with build_verifier(config) as verifier:
    parts = build(config, verifier)
    with jax.set_mesh(parts.base.mesh):
      params = warm_start.load(parts.base, folder, ingredients(config)) if folder.is_dir() else None
      step = config.sft.steps
      if params is None and (folder / 'checkpoints').is_dir():
        with Checkpointer(folder / 'checkpoints', keep=config.checkpoint.keep) as checkpoints:
          found = loop.restore(parts, loop.start(parts, warm_start.random_params(parts.base, config.seed)), checkpoints)
        params, step = (None, 0) if found is None else (found.state.params['policy'], found.step)
      if params is None:
        raise ConfigError(f'--workdir: {folder} holds neither a warm start nor a checkpoint of a run.')
      return _scores(config, parts, params, step)


def initial(config: ConfigDict, base: Base, folder: pathlib.Path | None, stop: Callable[[], bool]) -> PyTree:
  """The parameters to start from: a given warm start, one of the run's own in `folder`, or random ones."""
  if config.warm_start:
    given = pathlib.Path(config.warm_start)
    params = warm_start.load(base, given, ingredients(config))
    if params is None:
      raise ConfigError(
        f'warm_start: {given} holds no finished warm start. Make one: '
        f'python -m experiments.sft --config=FILE --workdir={given}'
      )
    return params
  params = warm_start.random_params(base, config.seed)
  if folder is None or not config.sft.steps:
    return params
  tx, plan = build_sft(config)
  return warm_start.fine_tune(base, tx, plan, params, folder / 'warm_start', ingredients(config), stop)


def _evaluated(config: ConfigDict, parts: Parts, run: loop.Run) -> dict[str, float]:
  """One point of the curve: held-out scores beside the costs so far, none of which includes evaluation."""
  began = time.perf_counter()
  scores = _scores(config, parts, run.state.params['policy'], run.step)
  return {'step': run.step, **run.totals, **scores, 'evaluation_seconds': time.perf_counter() - began}


def _scores(config: ConfigDict, parts: Parts, params: PyTree, step: int) -> Mapping[str, float]:
  """Greedy accuracy and, with samples, mean@k and pass@k, on the held-out problems."""
  problems, samples = config.evaluation.problems, config.evaluation.samples
  with progress(f'evaluating step {step}', problems * (1 + samples)) as advance:
    greedy_P1, _ = evaluate(parts.greedy, params, step, problems=problems, samples=1, progress=advance)
    sampled_PG = None
    if samples:
      sampled_PG, _ = evaluate(parts.sampled, params, step, problems=problems, samples=samples, progress=advance)
  scores = summarise(greedy_P1, sampled_PG)
  say(f'step {step}: held-out ' + ', '.join(f'{name} {value:.3f}' for name, value in scores.items()))
  return scores


def _summary(run: loop.Run, warm_seconds: float, seconds: float) -> Mapping[str, Any]:
  """What came of a run. `minutes` counts this process only: set-up, compilation and evaluation included."""
  return {
    'accuracy': {'before': run.curve[0]['greedy'], 'after': run.curve[-1]['greedy']},
    'steps': run.step,
    'totals': run.totals,
    'ledger': run.ledger.to_dict(),
    'curve': run.curve,
    'minutes': {'warm_start': warm_seconds / 60, 'total': seconds / 60},
  }


def header(config: ConfigDict, parts: Parts, folder: pathlib.Path, state: loop.Run | None) -> Mapping[str, Any]:
  """What a run ran on and with; for a run that goes on, the header that it began with and where it was taken up."""
  now = {**origin(parts.base.mesh.devices.flatten()), 'mesh': dict(parts.base.mesh.shape)}
  if state is not None:
    began = read_json(folder / 'run.json')
    return {**began, 'resumed': [*began['resumed'], {'step': state.step, **now}]}
  return {
    'config': plain(config.to_dict()),
    'parameters': sum(x.size for x in jax.tree.leaves(parts.base.policy.shapes)),
    **parts.header,
    **now,
    'resumed': [],
  }


def origin(devices: Sequence[jax.Device]) -> Mapping[str, Any]:
  """Which code made a figure, with which packages, on which hardware, and when."""
  return {
    'commit': _commit(),
    'python': platform.python_version(),
    'packages': {name: metadata.version(name) for name in PACKAGES},
    'hardware': {
      'devices': len(devices),
      'kind': devices[0].device_kind,
      'platform': devices[0].platform,
      'machine': platform.machine(),
      'processes': jax.process_count(),
    },
    'time': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
  }


def _commit() -> str:
  """The commit of the code, with a plus sign if the tree differs from it."""
  here = pathlib.Path(__file__).parent
  git = lambda *args: subprocess.run(['git', '-C', here, *args], capture_output=True, text=True, check=False)
  try:
    found = git('rev-parse', '--short', 'HEAD')
    changed = git('status', '--porcelain', '--untracked-files=no').stdout.strip()
  except FileNotFoundError:
    return 'unknown'
  return found.stdout.strip() + ('+' if changed else '') if found.returncode == 0 else 'unknown'


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
  """Whether SIGTERM or Ctrl-C came. The loops then save after their step and raise Stopped, which ends here.

  A second Ctrl-C interrupts at once.
  """
  asked = []

  def handle(number: int, frame: Any) -> None:
    if asked and number == signal.SIGINT:
      raise KeyboardInterrupt
    asked.append(number)
    say('stopping after this step (Ctrl-C once more to stop at once)')

  before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield lambda: bool(asked)
  except Stopped as stopped:
    say(f'{stopped} and saved; the same command goes on from there')
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
