"""Functions for a model to call, of every kind of argument."""

import enum
from typing import Any, Literal, Optional, Union


class Unit(enum.Enum):
  """What a temperature is in."""

  CELSIUS = "c"
  FAHRENHEIT = "f"


def add(a: int, b: int) -> int:
  """Adds two numbers.

  Args:
    a: the first.
    b: the second,
      which goes on
      for lines.

  Returns:
    Their sum.
  """
  return a + b


def weather(city: str, unit: Unit = Unit.CELSIUS, days: Literal[1, 3, 7] = 1, place: str = "out") -> dict[str, Any]:
  """The weather of a city.

  More of it in a second paragraph: as said.

  Args:
    city (str): a city; a note: with colons.
    unit: of the temperature.
    days (int, optional): how many.

    place: where (choices: ["in", "out "])

  Raises:
    KeyError: no such city.
  """
  return {"city": city, "days": days}


def many(a: list[int], b: dict[str, float], c: tuple[int, str], d: Optional[int], e: Union[int, str, None],  # noqa: UP007, UP045
         f: list[int] | dict[str, int], g: Any, h: list, i: bool = True, j: Literal["x", 2, None] = None,
         k: float | int = 1) -> str | None:
  """Takes all.

  Args:
    a: numbers.
    b: more.
    c: a pair.
    d: maybe.
    e: either.
    f: lists or dicts.
    g: anything.
    h: things.
    i: a switch.
    j: mixed.
    k: a number.

  Returns:
    str: something,
      or nothing.
  """


def nothing():
  """Does nothing."""


def broken(text: str) -> str:
  """Fails.

  Args:
    text: why.
  """
  raise SystemExit(text) if text == "exit()" else ValueError(text)


async def later(n: int) -> list[int]:
  """Counts.

  Args:
    n: how far.
  """
  return list(range(n))


ALL = (add, weather, many, nothing, broken, later)
