"""Config keys as their source has them: the comment, the default, the line; and the lines that read a key.

Both are found by parsing: nothing here is written down twice, and nothing is imported that would start JAX.

A key is named by its dotted path. What a config may have several of is named `<name>`: input.sources.<name>.path. Keys
of strategies, of which each has its own, are named by it: strategy(dpo).beta.
"""

import ast
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from trainer import config_sections
from trainer.config import defaults

ROOT = Path(__file__).resolve().parent.parent
FILES = ("trainer/config.py", "trainer/config_model.py", "trainer/config_sections.py")
# {function that makes a section which is not in the defaults: its path}.
_NAMED = {"source": "input.sources.<name>.", "evaluator": "evals.<name>.", "reward": "rollout.rewards.<name>."}


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


@functools.cache
def keys() -> dict[str, Key]:
  """Every key by its path, in the order of the source."""
  found: dict[str, Key] = {}
  parsed = {file: _Parsed(file) for file in FILES}
  made = {name: (source, node) for source in parsed.values() for name, node in source.functions.items()}

  def add(source: "_Parsed", node: ast.AST, path: str, values: Any) -> None:
    comment = source.comment(node)
    found[path] = Key(path, _value(values, path), comment, source.file, node.lineno)

  def section(function: str, path: str, values: Any) -> None:
    source, body = made[function]
    inside = {}  # {variable: path of the section that it holds}
    for node in body.body:
      if isinstance(node, ast.Assign | ast.AnnAssign):
        target, *others = targets(node)
        if isinstance(target, ast.Name):
          inside[target.id] = path
          continue
        here = f"{inside[target.value.id]}{target.attr}"
        value = node.value
        called = getattr(getattr(value, "func", None), "id", "")
        if called in made and called not in ("unset", "strategy"):
          section(called, f"{here}.", values)
        elif called == "ConfigDict":
          for entry in value.args[0].keywords if value.args else ():
            add(source, entry if source.comment(entry) else node, f"{here}.{entry.arg}", values)
          if not value.args and not others:
            add(source, node, here, values)
        else:
          add(source, node, here, values)
        inside |= {other.id: f"{here}." for other in others}
      elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        for prefix in _durations(node.value):
          of = inside[node.value.func.value.id]
          for unit in config_sections.DURATION_UNITS:
            add(source, node, f"{of}{prefix}_{unit}", values)

  section("defaults", "", defaults())
  for function, path in _NAMED.items():
    section(function, path, getattr(config_sections, function)())
  source = parsed[FILES[-1]]
  for name, options in zip(source.strategies.keys, source.strategies.values, strict=True):
    for option in options.keywords:
      path, value = f"strategy({name.value}).{option.arg}", config_sections.STRATEGIES[name.value][option.arg]
      found[path] = Key(path, None if isinstance(value, type) else value, source.comment(option), source.file,
                        option.lineno)
  return found


def targets(node: ast.AST) -> list[ast.expr]:
  """What a statement assigns to."""
  return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def _name(node: ast.AST) -> str:
  return getattr(node, "id", "")


def _value(values: ConfigDict, path: str) -> Any:
  """The default at a path, whose first part may be a section that stands for a named one."""
  for prefix in _NAMED.values():
    path = path.removeprefix(prefix)
  for part in path.split("."):
    values = values[part]
  return values.name if isinstance(values, ConfigDict) and "name" in values else (
      values.to_dict() if isinstance(values, ConfigDict) else values)


def _durations(call: ast.Call) -> list[str]:
  """Prefixes of the durations that `c.update(duration("total", …))` makes."""
  if getattr(call.func, "attr", "") != "update":
    return []
  return [arg.args[0].value for arg in call.args if getattr(getattr(arg, "func", None), "id", "") == "duration"]


class _Parsed:
  """A file of config functions, with its comments."""

  def __init__(self, file: str):
    self.file = file
    text = (ROOT / file).read_text(encoding="utf-8")
    self.lines = text.splitlines()
    tree = ast.parse(text)
    self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    self.strategies = next((node.value for node in tree.body if "STRATEGIES" in map(_name, targets(node))), None)

  def comment(self, node: ast.AST) -> str:
    """Behind the node, or above it, or above the keys that stand above it without a gap."""
    behind = self.lines[node.end_lineno - 1][node.end_col_offset:].partition("#")[2].strip()
    if behind:
      return behind
    line = node.lineno - 2  # the one before, from 0
    while line >= 0 and self.lines[line].strip() and not self.lines[line].strip().startswith("#"):
      if re.search(r"ConfigDict\(\)$|dict\($|^\s*(def|\"\"\")", self.lines[line]):
        return ""  # what is above belongs to the section
      line -= 1
    last = line
    while line >= 0 and self.lines[line].strip().startswith("#"):
      line -= 1
    return " ".join(text.strip().lstrip("#").strip() for text in self.lines[line + 1:last + 1])
