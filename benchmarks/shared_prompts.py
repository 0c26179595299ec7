"""Time to the first token of requests that begin alike, with and without kept texts: one request after another.

    python -m benchmarks.shared_prompts FOLDER [--common 500] [--own 30] [--requests 8]

FOLDER is a Hugging Face folder. Prompts are random tokens, so many in common and so many of each alone; each answer has
8 tokens, which come at once. The first two requests compile, and are not counted.
"""

import argparse
import statistics
import threading
import time

import numpy as np

from trainer.distributed import mesh as mesh_lib
from trainer.generate import command as generate
from trainer.generate.sampler import Sampler
from trainer.serve.engine import Engine, How, Job


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("folder")
  for name, value in (("common", 500), ("own", 30), ("requests", 8)):
    parser.add_argument(f"--{name}", type=int, default=value)
  given = parser.parse_args()
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=-1, tensor=1))
  loaded = generate.load_folder(given.folder, mesh)
  rng = np.random.default_rng(0)
  common, own = (rng.integers(0, 1000, size).astype(np.int32)
                 for size in (given.common, (given.requests + 2, given.own)))
  said = []
  for kept_texts in (0, 16):
    sampler = Sampler(loaded.model, mesh, rows=8, chunk=generate.CHUNK)
    engine = Engine(sampler, loaded.params, loaded.tokenizer, kept_texts)
    firsts, answers = [], []
    for mine in own:
      parts, told = [], threading.Event()
      began = time.perf_counter()

      def report(part, parts=parts, told=told, began=began, firsts=firsts):
        firsts.extend([time.perf_counter() - began] * (not parts))
        parts.append(part)
        if isinstance(part, BaseException) or part.finish_reason:
          told.set()

      engine.submit(Job(np.concatenate([common, mine]), 8, 1, How(temperature=0.0, seed=0), report))
      told.wait()
      answers.append(np.concatenate([part.ids for part in parts]).tolist())
    engine.close()
    said.append(answers)
    reused = 0 if engine.kept is None else engine.kept.shared
    print(f"kept_texts={kept_texts}: first tokens after {statistics.median(firsts[2:]):.3f} s (median of "
          f"{given.requests}), {reused} tokens of prompts were kept", flush=True)
  print("answers are the same:", said[0] == said[1])


if __name__ == "__main__":
  main()
