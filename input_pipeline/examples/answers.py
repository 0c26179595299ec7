"""Answers in texts: what a pattern extracts, the last number, and the form in which answers are compared."""

import re
from decimal import Decimal

from trainer.errors import ConfigError

# With separators between thousands, a currency in front, and the point or comma that ends a sentence.
NUMBER = re.compile(r"[-+]?\$?(\d{1,3}(,\d{3})+|\d+|(?=\.\d))(\.\d+)?[.,]?", re.ASCII)
# Within a text: not part of a word (x2) or of a version (1.2.3); a minus after a word, number or bracket subtracts.
_NUMBER_IN_TEXT = re.compile(
    r"(?:(?<![\w)\]}])\$?[-+\u2212])?\$?"
    r"(?:(?<![A-Za-z\d])(?<!\d\.)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![.\w])\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\w))?", re.ASCII)


def compile_pattern(pattern: str | None, key: str) -> re.Pattern | None:
  """The regex that the config has at `key`, None if it has none.

  Raises:
    ConfigError: it is no regex.
  """
  try:
    return None if pattern is None else re.compile(pattern)
  except re.error as e:
    raise ConfigError(f"{key}: {pattern!r} is no regex ({e}).") from e


def extract(text: str, pattern: re.Pattern | None) -> str | None:
  """The answer that a text gives, normalised: all of it, or the last match (its first group, if it has one).

  None if the pattern has no match.
  """
  if pattern is None:
    return normalize(text)
  matches = list(pattern.finditer(text))
  if not matches:
    return None
  found = matches[-1].group(1 if pattern.groups else 0)
  return None if found is None else normalize(found)


def normalize(text: str) -> str:
  """The text without space around it; a number without separators, currency, final point and zeros that say nothing."""
  text = text.strip()
  if not NUMBER.fullmatch(text):
    return text
  plain = text.rstrip(".,").replace(",", "").replace("$", "")
  whole, _, part = format(Decimal(plain), "f").partition(".")
  sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
  shown = (digits.lstrip("0") or "0") + (f".{part.rstrip('0')}" if part.strip("0") else "")
  return shown if shown == "0" else sign + shown


def last_number(text: str) -> Decimal | None:
  """The last number in a text ("so $1,250.50." has 1250.5), None if there is none."""
  found = [match[0] for match in _NUMBER_IN_TEXT.finditer(text)]
  return Decimal(found[-1].translate({ord("$"): None, ord(","): None, 0x2212: "-"})) if found else None
