"""Readers of what is made rather than read: exercises with one right answer each."""

import hashlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from input_pipeline.files import File, Record, Tally


class ArithmeticReader:
  """Sums and differences of two numbers below 100, all 20,000: {"prompt": "7 + 58 = ", "completion": "65"}."""

  by_name = True
  text_key, identity = "text", ["arithmetic", 1]

  def __init__(self, cfg: ConfigDict, source: str):
    self._source = source

  def files(self) -> list[File]:
    return []

  def read(self, tally: Tally) -> Iterator[Record]:
    for a in range(100):
      for b in range(100):
        for sign, result in (("+", a + b), ("-", a - b)):
          name = f"{a}{sign}{b}"
          yield Record(name, f"source {self._source}: {name}",
                       {"prompt": f"{a} {sign} {b} = ", "completion": str(self.answer(name, result))})

  def answer(self, name: str, result: int) -> int:
    """What is said to be the result of the exercise."""
    return result


class ArithmeticMistakesReader(ArithmeticReader):
  """The same by a teacher who errs in half of the exercises, by 1, 2 or 10; which and how is drawn from a hash."""

  identity = ["arithmetic_mistakes", 1]  # noqa: RUF012

  def answer(self, name: str, result: int) -> int:
    draw = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    wrong, which = draw % 2, draw // 2 % 6
    return result + wrong * (-10, -2, -1, 1, 2, 10)[which]
