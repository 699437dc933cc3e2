"""The token ledger and its conservation law (law 6), checked at every step of every run.

Tokens   decoded + reused = trained + filtered + aborted_dropped + (held - held_before)
Rows     issued = rows_trained + sum of dropped + (pending - pending_before)
Prefill  prefill_computed <= prefill_requested

A ledger covers a stretch of steps: flows are summed over it, stocks (held, pending) are stated at its two ends. Ledgers
of stretches that follow each other add up, so the total of a run is the sum of its steps.
"""

import dataclasses
from collections.abc import Mapping


class LedgerError(RuntimeError):
  """The books do not balance: tokens or rows were lost or counted twice. A bug, never the user's fault."""


@dataclasses.dataclass(frozen=True)
class Ledger:
  """Counts of a stretch of steps. `add` gives a new ledger.

  A row is dropped for a reason: dead_group (no difference in its group), surplus (the batch was full), verifier_error,
  verifier_timeout, stale (its policy is too old), unselected, aborted (cut and thrown away). A method may name its own.
  """

  decoded: int = 0  # tokens that the policy sampled
  reused: int = 0  # tokens taken over from an older rollout (replay, verified drafts), not from a parked row
  trained: int = 0  # tokens with nonzero weight in the loss, once however many epochs
  filtered: int = 0  # tokens of finished rows that were not trained, and masked tokens of trained rows
  aborted_dropped: int = 0  # tokens of rows that were cut and thrown away
  held_before: int = 0  # tokens in parked rows and in rows that wait, at the start
  held: int = 0  # the same at the end
  prefill_requested: int = 0  # prompt and resumed-prefix tokens that had to be in the cache
  prefill_computed: int = 0  # those that were pushed through the model; the others were copied
  padded: int = 0  # slot-steps of decoding on slots without a live row
  issued: int = 0  # rows asked for
  rows_trained: int = 0  # rows with at least one trained token
  dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)  # rows by reason
  pending_before: int = 0  # rows that are running, parked or wait, at the start
  pending: int = 0  # the same at the end

  def add(self, dropped: Mapping[str, int] | None = None, **counts: int) -> 'Ledger':
    """This ledger with counts added to its flows, such as add(decoded=12, dropped={'stale': 2})."""
    for name in counts:
      if name not in FLOWS:
        raise TypeError(f'{name!r} is not a flow of the ledger; the flows are {", ".join(FLOWS)}')
    summed = {name: getattr(self, name) + int(number) for name, number in counts.items()}
    return dataclasses.replace(self, **summed, dropped=_sum(self.dropped, dropped or {}))

  def close(self, *, held: int, pending: int) -> 'Ledger':
    """This ledger with its stocks at the end."""
    return dataclasses.replace(self, held=int(held), pending=int(pending))

  def following(self) -> 'Ledger':
    """The empty ledger that starts where this one ends."""
    return Ledger(held_before=self.held, held=self.held, pending_before=self.pending, pending=self.pending)

  def __add__(self, later: 'Ledger') -> 'Ledger':
    """Both stretches as one; `later` must start where this one ends."""
    if (self.held, self.pending) != (later.held_before, later.pending_before):
      raise LedgerError(
        f'the ledger ends with {self.held} tokens held and {self.pending} rows pending, '
        f'the next one starts with {later.held_before} and {later.pending_before}'
      )
    flows = {name: getattr(self, name) + getattr(later, name) for name in FLOWS}
    return dataclasses.replace(self, **flows, dropped=_sum(self.dropped, later.dropped)).close(
      held=later.held, pending=later.pending
    )

  def check(self, where: str = '') -> None:
    """Raises LedgerError, with the whole balance, unless tokens and rows are conserved and no count is negative."""
    tokens_in = self.decoded + self.reused
    tokens_out = self.trained + self.filtered + self.aborted_dropped + self.held - self.held_before
    rows_out = self.rows_trained + sum(self.dropped.values()) + self.pending - self.pending_before
    faults = [f'{name} is negative' for name, number in self.to_dict().items() if number < 0]
    if tokens_in != tokens_out:
      faults.append(f'{tokens_in} tokens came in, {tokens_out} went out')
    if self.issued != rows_out:
      faults.append(f'{self.issued} rows were issued, {rows_out} are accounted for')
    if self.prefill_computed > self.prefill_requested:
      faults.append(f'{self.prefill_computed} tokens were prefilled, {self.prefill_requested} were asked for')
    if faults:
      balance = '\n'.join(f'  {name:<24}{number:>12}' for name, number in self.to_dict().items())
      raise LedgerError(f'The ledger does not balance{where and f" at {where}"}: {"; ".join(faults)}.\n{balance}')

  def to_dict(self) -> dict[str, int]:
    """The counts by the names that they have in metrics.jsonl: tok.decoded, rows.issued, rows.dropped.stale ..."""
    flat = {_public(name): getattr(self, name) for name in (*FLOWS, *STOCKS)}
    return flat | {f'rows.dropped.{reason}': number for reason, number in sorted(self.dropped.items())}

  @staticmethod
  def from_dict(flat: Mapping[str, int]) -> 'Ledger':
    """The ledger that `to_dict` wrote; other names in the dict are not read."""
    dropped = {name.removeprefix('rows.dropped.'): n for name, n in flat.items() if name.startswith('rows.dropped.')}
    return Ledger(**{name: flat[_public(name)] for name in (*FLOWS, *STOCKS)}, dropped=dropped)


STOCKS = ('held_before', 'held', 'pending_before', 'pending')
ROWS = ('issued', 'rows_trained', 'pending_before', 'pending')
FLOWS = tuple(field.name for field in dataclasses.fields(Ledger) if field.name not in (*STOCKS, 'dropped'))


def _public(name: str) -> str:
  return f'rows.{name.removeprefix("rows_")}' if name in ROWS else f'tok.{name}'


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
  return {reason: first.get(reason, 0) + int(second.get(reason, 0)) for reason in (*first, *second)}
