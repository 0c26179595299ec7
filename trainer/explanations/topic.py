"""What an explanation consists of, and how it is written down (trainer/explain.py prints it).

    = loss.ipo, ipo2: a title
    What it is, in a sentence or two.
    equation:
      lines that stay as they are
    source: trainer/strategies/preference.py ipo
    source: trainer/strategies/seq.py next_token_loss @ if dft:
    test: tests/trainer/strategies/test_preference.py::test_values_by_hand
    config: config.strategy = strategy("dpo", loss={"ipo": 1.0})
    keys: strategy(dpo).loss strategy(dpo).beta
    paper: authors, title, year, arXiv id
    others: what others compute or name differently
    see: loss.dpo

The names after the first are other names for it. Lines that follow a field, indented, go on with it; source, test,
paper and others may be there several times.
"""

import textwrap
from dataclasses import dataclass, field
from typing import NamedTuple


class At(NamedTuple):
  """A place in the source, found again each time it is asked for.

  Attributes:
    file: from the checkout's root.
    name: of a function, a method (`Class.method`), a class or a variable of that file; "": the file itself.
    text: what the first of the lines meant contains, within that; "": all of it.
  """

  file: str
  name: str = ""
  text: str = ""


@dataclass
class Topic:
  """One thing that can be explained; see the docstring above.

  `preset`: of grpo, whose values are listed. `like`: the kind of topic, whose notation and tests it shares.
  """

  name: str
  title: str
  what: str = ""
  equation: str = ""
  source: list[At] = field(default_factory=list)
  test: list[str] = field(default_factory=list)
  config: str = ""
  keys: list[str] = field(default_factory=list)
  paper: list[str] = field(default_factory=list)
  others: list[str] = field(default_factory=list)
  see: list[str] = field(default_factory=list)
  aliases: list[str] = field(default_factory=list)
  preset: str = ""
  like: str = ""


_ONE, _MANY = ("equation", "config", "preset", "like"), ("source", "test", "paper", "others")


def parse(text: str) -> list[Topic]:
  """The topics of a text.

  Raises:
    ValueError: a line that is no field, with that line.
  """
  topics = []
  for part in ("\n" + text).split("\n= ")[1:]:
    head, *lines = part.rstrip().split("\n")
    names, _, title = head.partition(": ")
    name, *aliases = (word.strip() for word in names.split(","))
    topic, fields = Topic(name, title, aliases=aliases), [("what", [""])]
    for line in lines:
      key, colon, value = line.partition(":")
      if colon and key in (*_ONE, *_MANY, "keys", "see"):
        fields.append((key, [value]))
      elif line.startswith(" ") or not line or fields[-1][0] == "what":
        fields[-1][1].append(line)
      else:
        raise ValueError(f"explanations, {name}: {line!r} is no field")
    for key, values in fields:
      _set(topic, key, values)
    topics.append(topic)
  return topics


def _set(topic: Topic, key: str, lines: list[str]) -> None:
  if key == "equation":
    topic.equation = "\n".join(filter(None, [lines[0].strip(), textwrap.dedent("\n".join(lines[1:])).strip()]))
    return
  text = " ".join(line.strip() for line in lines).strip()
  if key == "source":
    place, _, inside = text.partition(" @ ")
    topic.source.append(At(*place.split(), *([""] * (" " not in place)), inside))
  elif key in _MANY:
    getattr(topic, key).append(text.replace(" ", "") if key == "test" else text)
  elif key in ("keys", "see"):
    setattr(topic, key, text.split())
  else:
    setattr(topic, key, text)
