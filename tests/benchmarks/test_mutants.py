"""Planted faults: every one can be planted, what was seen of each is kept until it changes, and the table counts it."""

from dataclasses import replace

import pytest

from benchmarks import mutants
from benchmarks.mutants import Fault
from tests import tiny

FAULTS = [*(Fault("trainer/a.py", "x", f"y{i}", f"what {i}") for i in range(4)),
          Fault("models/b.py", "x", "y", "other")]


def seen(*faults, noticed="tests/test_a.py::test"):
  return {fault.place: dict(file=fault.file, what=fault.what, noticed=noticed, date="2026-01-01", commit="0")
          for fault in faults}


def test_results_are_those_of_a_place_and_come_back(tmp_path, monkeypatch):
  monkeypatch.setattr(mutants, "RESULTS", tmp_path / "results.json")
  assert mutants.read_results() == {}
  results = seen(*FAULTS)
  mutants.write_results(results)
  assert mutants.read_results() == results
  assert len(mutants.RESULTS.read_text().splitlines()) == len(FAULTS) + 2
  places = {replace(FAULTS[0], **{key: "z"}).place for key in ("file", "old", "new")} | {FAULTS[0].place}
  assert len(places) == 4 and replace(FAULTS[0], what="in other words", tests=("a",)).place == FAULTS[0].place


def test_what_was_not_noticed_yet_is_planted_from_the_least_known_room_on():
  results = seen(FAULTS[0]) | seen(FAULTS[1], noticed="")
  assert mutants.to_plant(FAULTS, results) == [FAULTS[4], FAULTS[1], FAULTS[2], FAULTS[3]]
  assert mutants.to_plant(FAULTS, results, new=True) == [FAULTS[4], FAULTS[2], FAULTS[3]]
  assert mutants.to_plant(FAULTS, {}) == [FAULTS[4], *FAULTS[:4]]
  more = [*FAULTS, Fault("models/b.py", "x", "z", "another")]
  assert mutants.to_plant(more, {}) == [FAULTS[4], FAULTS[0], FAULTS[1], more[5], FAULTS[2], FAULTS[3]]


def test_the_table_counts_what_was_planted():
  lines = mutants.table(FAULTS, seen(FAULTS[0], FAULTS[2]) | seen(FAULTS[1], noticed="")).splitlines()
  assert lines[2:5] == ["| models | 1 | 0 |  |", "| trainer | 4 | 3 | 67% |", "| together | 5 | 3 | 67% |"]
  assert lines[6:8] == ["Unnoticed:", "- trainer/a.py: what 1"]
  assert lines[9:] == ["Never planted as they stand now:", "- trainer/a.py: what 3", "- models/b.py: other"]


def test_a_fault_replaces_what_is_there_once(tmp_path):
  (tmp_path / "a.py").write_text("one = 1\ntwo = 2\n")
  assert Fault("a.py", "two = 2", "two = 3", "").plant(tmp_path) == "one = 1\ntwo = 2\n"
  assert (tmp_path / "a.py").read_text() == "one = 1\ntwo = 3\n"
  for old, new in ((" = ", "="), ("three", "four"), ("one", "one")):
    with pytest.raises(ValueError, match="not once"):
      Fault("a.py", old, new, "").plant(tmp_path)
  assert Fault("models/spec.py", "import", "x", "what").problem(tiny.ROOT)  # more than once; the file stays as it is
