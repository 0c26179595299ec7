"""Rows that name their teacher: whose each document is, and what decides that."""

import numpy as np
import pytest

from input_pipeline.examples.base import Encoded
from input_pipeline.examples.routed import RoutedEncoder, Router
from input_pipeline.files import Record
from trainer.config import strategy
from trainer.errors import ConfigError, DataError

NAMES = {"a": {"path": "x"}, "b": {"path": "y", "keys": ("code", "c++")}}


class Inner:
  """Each record gives as many documents as its `count` says, or is dropped."""

  fingerprint = "inner"

  def encode(self, records):
    return [Encoded(np.array([n], np.int32)) if record.fields["count"] else "dropped"
            for record in records for n in range(max(1, record.fields["count"]))]

  def columns(self, record):
    return frozenset({"count"})


def cfg(teachers=None, key="domain"):
  return strategy("distill", teacher_key=key, teachers=teachers or NAMES)


def record(number, **fields):
  return Record("", f"rows.jsonl:{number}", fields)


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 0, 3), (0, 1, 2)])
def test_all_documents_of_a_row_are_its_teachers(counts):
  encoder = RoutedEncoder(Inner(), cfg())
  rows = [record(n, count=count, domain=domain)
          for n, (count, domain) in enumerate(zip(counts, ("code", "a", "c++"), strict=True))]
  made = [one if isinstance(one, str) else (one.teacher, one.ids.tolist()) for one in encoder.encode(rows)]
  assert made == [one for count, whose in zip(counts, (1, 0, 1), strict=True)
                  for one in ([(whose, [n]) for n in range(count)] or ["dropped"])]
  assert encoder.columns(rows[0]) == {"count", "domain"}


def test_a_cache_belongs_to_the_column_and_to_what_its_values_stand_for():
  prints = {RoutedEncoder(Inner(), one).fingerprint for one in (
      cfg(), cfg(key="other"), cfg({"b": NAMES["b"], "a": NAMES["a"]}), cfg({"a": NAMES["a"], "b": {"path": "y"}}))}
  assert len(prints) == 3  # names are sorted, in whatever order they are given
  assert RoutedEncoder(Inner(), cfg({"a": {"path": "z"}, "b": NAMES["b"]})).fingerprint in prints


def test_what_names_no_teacher_is_told_by_its_line():
  router = Router(cfg())
  assert router.number(record(1, domain="a")) == 0
  with pytest.raises(DataError, match=r"rows.jsonl:2: no 'domain' \(or null\).*columns are 'count'.*one of 'a'"):
    router.number(record(2, count=1))
  with pytest.raises(DataError, match=r"rows.jsonl:3: 'domain' is 'b', which is no teacher; allowed: 'a', 'code'"):
    router.number(record(3, domain="b"))
  with pytest.raises(ConfigError, match="strategy.teachers.b.keys has 'a', which stands for 'a' already"):
    Router(cfg({"a": {"path": "x"}, "b": {"path": "y", "keys": ("a",)}}))
