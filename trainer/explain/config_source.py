"""Config keys as their source has them: the comment, the default, the line.

They are found by parsing: nothing here is written down twice.

A key is named by its dotted path. What a config may have several of is named `<name>`: input.sources.<name>.path. Keys
of strategies, of which each has its own, are named by it: strategy(dpo).beta.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from trainer import strategies
from trainer.config import defaults
from trainer.config import sections as config_sections

ROOT = Path(__file__).resolve().parents[2]
FILES = ("trainer/config/keys.py", "models/config.py", "trainer/config/sections.py")
# {section that is not in the defaults: the function that makes it}.
NAMED = {"input.sources.<name>": "source", "evals.<name>": "evaluator", "rollout.rewards.<name>": "reward"}


class Key(NamedTuple):
  """A key of the config.

  Attributes:
    path: as in the docstring above.
    default: its value; None: none is given.
    comment: what its source says of it and of the keys beside it.
    file, line: where.
  """

  path: str
  default: Any
  comment: str
  file: str
  line: int

  @property
  def typed(self) -> str:
    """The path as it is typed: strategy.beta."""
    return re.sub(r"^strategy\(\w+\)", "strategy", self.path)


@dataclass
class Group:
  """Keys that stand below one comment.

  Attributes:
    comment: on one line.
    keys: {path: line in `file`}.
    file: one of FILES, or that of a strategy.
  """

  comment: str
  keys: dict[str, int]
  file: str


@dataclass
class Section:
  """A dict of the config.

  Attributes:
    path: with a dot at its end; "" for the whole config.
    about: what is said of it.
    groups: its keys, and the sections in it, in the order of the source.
  """

  path: str
  about: str
  groups: list["Group | Section"] = field(default_factory=list)

  def all_groups(self) -> Iterator[Group]:
    """The groups in it and in the sections in it."""
    for group in self.groups:
      if isinstance(group, Section):
        yield from group.all_groups()
      else:
        yield group


class Undocumented(ValueError):
  """A key without a comment."""


# ----------------------------------------------------------------------------------------------
# What there is.


@functools.cache
def keys() -> dict[str, Key]:
  """Every key by its path, in the order of the source.

  Raises:
    Undocumented: a key has no comment, or the source makes a key in a way that is not understood here.
  """
  found: dict[str, Key] = {}
  for section, values in sections():
    for group in section.all_groups():
      for path, line in group.keys.items():
        value = values.pop(path, Undocumented)
        if value is Undocumented:
          raise Undocumented(f"{group.file}:{line}: {path} is made here, but defaults have no such key, or it is made "
                             "twice.")
        found[path] = Key(path, value, group.comment, group.file, line)
    if values:
      raise Undocumented(f"{', '.join(values)}: among the defaults, but not found in {', '.join(FILES)}, or the "
                         "strategy's file.")
  return found


def sections() -> list[tuple[Section, dict[str, Any]]]:
  """The whole config, the sections that one may have several of, and each strategy; each with {path: default}."""
  found = [(_section_of("defaults", ""), dict(_flat(defaults())))]
  for path, function in NAMED.items():
    found.append((_section_of(function, f"{path}."), dict(_flat(getattr(config_sections, function)(), f"{path}."))))
  for name, strategy in strategies.STRATEGIES.items():
    source = _Source(strategy.loss.__module__.replace(".", "/") + ".py")
    record = source.records[name.upper()]
    section = Section(f"strategy({name}).", source.above(record.lineno))
    options: Any = next(given.value for given in record.value.keywords if given.arg == "options")
    for option in options.keywords:
      _add(source, option, section, [option.arg])
    values = dict(_flat(config_sections.strategy(name), section.path))
    del values[f"{section.path}name"]
    found.append((section, values))
  return found


def _flat(values: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """(path, default) of each key. A dict that is a value (a strategy's losses), or empty, is one; a strategy is its
  name."""
  for key, value in values.items():
    if not isinstance(value, ConfigDict):
      yield f"{prefix}{key}", value
    elif not value or prefix.startswith("strategy("):
      yield f"{prefix}{key}", value.to_dict()
    elif f"{prefix}{key}" == "strategy":
      yield key, value.name
    else:
      yield from _flat(value, f"{prefix}{key}.")


def _targets(node: ast.AST) -> list[ast.expr]:
  """What a statement assigns to."""
  return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


# ----------------------------------------------------------------------------------------------
# Reading the source.


class _Source:
  """A file of config functions, or of a strategy, with its comments."""

  def __init__(self, file: str):
    self.file = file
    text = (ROOT / file).read_text(encoding="utf-8")
    self.lines = text.splitlines()
    tree = ast.parse(text)
    self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    # Of strategies: what is assigned to each name.
    self.records: dict[str, Any] = {
        target.id: node for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)}

  def above(self, line: int) -> str:
    """The comment that ends in the line before `line`, counted from 1."""
    first = line - 1
    while first > 0 and self.lines[first - 1].strip().startswith("#"):
      first -= 1
    return " ".join(text.strip().lstrip("#").strip() for text in self.lines[first:line - 1])

  def comment(self, node: ast.stmt | ast.keyword) -> str:
    """The one at the end of the node's last line, or the one above it."""
    _, _, beside = self.lines[(node.end_lineno or 1) - 1][node.end_col_offset:].partition("#")
    return beside.strip() or self.above(node.lineno)


@functools.cache
def _sources() -> list[_Source]:
  return [_Source(file) for file in FILES]


def _section_of(function: str, path: str) -> Section:
  """What the function `function` of one of FILES returns, as the section `path`."""
  source = next(source for source in _sources() if function in source.functions)
  node = source.functions[function]
  section = Section(path, (ast.get_docstring(node) or "").replace("\n\n", "\n").replace("\n", " "))
  inside = {"c": section}  # what each variable of the function holds
  for statement in node.body:
    _read(source, statement, inside)
  return section


def _read(source: _Source, statement: Any, inside: dict[str, Section]) -> None:
  """Adds the keys that one statement makes."""
  if (to := _targets(statement)) and isinstance(to[0], ast.Name) and len(to) == 1:
    inside[to[0].id] = inside.pop("c")  # c = ConfigDict(), whatever it is called
  elif to and isinstance(to[0], ast.Attribute):
    target: Any = to[0]
    parent = inside[target.value.id]
    made = _made(source, statement, target.attr, parent, len(to) > 1)
    inside |= {other.id: made for other in to[1:] if isinstance(other, ast.Name) and made}
  elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
    call: Any = statement.value
    for given in call.args:
      if getattr(getattr(given, "func", None), "id", "") == "duration":  # c.update(duration("total", steps=1000))
        _add(source, statement, inside[call.func.value.id],
             [f"{given.args[0].value}_{unit}" for unit in config_sections.DURATION_UNITS])


def _made(source: _Source, statement: Any, name: str, parent: Section, goes_on: bool) -> Section | None:
  """Adds the key or the section that an assignment makes; returns a section.

  Args:
    goes_on: keys are added to it by later statements.
  """
  value = statement.value
  if not isinstance(value, ast.Call) or getattr(value.func, "id", "") in ("unset", "strategy"):
    _add(source, statement, parent, [name])
    return None
  path = f"{parent.path}{name}."
  if value.func.id != "ConfigDict":  # another function of ours
    section = _section_of(value.func.id, path)
    parent.groups.append(section)
    return section
  entries = value.args[0].keywords if value.args else []
  section, comment = Section(path, ""), source.comment(statement)
  keys = {f"{path}{entry.arg}": entry.lineno for entry in entries}
  if goes_on:
    section.about = "" if keys else comment
    section.groups += [Group(comment, keys, source.file)] if keys else []
    parent.groups.append(section)
  else:  # all of it, with one comment; or, empty, filled by the user with names
    parent.groups.append(Group(comment, keys or {path.rstrip("."): statement.lineno}, source.file))
  return section


def _add(source: _Source, node: ast.stmt | ast.keyword, section: Section, names: list[str]) -> None:
  """Adds keys: to a group of their own, or, without a comment, to the group of the line before."""
  added = {f"{section.path}{name}": node.lineno for name in names}
  last = section.groups[-1] if section.groups else None
  if comment := source.comment(node):
    section.groups.append(Group(comment, added, source.file))
  elif isinstance(last, Group) and source.lines[node.lineno - 2].strip():
    last.keys |= added
  else:
    raise Undocumented(f"{source.file}:{node.lineno}: {next(iter(added))} has no comment above it.")
