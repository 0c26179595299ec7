"""Which learning rate is best at which width, with muP and without.

    python -m benchmarks.mup --out runs/mup --plot runs/mup.svg

Trains a small Llama on Python's own standard library sources (configs/quickstart.py) at several widths and rates, with
`model.mup_base_size` and without, and prints the mean loss of the last tenth of the steps. What is in --out is not run
again.
"""

import argparse
import contextlib
import statistics
from pathlib import Path

from configs import quickstart
from trainer import train
from trainer.telemetry.writers import read_rows

HEAD = 16


def loss(out: Path, width: int, exponent: int, base: int | None, steps: int) -> float:
  """The mean training loss of the last tenth of the steps."""
  workdir = out / f"{'plain' if base is None else 'mup'}-{width}-{exponent}"

  def losses() -> list[float]:
    return [row["loss"] for row in read_rows(workdir / "metrics.jsonl") if "grad_norm" in row]

  if len(losses()) < steps:
    c = quickstart.get_config()
    c.update(total_steps=steps, log_steps=1, batch_size=16, seq_len=64, ckpt_steps=steps)
    c.evals = {}
    c.model.update(num_layers=2, hidden_size=width, intermediate_size=3 * width, num_heads=width // HEAD,
                   head_dim=HEAD, qk_norm=False, mup_base_size=base)
    c.optimizer.update(name="adamw", learning_rate=2.0**exponent, weight_decay=0.0)
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "log.txt").open("w") as file, contextlib.redirect_stdout(file):
      train(c, workdir)
  return statistics.mean(losses()[-max(steps // 10, 1):])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--plot", type=Path)
  parser.add_argument("--widths", type=int, nargs="*", default=[32, 64, 128, 256])
  parser.add_argument("--exponents", type=int, nargs="*", default=[-9, -8, -7, -6, -5, -4], help="rates are 2 ** these")
  parser.add_argument("--steps", type=int, default=200)
  args = parser.parse_args()
  found: dict[tuple[str, int], list[float]] = {}
  for name, base in (("plain", None), ("muP", args.widths[0])):
    print(f"| {name}: width | {' | '.join(f'2^{e}' for e in args.exponents)} | best |")
    print(f"|{'---|' * (len(args.exponents) + 2)}")
    for width in args.widths:
      found[name, width] = [loss(args.out, width, e, base, args.steps) for e in args.exponents]
      best = args.exponents[found[name, width].index(min(found[name, width]))]
      print(f"| {width} | {' | '.join(f'{x:.3f}' for x in found[name, width])} | 2^{best} |", flush=True)
  if args.plot:
    draw(args, found)


def draw(args: argparse.Namespace, found: dict[tuple[str, int], list[float]]) -> None:
  """Loss by rate, a line for each width; without muP and with it."""
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 8}):
    figure = Figure(figsize=(7, 3), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2, sharey=True), ("plain", "muP"), strict=True):
      for shade, width in enumerate(args.widths):
        losses = found[name, width]
        color = matplotlib.colormaps["viridis"](shade / len(args.widths))
        axis.plot(args.exponents, losses, color=color, label=f"width {width}")
        axis.plot(args.exponents[losses.index(min(losses))], min(losses), "o", color=color)
      axis.set(title="with muP" if name == "muP" else "without", xlabel="learning rate, 2 to the")
    figure.axes[0].set_ylabel("loss")
    figure.axes[0].legend()
    figure.savefig(args.plot, metadata={"Date": None} if args.plot.suffix == ".svg" else None)


if __name__ == "__main__":
  main()
