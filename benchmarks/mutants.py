"""Small faults planted in the program, one at a time: which of them do the tests notice?

    python -m benchmarks.mutants [--room trainer/checkpoints …] [--only REGEX] [--new | --again] [--slow] [--jobs 2]
    python -m benchmarks.mutants --list

benchmarks/mutants.json has a fault a line: the file, what stands there exactly once (`old`), what is put in its place
(`new`), what is then wrong (`what`), and the tests that are to notice it where these are not, or not only, those of the
file of the same name under tests/ (`tests`: `FILE` or `FILE -k EXPRESSION`). Each is planted in a copy of the checkout;
the tests that are named run first, then those of the file, until one fails. A fault that makes them hang is noticed by
--limit, in seconds for a fault's tests. `--list` plants nothing: it looks whether every fault can be planted. Before
anything is planted the tests must pass without (--trust: they are believed to).

What noticed a fault, when, and at which commit is kept in benchmarks/mutants_results.json. A fault that was noticed
there is not planted again (--again: it is; --new: nor is one that was planted and not noticed), unless its `old`, `new`
or `file` has changed since; the next is always one of the room of which the least is known then. Slow tests are run
where they are named, or with --slow. The table at the end has, by room, how many there are, how many were planted, and
the share noticed; below it what nothing noticed, and what was never planted as it stands now.
"""

import argparse
import collections
import contextlib
import datetime
import functools
import hashlib
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
RESULTS = Path(__file__).with_name("mutants_results.json")
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

  @property
  def place(self) -> str:
    """A digest of the file and of what is put where."""
    return hashlib.blake2b(json.dumps([self.file, self.old, self.new]).encode(), digest_size=6).hexdigest()

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
    missing = [run for run in self.runs(tree) if not (tree / run.partition(" -k ")[0]).exists()]
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


def run_tests(tree: Path, runs: list[str], cache: str, limit: float, slow: bool = False) -> str:
  """What noticed something: "" if all tests pass, else the first that failed, or that they took too long."""
  end = time.monotonic() + limit
  for arguments in runs:
    file, _, expression = arguments.partition(" -k ")
    chosen = ["-k", expression] if expression else [] if slow else ["-m", "not slow"]  # what is named may be slow
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


def plant_all(faults: list[Fault], jobs: int, tests: Callable[[Path, list[str]], str],
              tell: Callable[[Fault, str, float], None]) -> None:
  """Plants each fault in one of `jobs` copies and tells what noticed it ("": nothing) and how many seconds it took.

  Raises:
    RuntimeError: tests could not be run; after those of all the other faults.
  """
  failures: list[str] = []
  with contextlib.ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
    free = [stack.enter_context(copied(ROOT)) for _ in range(jobs)]

    def one(number: int, fault: Fault) -> None:
      tree, start = free.pop(), time.monotonic()
      file, text = tree / fault.file, fault.plant(tree)
      # Python takes a compiled file for that of a source with the same size and second of change.
      os.utime(file, (number, number))
      try:
        tell(fault, tests(tree, fault.runs(tree)), time.monotonic() - start)
      except RuntimeError as error:
        failures.append(f"{fault.file}: {fault.what}: {error}")
      file.write_text(text, encoding="utf-8")
      free.append(tree)

    for planted in [pool.submit(one, number, fault) for number, fault in enumerate(faults, 1)]:
      planted.result()
  if failures:
    raise RuntimeError("\n".join(failures))


Results = dict[str, dict[str, str]]


def read_results() -> Results:
  """{place: what was seen of the fault there}: `file`, `what`, `noticed` ("": by nothing), `date`, `commit`."""
  return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write_results(results: Results) -> None:
  """A line for each, by file, so that a change of one is a line's change."""
  lines = [f"{json.dumps(place)}: {json.dumps(result, ensure_ascii=False)}"
           for place, result in sorted(results.items(), key=lambda item: (item[1]["file"], item[1]["what"]))]
  RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def table(faults: list[Fault], results: Results) -> str:
  """Markdown: the share noticed by room; what was not, and what was never planted."""
  rooms = collections.defaultdict(list)
  for fault in faults:
    for room in (fault.room, "together"):
      rooms[room].append(fault)
  lines = ["| room | faults | planted | noticed |", "|---|---|---|---|"]
  for room in sorted(rooms, key=lambda name: (name == "together", name)):
    planted = [bool(results[fault.place]["noticed"]) for fault in rooms[room] if fault.place in results]
    share = f"{sum(planted) / len(planted):.0%}" if planted else ""
    lines.append(f"| {room} | {len(rooms[room])} | {len(planted)} | {share} |")
  missed = [fault for fault in faults if fault.place in results and not results[fault.place]["noticed"]]
  never = [fault for fault in faults if fault.place not in results]
  for title, those in (("Unnoticed:", missed), ("Never planted as they stand now:", never)):
    lines += ["", title, *([f"- {fault.file}: {fault.what}" for fault in those] or ["- none"])]
  return "\n".join(lines)


def to_plant(faults: list[Fault], results: Results, new: bool = False) -> list[Fault]:
  """Those never noticed, or never planted (`new`): always one of the room of which the least is known then."""
  known = collections.Counter(fault.room for fault in faults if fault.place in results)
  of_room = collections.Counter(fault.room for fault in faults)
  left = [fault for fault in faults if fault.place not in results or not (new or results[fault.place]["noticed"])]
  share = {}
  for fault in left:
    share[fault.place] = known[fault.room] / of_room[fault.room]
    known[fault.room] += 1
  return sorted(left, key=lambda fault: (share[fault.place], fault.room))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--room", nargs="*", default=[], help="only faults of these rooms")
  parser.add_argument("--only", default="", help="a regex over the file and what is then wrong")
  parser.add_argument("--jobs", type=int, default=1)
  parser.add_argument("--limit", type=float, default=600.0)
  which = parser.add_mutually_exclusive_group()
  which.add_argument("--new", action="store_true")
  which.add_argument("--again", action="store_true")
  parser.add_argument("--slow", action="store_true")
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
  lock = threading.Lock()
  commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout.strip()

  def tell(fault: Fault, noticed: str, seconds: float) -> None:
    with lock:
      results = read_results()  # anew, since another command may have written there
      results[fault.place] = dict(file=fault.file, what=fault.what, noticed=noticed,
                                  date=datetime.date.today().isoformat(), commit=commit)
      write_results(results)
      print(f"{seconds:5.0f} s  {fault.file}: {fault.what}: {noticed or 'UNNOTICED'}", flush=True)

  if not args.list:
    faults_now = faults if args.again else to_plant(faults, read_results(), args.new)
    with tempfile.TemporaryDirectory(prefix="weft-mutants-cache-") as cache, copied(ROOT) as tree:
      tests = sorted({run for fault in faults_now for run in fault.runs(tree)})
      of = functools.partial(run_tests, cache=cache, limit=args.limit, slow=args.slow)
      failed = [] if args.trust else [failed for run in tests if (failed := of(tree, [run]))]
      if failed:
        sys.exit(f"Without any fault these fail: {', '.join(failed)}")
      plant_all(faults_now, args.jobs, of, tell)
  print("\n" + table(faults, read_results()))


if __name__ == "__main__":
  main()
