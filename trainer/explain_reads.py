"""Which lines of the code read a config key: found by following sections of the config through the source.

A variable holds a section if it is assigned one (`c = config.rollout`), is a parameter that is given one somewhere
(`make_optimizer(config.optimizer, …)`), or is one of SEEDS, where what is called is chosen while the program runs. A
line reads a key if it takes that attribute or item of a section. What cannot be followed so (a section handed on whole
as keyword arguments, names of keys in a list) counts as a read where it is written.
"""

import ast
import functools
import re
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from trainer.config_sections import DURATION_UNITS
from trainer.config_source import FILES, ROOT, keys, targets

FOLDERS = ("trainer", "models", "input_pipeline", "evaluators")
# These read saved files of the same names, or are about the config rather than of it.
_NOT = re.compile(r"(models/hf|trainer/report|trainer/explain\w*|trainer/config_(checks|typed)|trainer/trackers)")
# {(file, variable): section}; "": all of the config.
SEEDS = {
    ("", "config"): "", ("", "resolved"): "", ("", "cfg_model"): "model.", ("", "cfg_schedule"): "schedule.",
    ("trainer/strategies/", "cfg"): "strategy.", ("evaluators/", "cfg"): "evals.<name>.",
    ("input_pipeline/readers", "cfg"): "input.sources.<name>.",
    ("input_pipeline/sources", "cfg"): "input.sources.<name>.", ("input_pipeline/loader", "cfg"): "",
}


@functools.cache
def reads() -> dict[str, list[tuple[str, int]]]:
  """{key: [(file, line)]}, each file's lines in order; strategies' keys by the name that is typed, strategy.beta. A
  name that ends in a dot is a section, which is taken there as a whole."""
  known = {key.typed for key in keys().values()}
  sections = frozenset(path[:i + 1] for path in known for i, c in enumerate(path) if c == ".") | {""}
  modules = [_Module(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
             if not _NOT.match(str(path.relative_to(ROOT))) and str(path.relative_to(ROOT)) not in FILES]
  by_file = {module.file: module for module in modules}
  given: dict[tuple[str, str, str], set[str]] = {}  # {(file, function, parameter): sections that it is given}
  while True:
    before = {place: set(sections) for place, sections in given.items()}
    found: dict[str, set[tuple[str, int]]] = {}
    for module in modules:
      _Reader(module, by_file, known | sections, sections, given, found).read()
    if given == before:
      return {key: sorted(found[key]) for key in sorted(found)}


class _Module:
  """A file, its functions by name, and what it calls functions of other files."""

  def __init__(self, path: Path):
    self.file = str(path.relative_to(ROOT))
    self.tree = ast.parse(path.read_text(encoding="utf-8"))
    self.functions = {}
    for node in self.tree.body:
      if isinstance(node, ast.FunctionDef):
        self.functions[node.name] = node
      elif isinstance(node, ast.ClassDef):
        methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        self.functions |= {f"{node.name}.{name}": part for name, part in methods.items()}
        if "__init__" in methods:
          self.functions[node.name] = methods["__init__"]
    self.imports = {}
    for node in ast.walk(self.tree):
      if isinstance(node, ast.ImportFrom) and node.module:
        self.imports |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}


