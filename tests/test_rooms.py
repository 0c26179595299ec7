"""Which package may import which, that no files import each other in a circle, and that functions have few parameters.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests import tiny

PACKAGES = ("trainer", "models", "input_pipeline", "evaluators")
# The ground floor of trainer, which every package may import; its files import each other alone.
GROUND = ("trainer.errors", "trainer.tree", "trainer.metrics", "trainer.dotted", "trainer.atomic")
# What the files of a package may import beside GROUND; those of packages that are not named, anything.
MAY_IMPORT = {"models": ("models",), "input_pipeline": ("input_pipeline",), **dict.fromkeys(GROUND, ())}
# The most files that may stand on top of trainer/.
MOST_ON_TOP = 20
# Who imports evaluators: programs, and what measures as they do.
OF_EVALUATORS = {"trainer.main", "trainer.modes.invariances"}
# Imports within functions that close a circle, by design: {(file, imported): why}.
LATE = {
    ("trainer", "trainer.main"): "`from trainer import train`, while `import trainer.config` starts no JAX",
    ("trainer.config.sections", "trainer.strategies"): "the options of a strategy of the user's own are in its record",
    ("trainer.bases", "trainer.speedrun.command"): "a run that begins from another one trains that one first",
    ("trainer.report", "trainer.report.record"): "the report is of the run that it ends",
}
# The most parameters that a function may have, but those that are named here, by file and name, with why no record of
# them would serve.
MOST_PARAMETERS = 7
OPTIONS = "each option stands alone, has a default, and is given by few"
MORE_PARAMETERS = {
    ("input_pipeline/evaluation.py", "make_eval_data"): OPTIONS,
    ("input_pipeline/examples/registry.py", "open_examples"): OPTIONS,
    ("input_pipeline/packing.py", "make_plan"): OPTIONS,
    ("models/api.py", "make_model"): "what it gives a model's class, which may be a user's own, by name",
    **{(f"models/attention/{file}.py", f"{pass_}.kernel"): "Pallas gives a kernel one reference an array, in order"
       for file, passes in (("gpu_kernels", ("_forward", "_to_queries", "_to_keys")),
                            ("delta_kernels", ("_read", "_read_back", "_gradients"))) for pass_ in passes},
    ("models/flops.py", "per_token"): "a formula of as many numbers",
    ("models/hf/__init__.py", "save"): OPTIONS,
    ("models/hf/convert.py", "write_tensors"): OPTIONS,
    ("models/layers.py", "Norm.__init__"): "the kinds of norm there are; a layer is made with two or three of them",
    ("models/transformer.py", "Transformer.__init__"): "see make_model",
    ("trainer/export/command.py", "export"): OPTIONS,
    ("trainer/optim/optimizer.py", "make_optimizer"): OPTIONS,
    ("trainer/strategies/logprobs.py", "token_stats"): OPTIONS,
}


def modules() -> dict[str, Path]:
  files = {}
  for package in PACKAGES:
    for path in sorted((tiny.ROOT / package).rglob("*.py")):
      name = ".".join(path.relative_to(tiny.ROOT).with_suffix("").parts)
      files[name.removesuffix(".__init__")] = path
  return files


FILES = modules()


def imported(name: str, path: Path) -> set[str]:
  """The project's modules that a file imports, wherever in it the statement stands; but for types alone."""
  found, tree = set(), ast.parse(path.read_text("utf-8"))
  for node in ast.walk(tree):
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
      node.body = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f"{path} imports from '.'"
      found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in FILES else node.module
                for alias in node.names}
  return (found & FILES.keys()) - {name}


@functools.cache
def imports() -> dict[str, set[str]]:
  """{module: what it imports}; not when this file is imported, which each process of tests does."""
  return {name: imported(name, path) for name, path in FILES.items()}


def within(name: str, prefix: str) -> bool:
  return name == prefix or name.startswith(f"{prefix}.")


def rooms() -> dict[str, tuple[str, ...]]:
  """{room: what its docstring says that it may import}. A room is a package directly within one of PACKAGES."""
  found = {}
  for name, path in FILES.items():
    if path.name == "__init__.py" and name.count(".") == 1:
      said = re.search(r"^May import: (.+?)\.$", ast.get_docstring(ast.parse(path.read_text("utf-8"))), re.M | re.S)
      assert said, f"{path} does not end its docstring with 'May import: ….'"
      found[name] = () if said[1] == "nothing" else tuple(re.split(r",\s+", said[1]))
  return found


ROOMS = rooms()


@pytest.mark.parametrize("prefix", [*MAY_IMPORT, *ROOMS])
def test_files_import_what_they_may(prefix):
  files = [name for name in FILES if within(name, prefix)]
  allowed = {*GROUND, prefix, *(ROOMS | MAY_IMPORT)[prefix]}
  assert files
  for name in files:
    odd = {other for other in imports()[name] if not any(within(other, package) for package in allowed)}
    assert not odd, f"{name} imports {', '.join(sorted(odd))}, which {prefix} may not"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_say_no_more_than_they_import(room):
  found = {other for name in FILES if within(name, room) for other in imports()[name]}
  assert not {said for said in ROOMS[room] if not any(within(other, said) for other in found)}
  assert not set(ROOMS[room]) - {*FILES}


def test_only_what_a_run_is_made_of_stands_on_top():
  assert len([name for name, path in FILES.items() if path.parent == tiny.ROOT / "trainer"]) <= MOST_ON_TOP


def test_evaluators_are_imported_by_programs():
  found = {name for name in FILES if not within(name, "evaluators")
           and any(within(other, "evaluators") for other in imports()[name])}
  assert found <= OF_EVALUATORS


def test_no_circle_of_imports():
  left = {name: {other for other in others if (name, other) not in LATE} for name, others in imports().items()}
  while leaves := [name for name, others in left.items() if not others & left.keys()]:
    for name in leaves:
      del left[name]
  # What remains imports a circle, or is in one.
  assert not left, f"a circle among, or below, {', '.join(sorted(left))}"


def test_functions_have_few_parameters():
  found = set()
  for folder in (*PACKAGES, "configs", "benchmarks"):
    for path in (tiny.ROOT / folder).rglob("*.py"):
      for parent in ast.walk(ast.parse(path.read_text("utf-8"))):
        for node in ast.iter_child_nodes(parent):
          if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len([name for name in names if name not in ("self", "cls")]) > MOST_PARAMETERS:
              within = f"{parent.name}." if hasattr(parent, "name") else ""
              found.add((path.relative_to(tiny.ROOT).as_posix(), within + node.name))
  assert found == MORE_PARAMETERS.keys(), "what belongs together gets a record; or a name in the list, and why"
