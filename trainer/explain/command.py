"""What a config key, a value of one, or a metric is: python -m trainer.explain [NAME]

Of a key its default, its type and the comment above it in the source; of every name what docs/ say of it, the lines of
code and the tests that have it. Without a name: all that there are.
"""

import difflib
import functools
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

from trainer.errors import ConfigError
from trainer.explain import config_source
from trainer.explain import docs as explain_docs
from trainer.explain.config_source import Key
from trainer.explain.docs import Passage
from trainer.telemetry import terminal
from trainer.telemetry.terminal import BOLD, DIM, OFF

ROOT = config_source.ROOT
# Passages of docs that are printed, further places that are named; lines of code and tests.
MOST_PASSAGES, MOST_PLACES, MOST_LINES = 6, 12, 12
NO_DOCS = ("The documentation is not installed with the packages: read docs/*.md in a checkout, or install from one "
           "(pip install -e .).")


def explain(name: str) -> str:
  """What is printed for a name.

  Raises:
    ConfigError: nothing has it, with the nearest ones.
  """
  typed = re.sub(r"^config\.", "", name.strip())
  if found := find_keys(typed):
    # The last part alone too, where its section is named beside it (`explain_docs.find`).
    names = list(dict.fromkeys([found[0].typed, found[0].typed.rpartition(".")[2]]))
    section = typed.partition(".")[0] if "." in typed else ""
    spoken = _documented(names, section) if explain_docs.passages() else [NO_DOCS]
    spoken += [*_section("Code", _code(names)), *_section("Tests", _tests(names))]
    return "\n\n".join([*map(_of_key, found), *spoken])
  context, _, last = typed.rpartition(".")
  names = _names_of_metric(last if context else typed)
  spoken = _documented(names, "" if context in ("loss", "metric") else context)
  if not spoken and not explain_docs.passages():
    raise ConfigError(f"{name!r} is no config key. {NO_DOCS}")
  if not spoken:
    raise ConfigError(f"{name!r} is no config key, and nothing in docs/ has that name.{_nearest(typed)} All names: "
                      "python -m trainer.explain")
  keys = [f"  {key.path}" for key in config_source.keys().values() if key.path.rpartition(".")[2] == names[0]]
  return "\n\n".join([f"{BOLD}{typed}{OFF}", *spoken, *_section("Config keys", keys),
                      *_section("Code", _code(names)), *_section("Tests", _tests(names))])


def overview() -> str:
  """All keys by section, and all names that docs are about by page."""
  sections: dict[str, list[str]] = {}
  for key in config_source.keys().values():
    section, _, leaf = key.path.rpartition(".")
    sections.setdefault(section, []).append(leaf)
  lines = ["python -m trainer.explain NAME: a config key (optimizer.b2), a loss, an optimizer, a metric …", ""]
  lines += [f"{BOLD}Config keys{OFF}"]
  lines += [_wrapped(f"{section or 'top'}: {' '.join(leaves)}", "  ") for section, leaves in sections.items()]
  lines += ["", f"{BOLD}Names in docs/{OFF}"]
  lines += [_wrapped(f"{page}: {' '.join(names)}", "  ") for page, names in explain_docs.names().items()]
  return "\n".join(lines if explain_docs.passages() else [*lines, f"  {NO_DOCS}"])


def _nearest(name: str) -> str:
  known = [key.typed for key in config_source.keys().values()]
  known += [other for names in explain_docs.names().values() for other in names]
  leaf = name.rpartition(".")[2]
  near = [other for some in (name, leaf) for other in difflib.get_close_matches(some, known, n=4, cutoff=0.6)]
  near += [other for other in known if other.rpartition(".")[2] == leaf]
  return f" Did you mean {', '.join(dict.fromkeys(near[:6]))}?" if near else ""


def _section(title: str, lines: Sequence[str]) -> list[str]:
  return [f"{BOLD}{title}{OFF}\n" + "\n".join(lines)] if lines else []


def _wrapped(text: str, indent: str = "") -> str:
  width = max(40, min(shutil.get_terminal_size((100, 24)).columns, 110))
  return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
                       break_on_hyphens=False)


def _names_of_metric(name: str) -> list[str]:
  """As it is logged, and as docs may write it: rewards/<name>/mean."""
  logged = re.sub(r"^eval/[^/]+/", "", name)
  parts = logged.split("/")
  return [logged, *("/".join([*parts[:i], "<name>", *parts[i + 1:]]) for i in range(1, len(parts)))]


