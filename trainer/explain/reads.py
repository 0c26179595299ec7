"""Which lines of the code read a config key: found by following sections of the config through the source.

A variable holds a section if it is assigned one (`c = config.rollout`), is a parameter that is given one somewhere
(`make_optimizer(config.optimizer, …)`), or is one of SEEDS, where what is called is chosen while the program runs. A
line reads a key if it takes that attribute or item of a section. What cannot be followed so (a section handed on whole
as keyword arguments, names of keys in a list) counts as a read where it is written.
"""

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.config.sections import DURATION_UNITS
from trainer.explain.config_source import FILES, ROOT, keys, targets

FOLDERS = ("trainer", "models", "input_pipeline", "evaluators")
# These read saved files of the same names, or are about the config rather than of it.
_NOT = re.compile(r"(models/hf|trainer/report|trainer/explain\w*|trainer/config_(checks|typed)|trainer/trackers)")
# {(file, variable): section}; "": all of the config.
SEEDS = {
    ("", "config"): "", ("", "resolved"): "", ("", "cfg_model"): "model.", ("", "cfg_schedule"): "schedule.",
    ("trainer/strategies/", "cfg"): "strategy.", ("evaluators/", "cfg"): "evals.<name>.",
    ("input_pipeline/sources/readers", "cfg"): "input.sources.<name>.",
    ("input_pipeline/sources", "cfg"): "input.sources.<name>.", ("input_pipeline/loader", "cfg"): "",
}


# {(file, function, parameter, or .attribute): the sections that it is given}.
Given = dict[tuple[str, str, str], set[str]]


@functools.cache
def reads() -> dict[str, list[tuple[str, int]]]:
  """{key: [(file, line)]}, each file's lines in order; strategies' keys by the name that is typed, strategy.beta. A
  name that ends in a dot is a section, which is taken there as a whole."""
  known = {key.typed for key in keys().values()}
  known |= {path[:i + 1] for path in known for i, c in enumerate(path) if c == "."}
  paths = [(path, str(path.relative_to(ROOT))) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
  modules = {file: _Module(path, file) for path, file in paths if not _NOT.match(file) and file not in FILES}
  given: Given = {}
  while True:
    before = {place: set(sections) for place, sections in given.items()}
    found: dict[str, set[tuple[str, int]]] = {}
    for module in modules.values():
      _Reader(module, modules, known, given, found).read(module.tree, {}, "")
    if given == before:
      return {key: sorted(found[key]) for key in sorted(found)}


class _Module:
  """A file, its functions by name, and what it calls functions of other files."""

  def __init__(self, path: Path, file: str):
    self.file, self.tree = file, ast.parse(path.read_text(encoding="utf-8"))
    self.functions: dict[str, ast.FunctionDef] = {}
    for node in self.tree.body:
      for part in node.body if isinstance(node, ast.ClassDef) else [node]:
        if isinstance(part, ast.FunctionDef):
          self.functions[f"{node.name}.{part.name}" if part is not node else part.name] = part
          if part.name == "__init__":
            self.functions[node.name] = part
    self.imports = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in ast.walk(self.tree)
                    if isinstance(node, ast.ImportFrom) and node.module for alias in node.names}