class _Reader:
  """Goes through one module; adds to `given` and `found`."""

  def __init__(self, module: _Module, by_file: dict[str, _Module], known: Set[str], sections: Set[str],
               given: dict[tuple[str, str, str], set[str]], found: dict[str, set[tuple[str, int]]]):
    self._module, self._by_file, self._known, self._sections = module, by_file, known, sections
    self._given, self._found = given, found
    self._seeds = {name: section for (start, name), section in SEEDS.items() if module.file.startswith(start)}

  def read(self) -> None:
    self._body(self._module.tree, {}, "")

  def _body(self, scope: ast.AST, outer: dict[str, set[str]], owner: str) -> None:
    """One function (or the module) with what its variables hold; those inside it see them, too."""
    inside, self._owner = dict(outer), owner
    if isinstance(scope, ast.FunctionDef | ast.Lambda):
      for arg in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs):
        inside.pop(arg.arg, None)
        sections = set(self._given.get((self._module.file, getattr(scope, "name", ""), arg.arg), ()))
        if arg.arg in self._seeds and not sections:
          sections = {self._seeds[arg.arg]}
        if sections:
          inside[arg.arg] = sections
    own = _own_nodes(scope)
    binds = [node for node in own if isinstance(node, _BINDS)]
    for _ in range(2):  # a variable may be used above the line that assigns it, in a loop
      for node in binds:
        self._assign(node, inside, owner)
    for node in own:
      self._look(node, inside, own, owner)
    for node in own:
      if isinstance(node, ast.FunctionDef | ast.Lambda):
        self._body(node, inside, owner)
      elif isinstance(node, ast.ClassDef):
        self._body(node, inside, node.name)

  def _assign(self, node: ast.AST, inside: dict[str, set[str]], owner: str) -> None:
    pairs: list[tuple[ast.AST, ast.AST]] = []
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
      for target in targets(node):
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and (
            len(target.elts) == len(node.value.elts)):
          pairs += zip(target.elts, node.value.elts, strict=True)
        else:
          pairs.append((target, node.value))
    elif isinstance(node, ast.NamedExpr):
      pairs.append((node.target, node.value))
    elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Call):
      method = getattr(node.iter.func, "attr", "")  # for name, section in config.evals.items()
      named = self._resolve(node.iter.func.value, inside) if method in ("items", "values") else set()
      values = {f"{s}<name>." for s in named if f"{s}<name>." in self._sections}
      target = node.target.elts[-1] if isinstance(node.target, ast.Tuple) else node.target
      if values and isinstance(target, ast.Name):
        inside[target.id] = values
    for target, value in pairs:
      sections = self._resolve(value, inside)
      if isinstance(target, ast.Name) and sections:
        inside[target.id] = inside.get(target.id, set()) | sections
      elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and sections:
        self._given.setdefault((self._module.file, owner, f".{target.attr}"), set()).update(sections)

  def _resolve(self, node: ast.AST, inside: dict[str, set[str]]) -> set[str]:
    """The sections that an expression stands for."""
    if isinstance(node, ast.Name):
      return inside.get(node.id, set()) or ({self._seeds[node.id]} if node.id in ("config", "resolved") else set())
    if isinstance(node, ast.Attribute):
      parents = self._resolve(node.value, inside)
      if not parents and node.attr in ("config", "_config"):
        return {""}
      if getattr(node.value, "id", "") == "self":
        return self._given.get((self._module.file, self._owner, f".{node.attr}"), set())
      return {f"{p}{node.attr}." for p in parents if f"{p}{node.attr}." in self._sections}
    if isinstance(node, ast.Subscript):
      parents = self._resolve(node.value, inside)
      name = f"{node.slice.value}." if isinstance(node.slice, ast.Constant) else "<name>."
      return {f"{p}{name}" for p in parents if f"{p}{name}" in self._sections}
    if isinstance(node, ast.IfExp):
      return self._resolve(node.body, inside) | self._resolve(node.orelse, inside)
    return set()

  def _look(self, node: ast.AST, inside: dict[str, set[str]], own: Sequence[ast.AST], owner: str) -> None:
    """What one expression reads, and what a call hands on."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
      paths = {f"{s}{node.attr}" for s in self._resolve(node.value, inside)}
      self._note(paths | {f"{path}." for path in paths}, node)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
      sections = self._resolve(node.value, inside)
      if isinstance(node.slice, ast.Constant):
        self._note({f"{s}{node.slice.value}" for s in sections}, node)
      else:  # names of keys in a list nearby
        for other in own if sections else ():
          if isinstance(other, ast.Constant) and isinstance(other.value, str):
            self._note({f"{s}{other.value}" for s in sections}, other)
    elif isinstance(node, ast.Call):
      self._call(node, inside, own, owner)

  def _call(self, node: ast.Call, inside: dict[str, set[str]], own: Sequence[ast.AST], owner: str) -> None:
    arguments = [(i, self._resolve(arg, inside)) for i, arg in enumerate(node.args)]
    named = [(word.arg, self._resolve(word.value, inside)) for word in node.keywords]
    for word, sections in named:
      if word is None:  # **config.spikes
        self._note({key for s in sections for key in self._known if s and key.startswith(s) and key != s}, node)
    called = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
    if len(node.args) > 1 and arguments[0][1] and called in ("to_steps", "steps", "resolve"):  # to_steps(cfg, "total")
      for prefix in (node.args[1],) if isinstance(node.args[1], ast.Constant) else own:
        if isinstance(prefix, ast.Constant) and isinstance(prefix.value, str):
          self._note({f"{s}{prefix.value}_{unit}" for s in arguments[0][1] for unit in DURATION_UNITS}, prefix)
    if getattr(node.func, "attr", "") == "get" and node.args and isinstance(node.args[0], ast.Constant):
      self._note({f"{s}{node.args[0].value}" for s in self._resolve(node.func.value, inside)}, node)
    self._note({s for _, sections in (*arguments, *named) for s in sections if s}, node)
    for module, name, function in self._called(node.func, owner):
      names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
      names = names[1:] if names[:1] == ["self"] else names
      for i, sections in arguments:
        if sections and i < len(names):
          self._given.setdefault((module.file, name, names[i]), set()).update(sections)
      for word, sections in named:
        if word and sections:
          self._given.setdefault((module.file, name, word), set()).update(sections)

  def _called(self, func: ast.AST, owner: str) -> Iterator[tuple[_Module, str, Any]]:
    """(module, name, function) of what a call calls, if that is one of ours and can be told."""
    module, name = self._module, ""
    if isinstance(func, ast.Name):
      name = func.id
      if name in module.imports:
        path, _, name = module.imports[name].rpartition(".")
        module = self._by_file.get(path.replace(".", "/") + ".py", module)
    elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
      name = func.attr
      if func.value.id == "self":
        name = f"{owner}.{name}"
      else:
        path = module.imports.get(func.value.id, "").replace(".", "/")
        module = self._by_file.get(f"{path}.py") or self._by_file.get(f"{path}/__init__.py")
    if module is not None and name in module.functions:
      yield module, module.functions[name].name, module.functions[name]

  def _note(self, paths: set[str], node: ast.AST) -> None:
    for path in paths & self._known:
      self._found.setdefault(path, set()).add((self._module.file, node.lineno))


_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ClassDef)
_BINDS = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension)
_LOOKED_AT = (*_SCOPES, *_BINDS, ast.Attribute, ast.Subscript, ast.Call, ast.Constant)


@functools.cache
def _own_nodes(scope: ast.AST) -> tuple[ast.AST, ...]:
  """What is looked at of a function, without what is inside of functions and classes in it."""
  found, waiting = [], list(ast.iter_child_nodes(scope))[::-1]
  while waiting:
    node = waiting.pop()
    if isinstance(node, _LOOKED_AT):
      found.append(node)
    if not isinstance(node, _SCOPES):
      waiting += list(ast.iter_child_nodes(node))[::-1]
  return tuple(found)
