"""Weft's side of the cases `generate` and `rollouts`: python -m benchmarks.speed.weft_generate CASE; prints JSON.

Fresh parameters, sampled from by the class that rollouts use.
"""

import json
import resource
import sys
import time

from trainer import startup


def main(case: str) -> None:
  import jax
  import numpy as np

  from benchmarks.speed import sizes as s
  from benchmarks.speed import weft_config
  from trainer import program
  from trainer.sampler import Sampler

  config, _ = program.resolve(weft_config.get_config("grpo,unused"))
  program.settle(config, "cpu")
  model = program.make_model(config, s.VOCAB)
  params = jax.jit(model.init)(jax.random.key(0))
  rng, marks, tokens = np.random.default_rng(1), [time.perf_counter()], []
  steps = s.STEPS if case == "generate" else s.ROLL_STEPS
  if case == "generate":
    count, group, rows, options = s.PROMPTS * s.GROUP, 1, s.PROMPTS * s.GROUP, dict(max_new_tokens=s.NEW)
  else:
    count, group, rows = s.ROLL_PROMPTS, s.ROLL_GROUP, s.ROLL_ROWS
    options = dict(max_new_tokens=s.ROLL_NEW, stop_ids=range(s.VOCAB - s.ROLL_STOPS, s.VOCAB))
  sampler = Sampler(model, rows=rows)
  for n in range(s.WARMUP + steps):
    prompts = rng.integers(len(s.SPECIAL), s.VOCAB, (count, s.PROMPT_LEN))
    completions = sampler.generate(params, prompts, num_samples=group, seed=n, **options)
    marks.append(time.perf_counter())
    tokens.append(sum(len(completion.ids) for completion in completions))
    assert len(completions) == count * group
    assert case != "generate" or tokens[-1] == s.TOKENS["generate"]
  print(json.dumps(dict(
      first_step_at=time.time() - time.perf_counter() + marks[1],
      step_seconds=[b - a for a, b in zip(marks, marks[1:], strict=False)], losses=[], tokens=tokens,
      versions={"jax": jax.__version__}, parameters=sum(p.size for p in jax.tree.leaves(params)),
      peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)))


if __name__ == "__main__":
  startup.use_huge_pages()
  startup.set_compiler_flags()
  startup.keep_compiled_programs()
  main(sys.argv[1])
