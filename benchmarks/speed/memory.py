"""How far the memory of a training step rises with length and vocabulary, beside transformers, as a picture.

    python -m benchmarks.speed.memory --peer peers/bin/python [--out benchmarks/speed/memory.svg]

The model of `python -m benchmarks.speed`, one row, float32, AdamW, on CPU. The peak of the process's memory in a later
step, less what its imports take: parameters, gradients and moments are part of it, what compiled the step is not.
"""

import argparse
import json
import sys

from tqdm import tqdm

from benchmarks.speed.__main__ import HERE, run

LENGTHS, VOCABS = (1024, 2048, 4096, 8192, 16384), (8192, 32768, 65536, 131072)
# One of the two stays while the other grows.
LENGTH, VOCAB = 4096, 8192


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--peer", required=True, help="the Python with torch and transformers")
  parser.add_argument("--out", default=str(HERE / "memory.svg"))
  args = parser.parse_args()
  programs = {"Weft": [sys.executable, "-m", "benchmarks.speed.weft_memory"],
              "transformers": [args.peer, str(HERE / "torch_peer.py"), "memory"]}
  sizes = sorted({(length, VOCAB) for length in LENGTHS} | {(LENGTH, vocab) for vocab in VOCABS})
  found: dict[tuple[int, int], dict[str, float]] = {}
  print("| tokens | vocabulary | " + " | ".join(f"{name}, MB" for name in programs) + " |")
  print("|---" * (2 + len(programs)) + "|")
  for size in tqdm(sizes, leave=False):
    found[size] = {name: json.loads(run([*command, *map(str, size)]).splitlines()[-1])["mb"]
                   for name, command in programs.items()}
    print("| {:,} | {:,} | ".format(*size) + " | ".join(f"{mb:,.0f}" for mb in found[size].values()) + " |", flush=True)
  draw(found, tuple(programs), args.out)


def draw(found: dict[tuple[int, int], dict[str, float]], programs: tuple[str, ...], out: str) -> None:
  """Two curves for each program, over length and over vocabulary."""
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context({"svg.hashsalt": "weft", "font.size": 9}):
    figure = Figure(figsize=(8, 3), layout="constrained")
    panels = ((f"tokens in a row, {VOCAB:,} entries", [((n, VOCAB), n) for n in LENGTHS]),
              (f"entries of the vocabulary, {LENGTH:,} tokens", [((LENGTH, n), n) for n in VOCABS]))
    for axes, (label, sizes) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
      for name in programs:
        axes.plot([n for _, n in sizes], [found[size][name] / 1000 for size, _ in sizes], marker="o", label=name)
      axes.set(xlabel=label, xscale="log", yscale="log", ylabel="peak of a training step, GB")
      axes.set_yticks([2.0**n for n in range(-1, 5)], [f"{2.0**n:g}" for n in range(-1, 5)])
      axes.set_xticks([n for _, n in sizes], [f"{n // 1024}k" for _, n in sizes], minor=False)
      axes.minorticks_off()
      axes.grid(alpha=0.3)
      axes.legend()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
  main()
