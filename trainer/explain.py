"""What something in Weft is: python -m trainer.explain [TOPIC]

Prints the equation, the lines that compute it, the config keys, the tests that show it, the paper, and what others do
differently; of a config key its meaning, its default and the lines that read it. Without a topic: all there are.
"""

import ast
import difflib
import functools
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainer import config_source, terminal
from trainer.config_source import Key, targets
from trainer.errors import ConfigError
from trainer.explanations import groups, topics
from trainer.explanations.topic import At, Topic
from trainer.terminal import BOLD, DIM, OFF

ROOT = config_source.ROOT
# Lines of code shown of each place; lines that read a key.
MOST_LINES, MOST_READS = 30, 12


def explain(name: str) -> str:
  """What is printed for a topic or a config key.

  Raises:
    ConfigError: there is neither, with the nearest ones.
  """
  name = name.strip()
  typed = re.sub(r"^config\.", "", name)
  if name in topics():
    return _of_topic(topics()[name])
  if found := find_keys(typed):
    return "\n\n".join(_of_key(key) for key in found)
  if (topic := find_topic(typed)) is not None:
    return _of_topic(topic)
  raise ConfigError(f"{name!r} is no topic and no config key.{_nearest(typed)} All topics: python -m trainer.explain")


def find_topic(name: str) -> Topic | None:
  """The topic that is meant by the last part of its name, or by the name of a metric as it is logged."""
  logged = re.sub(r"^eval/[^/]+/", "", name)
  parts = logged.split("/")
  names = [logged, *(f"{group}.{logged}" for group in ("loss", "metric", "optimizer", "schedule")),
           *(start + "/".join(parts[:size]) for size in range(len(parts) - 1, 0, -1) for start in ("metric.", ""))]
  if (found := next((topics()[known] for known in names if known in topics()), None)) is not None:
    return found
  ending = {topic.name: topic for known, topic in topics().items() if known.rpartition(".")[2] == logged}
  return next(iter(ending.values())) if len(ending) == 1 else None


def overview() -> str:
  """All topics, by group."""
  lines = ["python -m trainer.explain TOPIC, or any config key, e.g. optimizer.b2"]
  for group, members in groups().items():
    width = max(len(topic.name) for topic in members)
    lines += ["", f"{BOLD}{group}{OFF}", *(f"  {topic.name:<{width}}  {topic.title}" for topic in members)]
  return "\n".join(lines)


def _nearest(name: str) -> str:
  known = [*topics(), *(key.typed for key in config_source.keys().values())]
  near = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
  near += [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2] and other not in near]
  return f" Did you mean {', '.join(dict.fromkeys(near[:6]))}?" if near else ""


# ----------------------------------------------------------------------------------------------
# A topic.


def _of_topic(topic: Topic) -> str:
  parts = [f"{BOLD}{topic.name}{OFF}: {topic.title}", _wrapped(topic.what)]
  parts += _section("Equation", [textwrap.indent(topic.equation, "  ")] if topic.equation else [])
  parts += _section("Config", _config_lines(topic))
  parts += _section("Source", [_or_missing(code, at) for at in topic.source])
  parts += _section("Tests", [f"  {_or_missing(find_test, test)}" for test in topic.test])
  parts += _section("Paper", [_wrapped(paper, "  ") for paper in topic.paper])
  parts += _section("Elsewhere", [_wrapped(other, "  ") for other in topic.others])
  parts += _section("See also", [_wrapped(", ".join(topic.see), "  ")] if topic.see else [])
  return "\n\n".join(filter(None, parts))


def _or_missing(find: Callable[[Any], str], what: Any) -> str:
  try:
    return find(what)
  except LookupError as error:
    return f"  ({error})"


def _section(title: str, lines: Iterable[str]) -> list[str]:
  lines = list(lines)
  return [f"{BOLD}{title}{OFF}\n" + "\n".join(lines)] if lines else []


def _config_lines(topic: Topic) -> list[str]:
  lines = [f"  {topic.config}"] if topic.config else []
  values = _preset(topic.preset) if topic.preset else {}
  for path in topic.keys:
    key = config_source.keys()[path]
    shown = f"{values[key.typed]!r} in this preset" if key.typed in values else "" if key.default is None else (
        f"default {key.default!r}")
    lines.append(f"  {key.typed}" + (f": {shown}" if shown else ""))
  rest = {key: value for key, value in values.items() if key not in {config_source.keys()[p].typed for p in topic.keys}}
  if rest:
    lines.append(_wrapped("also: " + ", ".join(f"{key}={value!r}" for key, value in rest.items()), "  "))
  return lines


def _preset(name: str) -> dict[str, object]:
  from trainer.strategies.presets import PRESETS  # imported here: it imports JAX
  return {f"{section}.{key}": value for section, values in PRESETS[name].items() for key, value in values.items()}


def _wrapped(text: str, indent: str = "") -> str:
  return textwrap.fill(text, _width(), initial_indent=indent, subsequent_indent=indent, break_long_words=False,
                       break_on_hyphens=False)


def _width() -> int:
  return max(40, min(shutil.get_terminal_size((100, 24)).columns, 110))


# ----------------------------------------------------------------------------------------------
# Places in the source, found when they are asked for.


@functools.cache
def _parsed(file: str) -> tuple[list[str], ast.Module]:
  text = (ROOT / file).read_text(encoding="utf-8")
  return text.splitlines(), ast.parse(text)


