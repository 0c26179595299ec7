"""Coverage-guided fuzzing of the parsers of tests/hostile/parsers.py: what they raise that is no error of ours.

    python -m benchmarks.fuzz --parser jsonl --seconds 60
    python -m benchmarks.fuzz --seconds 60          # each of them in turn

Needs `pip install -e '.[fuzz]'` and runs from the repository's root. Each parser has a process of its own, which begins
with the parser's seeds. The table says how often it ran, how many branches that reached, and what crashed it: errors
are told apart by their kind and place, and an input of each is kept in the folder that is named.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType

PACKAGES = ["input_pipeline", "models.hf", "trainer.config.checks", "trainer.config.values", "trainer.config.durations",
            "trainer.tree", "trainer.distributed.mesh", "jinja2", "json", "PIL.Image"]


def fuzz(parsers: ModuleType, name: str, seconds: int, folder: Path) -> None:
  """Runs one parser until the time is up; ends the process. Crashes are written to `folder`."""
  import atheris
  parse, seen = parsers.PARSERS[name], set()
  corpus = folder / "corpus"
  corpus.mkdir()
  for number, seed in enumerate(parsers.SEEDS.get(name, [b"a"])):
    (corpus / f"seed{number}").write_bytes(seed)

  def one(data: bytes) -> None:
    try:
      parse(data)
    except parsers.OURS:
      pass
    except Exception as error:
      last = traceback.extract_tb(error.__traceback__)[-1]
      crash = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
      if crash not in seen:
        seen.add(crash)
        (folder / f"crash{len(seen)}").write_bytes(data)
        (folder / f"crash{len(seen)}.json").write_text(json.dumps([crash, str(error)[:200]]))

  atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-print_final_stats=1", "-max_len=4096", "-timeout=30",
                 "-rss_limit_mb=6000", f"-artifact_prefix={folder}/stopped-", str(corpus)], one)
  atheris.Fuzz()


def measure(parsers: ModuleType, name: str, seconds: int) -> str:
  """The row of the table for one parser, which runs in a copy of this process: libFuzzer never gives it back."""
  folder = Path(tempfile.mkdtemp(prefix=f"weft-fuzz-{name}-"))
  log = folder / "log"
  child = os.fork()
  if not child:
    with open(log, "wb") as file:
      os.dup2(file.fileno(), 1)
      os.dup2(file.fileno(), 2)
    fuzz(parsers, name, seconds, folder)
    os._exit(0)
  _, status = os.waitpid(child, 0)
  said = log.read_text(errors="replace")
  runs = re.search(r"number_of_executed_units:\s*(\d+)", said)
  reached = re.findall(r"cov: (\d+)", said)
  crashes = [json.loads(file.read_text()) for file in sorted(folder.glob("crash*.json"))]
  stopped = sorted(file.name for file in folder.glob("stopped-*"))
  if status and not stopped:
    stopped = [(said.strip().splitlines() or ["no output"])[-1][:100]]
  told = "; ".join([*(f"{where}: {message[:60]}" for where, message in crashes), *stopped])
  return (f"{name:<17} {int(runs[1]) if runs else 0:>11,} {int(reached[-1]) if reached else 0:>9,} "
          f"{len(crashes) + len(stopped):>8}  {f'{told} (in {folder})' if told else ''}").rstrip()


def main() -> None:
  options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  options.add_argument("--parser", help="one of tests/hostile/parsers.py; default: all, one after another")
  options.add_argument("--seconds", type=int, default=60)
  given = options.parse_args()
  import atheris
  with atheris.instrument_imports(include=PACKAGES):
    from tests.hostile import parsers
  if given.parser and given.parser not in parsers.PARSERS:
    options.error(f"no parser {given.parser!r}; there are {', '.join(parsers.PARSERS)}")
  print(f"{'parser':<17} {'executions':>11} {'branches':>9} {'crashes':>8}")
  for name in [given.parser] if given.parser else parsers.PARSERS:
    print(measure(parsers, name, given.seconds), flush=True)


if __name__ == "__main__":
  main()
