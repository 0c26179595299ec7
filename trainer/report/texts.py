"""What was generated over time: the files of `samples/`, some of their steps and rows, tokens coloured by log-prob."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.report.history import at, parse

# Of each name: steps, and texts of a step; of a text: characters and tokens; of a page: characters, markup included.
MOST_NAMES, MOST_STEPS, MOST_TEXTS, MOST_CHARACTERS, MOST_TOKENS, ALL_CHARACTERS = 12, 12, 6, 3000, 500, 1_000_000
# Characters of markup around a token.
MARKUP = 45
# A line of JSON that is longer is not read.
LONGEST_LINE = 4 << 20
_FILE = re.compile(r"(?P<name>.+)[-_](?P<step>\d{1,18})\.(?P<kind>jsonl|txt|html)")
# Probabilities below which a token is shown in the next stronger colour.
BOUNDS = (0.9, 0.5, 0.2, 0.05, 0.01)
# Fields of a row that are told beside its texts, in this order.
_TOLD = ("answer", "extracted", "taken", "reward", "advantage", "rewards", "score", "finish_reason", "stop_reason",
         "tokens", "logprob", "nll", "temperature")
_CONTROLS = {**{code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)}, 127: "\u2421"}


class Token(NamedTuple):
  """`level`: 0 for a likely token, up to len(BOUNDS); `title`: its figures."""

  text: str
  level: int
  title: str


class Said(NamedTuple):
  """A completion: its tokens, or where they are not known its text; `cut`: there is more of it."""

  tokens: list[Token]
  text: str
  cut: bool


class Text(NamedTuple):
  """`facts`: (name, value) beside the texts; `right`: None where nobody says; `reference`: of another policy."""

  title: str
  prompt: str
  said: Said
  reference: Said | None
  facts: list[tuple[str, str]]
  right: bool | None


class Step(NamedTuple):
  """`texts`: the first of `total`; None: not known. `plain`: in place of texts, for a file that is for people.
  `page`: the file, in the workdir, with more of them."""

  step: int
  texts: list[Text]
  total: int | None
  plain: str
  page: str | None


class Stream(NamedTuple):
  """What has one name, over time. `all_steps`: how many steps there are files of."""

  name: str
  steps: list[Step]
  all_steps: int


def streams(folder: Path) -> tuple[list[Stream], list[str]]:
  """(what was sampled, by name, names that are left out). [] where there are no samples."""
  files: dict[str, dict[int, dict[str, Path]]] = {}
  for path in sorted(folder.glob("*")) if folder.is_dir() else ():
    if (match := _FILE.fullmatch(path.name)) and path.is_file():
      files.setdefault(match["name"], {}).setdefault(int(match["step"]), {})[match["kind"]] = path
  names = sorted(files)
  shown = names[:MOST_NAMES]
  room = ALL_CHARACTERS // max(len(shown), 1)
  return [_stream(name, files[name], room) for name in shown], names[MOST_NAMES:]


def _stream(name: str, by_step: dict[int, dict[str, Path]], room: int) -> Stream:
  steps = sorted(by_step)
  if len(steps) > MOST_STEPS:  # the first, the last, and some between
    steps = [steps[i * (len(steps) - 1) // (MOST_STEPS - 1)] for i in range(MOST_STEPS)]
  return Stream(name, [_step(step, by_step[step], room // len(steps)) for step in steps], len(by_step))


def _step(step: int, files: dict[str, Path], room: int) -> Step:
  page = f"samples/{files['html'].name}" if "html" in files else None
  if "jsonl" in files:
    rows, total = _rows(files["jsonl"])
    if rows:
      share = room // len(rows)
      return Step(step, [text_of(row, share) for row in rows], total, "", page)
  plain = ""
  if "txt" in files:
    try:
      with open(files["txt"], encoding="utf-8", errors="replace") as file:
        plain = file.read(MOST_CHARACTERS + 1)
    except OSError as e:
      plain = f"{files['txt'].name} cannot be read: {e.strerror}"
  return Step(step, [], None, cut(plain, MOST_CHARACTERS), page)


def _rows(path: Path) -> tuple[list[dict[str, Any]], int | None]:
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
    return rows, None
  return rows, total


def text_of(row: dict[str, Any], room: int) -> Text:
  """A row of a table of samples, as evaluators and rollouts write them, in about so many characters."""
  most = max(200, room)
  where = [str(row[key]) for key in ("where",) if row.get(key) is not None]
  where += [f"sample {row['sample']}"] if isinstance(row.get("sample"), int) else []
  right = row.get("correct") if isinstance(row.get("correct"), bool) else None
  facts = [(key, cut(_fact(row[key]), 300)) for key in _TOLD if row.get(key) is not None
           and not (key == "tokens" and isinstance(row[key], list))]
  reference = row.get("reference")
  prompt = cut(_text(row.get("prompt", "")), min(most, MOST_CHARACTERS) // 2)
  return Text(cut(", ".join(where), 200), prompt, said_of(row, most),
              said_of(reference, most) if isinstance(reference, dict) else None, facts, right)


def said_of(row: dict[str, Any], most: int) -> Said:
  """The completion of a row: with tokens and their log-probs where it has both."""
  tokens, logprobs = row.get("tokens"), row.get("logprobs")
  if isinstance(tokens, list) and isinstance(logprobs, list) and len(tokens) == len(logprobs) and tokens:
    shown, length = [], 0
    for text, logprob in list(zip(tokens, logprobs, strict=True))[:MOST_TOKENS]:
      shown.append(token_of(cut(_text(text), 200), logprob))
      length += len(shown[-1].text) + MARKUP
      if length > most:
        break
    return Said(shown, "", len(shown) < len(tokens))
  text, most = _text(row.get("completion", "")), min(most, MOST_CHARACTERS)
  return Said([], cut(text, most), len(text) > most)


def token_of(text: str, logprob: Any) -> Token:
  """A token in its colour: that of how surprising it was."""
  text = text.replace("\n", "⏎\n")  # a break has no colour of its own
  if not isinstance(logprob, (int, float)) or isinstance(logprob, bool) or math.isnan(logprob):
    return Token(text or "\u00b7", 0, "log-prob not known")
  p = math.exp(min(logprob, 0.0))
  # What shows nothing gets a mark, to have a colour.
  return Token(text or "\u00b7", sum(p < bound for bound in BOUNDS), f"p {p:.3g}, log-prob {logprob:.4g}")


def cut(text: str, most: int) -> str:
  """At most so many characters, those that control something shown as what they are."""
  text = text if len(text) <= most else text[:most] + " …"
  return text.replace("\r\n", "\n").translate(_CONTROLS)


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
