"""Random numbers on CPU as JAX compiles them by itself, and as models/cpu/random_bits.py has it:
compiling them, drawing them.

    python -m benchmarks.drawing

What the model of benchmarks/speed draws: its parameters, a bit for each place of a dropout mask, 32 for each number
that is rounded at random, a token for each of 8 rows of logits. The bits are the same.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.speed.sizes import CHOSEN as size

REPEATS = 7
LAYER = [(size.hidden, size.hidden)] * 4 + [(size.hidden, size.ffn)] * 2 + [(size.ffn, size.hidden)]
SHAPES = [(size.vocab, size.hidden), (size.hidden, size.vocab), *[(size.layers, *shape) for shape in LAYER]]


def of_each(draw):
  """For the shape of each parameter, with a key of its own."""
  return lambda key: [draw(jax.random.fold_in(key, i), shape) for i, shape in enumerate(SHAPES)]


DRAWN = {
    "parameters": of_each(jax.random.normal),
    "rounding": of_each(lambda key, shape: jax.random.bits(key, shape) & 0xFFFF),
    "dropout": lambda key: jax.random.bernoulli(key, 0.9, (size.batch, size.seq, size.hidden)),
    "tokens": lambda key: jax.random.categorical(key, jnp.zeros((8, size.vocab))),
}


def measure() -> dict[str, tuple[float, float]]:
  """{what: (seconds to compile it, seconds to draw it, at the median)}."""
  key, found = jax.random.key(0), {}
  jax.jit(lambda key: jax.random.normal(key, (2, 2)))(key)  # what comes first compiles for longer
  for name, draw in DRAWN.items():
    lowered = jax.jit(draw).lower(key)
    marks = [time.perf_counter()]
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    for _ in range(REPEATS + 1):
      jax.block_until_ready(compiled(key))
      marks.append(time.perf_counter())
    compiling, _, *drawing = (b - a for a, b in zip(marks, marks[1:], strict=False))
    found[name] = compiling, statistics.median(drawing)
  return found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--child", choices=("alone", "ours"), help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    if args.child == "ours":
      from models import cpu
      cpu.write_out_random_bits()
    print(json.dumps(measure()))
    return
  results = {}
  for who in ("alone", "ours"):
    command = [sys.executable, "-m", "benchmarks.drawing", "--child", who]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parents[1], check=True, stdout=subprocess.PIPE)
    results[who] = json.loads(done.stdout)
  print("| drawn | compiled by JAX alone, s | here, s | drawn by JAX alone, ms | here, ms |\n|---|---|---|---|---|")
  for name in DRAWN:
    (alone, slow), (ours, fast) = (results[who][name] for who in ("alone", "ours"))
    print(f"| {name} | {alone:.2f} | {ours:.2f} | {1e3 * slow:.1f} | {1e3 * fast:.1f} |")


if __name__ == "__main__":
  main()
