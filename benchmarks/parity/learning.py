"""GRPO of Weft beside TRL's, each with its own sampler: do both learn as much from as many completions?

    python -m benchmarks.parity.learning --peer peers/bin/python --out runs/learning [--plot FILE.svg]

Both begin with the model of configs/quickstart_arithmetic.py, which errs in half of its sums and differences (`--base`
is the workdir of such a run; without it one is made), and are told of what they write whether it is right. Several
seeds each: what is sampled, and in which order prompts are asked. Prints the share of right answers to exercises that
neither has trained on, at temperature 1, as the mean of the seeds and their range, and the wall time of each side's
whole command, evaluations and start-up included. What is in --out is not run again.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from benchmarks.parity.__main__ import HERE, ROOT, run
from configs import quickstart_arithmetic, quickstart_grpo
from input_pipeline.sources.sources import open_source
from trainer.config import source
from trainer.telemetry.writers import read_rows

SIDES = ("weft", "trl")
SETTINGS = dict(steps=100, evals=10, prompts=32, group=8, new_tokens=8, learning_rate=1e-3, b1=0.9, b2=0.95, eps=1e-8,
                clip_norm=1.0, held_out=512)


class Curve(NamedTuple):
  """Of one side and seed: the share of right answers after so many updates, and the seconds of the command."""

  side: str
  steps: list[int]
  right: list[float]
  seconds: float


def write(out: Path, base: Path | None, settings: dict) -> None:
  """Writes settings.json, the initial model as a Hugging Face folder, and the exercises as JSON Lines.

  Raises:
    ValueError: the folder holds results of other settings.
  """
  out.mkdir(parents=True, exist_ok=True)
  file = out / "settings.json"
  if file.exists() and json.loads(file.read_text()) != settings:
    raise ValueError(f"{out} holds results of other settings than these; remove it, or choose another --out.")
  if not (out / "model" / "config.json").exists():
    if base is None:
      base = out / "base"
      run([sys.executable, "-m", "trainer", f"--config={ROOT}/configs/quickstart_arithmetic.py", f"--workdir={base}"],
          out / "base.log", PYTHONPATH=str(ROOT))
    run([sys.executable, "-m", "trainer.export", f"--workdir={base}", f"--out={out / 'model'}", "--dtype=float32"],
        out / "export.log", PYTHONPATH=str(ROOT))
  for split, most in (("train", None), ("validation", settings["held_out"])):
    exercises = open_source(source(type="arithmetic", split=split), "sums", max_documents=most).records()
    (out / f"{split}.jsonl").write_text("".join(json.dumps(record.fields) + "\n" for record in exercises), "utf-8")
  file.write_text(json.dumps(settings, indent=1))


def get_config(arg: str) -> ConfigDict:
  """Weft's side; `arg`: the folder that `write` made, and the seed."""
  folder, _, seed = arg.rpartition(",")
  s = json.loads((Path(folder) / "settings.json").read_text())
  c = quickstart_grpo.get_config("")
  c.seed, c.init_from.path, c.init_from.made_by, c.model.hf = int(seed), None, None, f"{folder}/model"
  for key in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "qk_norm"):
    c.model[key] = quickstart_arithmetic.get_config().model[key]
  c.input.sources.sums = source(type="jsonl", path=f"{folder}/train.jsonl", split="all")
  c.rollout.num_prompts, c.rollout.group_size, c.rollout.max_new_tokens = s["prompts"], s["group"], s["new_tokens"]
  c.rollout.updates, c.total_steps = 1, s["steps"]
  c.strategy.kl_coef = 0.0
  o = c.optimizer
  o.learning_rate, o.b1, o.b2, o.eps, o.clip_norm = s["learning_rate"], s["b1"], s["b2"], s["eps"], s["clip_norm"]
  o.weight_decay = 0.0
  c.precision.params = c.precision.compute = "float32"
  c.evals.pass1.sources = dict(sums=source(type="jsonl", path=f"{folder}/validation.jsonl", split="all"))
  c.evals.pass1.max_documents, c.evals.pass1.batch_size = s["held_out"], s["held_out"]
  c.evals.pass1.eval_percent = 100.0 / s["evals"]
  c.ckpt_percent = 0.0
  c.report = False
  return c


