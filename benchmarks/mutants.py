"""Small faults planted in the program, one at a time: which of them do the tests notice?

    python -m benchmarks.mutants [--room trainer/checkpoints …] [--only REGEX] [--jobs 2] [--limit 600] [--out FILE]
    python -m benchmarks.mutants --list

benchmarks/mutants.json has a fault a line: the file, what stands there exactly once (`old`), what is put in its place
(`new`), what is then wrong (`what`), and the tests that are to notice it where these are not, or not only, those of the
file of the same name under tests/ (`tests`: `FILE` or `FILE -k EXPRESSION`). Each is planted in a copy of the checkout;
the tests that are named run first, then those of the file, until one fails. A fault that makes them hang is noticed by
--limit, in seconds for a fault's tests. `--list` only looks whether every fault can be planted. Before anything is
planted the tests must pass without (--trust: they are believed to).

The table at the end has the share noticed by room; below it the faults that nothing noticed. With --out each result is
also a line of that file, and what has one there already is not planted again.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What pytest ends with: tests failed; it was interrupted, since a file of tests could not be imported.
NOTICED = (1, 2)


@dataclass(frozen=True)
class Fault:
  file: str
  old: str
  new: str
  what: str
  tests: tuple[str, ...] = ()

  @property
  def room(self) -> str:
    """The package that the file is in, of two names at most: trainer/checkpoints, evaluators."""
    return "/".join(Path(self.file).parts[:-1][:2])

  def runs(self, tree: Path) -> list[str]:
    """What pytest is run with, run after run: the tests that are named, then those of the file."""
    mirrored = f"tests/{Path(self.file).parent}/test_{Path(self.file).name}"
    return [*(test for test in self.tests if test != mirrored), *([mirrored] if (tree / mirrored).exists() else [])]

  def plant(self, tree: Path) -> str:
    """Puts the fault in the place of what is there; returns the file's text as it was.

    Raises:
      ValueError: what is to be replaced is not there exactly once.
    """
    file = tree / self.file
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if (count := text.count(self.old)) != 1 or self.old == self.new:
      raise ValueError(f"{self.file}: {self.old!r} is there {count} times, not once ({self.what})")
    file.write_text(text.replace(self.old, self.new), encoding="utf-8")
    return text

  def problem(self, tree: Path) -> str:
    """Why it cannot be planted, or has no tests; "" otherwise."""
    try:
      text = self.plant(tree)
      (tree / self.file).write_text(text, encoding="utf-8")
      compile(text.replace(self.old, self.new), self.file, "exec")
    except (ValueError, SyntaxError) as error:
      return str(error)
    missing = [run for run in self.runs(tree) if not (tree / run.partition(" ")[0]).exists()]
    return "" if self.runs(tree) and not missing else f"{self.file}: no tests {' '.join(missing)} ({self.what})"


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
  """What git does not ignore, in a temporary folder."""
  listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=root, capture_output=True, check=True)
  with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
    for name in filter(None, listed.stdout.decode().split("\0")):
      if (root / name).is_file():
        (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, Path(folder) / name)
    yield Path(folder)


def run_tests(tree: Path, runs: list[str], cache: str, limit: float) -> str:
  """What noticed something: "" if all tests pass, else the first that failed, or that they took too long."""
  end = time.monotonic() + limit
  for arguments in runs:
    file, _, expression = arguments.partition(" -k ")
    chosen = ["-k", expression] if expression else ["-m", "not slow"]  # what is named may be slow
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", "-n", "0", "--tb=no", "-p",
               "no:cacheprovider", f"--timeout={limit:.0f}", file, *chosen]
    process = subprocess.Popen(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree), "WEFT_TEST_CACHE": cache}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
      said, _ = process.communicate(timeout=max(end - time.monotonic(), 1.0))
    except subprocess.TimeoutExpired:
      return "took too long"
    finally:
      with contextlib.suppress(ProcessLookupError):  # what tests have started, too
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    if process.returncode in NOTICED or process.returncode < 0:
      found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
      return found[1] if found else f"pytest ended with {process.returncode}"
    if process.returncode:
      raise RuntimeError(f"pytest {arguments} ended with {process.returncode}:\n{said[-2000:]}")
  return ""


def plant_all(faults: list[Fault], jobs: int, cache: str, limit: float,
              tell: Callable[[Fault, str, float], None]) -> None:
  """Plants each fault in one of `jobs` copies and tells what noticed it ("": nothing) and how many seconds it took."""
  with contextlib.ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
    free = [stack.enter_context(copied(ROOT)) for _ in range(jobs)]

    def one(number: int, fault: Fault) -> None:
      tree, start = free.pop(), time.monotonic()
      file, text = tree / fault.file, fault.plant(tree)
      # Python takes a compiled file for that of a source with the same size and second of change.
      os.utime(file, (number, number))
      tell(fault, run_tests(tree, fault.runs(tree), cache, limit), time.monotonic() - start)
      file.write_text(text, encoding="utf-8")
      free.append(tree)

    for planted in [pool.submit(one, number, fault) for number, fault in enumerate(faults, 1)]:
      planted.result()


def table(results: list[dict[str, str]]) -> str:
  """Markdown: the share noticed by room, and what was not."""
  rooms = collections.defaultdict(list)
  for result in results:
    for room in (result["room"], "together"):
      rooms[room].append(bool(result["noticed"]))
  lines = [f"| {room} | {len(found)} | {sum(found) / len(found):.0%} |"
           for room, found in sorted(rooms.items(), key=lambda item: (item[0] == "together", item[0]))]
  missed = [f"- {result['file']}: {result['what']}" for result in results if not result["noticed"]]
  return "\n".join(["| room | faults | noticed |", "|---|---|---|", *lines, "", "Unnoticed:", *(missed or ["- none"])])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--room", nargs="*", default=[], help="only faults of these rooms")
  parser.add_argument("--only", default="", help="a regex over the file and what is then wrong")
  parser.add_argument("--jobs", type=int, default=1)
  parser.add_argument("--limit", type=float, default=600.0)
  parser.add_argument("--out", type=Path)
  parser.add_argument("--list", action="store_true")
  parser.add_argument("--trust", action="store_true")
  args = parser.parse_args()
  listed = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
  faults = [Fault(**{**row, "tests": tuple(row.get("tests", ()))}) for row in listed]
  faults = [fault for fault in faults if (not args.room or fault.room in args.room)
            and re.search(args.only, f"{fault.file}: {fault.what}")]
  with copied(ROOT) as tree:
    if problems := list(filter(None, (fault.problem(tree) for fault in faults))):
      sys.exit("\n".join(problems))
    tests = sorted({run for fault in faults for run in fault.runs(tree)})
  print(f"{len(faults)} faults can be planted, for {len(tests)} runs of tests to notice", flush=True)
  lines = args.out.read_text(encoding="utf-8").splitlines() if args.out and args.out.exists() else []
  results = [json.loads(line) for line in lines]
  there, lock = {(result["file"], result["what"]) for result in results}, threading.Lock()

  def tell(fault: Fault, noticed: str, seconds: float) -> None:
    result = dict(room=fault.room, file=fault.file, what=fault.what, noticed=noticed)
    with lock:
      results.append(result)
      print(f"{seconds:5.0f} s  {fault.file}: {fault.what}: {noticed or 'UNNOTICED'}", flush=True)
      if args.out:
        with args.out.open("a", encoding="utf-8") as file:
          file.write(json.dumps(result) + "\n")

  if not args.list:
    with tempfile.TemporaryDirectory(prefix="weft-mutants-cache-") as cache, copied(ROOT) as tree:
      failed = [] if args.trust else [failed for run in tests if (failed := run_tests(tree, [run], cache, args.limit))]
      if failed:
        sys.exit(f"Without any fault these fail: {', '.join(failed)}")
      faults = [fault for fault in faults if (fault.file, fault.what) not in there]
      plant_all(faults, args.jobs, cache, args.limit, tell)
    print("\n" + table(results))


if __name__ == "__main__":
  main()
