"""The KL penalty to a reference policy, estimated from the sampled token (Schulman, 'Approximating KL divergence').

With x = learner - reference log-prob, on tokens that the learner's own policy has sampled:

  kind   value          expectation of the value   expectation of the gradient
  k1     x              KL(learner || reference)   zero: a penalty that only adds noise
  k2     x^2 / 2        close to the KL if small   that of KL(learner || reference), the reverse KL
  k3     e^-x + x - 1   KL(learner || reference)   that of KL(reference || learner), the forward KL

So k2 is the one whose gradient is that of the reverse KL. k3 is GRPO's choice (arXiv 2402.03300), and what most
reports plot. The training step multiplies the penalty by the token's coefficient, like the loss: where a correction
makes up for another sampler, it does so for the penalty too.

Config: section `kl`, `kind='k2', beta=0.001`.
"""

from collections.abc import Callable

import jax.numpy as jnp

from rollout_jax import masked, ratios
from rollout_jax.types import Array, ConfigError, Loss, Report, Tokens

ESTIMATORS: dict[str, Callable[[Array], Array]] = {
  'k1': lambda x_n: x_n,
  'k2': lambda x_n: x_n**2 / 2,
  'k3': lambda x_n: jnp.exp(-x_n) + x_n - 1,
}


def kl(*, kind: str = 'none', beta: float = 0.0) -> Loss:
  """beta * estimate per token, as a loss to be added to another one; kind 'none' reads no reference and is zero.

  With beta 0 and a kind, the KL is measured and not penalised. Reports the estimate over kept tokens.
  """
  if kind != 'none' and kind not in ESTIMATORS:
    raise ConfigError(f"kl.kind must be 'none' or one of {tuple(ESTIMATORS)}, but is {kind!r}.")
  if beta < 0:
    raise ConfigError(f'kl.beta must not be negative, or the policy is pushed away from the reference, but is {beta}.')
  if kind == 'none':
    if beta > 0:
      raise ConfigError(f"kl.beta is {beta} while kl.kind is 'none': set kl.kind to one of {tuple(ESTIMATORS)}.")
    return Loss(lambda tokens: (), lambda tokens, scalars: (jnp.zeros_like(tokens.learner_logp_n), {}))

  def value(tokens: Tokens, scalars: tuple) -> tuple[Array, Report]:
    x_n = ratios.log_ratio(tokens.learner_logp_n, tokens.reference_logp_n, tokens.keep_n)
    kl_n = ESTIMATORS[kind](x_n)
    return beta * kl_n, {f'loss/kl_{kind}': masked.average(kl_n, tokens.keep_n)}

  return Loss(lambda tokens: (), value, frozenset({'reference_logp_PGT'}))


def add(first: Loss, second: Loss) -> Loss:
  """The sum of two losses, token by token."""

  def value(tokens: Tokens, scalars: tuple) -> tuple[Array, Report]:
    first_n, report = first.value(tokens, scalars[0])
    second_n, more = second.value(tokens, scalars[1])
    return first_n + second_n, report | more

  return Loss(lambda tokens: (first.prepare(tokens), second.prepare(tokens)), value, first.reads | second.reads)
