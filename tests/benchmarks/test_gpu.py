"""What is measured on a GPU ends with a table that says what was not measured."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu


@pytest.fixture
def given():
  return gpu.Given(True, None, Path("f"), 0.0, [], 0.0, False)


def table_of(shown):
  return shown.partition("== All rows")[2].splitlines()[2:]


def test_parts_that_were_not_begun_are_in_the_table(monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["gpu", "0.1", "--parts", "bits", "8b"])
  gpu.main()
  assert table_of(capsys.readouterr().out) == [
      "| bits | not begun: 0.1 minutes are over |", "| 8b | not begun: 0.1 minutes are over |"]


@pytest.mark.parametrize("last, how", [("1 PASS", ""), (gpu.ENDED, "ended after ")])
def test_checks_that_were_ended_are_not_told_as_done(given, monkeypatch, last, how):
  monkeypatch.setattr(gpu, "lines_of", lambda *args: ["8 rows", "PASS  I1", last])
  monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: 7.0))
  assert list(gpu.verify(given))[-1] == f"| verify | the quickstart | {how}0 s, the first check after 0 s |"


def test_rows_of_both_choices_of_kernels_are_told_apart(given, monkeypatch):
  monkeypatch.setattr(gpu, "lines_of", lambda *args, **env: [f"| {len(env)} {env.get('WEFT_SPEED_TIMED')} |"])
  assert [row for row in gpu.generate(given) if row.startswith("|")] == [
      "| 1 None |", "| kernels chosen by timing: |", "| 1 1 |"]
