"""Rows that cannot be used: the whole source is looked through, the first of them are told, and `input.on_bad_row` says
whether they stop the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from absl import logging
from ml_collections import ConfigDict

from input_pipeline.files import BadTextError, Record
from trainer.errors import DataError, one_of

ON_BAD_ROW = ("error", "drop")
# How many are told, after which a run that they stop looks no further.
SHOWN = 10
# Why a row is dropped, in the table at the start.
BAD_ROW = "bad row"


class Policy(NamedTuple):
  """What becomes of bad rows: `input.on_bad_row`, and the share of a source's rows that may be dropped."""

  on_bad_row: str = "error"
  most: float = 0.0

  @staticmethod
  def of(config: ConfigDict) -> "Policy":
    """That of a whole config. Raises ConfigError."""
    i = config.input
    one_of("input.on_bad_row", i.on_bad_row, ON_BAD_ROW)
    return Policy(i.on_bad_row, i.max_bad_rows)


class BadRows:
  """The bad rows of a pass over a source.

  Args:
    policy: what becomes of them.

  Attributes:
    seen: rows of the pass, bad ones included; to be counted by who reads them.
    count: bad ones.
    first: (where, why) of the first SHOWN.
  """

  def __init__(self, source: str, policy: Policy = Policy()):  # noqa: B008 (it is frozen)
    self.seen = self.count = 0
    self.first: list[tuple[str, str]] = []
    self._source, self._policy = source, policy

  @property
  def _stops(self) -> bool:
    return self._policy.on_bad_row == "error"

  def add(self, where: str, error: DataError) -> None:
    """Counts a bad row. Raises DataError once there are SHOWN, where they stop the run."""
    self.count += 1
    if len(self.first) < SHOWN:
      text = str(error).removeprefix(f"{where}: ")
      # What is no text names its own line.
      self.first.append(("", text) if isinstance(error, BadTextError) and text == str(error) else (where, text))
    if self.count == 1:
      then = "the rest is looked through before the run stops" if self._stops else "it is dropped"
      logging.warning("source %r: a bad row (%s): %s", self._source, then, error)
    if self._stops and self.count >= SHOWN:
      raise self._error(f"the first {SHOWN} rows that cannot be used, of {self.seen:,} that were looked at") from error

  @contextmanager
  def none_in(self, record: Record) -> Iterator[None]:
    """Within it, an error of the data is that of this row, which is then counted."""
    try:
      yield
    except DataError as e:
      self.add(record.where, e)

  def finish(self) -> None:
    """At the end of the pass. Raises DataError if its bad rows stop the run, or are too many to be dropped."""
    if not self.count:
      return
    share = f"{self.count:,} of {self.seen:,} rows ({self.count / self.seen:.1%}) cannot be used"
    if self._stops:
      if self.count == 1:
        where, why = self.first[0]
        raise DataError(f"{_joined([where], why)} (Of {self.seen:,} rows, no other is bad. input.on_bad_row='drop' "
                        "leaves such rows out.)")
      raise self._error(share)
    if self.count > self._policy.most * self.seen:
      raise self._error(f"{share}, and input.max_bad_rows allows {self._policy.most:.1%}. The first")
    logging.warning("source %r: dropped, since %s:%s", self._source, share, self._listed())

  def state(self) -> dict[str, Any]:
    """What `restore` takes, JSON-able."""
    return {"seen": self.seen, "count": self.count, "first": self.first}

  def restore(self, state: dict[str, Any]) -> "BadRows":
    """The bad rows of a pass that was made before."""
    self.seen, self.count = state["seen"], state["count"]
    self.first = [(where, why) for where, why in state["first"]]
    return self

  def _error(self, what: str) -> DataError:
    remedy = ("Repair them, or leave such rows out, which are counted then: --config.input.on_bad_row=drop."
              if self._stops else "Repair them, or raise --config.input.max_bad_rows.")
    return DataError(f"source {self._source!r}: {what}:{self._listed()}\n{remedy}")

  def _listed(self) -> str:
    """A line for each of the first, those with the same reason on one."""
    reasons: dict[str, list[str]] = {}
    for where, why in self.first:
      reasons.setdefault(why, []).append(where)
    return "".join(f"\n  {_joined(wheres, why)}" for why, wheres in reasons.items())


def _joined(wheres: list[str], why: str) -> str:
  places = ", ".join(filter(None, wheres))
  return f"{places}: {why}" if places else why
