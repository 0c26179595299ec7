"""Whether the device waits for the host between steps, and what else than steps takes time: of one run.

    python -m benchmarks.dispatch [configs/quickstart.py] [--steps 700]

Steps are dispatched ahead: when the next one is about to be, the one before should still be computed. A step before
which the device had nothing left to do counts as waited for; steps that follow an evaluation, a checkpoint or a
compilation, which wait by intention, count apart.
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path

from trainer import startup
from trainer.callbacks import Callback


class Ahead(Callback):
  """Counts the steps that the device waited for."""

  steps = late = after_pauses = 0

  def __init__(self):
    self._paused = True

  def on_step_begin(self, run):
    if self._paused:
      Ahead.after_pauses += 1
    else:
      Ahead.steps += 1
      Ahead.late += bool(run.state["step"].is_ready())
    self._paused = False

  def on_eval(self, run, name, metrics):
    self._paused = True

  def on_checkpoint(self, run, step):
    self._paused = True


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("config", nargs="?", default="configs/quickstart.py")
  parser.add_argument("--steps", type=int, help="instead of the config's")
  args = parser.parse_args()
  from trainer import train

  spec = importlib.util.spec_from_file_location("config", args.config)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  config.callbacks.ahead = dict(type="benchmarks.dispatch.Ahead")
  if args.steps:
    config.total_steps = args.steps
  with tempfile.TemporaryDirectory() as folder:
    run = train(config, Path(folder) / "run")
  # The class that the config named, which is not this one where the file runs as a program.
  from benchmarks.dispatch import Ahead as counted

  seconds = run.chrono.state()
  total = sum(seconds.values())
  print("\n| what | seconds | share |\n|---|---|---|")
  for kind, part in sorted(seconds.items(), key=lambda item: -item[1]):
    print(f"| {kind} | {part:.2f} | {part / total:.2%} |")
  print(f"\nof {counted.steps:,} steps that followed another the device waited for {counted.late:,}; "
        f"{counted.after_pauses:,} more followed the start, an evaluation or a checkpoint")


if __name__ == "__main__":
  startup.use_huge_pages()
  startup.set_environment()
  main()
