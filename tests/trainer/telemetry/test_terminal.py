"""Colours are for terminals: elsewhere nothing escapes, and what they said is said by brackets."""

import doctest
import io

import pytest

from trainer.telemetry import terminal
from trainer.telemetry.terminal import BOLD, DIM, OFF, PARTLY, TRAINED, say

TEXT = f"{BOLD}row 0{OFF}\n{DIM}a{OFF}{TRAINED}b⏎\n{OFF}{TRAINED}c{OFF}{PARTLY}d{OFF}{DIM}[x]{OFF}"


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize("stream, no_color, coloured", [
    (io.StringIO, None, False), (Terminal, None, True), (Terminal, "1", False), (Terminal, "", True)])
def test_codes_go_to_terminals_alone(stream, no_color, coloured, monkeypatch):
  out = stream()
  monkeypatch.setattr("sys.stdout", out)
  monkeypatch.delenv("NO_COLOR", raising=False)
  if no_color is not None:
    monkeypatch.setenv("NO_COLOR", no_color)
  say(TEXT)
  assert out.getvalue() == (TEXT + "\n" if coloured else "row 0\na⟦b⏎\nc⟧⦅d⦆[x]\n")


def test_the_example():
  assert doctest.testmod(terminal).attempted == 1 and doctest.testmod(terminal).failed == 0


def test_columns_of_a_table_end_at_their_right_but_those_that_are_named():
  rows = [["a", "number", "text"], ["long", "1", "b"]]
  assert terminal.table(rows) == "a     number  text\nlong       1     b"
  assert terminal.table(rows, left=(1, 2)) == "   a  number  text\nlong  1       b"
