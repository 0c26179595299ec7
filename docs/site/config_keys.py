"""docs/config_keys.md: every config key with its default and the comment above it in the source.

    python docs/site/config_keys.py

tests/test_config_page.py fails where the page is not what this would write.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
  sys.path.insert(0, str(ROOT))

from ml_collections import ConfigDict  # noqa: E402

from trainer import config, config_model, config_sections  # noqa: E402

PAGE = ROOT / "docs" / "config_keys.md"
MODULES = (config, config_model, config_sections)
UNITS = config_sections.DURATION_UNITS

HEAD = """# Every config key

Each key with its default and the comment that stands above it in the source:
[trainer/config.py](../trainer/config.py), [config_model.py](../trainer/config_model.py) and
[config_sections.py](../trainer/config_sections.py), from which this page is made
(`python docs/site/config_keys.py`). How keys are set, and what is refused, is in [configuration.md](configuration.md).

`None` is "not given". `{steps,…}` stands for `steps`, `examples`, `tokens`, `epochs` and `percent`: a
[duration](configuration.md#durations) is five keys, of which one is set.
"""


@dataclass
class Group:
  """Keys that stand below one comment."""

  comment: str
  keys: list[str]


@dataclass
class Section:
  """A dict of the config: what is said of it, and the groups of its keys. `groups` may hold sections."""

  path: str
  about: str
  groups: list["Group | Section"] = field(default_factory=list)


class Undocumented(ValueError):
  """A key without a comment."""


# ----------------------------------------------------------------------------------------------
# Reading the source.


class _Source:
  """A module's functions and comments."""

  def __init__(self, module: ModuleType):
    self.name = Path(module.__file__ or "").name
    text = Path(module.__file__ or "").read_text(encoding="utf-8")
    self.lines = text.splitlines()
    self.tree = ast.parse(text)
    self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

  def above(self, line: int) -> str:
    """The comment that ends in the line before `line`, counted from 1."""
    first = line - 1
    while first > 0 and self.lines[first - 1].strip().startswith("#"):
      first -= 1
    return " ".join(text.strip().lstrip("#").strip() for text in self.lines[first:line - 1])

  def beside(self, node: ast.AST) -> str:
    """The comment at the end of the node's last line."""
    _, _, comment = self.lines[node.end_lineno - 1][node.end_col_offset:].partition("#")
    return comment.strip()


SOURCES = [_Source(module) for module in MODULES]


def section_of(function: str, path: str) -> Section:
  """What the function `function` of one of the MODULES returns, as the section `path`."""
  source = next(source for source in SOURCES if function in source.functions)
  node = source.functions[function]
  about = (ast.get_docstring(node) or "").replace("\n\n", "\n").replace("\n", " ")
  section = Section(path, about)
  inside = {"c": section}  # what each variable of the function holds
  for statement in node.body:
    _read(source, statement, inside)
  return section


def _read(source: _Source, statement: ast.stmt, inside: dict[str, Section]) -> None:
  """Adds the keys that one statement makes."""
  if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and len(statement.targets) == 1:
    inside[statement.targets[0].id] = inside.pop("c")  # c = ConfigDict(), whatever it is called
  elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
    target = statement.targets[0]
    parent = inside[target.value.id]
    made = _made(source, statement, f"{parent.path}{target.attr}", parent)
    for other in statement.targets[1:]:
      inside[other.id] = made
  elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
    call = statement.value
    given = call.args[0] if call.args else None
    if isinstance(given, ast.Call) and given.func.id == "duration":  # c.update(duration("total", steps=1000))
      parent = inside[call.func.value.id]
      prefix = f"{parent.path}{given.args[0].value}"
      _add(source, statement, parent, [f"{prefix}_{unit}" for unit in UNITS])


def _made(source: _Source, statement: ast.Assign, path: str, parent: Section) -> Section | None:
  """Adds the key or the section that an assignment makes; returns a section."""
  value = statement.value
  if not isinstance(value, ast.Call) or getattr(value.func, "id", "") in ("unset", "strategy"):
    _add(source, statement, parent, [path])
    return None
  if value.func.id != "ConfigDict":  # another function of ours
    made = section_of(value.func.id, f"{path}.")
  else:
    made = Section(f"{path}.", _comment(source, statement))
    entries = value.args[0].keywords if value.args else ()
    if entries and len(statement.targets) == 1:  # all of it: one comment for all keys
      parent.groups.append(Group(made.about, [f"{path}.{entry.arg}" for entry in entries]))
      return made
    if entries:
      made.groups.append(Group(made.about, [f"{path}.{entry.arg}" for entry in entries]))
      made.about = ""
    elif len(statement.targets) == 1:  # filled by the user, with names
      parent.groups.append(Group(made.about, [path]))
      return made
  parent.groups.append(made)
  return made


def _comment(source: _Source, node: ast.stmt | ast.keyword) -> str:
  return source.beside(node) or source.above(node.lineno)


def _add(source: _Source, node: ast.stmt | ast.keyword, section: Section, keys: list[str]) -> None:
  """Adds keys: to a group of their own, or, without a comment, to the group of the line before."""
  if comment := _comment(source, node):
    section.groups.append(Group(comment, keys))
  elif section.groups and isinstance(section.groups[-1], Group) and source.lines[node.lineno - 2].strip():
    section.groups[-1].keys += keys
  else:
    raise Undocumented(f"trainer/{source.name}:{node.lineno}: {keys[0]} has no comment above it.")


def strategies() -> list[tuple[str, Section]]:
  """(name, its section) of each of STRATEGIES."""
  source = SOURCES[-1]
  table = next(node.value for node in source.tree.body if isinstance(node, ast.Assign)
               and getattr(node.targets[0], "id", "") == "STRATEGIES")
  found = []
  for name, options in zip(table.keys, table.values, strict=True):
    section = Section("strategy.", source.above(name.lineno))
    for option in options.keywords:
      _add(source, option, section, [f"strategy.{option.arg}"])
    found.append((name.value, section))
  return found


# ----------------------------------------------------------------------------------------------
# Writing the page.


def page() -> str:
  """The text of docs/config_keys.md.

  Raises:
    Undocumented: a key has no comment, or one that the source makes was not understood.
  """
  whole = section_of("defaults", "")
  parts = [HEAD, *_written(whole, "Top level", dict(flat(config.defaults())))]
  made = [
      ("input.sources.<name>", "source", config_sections.source()),
      ("evals.<name>", "evaluator", config_sections.evaluator()),
      ("rollout.rewards.<name>", "reward", config_sections.reward()),
  ]
  for title, function, values in made:
    path = f"{title}."
    parts += _written(section_of(function, path), title, dict(flat(values, path)))
  for name, section in strategies():
    values = dict(flat(config_sections.strategy(name), "strategy."))
    del values["strategy.name"]
    parts += _written(section, f"strategy: {name}", values)
  return "\n".join(parts)


def flat(values: ConfigDict, prefix: str = "") -> Iterator[tuple[str, object]]:
  """(path, value) of each key; a dict that is a value (a strategy's losses), or empty, is one."""
  for key, value in values.items():
    if isinstance(value, ConfigDict) and len(value) and f"{prefix}{key}" not in ("strategy", "strategy.loss"):
      yield from flat(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


def _written(section: Section, title: str, values: dict[str, object]) -> Iterator[str]:
  """The section's heading and table, then those within it; `values` are all of them, which must be there once."""
  shown = list(_keys(section))
  if wrong := set(shown) ^ set(values) or {key for key in shown if shown.count(key) > 1}:
    raise Undocumented(f"{sorted(wrong)}: in the source or in what it makes, but not in both once.")
  yield from _tables(section, title, values)


def _keys(section: Section) -> Iterator[str]:
  for group in section.groups:
    yield from _keys(group) if isinstance(group, Section) else group.keys


def _tables(section: Section, title: str, values: dict[str, object]) -> Iterator[str]:
  about = [f"{_prose(section.about)}\n"] if section.about else []
  groups = [group for group in section.groups if isinstance(group, Group)]
  yield f"## {title.replace('<', '&lt;').replace('>', '&gt;')}\n"
  if section.path:
    yield from about
  rows = [f"| {_names(group.keys)} | {_defaults(group.keys, values)} | {_prose(group.comment)} |" for group in groups]
  yield "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"
  for inner in section.groups:
    if isinstance(inner, Section):
      yield from _tables(inner, inner.path.rstrip("."), values)


def _durations(keys: list[str]) -> list[list[str]]:
  """The keys, those of a duration together."""
  found: list[list[str]] = []
  for key in keys:
    prefix, _, unit = key.rpartition("_")
    if unit in UNITS and all(f"{prefix}_{other}" in keys for other in UNITS):
      if unit == UNITS[0]:
        found.append([f"{prefix}_{other}" for other in UNITS])
    else:
      found.append([key])
  return found


def _names(keys: list[str]) -> str:
  names = (some[0] if len(some) == 1 else f"{some[0].rpartition('_')[0]}_{{{UNITS[0]},…}}"
           for some in _durations(keys))
  return "<br>".join(f"`{name}`" for name in names)


def _defaults(keys: list[str], values: dict[str, object]) -> str:
  shown = []
  for some in _durations(keys):
    if len(some) == 1:
      shown.append(_value(values[some[0]]))
    else:
      given = [f"{values[key]:g} {key.rpartition('_')[2]}" for key in some if values[key] is not None]
      shown.append(f"{given[0] if given else 'None'}")
  return "<br>".join(f"`{_cell(text)}`" for text in shown)


def _value(value: object) -> str:
  if isinstance(value, ConfigDict):
    if "name" in value:
      return f'strategy("{value.name}")'
    return repr(value.to_dict())
  return repr(value)


def _cell(text: str) -> str:
  return text.replace("|", r"\|")


def _prose(text: str) -> str:
  """A comment as Markdown: what would be markup is escaped, files are links."""
  parts = re.split(r"(`[^`]*`)", text)
  for i in range(0, len(parts), 2):
    escaped = re.sub(r"([*\[\]<]|(?<!\w)_|_(?!\w))", r"\\\1", parts[i])
    escaped = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", escaped)
    parts[i] = re.sub(r"\b((?:trainer|models|evaluators|input_pipeline)/\w+\.py)", r"[\1](../\1)", escaped)
  return _cell("".join(parts))


def main() -> None:
  PAGE.write_text(page(), encoding="utf-8")
  print(textwrap.dedent(f"Wrote {PAGE.relative_to(ROOT)}."))


if __name__ == "__main__":
  main()
