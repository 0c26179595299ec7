"""All that is to be measured on a GPU, in order of worth, within a few minutes: `bash benchmarks/gpu.sh [minutes]`.

    bits       two runs of the quickstart at once, each with caches of its own: whether a bit of their metrics differs
    verify     --mode=verify on the quickstart
    table      the gradient of an embedding, in order and scattered (benchmarks/lookup_gpu.py)
    attention  its kernels beside cuDNN's (benchmarks/attention_gpu.py)
    step       a step of 1.5 billion parameters, in several ways (benchmarks/step_gpu.py)
    seq        the same by `python -m trainer`, beside torch.compile (benchmarks/speed)
    generate, rollouts   beside transformers' `generate`
    grpo       eight steps of the GRPO quickstart, twice at once: whether a bit differs
    delta      the gated delta rule, by kernels and in XLA's hands (benchmarks/delta_gpu.py)
    8b         a step of 8 billion parameters

Each part prints its rows as soon as it has them. One that would begin after the time is over does not, and one that is
under way then is ended. At the end all rows come again, for benchmarks/RESULTS.md. No part leaves a checkpoint. --small
tries it all anywhere, with a tiny model: its times mean nothing.
"""

import argparse
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# What makes the quickstart small enough for --small.
SMALL = ("--config.tokenizer.type=bytes", "--config.input.sources.main.max_documents=40", "--config.model.num_layers=1",
         "--config.seq_len=64", "--config.batch_size=2", "--config.optimizer.name=adamw")
# Of metrics, those that are about time.
TIMED = ("time/", "goodput", "tokens_per_second", "mfu", "memory")
# What is said of a program that was ended.
ENDED = "ended: the time is over"
PEERS = "hf_compile", "hf_generate", "hf_rollouts"


class Given(NamedTuple):
  small: bool
  # The Python with torch and transformers; None: there is none.
  peer: str | None
  folder: Path
  ends: float  # time.monotonic()
  flags: list[str]  # further ones of benchmarks/step_gpu.py
  step_seconds: float  # after which it begins no other way
  peers: bool  # whether they run, too

  @property
  def left(self) -> float:
    return self.ends - time.monotonic()

  @property
  def size(self) -> str:
    return "tiny" if self.small else "1b"