def _documented(names: list[str], context: str) -> list[str]:
  found = explain_docs.find(names, context)
  places: dict[str, list[Passage]] = {}
  for _, passage in found[:MOST_PASSAGES]:
    places.setdefault(_place(passage), []).append(passage)
  parts = [f"{BOLD}{place}{OFF}\n" + "\n".join(map(_text, some)) for place, some in places.items()]
  more = [place for place in dict.fromkeys(_place(passage) for _, passage in found) if place not in places]
  return [*parts, *_section("Also in", [_wrapped(" ".join(more[:MOST_PLACES]), "  ")] if more else [])]


def _place(passage: Passage) -> str:
  return f"docs/{passage.page}#{passage.anchor}"


def _text(passage: Passage) -> str:
  """Without the marks of Markdown: links as their text with an address of another site, no bold and no code marks."""
  text = re.sub(r"\[([^\]]+)\]\((https?:[^)]+)\)", r"\1 (\2)", passage.text)
  text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
  text = re.sub(r"\*\*(.*?)\*\*", r"\1", text).replace("`$", "").replace("$`", "").replace("`", "").replace("\\|", "|")
  first, *others = text.split("\n")
  return "\n".join([_wrapped(first, "  "), *(f"  {line}" for line in others)])


def _code(names: list[str]) -> list[str]:
  """`file:line  text` of lines that define, read or name it, in this order; of a key those read it that take it of its
  section, or of what is often called `cfg`."""
  some = "|".join(map(re.escape, names))
  sections = "|".join({"cfg", "config", *(name.split(".")[-2] for name in names if "." in name)})
  defines = re.compile(rf"""^\s*(?:def|class) (?:{some})\b|^\s*["'](?:{some})["']:|\[["'](?:{some})["']\] =""")
  reads = re.compile(rf"""\b(?:{sections})\.{re.escape(names[0].rpartition(".")[2])}\b(?!["'])""")
  has = re.compile(rf"""["'](?:{some})["']""")
  lines = [(place, f"  {file}:{number}  {DIM}{' '.join(line.split())[:90]}{OFF}")
           for folder in ("trainer", "models", "evaluators", "input_pipeline") for file, text in _files(folder).items()
           for number, line in enumerate(text, 1)
           if (place := next((i for i, one in enumerate((defines, reads, has)) if one.search(line)), None)) is not None]
  return [line for _, line in sorted(lines, key=lambda one: one[0])[:MOST_LINES]]


def _tests(names: list[str]) -> list[str]:
  """`file:line::name` of tests that name it."""
  has = re.compile(rf"""["'](?:{'|'.join(map(re.escape, names))})["']|_(?:{'|'.join(map(re.escape, names))})_""")
  found: dict[str, None] = {}
  for file, text in _files("tests").items():
    inside = ""
    for number, line in enumerate(text, 1):
      if test := re.match(r"def (test_\w+)\(", line):
        inside = f"  {file}:{number}::{test[1]}"
      elif re.match(r"\S", line):
        inside = ""
      if inside and has.search(line):
        found[inside] = None
  return list(found)[:MOST_LINES]


@functools.cache
def _files(folder: str) -> dict[str, list[str]]:
  """{file: its lines} of the Python files of a folder of the checkout, but for those about explanations."""
  return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").splitlines()
          for path in sorted((ROOT / folder).rglob("*.py")) if path.parent.name != "explain"}


def find_keys(typed: str) -> list[Key]:
  """The keys that a dotted path means: of strategies, which have keys of the same name, all of them; of what has names
  (input.sources.mine.path), that of any name."""
  known = config_source.keys()
  names = {typed, re.sub(r"^(input\.sources|evals|rollout\.rewards)\.[^.]+\.", r"\1.<name>.", typed)}
  return [key for path, key in known.items() if path in names or key.typed in names]


def _of_key(key: Key) -> str:
  default = "" if key.default is None else f" = {key.default!r}  ({type(key.default).__name__})"
  named = f", strategy {key.path.partition('(')[2].partition(')')[0]}" if key.path != key.typed else ""
  comment, like = key.comment, re.fullmatch(r"(?:These a|A)s for (\w+)\.", key.comment)
  if like is not None:
    comment += " " + config_source.keys()[re.sub(r"\(\w+\)", f"({like.group(1)})", key.path)].comment
  parts = [f"{BOLD}config.{key.typed}{OFF}{default}{named}", _wrapped(comment), f"  {key.file}:{key.line}"]
  return "\n\n".join(filter(None, parts))


def main(argv: list[str]) -> int:
  """Prints what the command line asks for; returns the exit code."""
  if len(argv) > 1 or argv and argv[0] in ("-h", "--help"):
    print(__doc__.strip())
    return 0 if argv[0] in ("-h", "--help") else 2
  try:
    text = explain(argv[0]) if argv else overview()
  except ConfigError as error:
    print(f"ConfigError: {error}", file=sys.stderr)
    return 1
  terminal.say(text)
  return 0
