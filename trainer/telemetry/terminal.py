"""Colours for a terminal, and what stands for them in a file: no escape codes go where nobody reads them as colours."""

import os
import re
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any

BOLD, DIM, TRAINED, PARTLY, OFF = "\033[1m", "\033[2m", "\033[30;42m", "\033[30;43m", "\033[0m"
# What is coloured in its background says something by it.
_BRACKETS = {TRAINED: ("⟦", "⟧"), PARTLY: ("⦅", "⦆")}


def say(text: str) -> None:
  """Prints a text with the codes above: on a terminal in colour (unless NO_COLOR is set), else as `plain` has it."""
  print(text if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else plain(text))


def plain(text: str) -> str:
  """The text without codes; what is trained stands in brackets, neighbours in the same pair.

      >>> plain(f"{BOLD}row{OFF} {DIM}a{OFF}{TRAINED}b{OFF}{TRAINED}c{OFF}{PARTLY}d{OFF}")
      'row a⟦bc⟧⦅d⦆'
  """
  for code, (left, right) in _BRACKETS.items():
    text = re.sub(rf"((?:{re.escape(code)}[^\033]*{re.escape(OFF)})+)", rf"{left}\1{right}", text)
  return _without(text)


def _without(text: str) -> str:
  return re.sub("\033\\[[\\d;]*m", "", text)


def table(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
  """Rows of cells as lines; columns whose numbers are in `left` begin at their left, the others end at their right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join("  ".join(cell.ljust(width) if place in left else cell.rjust(width)
                             for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
                   for row in rows)


def stats(rows: Sequence[Mapping[str, Any]]) -> str:
  """The statistics of data, a row a source, as a table."""

  def show(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

  return table([list(rows[0]), *([show(value) for value in row.values()] for row in rows)])
