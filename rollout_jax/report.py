"""What a set of runs says: means and spreads over seeds, cost to quality, curves.

A run is its summary.json. Costs are those of its curve, none of which includes evaluation: training steps, decoded tokens,
trained tokens, device seconds. `cost_to_score` is where the straight line between two evaluations first reaches a score;
a run that never does has none, and a spread over seeds says how many did.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from tabulate import tabulate

Summary = Mapping[str, Any]
COSTS = ('step', 'decoded', 'trained', 'device_seconds')


def cost_to_score(curve: Sequence[Mapping[str, float]], score: float, cost: str) -> float | None:
  """The cost at which held-out greedy accuracy first reaches `score`; None if it never does."""
  points = [(point.get(cost, 0.0), point['greedy']) for point in curve]
  if points[0][1] >= score:
    return 0.0
  for (before, low), (after, high) in zip(points, points[1:], strict=False):
    if high >= score:
      return before + (after - before) * (score - low) / (high - low)
  return None


def table(runs: Mapping[str, Sequence[Summary]]) -> str:
  """A Markdown table with a row per fork: mean and standard deviation over its seeds.

  The first fork is the baseline: the last columns are tokens and device seconds until a run reaches the baseline's mean final
  accuracy.
  """
  baseline = next(iter(runs.values()))
  goal = float(np.mean([s['accuracy']['after'] for s in baseline]))
  head = ['fork', 'seeds', 'before', 'after', 'gain', 'decoded', 'trained', 'seconds']
  head += [f'{cost} to {goal:.3f}' for cost in ('decoded', 'trained', 'device seconds')]
  rows = []
  for name, summaries in runs.items():
    after = [s['accuracy']['after'] for s in summaries]
    before = [s['accuracy']['before'] for s in summaries]
    gain = [a - b for a, b in zip(after, before, strict=True)]
    spent = [_spread([s['totals'][cost] for s in summaries], '.3g') for cost in ('decoded', 'trained', 'seconds')]
    reach = [
      _spread([cost_to_score(s['curve'], goal, cost) for s in summaries], '.3g')
      for cost in ('decoded', 'trained', 'device_seconds')
    ]
    rows.append([name, len(summaries), *(_spread(x, '.3f') for x in (before, after, gain)), *spent, *reach])
  return tabulate(rows, headers=head, tablefmt='github')


def plot(runs: Mapping[str, Sequence[Summary]], path: pathlib.Path) -> None:
  """Held-out accuracy over each of the four costs: the mean over seeds, and the range between them."""
  matplotlib.use('Agg')
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, len(COSTS), figsize=(4 * len(COSTS), 3.5), sharey=True, layout='constrained')
  for axis, cost in zip(axes, COSTS, strict=True):
    for name, summaries in runs.items():
      x = np.array([[point.get(cost, 0.0) for point in s['curve']] for s in summaries])
      y = np.array([[point['greedy'] for point in s['curve']] for s in summaries])
      (line,) = axis.plot(x.mean(0), y.mean(0), marker='.', label=name)
      axis.fill_between(x.mean(0), y.min(0), y.max(0), alpha=0.2, color=line.get_color(), linewidth=0)
    axis.set_xlabel(cost.replace('_', ' '))
  axes[0].set_ylabel('held-out greedy accuracy')
  axes[0].legend()
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def _spread(values: Sequence[float | None], form: str) -> str:
  """Mean and standard deviation of what is there, and how many of how many are if some are not."""
  there = [v for v in values if v is not None]
  if not there:
    return 'never'
  text = f'{np.mean(there):{form}}'
  if len(there) > 1:
    text += f' ± {np.std(there, ddof=1):{form}}'
  return text if len(there) == len(values) else f'{text} ({len(there)} of {len(values)})'
