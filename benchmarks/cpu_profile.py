"""What a step on CPU spends its time on, kernel by kernel: the compiled ones by their names in the program.

    apt-get install linux-perf binutils
    python -m benchmarks.cpu_profile --case seq          # or sft, dpo, grpo: those of benchmarks/speed
    WEFT_SPEED_SIZE=small_mixed python -m benchmarks.cpu_profile    # in bfloat16
    python -m benchmarks.cpu_profile --config configs/quickstart.py    # any config, without its evaluations

JAX's own traces say when an operation begins, not what the threads do that share it; perf sees all of them, but no
names in code that was compiled when the program ran. So XLA leaves its compiled kernels as files, the process its
memory, and what lies at each address that perf met is looked up among the former. Code of neither XLA nor a library is
oneDNN's, which makes its own for products.
"""

import argparse
import bisect
import collections
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from trainer.callbacks import Callback

ROOT = Path(__file__).resolve().parents[1]
# Samples a second of each processor; steps that are left out first, since they compile; steps that are looked at.
RATE, FIRST, STEPS = 1500, 4, 6
KINDS = {
    "products": re.compile(r"^oneDNN|dnnl|^ynn::dot"),
    "products: packing": re.compile(r"gemm_pack|^ynn::interleave"),
    "sums (YNNPACK)": re.compile(r"^ynn|slinky"),
    "other kernels of the program": re.compile(r"^kernel "),
    "memory from the kernel": re.compile(r"\[kernel|clear_page|page_fault"),
}
ARRAY = re.compile(r"[a-z]+\d+\[[\d,]*\]")


class Function(NamedTuple):
  """A compiled kernel as XLA left it; its name is that of the program's file, and its own."""

  name: tuple[str, str]
  code: bytes


class Look(Callback):
  """Notes when steps ended, and at the end of the last one what executable memory there is that is no file's."""

  def __init__(self, folder: str):
    self._folder, self._ends = Path(folder), []

  def on_step_end(self, run, step, metrics):
    self._ends.append(time.monotonic())
    if len(self._ends) < FIRST + STEPS:
      return
    (self._folder / "ends.json").write_text(json.dumps(self._ends))
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
      for line in maps:
        where, rights, *_, inode = line.split()[:5]
        if "x" in rights and inode == "0" and not line.rstrip().endswith("]"):
          start, end = (int(part, 16) for part in where.split("-"))
          memory.seek(start)
          (self._folder / f"{start:x}.memory").write_bytes(memory.read(end - start))


def config_of(args: argparse.Namespace, folder: str) -> ConfigDict:
  """That of a case, whose data are in the folder; or that of a file."""
  if args.config:
    file, _, arg = args.config.partition(":")
    config = runpy.run_path(file)["get_config"](*([arg] if arg else []))
    config.evals = ConfigDict()
    return config
  from benchmarks.speed import weft_config
  return weft_config.get_config(f"{args.case},{folder}")


def train(config: ConfigDict, folder: str) -> None:
  """The child process: a few steps."""
  from trainer import train as run

  config.total_steps = FIRST + STEPS
  config.callbacks.look = dict(type="benchmarks.cpu_profile.Look", folder=folder)
  run(config, f"{folder}/workdir")


def functions(folder: Path) -> list[Function]:
  """The kernels in the object files that XLA has left."""
  found = []
  for file in folder.glob("*obj-file*.o"):
    def table(what: str, file: Path = file) -> list[list[str]]:
      text = subprocess.run(["readelf", what, "-W", file], capture_output=True, text=True, check=True).stdout
      return [line.replace("[ ", "[").split() for line in text.splitlines()]

    starts = {row[0].strip("[]"): int(row[4], 16) for row in table("-S") if len(row) > 5 and row[2] == "PROGBITS"}
    data = file.read_bytes()
    for row in table("-s"):
      if len(row) > 7 and row[3] == "FUNC" and row[6] in starts:
        start = starts[row[6]] + int(row[1], 16)
        found.append(Function((file.name.split(".obj-file")[0], row[7]), data[start:start + int(row[2], 0)]))
  return found


