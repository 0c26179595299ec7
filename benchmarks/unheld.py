"""What no test reaches, by the coverage of a run of the tests: errors that are never raised, functions never entered.

    SLIPCOVER_ENABLED=1 … python -m pytest …     (as .ci/run does, which leaves coverage.json)
    python -m benchmarks.unheld coverage.json [more.json …] [--room trainer/export …]

A fault planted there is noticed by nothing. Several files count together. What only other processes run, those that
tests start, is not in them. A line for each, `FILE:LINE: what`; the last one has the numbers.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def unheld(source: str, executed: set[int]) -> Iterator[tuple[int, str]]:
  """(line, what) of errors that are not raised and functions that are not entered where these lines were executed."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      body = [part for part in node.body[ast.get_docstring(node) is not None:] if not _is_stub(part)]
      if body and executed.isdisjoint(range(body[0].lineno, node.end_lineno + 1)):
        yield node.lineno, f"{node.name}() is never entered"
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
      if executed.isdisjoint(range(node.lineno, node.end_lineno + 1)):
        yield node.lineno, f"never raised: {' '.join(ast.unparse(node.exc).split())[:120]}"


def _is_stub(statement: ast.stmt) -> bool:
  """Whether it stands for what others do: `...` of a protocol, or NotImplementedError."""
  return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) or isinstance(
      statement, ast.Raise) and isinstance(statement.exc, ast.Name) and statement.exc.id == "NotImplementedError"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("coverage", nargs="+", type=Path)
  parser.add_argument("--room", nargs="*", default=[""], help="only files whose paths begin so")
  args = parser.parse_args()
  executed: dict[str, set[int]] = {}
  for file in args.coverage:
    for name, lines in json.loads(file.read_text(encoding="utf-8"))["files"].items():
      executed.setdefault(name, set()).update(lines["executed_lines"])
  counts = {"entered": 0, "raised": 0}
  for name in sorted(executed):
    if name.startswith(tuple(args.room)):
      for line, what in sorted(unheld((ROOT / name).read_text(encoding="utf-8"), executed[name])):
        print(f"{name}:{line}: {what}")
        counts["raised" if what.startswith("never raised") else "entered"] += 1
  print(f"{counts['raised']} errors are never raised, {counts['entered']} functions are never entered")


if __name__ == "__main__":
  main()
