"""Readers of what is made, or comes with a library: exercises with one right answer each."""

import hashlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from input_pipeline.files import File, Record, Tally, read_bytes
from trainer.errors import ConfigError


def asks_chats(cfg: ConfigDict, source: str) -> bool:
  """Whether the source's rows are to be conversations, `dataset="chat"`.

  Raises:
    ConfigError: another `dataset`.
  """
  if cfg.dataset not in (None, "chat"):
    raise ConfigError(f"input.sources.{source}.dataset is {cfg.dataset!r}; for type {cfg.type!r} it is 'chat', for "
                      "conversations, or unset, for texts.")
  return cfg.dataset == "chat"


def as_chat(question: str, **answers: str) -> dict[str, list[dict[str, str]]]:
  """The columns of a row in which a user asks and the assistant answers: {"prompt": [message], name: [message], …}."""
  said = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
  return {"prompt": [{"role": "user", "content": question}]} | said


class ArithmeticReader:
  """Sums and differences of two numbers below 100, all 20,000: {"prompt": "7 + 58 = ", "completion": "65"}.

  With `dataset="chat"`, "What is 7 + 58?" is asked by a user; the bare result is in the column "answer" as well.
  """

  by_name = True
  text_key, identity = "text", ["arithmetic", 1]

  def __init__(self, cfg: ConfigDict, source: str):
    self._source, self._chat = source, asks_chats(cfg, source)
    self.identity = [*self.identity, *(["chat"] if self._chat else [])]

  def files(self) -> list[File]:
    return []

  def read(self, tally: Tally) -> Iterator[Record]:
    for a in range(100):
      for b in range(100):
        for sign, result in (("+", a + b), ("-", a - b)):
          name = f"{a}{sign}{b}"
          answers = self.answers(name, result)
          yield Record(name, f"source {self._source}: {name}",
                       as_chat(f"What is {a} {sign} {b}?", **answers) | self.beside(answers) if self._chat else
                       {"prompt": f"{a} {sign} {b} = "} | answers)

  def answers(self, name: str, result: int) -> dict[str, str]:
    """What is said to be the result of the exercise, by column."""
    return {"completion": str(result)}

  def beside(self, answers: dict[str, str]) -> dict[str, str]:
    """Further columns of conversations."""
    return {"answer": answers["completion"]}


class ArithmeticMistakesReader(ArithmeticReader):
  """The same by a teacher who errs in half of the exercises, by 1, 2 or 10; which and how is drawn from a hash."""

  identity = ["arithmetic_mistakes", 1]

  def answers(self, name, result):
    wrong, error = _mistake(name)
    return {"completion": str(result + wrong * error)}


class ArithmeticPairsReader(ArithmeticReader):
  """The same as preferences: the right answer is chosen, one of those mistakes is rejected."""

  identity = ["arithmetic_pairs", 1]

  def answers(self, name, result):
    return {"chosen": str(result), "rejected": str(result + _mistake(name)[1])}

  def beside(self, answers):
    return {}


def _mistake(name: str) -> tuple[int, int]:
  """(whether the teacher errs in an exercise, by what then)."""
  draw = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
  return draw % 2, (-10, -2, -1, 1, 2, 10)[draw // 2 % 6]


class DigitsReader:
  """Handwritten digits, 1,797 pictures of 8 × 8 pixels, with questions: {"image": PNG, "prefix": …, "suffix": …}.

  The data are those of Alpaydin and Kaynak (1998), which come with scikit-learn (`load_digits`); they are read without
  importing it. "name" is answered with "a seven", "describe" with "a bold, wide seven": bold if the ink adds up to more
  than half of all pictures have, wide if it covers six columns or more. Which split a picture is in follows from a hash
  of its pixels, so that both questions about it are in the same one.
  """

  by_name = True
  text_key = "text"
  QUESTIONS = {"name": "name", "description": "describe"}
  NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
  # Pixels are 0 to 16; ink of less than FAINT covers no column.
  BOLD, FAINT, WIDE = 313, 4, 6

  def __init__(self, cfg: ConfigDict, source: str):
    if cfg.dataset not in (None, *self.QUESTIONS):
      raise ConfigError(f"input.sources.{source}.dataset is {cfg.dataset!r}; for type 'digits' it is one of "
                        f"{', '.join(self.QUESTIONS)}, or unset for both.")
    self._source, self._asked = source, list(self.QUESTIONS) if cfg.dataset is None else [cfg.dataset]
    self.identity = ["digits", 1, self._asked]

  def files(self) -> list[File]:
    sklearn = importlib.util.find_spec("sklearn").submodule_search_locations[0]  # importing it takes seconds
    path = Path(sklearn, "datasets/data/digits.csv.gz")
    return [File(path.name, path)]

  def read(self, tally: Tally) -> Iterator[Record]:
    (_, path), = self.files()
    table = np.array([line.split(b",") for line in read_bytes(path, tally).split()], float).astype(np.uint8)
    for row, values in enumerate(table):
      pixels, digit = values[:64].reshape(8, 8), int(values[64])
      name = f"digit-{hashlib.blake2b(pixels.tobytes(), digest_size=8).hexdigest()}"
      image = png((pixels.astype(np.uint16) * 255 // 16).astype(np.uint8))
      for question in self._asked:
        yield Record(name, f"source {self._source}: digit {row}", {
            "image": image, "prefix": self.QUESTIONS[question], "suffix": self.caption(pixels, digit, question)})

  def caption(self, pixels: np.ndarray, digit: int, question: str) -> str:
    """The answer to a question about a picture, uint8 [8, 8] from 0 to 16, of a digit."""
    if question == "name":
      return f"a{'n' if digit == 8 else ''} {self.NAMES[digit]}"
    weight = "bold" if int(pixels.sum()) >= self.BOLD else "thin"
    width = "wide" if int((pixels.max(axis=0) >= self.FAINT).sum()) >= self.WIDE else "narrow"
    return f"a {weight}, {width} {self.NAMES[digit]}"


def png(pixels: np.ndarray) -> bytes:
  """A PNG file of an array, uint8 [H, W] or [H, W, 3 or 4]."""
  file = io.BytesIO()
  Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
  return file.getvalue()
