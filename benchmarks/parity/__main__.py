"""Weft beside TRL, or for seq the plain PyTorch loop of `python -m trainer.parity`, step by step: the same rows in the
same order, optimizer, schedule and clipping, in float32; `bf16` in bfloat16, five seeds each.

    python -m venv peers
    peers/bin/pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0 peft==0.21.2 datasets==5.2.0
    python -m benchmarks.parity --peer peers/bin/python --model FOLDER --data FILE --out runs/parity [--plot FILE.svg]

FOLDER is a Hugging Face folder of a chat model with ChatML, the JSON Lines of --data have the columns question and
answer (GSM8K's train.jsonl say); `--tiny` does with neither: random weights, sums in words. Weft's side is `python -m
trainer` with benchmarks/parity/weft_config.py, the peer's is benchmarks/parity/trl_peer.py. Prints a table of losses
and gradient norms, and how far they are apart. What is in --out is not run again. Exits with 1 where a loss differs by
more than 1e-3, or bf16's mean lies outside of what the peer's seeds have.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.parity import settings
from trainer.telemetry.writers import read_rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BOUND = 1e-3


class Pair(NamedTuple):
  """Curves that are to agree: {loss, grad_norm} of each step, of Weft and of the peer.

  With `seeds`, those curves are the means of these pairs, and are to lie within the range of the peer's.
  """

  name: str
  weft: list[dict[str, float]]
  peer: list[dict[str, float]]
  seeds: tuple["Pair", ...] = ()

  def apart(self, key: str, relative: bool = False) -> float:
    """The largest difference of all steps."""
    return max(abs(a[key] - b[key]) / (abs(b[key]) if relative else 1)
               for a, b in zip(self.weft, self.peer, strict=True))

  def agrees(self) -> bool:
    if "as it is" in self.name:
      return True
    if not self.seeds:
      return self.apart("loss") <= BOUND
    return all(min(losses) <= step["loss"] <= max(losses) for step, losses in
               zip(self.weft, zip(*([at["loss"] for at in one.peer] for one in self.seeds), strict=True), strict=True))


def run(command: list[str], log: Path, **environment: str) -> None:
  """Runs it to its end; ends this program with its last lines where it fails."""
  with log.open("w") as file:
    done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment)
  if done.returncode:
    sys.exit("\n".join([" ".join(command), *log.read_text(errors="replace").splitlines()[-30:]]))


def weft(folder: Path, file: str = "", flags: Sequence[str] = ()) -> list[dict[str, float]]:
  """Trains a file of the folder; what it wrote of each step."""
  workdir = folder / f"weft{'-' * bool(file)}{file.partition('.')[0]}"
  steps = json.loads((folder / "settings.json").read_text())["steps"]
  rows = [row for row in read_rows(workdir / "metrics.jsonl") if "grad_norm" in row]
  if len(rows) < steps:
    run([sys.executable, "-m", "trainer", f"--config={HERE}/weft_config.py:{folder}{',' * bool(file)}{file}",
         f"--workdir={workdir}", *flags], folder / f"{workdir.name}.log", PYTHONPATH=str(ROOT))
    rows = [row for row in read_rows(workdir / "metrics.jsonl") if "grad_norm" in row]
  return [{key: row[key] for key in ("loss", "grad_norm")} for row in rows]


def peer(folder: Path, python: str, as_is: bool = False) -> dict:
  """Trains the folder's rows in Weft's order by TRL; {"versions", "steps"}."""
  out = folder / f"peer{'-as-is' * as_is}.json"
  if not out.exists():
    run([python, str(HERE / "trl_peer.py"), str(folder), str(out), *["--as-is"] * as_is], out.with_suffix(".log"),
        PYTHONPATH="")
  return json.loads(out.read_text())


def pairs(folder: Path, part: str, python: str, flags: Sequence[str], as_is: bool) -> tuple[list[Pair], dict[str, str]]:
  """The curves of a part, and the peer's versions.

  With `as_is`, TRL also as it is: for sft beside Weft on labels as TRL's, for kto beside the same run as before.
  """
  if part == "seq":
    return pretraining(folder, python, flags)
  if part == "lora" and not (folder / "peer.json").exists():
    run([python, str(HERE / "trl_peer.py"), str(folder), str(folder / "adapter"), "--adapter"], folder / "adapter.log",
        PYTHONPATH="")
  ours = weft(folder, flags=flags)
  theirs = peer(folder, python)
  found = [Pair(part, ours, theirs["steps"])]
  if part == "grpo":
    advantages = json.loads((folder / "advantages.json").read_text())
    assert advantages.keys() == theirs["advantages"].keys()
    apart = max(abs(value - theirs["advantages"][text]) for text, value in advantages.items())
    print(f"advantages of grpo's first step differ by at most {apart:.1e}")
  if as_is and part in ("sft", "kto"):
    if part == "sft":
      ours = weft(folder, "tokens.jsonl", flags)
    found.append(Pair(f"{part}, TRL as it is", ours, peer(folder, python, as_is=True)["steps"]))
  return found, theirs["versions"]


def pretraining(folder: Path, python: str, flags: Sequence[str]) -> tuple[list[Pair], dict[str, str]]:
  """As `pairs`, of `python -m trainer.parity`."""
  both, steps = folder / "both", json.loads((folder / "settings.json").read_text())["steps"]
  if not (both / "peer.json").exists():
    config = f"--config={HERE}/weft_config.py:{folder},rows.jsonl"
    run([sys.executable, "-m", "trainer.parity", config, f"--workdir={both}", f"--steps={steps}", f"--peer={python}",
         *flags], folder / "both.log", PYTHONPATH=str(ROOT))
  ours, theirs = (json.loads((both / f"{side}.json").read_text()) for side in ("weft", "peer"))
  return [Pair("seq", ours, theirs["steps"])], theirs["versions"]


def of_seeds(name: str, of: Sequence[Pair]) -> Pair:
  """The mean of pairs that differ in their seeds."""
  def mean(runs: Sequence[list[dict[str, float]]]) -> list[dict[str, float]]:
    return [{key: sum(at[key] for at in step) / len(step) for key in step[0]} for step in zip(*runs, strict=True)]

  return Pair(f"{name}, {len(of)} seeds", mean([one.weft for one in of]), mean([one.peer for one in of]), tuple(of))


def table(found: Sequence[Pair]) -> str:
  """Markdown: first and last losses, and the largest differences of all steps."""
  lines = ["| | steps | Weft's loss, first and last | the peer's | largest difference | of gradient norms, relative |",
           "|---|---|---|---|---|---|"]
  for pair in found:
    first_last = [f"{side[0]['loss']:.6f}, {side[-1]['loss']:.6f}" for side in (pair.weft, pair.peer)]
    lines.append(f"| {pair.name} | {len(pair.weft)} | {first_last[0]} | {first_last[1]} | {pair.apart('loss'):.1e} | "
                 f"{pair.apart('grad_norm', relative=True):.1e} |")
  return "\n".join(lines)


def draw(found: Sequence[Pair], out: Path) -> None:
  """A column for each part: losses, gradient norms, and the differences of both."""
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 8}):
    figure = Figure(figsize=(2.6 * len(found), 5), layout="constrained")
    axes = figure.subplots(3, len(found), sharex="col", squeeze=False)
    for (loss, norm, apart), pair in zip(axes.T, found, strict=True):
      at = range(1, len(pair.weft) + 1)
      for axis, key in ((loss, "loss"), (norm, "grad_norm")):
        axis.plot(at, [step[key] for step in pair.peer], lw=4, color="#ffb74d", label="peer")
        axis.plot(at, [step[key] for step in pair.weft], lw=1, color="#3f51b5", label="Weft")
        for side, color in (("peer", "#ffb74d"), ("weft", "#3f51b5")) if pair.seeds else ():
          steps = [[at[key] for at in step] for step in zip(*(getattr(one, side) for one in pair.seeds), strict=True)]
          axis.fill_between(at, list(map(min, steps)), list(map(max, steps)), color=color, alpha=0.25, lw=0)
        differences = [abs(a[key] - b[key]) / (abs(b[key]) if key == "grad_norm" else 1)
                       for a, b in zip(pair.weft, pair.peer, strict=True)]
        apart.plot(at, [max(d, 1e-9) for d in differences], lw=1, label=key.replace("_", " "))
      loss.set_title(pair.name)
      if max(abs(step["loss"]) for step in pair.weft) < BOUND:  # GRPO's on policy is rounding alone
        loss.set_ylim(-1, 1)
      apart.set(yscale="log", ylim=(1e-9, 1), xlabel="step")
      apart.minorticks_off()
      apart.axhline(BOUND, color="#999", ls="--", lw=0.8)
    for axis, label in zip(axes[:, 0], ("loss", "gradient norm", "difference"), strict=True):
      axis.set_ylabel(label)
    axes[0, 0].legend()
    axes[2, 0].legend()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("parts", nargs="*", default=list(settings.PARTS), help=f"of {', '.join(settings.PARTS)}")
  parser.add_argument("--peer", required=True, help="the Python with torch, transformers, trl, peft and datasets")
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--model", type=Path)
  parser.add_argument("--data", type=Path)
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--as-is", action="store_true", help="also what TRL does of its own way")
  parser.add_argument("--steps", type=int, help="in place of those of the part")
  parser.add_argument("--batch", type=int, help="rows of a step, in place of those of the part")
  parser.add_argument("--plot", type=Path)
  parser.add_argument("--flags", nargs="*", default=[], help="for Weft, last: --flags=--config.KEY=VALUE")
  args = parser.parse_args()
  if args.tiny == bool(args.model) or bool(args.model) != bool(args.data):
    parser.error("give --model with --data, or --tiny alone.")
  if odd := set(args.parts) - set(settings.PARTS):
    parser.error(f"no part {', '.join(sorted(odd))}; there are {', '.join(settings.PARTS)}.")
  changed = {key: value for key, value in (("steps", args.steps), ("batch_size", args.batch)) if value}
  found, versions = [], {}
  for part in args.parts:
    seeds = settings.SEEDS.get(part, 1)
    of_part = []
    for seed in range(seeds):
      folder = (args.out / part / str(seed) if seeds > 1 else args.out / part).resolve()
      settings.write(folder, part, args.model, args.data, **changed, seed=seed)
      curves, versions = pairs(folder, part, args.peer, args.flags, args.as_is)
      of_part += curves
    found += of_part if seeds == 1 else [of_seeds(part, of_part)]
  print(table(found))
  print(", ".join(f"{name} {version}" for name, version in versions.items()))
  if args.plot:
    draw(found, args.plot)
  sys.exit(not all(pair.agrees() for pair in found))


if __name__ == "__main__":
  main()
