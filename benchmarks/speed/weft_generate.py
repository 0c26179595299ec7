"""Weft's side of the case `generate`: python -m benchmarks.speed.weft_generate; prints one line of JSON.

Fresh parameters, sampled from by the class that rollouts use.
"""

import json
import resource
import time

from trainer import startup


def main() -> None:
  import jax
  import numpy as np

  from benchmarks.speed import sizes as s
  from benchmarks.speed import weft_config
  from trainer import program
  from trainer.sampler import Sampler

  config, _ = program.resolve(weft_config.get_config("grpo,unused"))
  program.settle_precision(config, "cpu")
  model = program.make_model(config, s.VOCAB)
  params = jax.jit(model.init)(jax.random.key(0))
  rng, rows = np.random.default_rng(1), s.PROMPTS * s.GROUP
  sampler = Sampler(model, rows=rows)
  marks = [time.perf_counter()]
  for n in range(s.WARMUP + s.STEPS):
    prompts = rng.integers(len(s.SPECIAL), s.VOCAB, (rows, s.PROMPT_LEN))
    completions = sampler.generate(params, prompts, max_new_tokens=s.NEW, seed=n)
    assert all(len(completion.ids) == s.NEW for completion in completions)
    marks.append(time.perf_counter())
  print(json.dumps(dict(
      first_step_at=time.time() - time.perf_counter() + marks[1],
      step_seconds=[b - a for a, b in zip(marks, marks[1:], strict=False)], losses=[],
      versions={"jax": jax.__version__}, parameters=sum(p.size for p in jax.tree.leaves(params)),
      peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)))


if __name__ == "__main__":
  startup.use_huge_pages()
  startup.set_compiler_flags()
  startup.keep_compiled_programs()
  main()