def kernels_in(memory: bytes, known: list[Function]) -> list[tuple[int, int, float, tuple[str, str]]]:
  """(beginning, end, share of bytes that are alike, name) of kernels that may be there: addresses in them were filled
  in when they were loaded."""
  found = []
  for name, code in known:
    start = memory.find(code[:16])
    if len(code) >= 32 and start >= 0:
      there = memory[start:start + len(code)]
      alike = sum(a == b for a, b in zip(code, there, strict=False)) / len(code)
      found.append((start, start + len(code), alike, name))
  return found


def samples(folder: Path, known: list[Function]) -> collections.Counter:
  """{what ran: samples} between the end of the first steps and that of the last."""
  regions = sorted((int(file.stem, 16), file.read_bytes()) for file in folder.glob("*.memory"))
  starts, ends = [start for start, _ in regions], json.loads((folder / "ends.json").read_text())
  text = subprocess.run(["perf", "script", "-i", folder / "perf.data", "-F", "time,ip,sym,dso"], capture_output=True,
                        text=True, check=True).stdout
  counts: collections.Counter = collections.Counter()
  kernels: dict[int, list] = {}
  for line in text.splitlines():
    match = re.match(r"\s*([\d.]+):\s+([0-9a-f]+)\s+(.*)", line)
    if match is None or not ends[FIRST - 1] <= float(match[1]) <= ends[-1]:
      continue
    address, what = int(match[2], 16), match[3]
    number = bisect.bisect_right(starts, address) - 1
    if number >= 0 and address < starts[number] + len(regions[number][1]):
      if number not in kernels:
        kernels[number] = kernels_in(regions[number][1], known)
      offset = address - starts[number]
      here = max(((alike, name) for start, end, alike, name in kernels[number] if start <= offset < end), default=None)
      what = f"kernel {' '.join(here[1])}" if here else "oneDNN"
    counts[what] += 1
  return counts


def described(kernel: str, programs: dict[str, str]) -> str:
  """The kernel with the shape of what it makes, and where that comes from."""
  program, name = kernel.split()
  found = re.search(rf"%{re.escape(name.removesuffix('_kernel'))} = (.*)", programs.get(program, ""))
  if found is None:
    return name
  shape, where = ARRAY.search(found[1]), re.search(r'op_name="([^"]*)"', found[1])
  return f"{name}  {shape[0] if shape else ''}  {where[1][-70:] if where else ''}"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--case", default="seq", choices=("seq", "sft", "dpo", "grpo"))
  parser.add_argument("--config", help="a config's file, or FILE:ARGUMENT, in place of a case")
  parser.add_argument("--most", type=int, default=25, help="so many kernels and functions, those that take most first")
  parser.add_argument("--child", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    return train(config_of(args, args.child), args.child)
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    from benchmarks.speed import weft_config
    from trainer import startup
    weft_config.write_data(folder)
    startup.set_environment(config_of(args, name).precision)
    env = dict(os.environ, JAX_COMPILATION_CACHE_DIR="", GLIBC_TUNABLES="glibc.malloc.hugetlb=1",
               XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}/dump --xla_dump_hlo_as_text")
    child = [sys.executable, "-m", "benchmarks.cpu_profile", *sys.argv[1:], "--child", name]
    command = ["perf", "record", "-k", "CLOCK_MONOTONIC", "-F", str(RATE), "-e", "cpu-clock", "-o", f"{name}/perf.data"]
    try:
      done = subprocess.run(command + child, env=env, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
      sys.exit("perf is not installed; apt-get install linux-perf, or what your system calls it.")
    if done.returncode:
      sys.exit((done.stdout + done.stderr)[-2000:])
    end = ".cpu_after_optimizations.txt"
    programs = {file.name.removesuffix(end): file.read_text() for file in (folder / "dump").glob(f"*{end}")}
    counts = samples(folder, functions(folder / "dump"))
  kinds: collections.Counter = collections.Counter()
  for what, count in counts.items():
    kinds[next((kind for kind, pattern in KINDS.items() if pattern.search(what)), "everything else")] += count
  scale = 1e3 / RATE / STEPS
  print(f"{args.config or args.case}: {scale * sum(counts.values()):,.0f} ms of processor time a step")
  for kind, count in kinds.most_common():
    print(f"{scale * count:9.1f} ms {count / sum(counts.values()):6.1%}  {kind}")
  print()
  for what, count in counts.most_common(args.most):
    shown = described(what.removeprefix("kernel "), programs) if what.startswith("kernel ") else what
    print(f"{scale * count:9.1f} ms  {shown[:150]}")


if __name__ == "__main__":
  main()
