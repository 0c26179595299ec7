"""Passages of docs/*.md that speak of a name: a config key, a value of one, a metric (trainer/explain/command.py prints
them).

A passage is a paragraph, an item of a list, a row of a table, or a table's column whose head is the name. It speaks of
a name that stands in it as code: `clip_ratio/low_mean`, `preset="dapo"`; braces and <name> stand for several names.
"""

import functools
import itertools
import re
from pathlib import Path
from typing import NamedTuple

from trainer.explain.config_source import ROOT

DOCS = ROOT / "docs"
# Written from comments and docstrings.
GENERATED = ("config_keys.md", "map.md")
# What these say of a name comes after what others do.
ELSEWHERE = ("coming_from.md", "troubleshooting.md")


class Passage(NamedTuple):
  """A passage.

  Attributes:
    page: its file's name.
    heading, anchor: of the section it stands in, and the part of an address for it, as on GitHub.
    text: Markdown on one line; equations and cells of columns on lines of their own.
    head: what stands first in it, or the name of a column: what a passage is about.
    around: what gives it a context: the page's title, the headings, the first row of a table.
    is_column: whether it is a table's column, which speaks of what stands at its head alone.
  """

  page: str
  heading: str
  anchor: str
  text: str
  head: str
  around: str
  is_column: bool


def find(names: list[str], context: str = "") -> list[tuple[int, Passage]]:
  """(score, passage) of those that speak of one of the names, the best first: 3 and more are about it.

  Args:
    context: what has to do with them: `scale` of scale.none. Passages without it are left out if others have it.
  """
  spoken = "|".join(re.escape(name).replace("<name>", r"<\w+>") for name in names)
  whole, part = re.compile(rf"(?<![\w./])(?:{spoken})(?![\w/])"), re.compile(rf"(?<![\w.])(?:{spoken})(?!\w)")
  plain = re.compile(rf"(?<!\w)(?:{spoken.replace('_', '[_ ]')})", re.IGNORECASE)
  near = re.compile(rf"(?<!\w){re.escape(context)}(?!\w)") if context else None
  found: list[tuple[int, bool, Passage]] = []
  begun = set()
  for passage in passages():
    code, place = code_of(passage.text), (passage.page, passage.anchor)
    headed = 3 * bool(place not in begun and plain.search(passage.heading))  # a section's first passage
    begun.add(place)
    head = bool(part.search(passage.head))
    score = 3 * head + (2 if whole.search(code) else 1 if part.search(code) else 0) * (head or not passage.is_column)
    if score := max(score, headed):
      belongs = bool(near and near.search(passage.around + passage.text))
      found.append((score - (passage.page in ELSEWHERE), belongs, passage))
  found = [one for one in found if one[1]] or found or [
      (1, False, passage) for passage in passages() if plain.search(passage.text)]
  return sorted(((score, passage) for score, _, passage in found), key=lambda one: -one[0])


def names() -> dict[str, list[str]]:
  """{page: the names that it is about}: those that stand first in its passages, as code."""
  found: dict[str, dict[str, None]] = {}
  for passage in passages():
    if passage.page not in ELSEWHERE:
      words = [word for word in code_of(passage.head).split() if re.fullmatch(r"[A-Za-z][\w.+/@<>-]+", word)]
      found.setdefault(passage.page, {}).update(dict.fromkeys(words))
  return {page: list(some) for page, some in found.items() if some}


@functools.cache
def passages() -> list[Passage]:
  """All, in their order; [] where there is no docs/."""
  return [passage for page in sorted(DOCS.glob("*.md")) if page.name not in GENERATED for passage in _of_page(page)]


@functools.cache
def code_of(text: str) -> str:
  """What stands as code in a text, and its equations, apart by spaces; of values in quotes the values; {a,b} written
  out."""
  text, _, equations = text.partition("\n")
  spans = [span.replace("\\|", "|") for span in re.findall(r"`([^`$]+)`", text)]
  spans = [re.sub(r"^(--)?config\.", "", span) for span in spans]
  return " ".join(re.sub(r"""["'()=…,]""", " ", one) for span in spans for one in _expanded(span)) + f" {equations}"


def _expanded(span: str) -> list[str]:
  parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(re.split(r"\{([\w,]+)\}", span))]
  return ["".join(one) for one in itertools.product(*parts)]


def _of_page(page: Path) -> list[Passage]:
  text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
  title, found = "", []
  for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
    first, _, rest = section.partition("\n")
    heading = first.lstrip("# ").strip()
    title = title or heading
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    for text, head, row, is_column in _blocks(rest):
      found.append(Passage(page.name, heading, anchor, text, head, f"{title} {heading} {row}", is_column))
  return found


def _blocks(section: str) -> list[tuple[str, str, str, bool]]:
  """(text, head, first row of its table, whether it is a column) of each passage."""
  found: list[tuple[str, str, str, bool]] = []
  for block in re.split(r"\n\s*\n", section):
    lines = block.strip("\n").splitlines()
    if not lines:
      continue
    if lines[0].startswith("|") and len(lines) > 2:
      found += _of_table([re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in lines])
    elif found and lines[0].startswith(("$$", "    ")):  # an equation goes on with what it belongs to
      shown = [f"  {line}" for line in lines if line != "$$"]
      found[-1] = ("\n".join([found[-1][0], *shown]), *found[-1][1:])
    else:
      for item in re.split(r"^(?=- |\d+\. )", block, flags=re.MULTILINE):
        if text := " ".join(item.split()):
          head = re.match(r"(?:- |\d+\. )?((?:\*\*.*?\*\*|(?:`[^`]*`(?:, | and )?)*))", text)
          found.append((text, head[1] if head else "", "", False))
  return found


def _of_table(table: list[list[str]]) -> list[tuple[str, str, str, bool]]:
  first, *rows = [[cell.strip() for cell in row] for row in (table[0], *table[2:])]
  found = [("  ".join(filter(None, row)), row[0], " ".join(first), False) for row in rows]
  for place, name in enumerate(first):
    if place and name.startswith("`"):
      cells = [f"  {row[0]}: {row[place]}" for row in rows if len(row) > place and row[place]]
      found.append(("\n".join([name, *cells]), name, first[0], True))
  return found
