"""What the tests take, by file or by folder, as a table: of the log of a run, or of its JUnit XML.

    python -m pytest --junitxml=/tmp/tests.xml
    python -m benchmarks.durations /tmp/tests.xml [--rows 20] [--depth 2]

A log is one of `pytest --durations=0 -vv`; it tells setup, call and teardown apart. Seconds are those of the tests'
own processes, added up: with two workers about twice what one waits for.
"""

import argparse
import collections
import re
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

LINE = re.compile(r"([\d.]+)s (setup|call|teardown) +([^ :]+)::(.*\S)")


def of_log(text: str) -> Iterator[tuple[str, str, float]]:
  """(file, test, seconds) of each line under "slowest durations"."""
  for seconds, _, file, name in LINE.findall(text):
    yield file, name, float(seconds)


def of_xml(text: str) -> Iterator[tuple[str, str, float]]:
  """(file, test, seconds) of each test; in `classname` a file is a module, and a class may follow."""
  for case in xml.etree.ElementTree.fromstring(text).iter("testcase"):
    module = re.match(r"(?:\w+\.)*?test_\w+|.*", case.get("classname", ""))[0]
    yield f"{module.replace('.', '/')}.py", case.get("name", ""), float(case.get("time", 0))


def table(found: list[tuple[str, str, float]], rows: int, depth: int = 0) -> str:
  """Markdown: the files that take longest, or the folders of so many parts; their slowest test, and the sum of all."""
  by_file: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
  for file, name, seconds in found:
    by_file["/".join(file.split("/")[:-1][:depth]) or file][file, name] += seconds
  ordered = sorted(by_file.items(), key=lambda item: -item[1].total())
  what = "folder" if depth else "file"
  lines = [f"| {what} | s | tests | slowest | s |", "|---|---|---|---|---|"]
  for file, tests in ordered[:rows]:
    ((_, name), seconds), = tests.most_common(1)
    lines.append(f"| {file} | {tests.total():.0f} | {len(tests)} | {name} | {seconds:.0f} |")
  whole = sum(tests.total() for tests in by_file.values())
  lines.append(f"| all {len(by_file)} {what}s | {whole:.0f} | {sum(map(len, by_file.values()))} | | |")
  return "\n".join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("file", type=Path, help="the log, or JUnit XML, of a run of the tests")
  parser.add_argument("--rows", type=int, default=40, help="how many files or folders to show")
  parser.add_argument("--depth", type=int, default=0, help="folders of so many parts rather than files")
  options = parser.parse_args()
  text = options.file.read_text(encoding="utf-8", errors="replace")
  found = list((of_xml if options.file.suffix == ".xml" else of_log)(text))
  if not found:
    parser.error(f"{options.file} has no durations: `pytest --durations=0 -vv`, or `--junitxml=FILE.xml`")
  print(table(found, options.rows, options.depth))


if __name__ == "__main__":
  main()