class _Reader:
  """Goes through one module; adds to `given` and `found`."""

  def __init__(self, module: _Module, modules: dict[str, _Module], known: set[str], given: Given,
               found: dict[str, set[tuple[str, int]]]):
    self._module, self._modules, self._known, self._given, self._found = module, modules, known, given, found
    self._seeds = {name: section for (start, name), section in SEEDS.items() if module.file.startswith(start)}

  def read(self, scope: Any, outer: dict[str, set[str]], owner: str) -> None:
    """One function (or the module) with what its variables hold; those inside it see them, too."""
    inside, self._owner = dict(outer), owner
    if isinstance(scope, ast.FunctionDef | ast.Lambda):
      for arg in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs):
        inside.pop(arg.arg, None)
        sections = self._given.get((self._module.file, getattr(scope, "name", ""), arg.arg)) or (
            {self._seeds[arg.arg]} if arg.arg in self._seeds else None)
        if sections:
          inside[arg.arg] = set(sections)
    own = _own_nodes(scope)
    for node in (*own, *own):  # a variable may be used above the line that assigns it, in a loop
      self._assign(node, inside)
    for node in own:
      self._look(node, inside, own)
    for node in own:
      if isinstance(node, _SCOPES):
        self.read(node, inside, node.name if isinstance(node, ast.ClassDef) else owner)

  def _assign(self, node: Any, inside: dict[str, set[str]]) -> None:
    if isinstance(node, ast.For | ast.comprehension):  # for name, section in config.evals.items()
      method = getattr(getattr(node.iter, "func", None), "attr", "")
      named = self._resolve(node.iter.func.value, inside) if method in ("items", "values") else ()
      target = node.target.elts[-1] if isinstance(node.target, ast.Tuple) else node.target
      if (values := {f"{s}<name>." for s in named} & self._known) and isinstance(target, ast.Name):
        inside[target.id] = values
      return
    for target in [node.target] if isinstance(node, ast.NamedExpr) else targets(node):
      both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
      for to, value in zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]:
        sections = self._resolve(value, inside)
        if sections and isinstance(to, ast.Name):
          inside[to.id] = inside.get(to.id, set()) | sections
        elif sections and isinstance(to, ast.Attribute) and isinstance(to.value, ast.Name):
          self._given.setdefault((self._module.file, self._owner, f".{to.attr}"), set()).update(sections)

  def _resolve(self, node: Any, inside: dict[str, set[str]]) -> set[str]:
    """The sections that an expression stands for."""
    if isinstance(node, ast.Name):
      return inside.get(node.id) or ({""} if node.id in ("config", "resolved") else set())
    if isinstance(node, ast.IfExp):
      return self._resolve(node.body, inside) | self._resolve(node.orelse, inside)
    if not isinstance(node, ast.Attribute | ast.Subscript):
      return set()
    parents = self._resolve(node.value, inside)
    if isinstance(node, ast.Subscript):
      name = node.slice.value if isinstance(node.slice, ast.Constant) else "<name>"
    elif not parents and node.attr in ("config", "_config"):
      return {""}
    elif getattr(node.value, "id", "") == "self":
      return self._given.get((self._module.file, self._owner, f".{node.attr}"), set())
    else:
      name = node.attr
    return {f"{p}{name}." for p in parents} & self._known

  def _look(self, node: Any, inside: dict[str, set[str]], own: Sequence[Any]) -> None:
    """What one expression reads, and what a call hands on."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
      self._note({f"{s}{node.attr}{dot}" for s in self._resolve(node.value, inside) for dot in ("", ".")}, node)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
      sections = self._resolve(node.value, inside)
      for name in _strings([node.slice], own) if sections else ():
        self._note({f"{s}{name.value}" for s in sections}, node if name is node.slice else name)
    elif isinstance(node, ast.Call):
      self._call(node, inside, own)

  def _call(self, node: ast.Call, inside: dict[str, set[str]], own: Sequence[Any]) -> None:
    arguments = [(i, self._resolve(arg, inside)) for i, arg in enumerate(node.args)]
    named = [(word.arg, self._resolve(word.value, inside)) for word in node.keywords]
    for s in {s for word, sections in named if word is None for s in sections if s}:  # **config.spikes
      self._note({key for key in self._known if key.startswith(s) and key != s}, node)
    called = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
    if len(node.args) > 1 and called in ("to_steps", "steps", "resolve") and arguments[0][1]:  # to_steps(cfg, "total")
      for prefix in _strings([node.args[1]], own):
        self._note({f"{s}{prefix.value}_{unit}" for s in arguments[0][1] for unit in DURATION_UNITS}, prefix)
    if isinstance(node.func, ast.Attribute) and called == "get" and node.args and isinstance(
        node.args[0], ast.Constant):
      self._note({f"{s}{node.args[0].value}" for s in self._resolve(node.func.value, inside)}, node)
    self._note({s for _, sections in (*arguments, *named) for s in sections if s}, node)
    if (target := self._called(node.func)) is None:
      return
    file, function = target
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    names = names[names[:1] == ["self"]:]
    for parameter, sections in (*((names[i], s) for i, s in arguments if i < len(names)), *named):
      if parameter and sections:
        self._given.setdefault((file, function.name, parameter), set()).update(sections)

  def _called(self, func: Any) -> tuple[str, ast.FunctionDef] | None:
    """(file, function) of what a call calls, if that is one of ours and can be told."""
    module, name = self._module, getattr(func, "attr", "") or getattr(func, "id", "")
    base = getattr(getattr(func, "value", None), "id", None)
    if base == "self":
      name = f"{self._owner}.{name}"
    elif isinstance(func, ast.Attribute):
      path = self._module.imports.get(base or "", "").replace(".", "/")
      module = self._modules.get(f"{path}.py") or self._modules.get(f"{path}/__init__.py")
    elif name in module.imports:
      path, _, name = module.imports[name].rpartition(".")
      module = self._modules.get(path.replace(".", "/") + ".py", module)
    return (module.file, module.functions[name]) if module and name in module.functions else None

  def _note(self, paths: set[str], node: Any) -> None:
    for path in paths & self._known:
      self._found.setdefault(path, set()).add((self._module.file, node.lineno))


def _strings(given: Sequence[Any], own: Sequence[Any]) -> Iterator[ast.Constant]:
  """A name that is given as it is; else names of keys in a list nearby."""
  constant = isinstance(given[0], ast.Constant)
  return (one for one in (given if constant else own) if isinstance(one, ast.Constant) and isinstance(one.value, str))


_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ClassDef)
_LOOKED_AT = (*_SCOPES, ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.Attribute,
              ast.Subscript, ast.Call, ast.Constant)


@functools.cache
def _own_nodes(scope: ast.AST) -> tuple[Any, ...]:
  """What is looked at of a function, without what is inside of functions and classes in it."""
  found, waiting = [], list(ast.iter_child_nodes(scope))[::-1]
  while waiting:
    node = waiting.pop()
    if isinstance(node, _LOOKED_AT):
      found.append(node)
    if not isinstance(node, _SCOPES):
      waiting += list(ast.iter_child_nodes(node))[::-1]
  return tuple(found)