def locate(at: At) -> tuple[int, int]:
  """The first and the last line of a place, counted from 1.

  Raises:
    LookupError: there is no such place (any more).
  """
  lines, tree = _parsed(at.file)
  node: Any = tree
  for part in filter(None, at.name.split(".")):
    node = next((child for child in ast.iter_child_nodes(node) if part in _names(child)), None)
    if node is None:
      raise LookupError(f"{at.file} has no {at.name}")
  first, last = (1, len(lines)) if node is tree else (node.lineno, node.end_lineno)
  if not at.text:
    return first, last
  begin = next((number for number in range(first, last + 1) if at.text in lines[number - 1]), None)
  if begin is None:
    raise LookupError(f"{at.file}: {at.name} has no line with {at.text!r}")
  # What begins in that line, if it is not what the line is in the middle of.
  inside: list[Any] = [child for child in ast.walk(node) if getattr(child, "lineno", 0) == begin]
  # Of an `if` its own lines, without those of what is else.
  last = max(((child.body[-1] if isinstance(child, ast.If) else child).end_lineno for child in inside), default=begin)
  while lines[begin - 2].strip().startswith("#"):
    begin -= 1
  return begin, last


def _names(node: ast.AST) -> list[str]:
  """What a statement defines."""
  if isinstance(node, ast.FunctionDef | ast.ClassDef):
    return [node.name]
  return [target.id for target in targets(node) if isinstance(target, ast.Name)]


def code(at: At) -> str:
  """`file:line` and the lines there, without a docstring of several lines; the first MOST_LINES of them."""
  first, last = locate(at)
  lines, tree = _parsed(at.file)
  hidden = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno >= first and ast.get_docstring(node):
      doc = node.body[0]
      if doc.end_lineno - doc.lineno > 2:
        hidden |= set(range(doc.lineno, doc.end_lineno + 1))
  shown = [number for number in range(first, last + 1) if number not in hidden]
  left, shown = len(shown) - MOST_LINES, shown[:MOST_LINES]
  margin = min((len(lines[n - 1]) - len(lines[n - 1].lstrip()) for n in shown if lines[n - 1].strip()), default=0)
  text = [f"  {DIM}{number:>5}{OFF} {lines[number - 1][margin:]}".rstrip() for number in shown]
  more = [f"        … {left} more lines"] if left > 0 else []
  return "\n".join([f"  {at.file}:{first}" + (f"  {at.name}" if at.name else ""), *text, *more])


def find_test(test: str) -> str:
  """`file:line::name` of a test; without the line where there are no tests beside the code.

  Raises:
    LookupError: the file is there, but no such test.
  """
  file, _, name = test.partition("::")
  if not (ROOT / file).exists():
    if (ROOT / "tests").exists():
      raise LookupError(f"there is no {file}")
    return test
  first, _ = locate(At(file, name))
  return f"{file}:{first}::{name}"


# ----------------------------------------------------------------------------------------------
# A config key.


def find_keys(typed: str) -> list[Key]:
  """The keys that a dotted path means: of strategies, which have keys of the same name, all of them; of what has names
  (input.sources.mine.path), that of any name."""
  known = config_source.keys()
  names = {typed, re.sub(r"^(input\.sources|evals|rollout\.rewards)\.[^.]+\.", r"\1.<name>.", typed)}
  return [key for path, key in known.items() if path in names or key.typed in names]


def _of_key(key: Key) -> str:
  from trainer import explain_reads
  found, typed = explain_reads.reads(), key.typed
  of = [place for place in found.get(typed, ()) if not _of_other_strategy(key, place[0])]
  title = "Read"
  if not of:  # the section that it is in is taken as a whole
    sections = [typed[:i + 1] for i in range(len(typed) - 1, 0, -1) if typed[i] == "."]
    of, title = next(((found[s], f"Read as part of {s[:-1]}") for s in sections if s in found), ([], title))
  default = "" if key.default is None else f" = {key.default!r}"
  named = f", strategy {key.path.partition('(')[2].partition(')')[0]}" if key.path != typed else ""
  comment, like = key.comment, re.fullmatch(r"(?:These a|A)s for (\w+)\.", key.comment)
  if like is not None:
    comment += " " + config_source.keys()[re.sub(r"\(\w+\)", f"({like.group(1)})", key.path)].comment
  parts = [f"{BOLD}config.{typed}{OFF}{default}{named}", _wrapped(comment), f"  {key.file}:{key.line}"]
  lines = [f"  {file}:{line}  {_line(file, line, typed.rpartition('.')[2])}" for file, line in of]
  more = [f"  … and {len(lines) - MOST_READS} more"] if len(lines) > MOST_READS else []
  parts += _section(title, lines[:MOST_READS] + more)
  about = [topic.name for group in groups().values() for topic in group if key.path in topic.keys]
  return "\n\n".join([*filter(None, parts), *_section("Topics", [_wrapped(", ".join(about), "  ")] if about else [])])


def _of_other_strategy(key: Key, file: str) -> bool:
  """Whether a file is that of another strategy than the key's."""
  strategy = key.path.partition("(")[2].partition(")")[0]
  files = {"seq": ("seq",), "sft": ("sft", "seq"), "dpo": ("dpo", "preference"), "kto": ("kto",),
           "grpo": ("grpo", "presets")}
  stem = Path(file).stem
  return key.path != key.typed and file.startswith("trainer/strategies/") and stem not in (
      *files.get(strategy, (stem,)), "sequences", "__init__")


def _line(file: str, line: int, leaf: str) -> str:
  """A line, or 70 characters of it around the key."""
  text = " ".join(_parsed(file)[0][line - 1].split())
  if len(text) > 70:
    begin = max(0, min(text.find(leaf) - 35, len(text) - 70))
    text = "…" * (begin > 0) + text[begin:begin + 69] + "…" * (begin + 69 < len(text))
  return f"{DIM}{text}{OFF}"


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


if __name__ == "__main__":
  if hasattr(signal, "SIGPIPE"):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands: `| head` is no error
  sys.exit(main(sys.argv[1:]))
