"""Runs that are killed again and again, and what becomes of them, beside runs that are left alone.

    python -m benchmarks.faults [--kills 100] [--cases seq sft dpo grpo] [--seed 0]

For each strategy a small run goes to its end. The same run is then killed with SIGKILL at moments drawn evenly over the
time that a start takes, and started again, until it is done; then the next one. Every array of the last checkpoint
(parameters, optimizer, counters) must have the checksum of the run that was left alone. The table says what the
processes were doing when they were killed.
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict
from tqdm import tqdm

from benchmarks.speed import weft_config
from trainer.callbacks import Callback
from trainer.checkpoints import checkpoint
from trainer.config import evaluator

CASES, STEPS = ("seq", "sft", "dpo", "grpo"), 24
PHASES = ("start", "compile", "step", "checkpoint", "eval", "rollout", "end")


def get_config(arg: str) -> ConfigDict:
  """The run of a case of benchmarks/speed, much smaller, that saves and evaluates often; `arg`: the case, a folder."""
  c = weft_config.get_config(arg)
  c.model.update(num_layers=2, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=2, head_dim=16)
  c.update(total_steps=STEPS, ckpt_steps=2, ckpt_percent=-1.0)
  case, folder = arg.split(",")
  if case == "grpo":
    c.rollout.update(num_prompts=4, max_new_tokens=16, batch_size=16)
  if case == "seq":
    c.evals.val = evaluator(type="loss", eval_steps=3, batch_size=8, sources={"same": c.input.sources.main})
  c.callbacks = ConfigDict(dict(phases=dict(type="benchmarks.faults.Phases", path=f"{folder}/phase")))
  return c


class Phases(Callback):
  """Writes down what the process does, in a file that outlives it."""

  def __init__(self, path: str):
    self._path = path

  def _now(self, phase: str) -> None:
    with open(self._path, "w", encoding="utf-8") as file:
      file.write(phase)

  def on_train_begin(self, run):
    pause = run.chrono.pause

    @contextlib.contextmanager
    def told(kind):
      self._now(kind)
      with pause(kind):
        yield
      self._now("step")

    run.chrono.pause = told
    self._now("step")

  def on_train_end(self, run):
    self._now("end")


def command(case: str, data: Path, workdir: Path) -> list[str]:
  return [sys.executable, "-m", "trainer", f"--config=benchmarks/faults.py:{case},{data}", f"--workdir={workdir}"]


def sums(workdir: Path) -> dict[str, str]:
  """The checksum of every array of the last checkpoint."""
  return checkpoint.read_meta(workdir / "checkpoints" / str(STEPS))["checksums"]


class Kills(NamedTuple):
  """The kills of a case's runs: how many there may be, when, and what a run was doing."""

  most: int
  # The longest that a run is left alone, in seconds.
  after: float
  rng: random.Random
  killed: collections.Counter
  bar: tqdm


def until_done(case: str, data: Path, workdir: Path, kills: Kills) -> None:
  """Starts the run again and again, and kills it until there were as many kills as there may be."""
  while True:
    (data / "phase").write_text("start")
    process = subprocess.Popen(command(case, data, workdir), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True)
    try:
      if sum(kills.killed.values()) >= kills.most:
        process.wait()
      else:
        process.wait(timeout=kills.rng.uniform(0, kills.after))
    except subprocess.TimeoutExpired:
      process.send_signal(signal.SIGKILL)
      process.wait()
      kills.killed[(data / "phase").read_text() or "start"] += 1
      kills.bar.update()
    else:
      if process.returncode:
        sys.exit(f"{case}: it ended with {process.returncode}:\n{process.stderr.read()[-3000:]}")
      return


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--kills", type=int, default=100, help="over all cases")
  parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  os.chdir(Path(__file__).resolve().parent.parent)
  rng, wrong = random.Random(args.seed), 0
  print(f"| case | runs | killed | {' | '.join(f'in {phase}' for phase in PHASES)} | equal to the run left alone |")
  print("|---" * (len(PHASES) + 4) + "|")
  for number, case in enumerate(args.cases):
    with tempfile.TemporaryDirectory() as folder:
      data = Path(folder)
      weft_config.write_data(data)
      for alone in ("compiles", "alone"):  # the first fills the cache of compiled programs
        began = time.monotonic()
        subprocess.run(command(case, data, data / alone), check=True, capture_output=True)
      most, reference = time.monotonic() - began, sums(data / "alone")
      kills = args.kills * (number + 1) // len(args.cases) - args.kills * number // len(args.cases)
      killed: collections.Counter = collections.Counter()
      runs = equal = 0
      with tqdm(total=kills, desc=case, leave=False) as bar:
        while sum(killed.values()) < kills:
          until_done(case, data, data / f"run{runs}", Kills(kills, most, rng, killed, bar))
          equal += sums(data / f"run{runs}") == reference
          runs += 1
      wrong += runs - equal
      counts = " | ".join(str(killed[phase]) for phase in PHASES)
      print(f"| {case} | {runs} | {sum(killed.values())} | {counts} | {equal} of {runs} |", flush=True)
  sys.exit(1 if wrong else 0)


if __name__ == "__main__":
  main()