def curve(out: Path, side: str, seed: int, peer: str) -> Curve:
  """Runs a side with a seed, unless its result is there."""
  result, log = out / f"{side}-{seed}.json", out / f"{side}-{seed}.log"
  if not result.exists():
    began = time.monotonic()
    if side == "weft":
      workdir = out / f"weft-{seed}"
      run([sys.executable, "-m", "trainer", f"--config={HERE}/learning.py:{out},{seed}", f"--workdir={workdir}"], log,
          PYTHONPATH=str(ROOT))
      rows = [row for row in read_rows(workdir / "metrics.jsonl") if "eval/pass1/pass@1" in row]
      found = [[row["step"], row["eval/pass1/pass@1"]] for row in rows]
    else:
      run([peer, str(HERE / "trl_learner.py"), str(out), str(seed), str(out / f"trl-{seed}.curve")], log,
          PYTHONPATH="")
      found = json.loads((out / f"trl-{seed}.curve").read_text())
    result.write_text(json.dumps({"curve": found, "seconds": time.monotonic() - began}))
  kept = json.loads(result.read_text())
  steps, right = zip(*kept["curve"], strict=True)
  return Curve(side, list(steps), list(right), kept["seconds"])


def band(curves: Sequence[Curve]) -> np.ndarray:
  """[3, evaluations]: mean, least and most of the seeds."""
  right = np.array([one.right for one in curves])
  return np.stack([right.mean(0), right.min(0), right.max(0)])


def table(found: dict[str, list[Curve]]) -> str:
  """Markdown: what the seeds of each side have learned by when."""
  lines = ["| updates | " + " | ".join(f"{side}: mean (least to most)" for side in found) + " |",
           "|---|" + "---|" * len(found)]
  bands = {side: band(curves) for side, curves in found.items()}
  for i, step in enumerate(next(iter(found.values()))[0].steps):
    cells = [f"{b[0, i]:.3f} ({b[1, i]:.3f} to {b[2, i]:.3f})" for b in bands.values()]
    lines.append(f"| {step} | {' | '.join(cells)} |")
  seconds = [f"{np.mean([one.seconds for one in curves]):.0f} s" for curves in found.values()]
  return "\n".join([*lines, f"| wall time | {' | '.join(seconds)} |"])


def draw(found: dict[str, list[Curve]], out: Path) -> None:
  """Means as lines, ranges of seeds as bands."""
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 8}):
    figure = Figure(figsize=(4.5, 3), layout="constrained")
    axis = figure.subplots()
    for (side, curves), color in zip(found.items(), ("#3f51b5", "#ffb74d"), strict=False):
      mean, least, most = band(curves)
      axis.plot(curves[0].steps, mean, color=color, label=f"{side}, {len(curves)} seeds")
      axis.fill_between(curves[0].steps, least, most, color=color, alpha=0.25, lw=0)
    axis.set(xlabel="updates", ylabel="right answers to held-out exercises")
    axis.legend()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--peer", required=True, help="the Python with torch, transformers, trl and datasets")
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--base", type=Path, help="the workdir of a run of configs/quickstart_arithmetic.py")
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
  parser.add_argument("--plot", type=Path)
  args = parser.parse_args()
  out = args.out.resolve()
  write(out, args.base, SETTINGS | {"steps": args.steps})
  # Seed by seed, so that a busy hour of the machine is shared by both.
  found: dict[str, list[Curve]] = {side: [] for side in SIDES}
  for seed in range(args.seeds):
    for side in SIDES:
      found[side].append(curve(out, side, seed, args.peer))
      print(f"{side}, seed {seed}: {found[side][-1].right[-1]:.3f} in {found[side][-1].seconds:.0f} s", flush=True)
  print(table(found))
  if args.plot:
    draw(found, args.plot)


if __name__ == "__main__":
  main()
