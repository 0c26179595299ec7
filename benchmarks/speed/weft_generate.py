"""Weft's side of the cases `generate` and `rollouts`: python -m benchmarks.speed.weft_generate CASE; prints JSON.

Fresh parameters, sampled from by the class that rollouts use. With WEFT_SPEED_PROFILE=N in the environment, N kernels
that take most of a batch's time come before; with WEFT_SPEED_TIMED=1 kernels are chosen by timing, as in runs with
`deterministic=False`.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainer import startup


def main(case: str) -> None:
  import jax
  import numpy as np

  from benchmarks.speed import sizes as s
  from benchmarks.speed import weft_config
  from benchmarks.speed.sizes import CHOSEN as size
  from trainer import program
  from trainer.generate.sampler import Sampler
  from trainer.telemetry import hardware

  config, _ = program.resolve(weft_config.get_config("grpo,unused"))
  startup.set_environment(config.precision, untimed=not os.environ.get("WEFT_SPEED_TIMED"))
  startup.keep_compiled_programs()
  program.settle(config, jax.default_backend())
  model = program.make_model(config, size.vocab)
  params = jax.jit(model.init)(jax.random.key(0))
  rng, marks, tokens = np.random.default_rng(1), [time.perf_counter()], []
  steps = s.STEPS if case == "generate" else s.ROLL_STEPS
  if case == "generate":
    count, group, rows, options = size.prompts * size.group, 1, size.prompts * size.group, dict(max_new_tokens=size.new)
  else:
    count, group, rows = size.roll_prompts, size.roll_group, size.roll_rows
    options = dict(max_new_tokens=size.roll_new, stop_ids=range(size.vocab - size.roll_stops, size.vocab))
  sampler = Sampler(model, rows=rows)
  for n in range(s.WARMUP + steps):
    prompts = rng.integers(len(s.SPECIAL), size.vocab, (count, size.prompt_len))
    completions = sampler.generate(params, prompts, num_samples=group, seed=n, **options)
    marks.append(time.perf_counter())
    tokens.append(sum(len(completion.ids) for completion in completions))
    assert len(completions) == count * group
    assert case != "generate" or tokens[-1] == size.tokens("generate")
  if number := int(os.environ.get("WEFT_SPEED_PROFILE", "0")):
    for line in kernels(lambda: sampler.generate(params, prompts, num_samples=group, seed=0, **options), number):
      print(line)
  kind, limit = jax.devices()[0].device_kind, {}
  if case == "generate" and (chip := hardware.find(kind)):
    # Each token of all texts reads the parameters but for the embeddings, which it looks up, and the texts so far.
    read = sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(jax.eval_shape(model.decoding_params, params)))
    read -= size.vocab * size.hidden * 2
    cache = size.layers * 2 * size.kv_heads * size.head_dim * 2 * (size.prompt_len + size.new / 2)
    limit["limit_seconds"] = size.new * (read + count * cache) / hardware.CHIPS[chip].memory_bandwidth
  print(json.dumps(dict(
      first_step_at=time.time() - time.perf_counter() + marks[1],
      step_seconds=[b - a for a, b in zip(marks, marks[1:], strict=False)], losses=[], tokens=tokens,
      versions={"jax": jax.__version__}, parameters=sum(p.size for p in jax.tree.leaves(params)),
      device=kind, peak_mb=weft_config.peak_mb(), **limit)))


def kernels(run: Callable[[], object], number: int) -> list[str]:
  """Those that take most of its time."""
  import jax

  from benchmarks.step_gpu import kernels_of
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    return kernels_of(Path(folder), number)


if __name__ == "__main__":
  startup.use_huge_pages()
  main(sys.argv[1])