def lines_of(given: Given, command: list[str], **env: str) -> Iterator[str]:
  """What a program prints, line by line; it is ended when the time is over. Its last lines where it fails."""
  process = subprocess.Popen(command, cwd=ROOT, env=os.environ | dict(TQDM_DISABLE="1") | env, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
  printed: queue.Queue[str | None] = queue.Queue()

  def read() -> None:
    for line in process.stdout or ():
      printed.put(line.rstrip("\n"))
    printed.put(None)

  threading.Thread(target=read, daemon=True).start()
  last: list[str] = []
  try:
    while (line := printed.get(timeout=max(given.left, 0.1))) is not None:
      last = [*last[-11:], line]
      yield line
  except queue.Empty:
    os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
    yield ENDED
  if process.wait():
    yield from (f"    {line[:300]}" for line in last)


def trainer(given: Given, config: str, workdir: Path, *flags: str) -> list[str]:
  return [sys.executable, "-m", "trainer", f"--config=configs/{config}.py", f"--workdir={workdir}",
          "--config.ckpt_percent=0", "--config.report=False", *flags]


def twice(given: Given, name: str, config: str, *flags: str, **env: str) -> Iterator[str]:
  """Two runs that know nothing of each other, which a GPU runs at once: whether a bit of their metrics differs."""
  folder = given.folder / name
  folder.mkdir()

  def begin(run: str) -> subprocess.Popen:
    command = trainer(given, config, folder / run, "--config.log_steps=1", *flags)
    its = dict(os.environ, XDG_CACHE_HOME=str(folder / f"cache_{run}"), XLA_PYTHON_CLIENT_PREALLOCATE="false", **env)
    with open(folder / f"{run}.txt", "w", encoding="utf-8") as file:
      return subprocess.Popen(command, cwd=ROOT, env=its, stdout=file, stderr=subprocess.STDOUT)

  runs, metrics = {run: begin(run) for run in ("one", "other")}, []
  for run, process in runs.items():
    try:
      process.wait(max(given.left, 1))
    except subprocess.TimeoutExpired:
      process.kill()
    said, file = (folder / f"{run}.txt").read_text().splitlines(), folder / run / "metrics.jsonl"
    yield from (f"    {line[:200]}" for line in said if "deterministic" in line or "compiled again" in line)
    if process.wait() or not file.exists():
      yield from (f"    {line[:300]}" for line in said[-12:])
      continue
    read = map(json.loads, file.read_text().splitlines())
    metrics.append([{key: value for key, value in row.items() if not any(word in key for word in TIMED)}
                    for row in read])
  if len(metrics) == 2:
    one, other = metrics
    yield f"| {name} | two runs, {len(one)} rows of {len(one[-1])} metrics | {differing(one, other)} |"
    timed = [sum("autotune" in str(p) and p.is_file() for p in (folder / f"cache_{run}").rglob("*")) for run in runs]
    yield f"| {name} | kernels chosen by timing | {timed[0]} and {timed[1]} |"


def bits(given: Given) -> Iterator[str]:
  """And, where they differ, two that are told to keep every order there is."""
  flags = [f"--config.total_steps={4 if given.small else 30}", "--config.evals.val.eval_percent=0",
           "--config.evals.samples.eval_percent=0", *(SMALL if given.small else ())]
  found = list(twice(given, "bits", "quickstart", *flags))
  yield from found
  if any(": " in row and "differ from" in row for row in found):
    yield from twice(given, "bits, all ordered", "quickstart", *flags, XLA_FLAGS="--xla_gpu_deterministic_ops=true")


def differing(one: list[dict], other: list[dict]) -> str:
  found = [(row["step"], key) for row, more in zip(one, other, strict=True) for key in row.keys() | more.keys()
           if row.get(key) != more.get(key)]
  if not found:
    return "no bit differs"
  return f"differ from step {found[0][0]} on: {', '.join(sorted({key for _, key in found})[:6])}"


def verify(given: Given) -> Iterator[str]:
  began = time.monotonic()
  flags = ["--mode=verify", *(SMALL if given.small else ())]
  command = [sys.executable, "-m", "trainer", "--config=configs/quickstart.py",
             f"--workdir={given.folder / 'verify'}", *flags]
  first, how = None, ""
  for line in lines_of(given, command):
    first = first or (time.monotonic() - began if line[:4] in ("PASS", "FAIL", "SKIP") else None)
    how = "ended after " if line == ENDED else how
    yield f"{time.monotonic() - began:5.0f} s  {line}"
  yield f"| verify | the quickstart | {how}{time.monotonic() - began:.0f} s, the first check after {first or 0:.0f} s |"


def module(name: str, *flags: str, small: tuple[str, ...] = ("--small",)) -> Callable[[Given], Iterator[str]]:
  """A script of benchmarks as it is."""
  return lambda given: lines_of(given, [sys.executable, "-m", f"benchmarks.{name}", *(small if given.small else flags)])


def step(given: Given) -> Iterator[str]:
  flags = ["--steps", "2", "--ways", "as configured", "logits read twice"] if given.small else given.flags
  yield from lines_of(given, [sys.executable, "-m", "benchmarks.step_gpu", "--seconds",
                              f"{min(given.step_seconds, given.left - 45):.0f}",
                              "--profile", "30", *flags], WEFT_SPEED_SIZE=given.size)


def speed(case: str, size: str = "") -> Callable[[Given], Iterator[str]]:
  """Weft, and then each peer by itself, so that there is a row where one takes too long."""
  def rows(given: Given, **env: str) -> Iterator[str]:
    from benchmarks.speed.__main__ import PEERS as all_peers
    peers = [peer for peer in all_peers[case] if peer in PEERS] if given.peer and given.peers and not size else []
    command = [sys.executable, "-m", "benchmarks.speed", "--size", size if size and not given.small else given.size,
               "--cases", case, "--rounds", "1"]
    command += ["--peer", str(given.peer), "--peers", *peers] if peers else []
    yield from lines_of(given, command, **env)
  return rows


def generate(given: Given) -> Iterator[str]:
  """Also with kernels that are chosen by timing, which a run that is to be repeated to the bit does not take."""
  run = speed("generate")
  yield from run(given, WEFT_SPEED_PROFILE="30")
  yield "| kernels chosen by timing: |"
  yield from run(given._replace(peers=False), WEFT_SPEED_TIMED="1")


def grpo(given: Given) -> Iterator[str]:
  """Eight steps of the GRPO quickstart from fresh parameters, twice at once."""
  began = time.monotonic()
  flags = ["--config.init_from.made_by=None", "--config.init_from.path=None", "--config.evals.pass1.eval_percent=0",
           f"--config.total_steps={2 if given.small else 8}"]
  flags += ["--config.rollout.num_prompts=4"] if given.small else []
  yield from twice(given, "grpo", "quickstart_grpo", *flags)
  yield f"| grpo | both in | {time.monotonic() - began:.0f} s |"


PARTS: dict[str, Callable[[Given], Iterator[str]]] = {
    "bits": bits,
    "verify": verify,
    "table": module("lookup_gpu"),
    "attention": module("attention_gpu", "--cases", "whole rows", "documents of 512 tokens"),
    "step": step,
    "seq": speed("seq"),
    "generate": generate,
    "rollouts": speed("rollouts"),
    "grpo": grpo,
    "delta": module("delta_gpu"),
    "8b": speed("seq", "8b"),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("minutes", nargs="?", type=float, default=8.0)
  parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
  parser.add_argument("--small", action="store_true")
  parser.add_argument("--peer", default=os.environ.get("PEER") or (
      sys.executable if all(map(importlib.util.find_spec, ("torch", "transformers"))) else None))
  parser.add_argument("--alone", action="store_true", help="without the peers")
  parser.add_argument("--ways", nargs="*", default=[], help="of benchmarks/step_gpu.py; default: all")
  parser.add_argument("--step_seconds", type=float, default=150.0, help="after which no other of them is begun")
  args = parser.parse_args()
  began, rows = time.monotonic(), []
  with tempfile.TemporaryDirectory() as folder:
    given = Given(args.small, args.peer, Path(folder), began + 60 * args.minutes,
                  ["--ways", *args.ways] if args.ways else [], args.step_seconds, not args.alone)
    for name in args.parts:
      if given.left < 15:
        rows.append(f"| {name} | not begun: {args.minutes:g} minutes are over |")
        print(rows[-1], flush=True)
        continue
      print(f"\n== {name}, after {time.monotonic() - began:.0f} s", flush=True)
      for line in PARTS[name](given):
        print(line, flush=True)
        rows += [line] if line.startswith("|") else []
  print(f"\n== All rows, {time.monotonic() - began:.0f} s\n", *rows, sep="\n", flush=True)


if __name__ == "__main__":
  main()
