"""What was generated over time: the files of `samples/`, some of their steps and rows, tokens coloured by log-prob."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from trainer.report import pages
from trainer.report.history import at, parse

# Of each name: steps, and texts of a step; of a text: characters and tokens; of a page: characters, markup included.
MOST_NAMES, MOST_STEPS, MOST_TEXTS, MOST_CHARACTERS, MOST_TOKENS, ALL_CHARACTERS = 12, 12, 6, 3000, 500, 1_000_000
# Characters of markup around a token.
MARKUP = 20
# A line of JSON that is longer is not read.
LONGEST_LINE = 4 << 20
_FILE = re.compile(r"(?P<name>.+)[-_](?P<step>\d{1,18})\.(?P<kind>jsonl|txt|html)")
# Fields of a row that are told beside its texts, in this order.
_TOLD = ("answer", "extracted", "taken", "reward", "advantage", "rewards", "score", "finish_reason", "stop_reason",
         "tokens", "logprob", "nll", "temperature")
# Tokens have the colour of their log-prob, full from a probability of 1% on.
COLUMN = {"key": "logprobs", "label": "log p", "kind": "low", "says": ("certain", "unlikely"), "scale": 4.605}


def streams(folder: Path) -> list[Markup]:
  """What was sampled, by name; [] where there are no samples."""
  files: dict[str, dict[int, dict[str, Path]]] = {}
  for path in sorted(folder.glob("*")) if folder.is_dir() else ():
    if (match := _FILE.fullmatch(path.name)) and path.is_file():
      files.setdefault(match["name"], {}).setdefault(int(match["step"]), {})[match["kind"]] = path
  names = sorted(files)
  room = ALL_CHARACTERS // max(min(len(names), MOST_NAMES), 1)
  left_out = pages.dim(f"Not shown: {', '.join(names[MOST_NAMES:])}") if len(names) > MOST_NAMES else Markup("")
  return [*(_stream(name, files[name], room) for name in names[:MOST_NAMES]), left_out] if names else []


def shown_steps(steps: Sequence[int]) -> list[int]:
  """The first, the last, and some between."""
  steps = sorted(steps)
  most = min(len(steps), MOST_STEPS)
  return [steps[i * (len(steps) - 1) // max(most - 1, 1)] for i in range(most)]


def _stream(name: str, by_step: dict[int, dict[str, Path]], room: int) -> Markup:
  steps = shown_steps(list(by_step))
  left_out = pages.dim(f"{len(steps)} of {len(by_step):,} steps are shown; the others are in samples/.")
  return pages.tag("div", pages.tag("h3", name), *(
      pages.details(f"step {step:,}", *_step(by_step[step], room // len(steps)), open_=step == steps[-1])
      for step in steps), left_out if len(by_step) > len(steps) else "")


def _step(files: dict[str, Path], room: int) -> list[Any]:
  parts: list[Any] = []
  if "html" in files:
    page = f"samples/{files['html'].name}"
    parts.append(pages.dim(pages.join(["More, with pictures where there are any: ",
                                       pages.tag("a", page, href=quote(page, errors="replace"))])))
  rows, total = _rows(files["jsonl"]) if "jsonl" in files else ([], 0)
  if rows:
    if total > len(rows):
      parts.append(pages.dim(f"The first {len(rows)} of {total:,}."))
    return [*parts, pages.tag("div", *(_card(row, max(200, room // len(rows))) for row in rows), class_="cards")]
  if "txt" in files:
    try:
      with open(files["txt"], encoding="utf-8", errors="replace") as file:
        plain = file.read(MOST_CHARACTERS + 1)
    except OSError as e:
      plain = f"{files['txt'].name} cannot be read: {e.strerror}"
    parts.append(pages.tag("div", cut(plain, MOST_CHARACTERS), class_="said"))
  return parts


def _rows(path: Path) -> tuple[list[dict[str, Any]], int]:
  """The first rows of a JSON Lines file, and how many there are; lines that are no objects do not count."""
  rows, total = [], 0
  try:
    with open(path, "rb") as file:
      while line := file.readline(LONGEST_LINE):
        total += bool(line.strip())
        if len(rows) < MOST_TEXTS:
          try:
            row = parse(line)
          except (ValueError, RecursionError):
            continue
          rows += [row] * isinstance(row, dict)
  except OSError:
    pass
  return rows, total


def _card(row: dict[str, Any], room: int) -> pages.Card:
  """A row of a table of samples, as evaluators and rollouts write them, in about so many characters."""
  where = [str(row[key]) for key in ("where",) if row.get(key) is not None]
  where += [f"sample {row['sample']}"] if isinstance(row.get("sample"), int) else []
  facts = [(key, cut(_fact(row[key]), 300)) for key in _TOLD if row.get(key) is not None
           and not (key == "tokens" and isinstance(row[key], list))]
  lines: list[tuple[str, Any]] = [("prompt", cut(_text(row.get("prompt", "")), min(room, MOST_CHARACTERS) // 2)),
                                  ("completion", said(row, room))]
  if isinstance(row.get("reference"), dict):
    lines.append(("the reference, from the same draws", said(row["reference"], room)))
  right = row.get("correct") if isinstance(row.get("correct"), bool) else None
  return pages.Card(cut(", ".join(where), 200), (), [*lines, ("", pages.pairs(facts, "facts"))], right)


def said(row: dict[str, Any], room: int) -> Any:
  """The completion of a row: with tokens and their log-probs where it has both."""
  tokens, logprobs = row.get("tokens"), row.get("logprobs")
  if isinstance(tokens, list) and isinstance(logprobs, list) and len(tokens) == len(logprobs) and tokens:
    shown: list[Markup] = []
    for text in tokens[:MOST_TOKENS]:
      shown.append(pages.token(_cut(_text(text), 200)))
      room -= len(shown[-1]) + MARKUP
      if room < 0:
        break
    values = [round(x, 4) if isinstance(x, float) and math.isfinite(x) else None for x in logprobs[:len(shown)]]
    more = pages.tag("small", " …") if len(shown) < len(tokens) else ""
    return pages.join([pages.tokens(shown, {"logprobs": values}, "a completion"), more])
  return cut(_text(row.get("completion", "")), min(room, MOST_CHARACTERS))


def _cut(text: str, most: int) -> str:
  return text if len(text) <= most else text[:most] + " …"


def cut(text: str, most: int) -> str:
  """At most so many characters, those that control something shown as what they are."""
  return pages.visible(_cut(text, most)).replace("⏎\n", "\n")


def _text(value: Any) -> str:
  if isinstance(value, str):
    return value
  if isinstance(value, Sequence) and all(isinstance(at(turn, "content"), str) for turn in value):  # a conversation
    return "\n".join(f"{at(turn, 'role', default='')}: {turn['content']}" for turn in value)
  return json.dumps(value, ensure_ascii=False)


def _fact(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:.4g}"
  if isinstance(value, dict):
    return ", ".join(f"{key} {_fact(part)}" for key, part in value.items())
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
