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
