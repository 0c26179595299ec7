"""Prompts that begin alike: time to the first token of requests one after another, with and without kept texts; and
time of a rollout of them all, with and without shared beginnings.

    python -m benchmarks.shared_prompts FOLDER [--common 500] [--own 30] [--requests 8] [--rounds 0]

FOLDER is a Hugging Face folder. Prompts are random tokens, so many in common and so many of each alone; each answer has
8 tokens, which come at once. The first two requests compile, and are not counted. With --rounds above 0 it is the
rollout, of so many prompts as there are requests, so often with and without in turns, after one of each that compiles.
"""

import argparse
import statistics
import threading
import time

import numpy as np
from jax.sharding import Mesh

from trainer.distributed import mesh as mesh_lib
from trainer.generate import command as generate
from trainer.generate.beginnings import Beginnings
from trainer.generate.sampler import Sampler
from trainer.serve.engine import Engine, How, Job


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("folder")
  for name, value in (("common", 500), ("own", 30), ("requests", 8), ("rounds", 0)):
    parser.add_argument(f"--{name}", type=int, default=value)
  given = parser.parse_args()
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=-1, tensor=1))
  loaded = generate.load_folder(given.folder, mesh)
  rng = np.random.default_rng(0)
  common, own = (rng.integers(0, 1000, size).astype(np.int32)
                 for size in (given.common, (given.requests + 2, given.own)))
  if given.rounds:
    return rollouts(loaded, mesh, [np.concatenate([common, mine]) for mine in own[2:]], given.rounds)
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


def rollouts(loaded: generate.Loaded, mesh: Mesh, prompts: list[np.ndarray], rounds: int) -> None:
  sampler, found, answers = Sampler(loaded.model, mesh, rows=32), {False: [], True: []}, []
  for nth in range(rounds + 1):
    for shares in (False, True):
      shared = Beginnings() if shares else None
      began, cpu = time.perf_counter(), time.process_time()
      said = sampler.generate(loaded.params, prompts, max_new_tokens=8, temperature=0.0, beginnings=shared)
      took = time.perf_counter() - began, time.process_time() - cpu
      answers.append([completion.ids.tolist() for completion in said])
      if nth:
        found[shares].append(took)
  for shares, took in found.items():
    run = sum(map(len, prompts)) - (shared.saved if shares else 0)
    walls, cpus = (", ".join(f"{seconds:.2f}" for seconds in part) for part in zip(*took, strict=True))
    print(f"share_beginnings={shares}: {walls} s, of processors {cpus} s; {run:,} tokens of prompts were run")
  print("answers are the same:", all(answer == answers[0] for answer in answers))


if __name__ == "__main__":
  main()
