"""Optimizers by name from optax, with gradient clipping, warm-up and decay."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import optax

from rollout_jax.resolve import nearest
from rollout_jax.types import ConfigError, PyTree


def schedule(*, learning_rate: float, warmup: int, decay: str, decay_steps: int, decay_to: float) -> optax.Schedule:
  """Learning rate by update: linear warm-up from 0 over `warmup` updates, then constant, cosine or linear decay.

  The decay ends at `decay_to` * learning_rate after `decay_steps` updates, counted from the end of the warm-up.
  """
  if decay == 'constant':
    after = optax.constant_schedule(learning_rate)
  elif decay == 'cosine':
    after = optax.cosine_decay_schedule(learning_rate, max(decay_steps, 1), alpha=decay_to)
  elif decay == 'linear':
    after = optax.linear_schedule(learning_rate, learning_rate * decay_to, max(decay_steps, 1))
  else:
    names = ('constant', 'cosine', 'linear')
    raise ConfigError(f'optimizer.decay must be one of {names}, but is {decay!r}. {nearest(decay, names)}')
  if warmup < 1:
    return after
  return optax.join_schedules([optax.linear_schedule(0.0, learning_rate, warmup), after], [warmup])


def optimizer(
  name: str,
  *,
  learning_rate: float,
  warmup: int,
  decay: str,
  decay_steps: int,
  decay_to: float,
  clip: float,
  options: Mapping[str, Any],
) -> optax.GradientTransformation:
  """The optax optimizer `name` with its own keyword `options`, behind a clip of the global gradient norm (0: none).

  Raises ConfigError for a name that optax does not have, and for an option that the optimizer does not take.
  """
  make = getattr(optax, name, None)
  names = [n for n in dir(optax) if 'learning_rate' in _parameters(getattr(optax, n))]
  if name not in names:
    raise ConfigError(f'optimizer.name must be an optimizer of optax, but is {name!r}. {nearest(name, names)}')
  for option in options:
    if option not in _parameters(make):
      raise ConfigError(
        f'optimizer.options.{option}: optax.{name} takes no such option. {nearest(option, _parameters(make))}'
      )
  rate = schedule(learning_rate=learning_rate, warmup=warmup, decay=decay, decay_steps=decay_steps, decay_to=decay_to)
  step = make(rate, **options)
  return optax.chain(optax.clip_by_global_norm(clip), step) if clip > 0 else step


def _parameters(function: Any) -> list[str]:
  if not inspect.isfunction(function):
    return []
  return list(inspect.signature(function).parameters)


def opt_state_like(tx: optax.GradientTransformation, params: PyTree, leaf: PyTree, other: Any) -> PyTree:
  """A tree like the optimizer's state, with `leaf`'s leaves for what has a parameter's shape and `other` for the rest."""
  state = jax.eval_shape(tx.init, params)
  return optax.tree_utils.tree_map_params(tx, lambda _, value: value, state, leaf, transform_non_params=lambda _: other)
