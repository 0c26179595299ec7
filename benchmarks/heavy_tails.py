"""Sampling completions whose lengths have a heavy tail: a cache in pages beside rows as long as the longest, in turns.

    python -m benchmarks.heavy_tails
    WEFT_SPEED_SIZE=tiny python -m benchmarks.heavy_tails --median 32 --most 512

Lengths are lognormal (sigma 1) and set as limits: fresh parameters end nowhere near so. A first round, in which both
ways are compiled, is not counted; tokens and log-probs are compared. Seconds are wall time, and those of processors,
which other programs on the machine disturb less. The model is one of benchmarks/speed/sizes.py.
"""

import argparse
import time

from trainer import startup


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, default in dict(texts=64, rows=16, median=128, most=2048, rounds=2).items():
    parser.add_argument(f"--{name}", type=int, default=default)
  args = parser.parse_args()

  import jax
  import numpy as np

  from benchmarks.speed import weft_config
  from benchmarks.speed.sizes import CHOSEN as size
  from trainer import program
  from trainer.generate.sampler import Sampler

  config, _ = program.resolve(weft_config.get_config("grpo,unused"))
  startup.set_environment(config.precision)
  startup.keep_compiled_programs()
  program.settle(config, jax.default_backend())
  model = program.make_model(config, size.vocab)
  params = jax.jit(model.init)(jax.random.key(0))
  rng = np.random.default_rng(1)
  prompts = rng.integers(4, size.vocab, (args.texts, size.prompt_len))
  limits = np.clip(args.median * np.exp(rng.normal(size=args.texts)), 1, args.most).astype(int)
  parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
  print(f"{parameters:,} parameters; {args.texts} texts, {args.rows} at a time, of {limits.mean():.0f} tokens on "
        f"average and {limits.max()} at most")
  samplers = {"rows": Sampler(model, rows=args.rows), "pages": Sampler(model, rows=args.rows)}
  for name, sampler in samplers.items():
    sampler.paged = name == "pages"
  found, seconds = {}, {name: [] for name in samplers}
  for n in range(args.rounds + 1):
    for name, sampler in samplers.items():
      wall, busy = time.perf_counter(), time.process_time()
      found[name] = sampler.generate(params, prompts, max_new_tokens=limits.tolist(), seed=n)
      wall, busy = time.perf_counter() - wall, time.process_time() - busy
      seconds[name].append((wall, busy))
      if n:
        print(f"{name:<6}{wall:8.2f} s {limits.sum() / wall:8.1f} tokens/s {busy:8.2f} s of processors", flush=True)
    pairs = list(zip(found["rows"], found["pages"], strict=True))
    same = [(a, b) for a, b in pairs if (a.ids == b.ids).all()]
    apart = max(float(abs(a.logprobs - b.logprobs).max()) for a, b in same)
  for which, what in enumerate(("wall time", "time of processors")):
    rows, pages = (min(pair[which] for pair in seconds[name][1:]) for name in ("rows", "pages"))
    print(f"pages take {rows / pages:.2f} times less {what}, best of {args.rounds}")
  print(f"of the last round {len(same)} of {args.texts} texts are the same, log-probs of these to {apart:.1e}")


if __name__ == "__main__":
  startup.use_huge_pages()
  main()
