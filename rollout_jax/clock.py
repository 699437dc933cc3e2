"""Where time goes, with compilation apart: JAX's own monitoring events say how long tracing and compiling took."""

import time

import jax

EVENTS = (
  '/jax/core/compile/jaxpr_trace_duration',
  '/jax/core/compile/jaxpr_to_mlir_module_duration',
  '/jax/core/compile/backend_compile_duration',
)


class Clock:
  """Seconds since the last call of `lap`, how many of these went into tracing and compiling, and counts of both."""

  def __init__(self) -> None:
    self.traced = 0  # functions traced so far
    self.compiled = 0  # programs compiled, or read from the compilation cache
    self._compiling = 0.0
    self._mark = (time.perf_counter(), 0.0)
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, event: str, duration: float, **_: object) -> None:
    if event in EVENTS:
      self._compiling += duration
      self.traced += event == EVENTS[0]
      self.compiled += event == EVENTS[-1]

  def lap(self) -> tuple[float, float]:
    """(seconds without compilation, seconds of compilation) since the last lap."""
    (then, compiled), now = self._mark, time.perf_counter()
    self._mark = (now, self._compiling)
    spent = self._compiling - compiled
    return max(now - then - spent, 0.0), spent

  def close(self) -> None:
    """Stops listening."""
    jax.monitoring.unregister_event_duration_listener(self._hear)
