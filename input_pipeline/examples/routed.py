"""Rows that name their teacher: multi-teacher distillation by a column, which `strategy.teacher_key` names.

Each row learns from the one teacher that it names; the others are not heard there. The field calls that routing:
`distillation.teacher_key` of verl, a `teacher_id` column in TRL.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from input_pipeline.examples.base import Encoded, Encoder
from input_pipeline.files import shown_names
from input_pipeline.sources.readers import Record
from trainer.errors import ConfigError, DataError

# The array of batches that says whose each token is, int32 [B, T]: a number among `strategy.teachers`.
INDEX = "teacher_index"
NOBODY = -1


class Router:
  """Which teacher a row names.

  Args:
    cfg: `config.strategy`, of which `teacher_key` and `teachers` count.

  Raises:
    ConfigError: a value of the column stands for two teachers.
  """

  def __init__(self, cfg: Any):
    self.key, self.numbers = cfg.teacher_key, values(cfg.teachers)

  def number(self, record: Record) -> int:
    """Of the row's teacher, in the order of the sorted names of `strategy.teachers`.

    Raises:
      DataError: it names none, or one that there is not.
    """
    known = ", ".join(map(repr, self.numbers))
    value = record.fields.get(self.key)
    if value is None:
      raise DataError(f"{record.where}: no {self.key!r} (or null), which names the row's teacher "
                      f"(strategy.teacher_key); its columns are {shown_names(record.fields)}. Give it: one of {known}.")
    if not isinstance(value, str) or value not in self.numbers:
      raise DataError(f"{record.where}: {self.key!r} is {value!r:.80}, which is no teacher; allowed: {known}. Correct "
                      "the row, or name the value in strategy.teachers.NAME.keys.")
    return self.numbers[value]


def values(teachers: Mapping[str, Any]) -> dict[str, int]:
  """{value of the column: the number of the teacher that it stands for}: a teacher's `keys`, or else its name."""
  found: dict[str, int] = {}
  for number, (name, given) in enumerate(teachers.items()):
    for value in dict(given.items()).get("keys") or (name,):
      if value in found:
        raise ConfigError(f"strategy.teachers.{name}.keys has {value!r}, which stands for "
                          f"{list(teachers)[found[value]]!r} already. Let each value stand for one teacher.")
      found[value] = number
  return found


class RoutedEncoder:
  """An encoder of rows that name their teacher; see `Encoder`. Args: `encoder` reads all else, `cfg`: see `Router`."""

  def __init__(self, encoder: Encoder, cfg: Any):
    self._encoder, self._router = encoder, Router(cfg)

  @property
  def fingerprint(self) -> str:
    return json.dumps([self._encoder.fingerprint, "routed", self._router.key, list(self._router.numbers.items())])

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    numbers = [self._router.number(record) for record in records]
    results = self._encoder.encode(records)
    if len(results) != len(records):  # some give several, and each gives one at least
      of_each = [self._encoder.encode([record]) for record in records]
      numbers = np.repeat(numbers, list(map(len, of_each))).tolist()
      results = [result for found in of_each for result in found]
    return [result if isinstance(result, str) else result._replace(teacher=number)
            for result, number in zip(results, numbers, strict=True)]

  def texts(self, record: Record) -> Iterable[str]:
    return self._encoder.texts(record)

  def describe(self, record: Record) -> str:
    return self._encoder.describe(record)

  def columns(self, record: Record) -> frozenset[str]:
    return self._encoder.columns(record) | {self._router.key}
