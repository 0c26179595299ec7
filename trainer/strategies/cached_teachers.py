"""What teachers say of all data, computed before the first step and kept beside the token caches: `cached_top_k`.

It belongs to a teacher's parameters, by their fingerprint (trainer/checkpoints/fingerprint.py). Which fingerprint the
parameters in some files have is remembered, in `teachers.json` beside the caches, under a hash of the files' contents;
so a cache that is there is found without reading the teacher. It is computed before the student is made: whichever of
them is larger has the memory for itself.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from input_pipeline.evaluation import default_cache_dir
from input_pipeline.files import FileHasher
from input_pipeline.loader import used_sources
from trainer import atomic, strategies
from trainer.checkpoints.fingerprint import fingerprint
from trainer.distributed import mesh as mesh_lib
from trainer.distributed import processes
from trainer.strategies import reference, teacher, teachers, top_k
from trainer.strategies.divergence import Side

# Raise when the same files would give other parameters.
VERSION = 1


class Prints:
  """Fingerprints of models by the files that they are in, as `teachers.json` of a folder remembers them."""

  def __init__(self, folder: Path):
    self._file, self._hasher = Path(folder) / "teachers.json", FileHasher(folder)
    try:
      self._known = json.loads(self._file.read_text("utf-8"))
    except (OSError, ValueError):
      self._known = {}

  def key(self, path: str, of: str, made: str) -> str:
    """A hash of all that decides the parameters of a teacher.

    Args:
      path, of: where it is, and what messages call that.
      made: what is made of the files: the model and its dtype.
    """
    source = teacher.find(path, of)
    contents = [[name, self._hasher(file)] for name, file in sorted(teacher.files(source).items())]
    self._hasher.save()
    return hashlib.blake2b(json.dumps([VERSION, contents, made]).encode(), digest_size=16).hexdigest()

  def get(self, key: str) -> str | None:
    return self._known.get(key)

  def remember(self, key: str, found: str) -> None:
    self._known[key] = found
    self._file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(self._file, json.dumps(self._known, indent=1))


def precompute(config: Any, program: Any, datasets: Sequence[Any], workdir: Path) -> tuple[str, str] | None:
  """Gives every dataset its teachers' most probable tokens, computed now unless they are in the cache, with one teacher
  in memory after another, or none. Args: see `reference.precompute`.

  Returns:
    The fingerprint of them all, and the key of the config that gives them. None: there is nothing to compute.
  """
  cfg, names, folder = config.strategy, used_sources(config.input), default_cache_dir(config, workdir)
  if not (program.precompute and strategies.of(config).teacher) or teachers.in_rows(cfg):
    return None
  all_of, weights_SxK = teachers.of(cfg), teachers.weights(cfg, names)
  models = {name: teachers.make_model(config, one) for name, one in all_of.items()}
  real = min([program.model.num_real_vocab, *(model.num_real_vocab for model in models.values())])
  said: list[list[Any]] = [[] for _ in datasets]
  prints, known = {}, Prints(folder)
  for number, (name, model) in enumerate(models.items()):
    spec = repr(getattr(model, "spec", all_of[name].path))
    sources = [source for source, weight in zip(names, weights_SxK[:, number], strict=True) if weight > 0]

    def kept_for(found: str, spec: str = spec, sources: list[str] = sources) -> list[Any]:
      identity = json.dumps([found, spec, config.precision.compute, program.options.micro_batch_size, cfg.temperature,
                             cfg.cached_top_k, real])
      return [data.teacher(identity, folder, cfg.cached_top_k, sources) for data in datasets]

    # What the first process remembers counts for all, since they read a teacher together.
    key = known.key(all_of[name].path, all_of[name].key, f"{spec} {config.precision.params}")
    before = processes.from_first(known.get(key))
    of_data = [] if before is None else kept_for(before)
    if before is not None and processes.from_first(all(one.complete for one in of_data)):
      prints[name] = before
    else:
      target = mesh_lib.placed_shapes(model.abstract_params(), program.mesh, config.sharding_rules)
      params = teacher.load(config, target, all_of[name].path, all_of[name].key)
      prints[name] = fingerprint({"teacher": params})
      if jax.process_index() == 0:
        known.remember(key, prints[name])
      of_data = kept_for(prints[name])
      compute = jax.jit(functools.partial(_most_probable, model, real, cfg, program.model.vocab_chunk))
      for one in of_data:
        reference.complete(one, program, f"teacher {name}".strip(), lambda batch, of=compute, params=params: of(
            params, batch))
      del params
    for held, one in zip(said, of_data, strict=True):
      held.append(one)
  for data, held in zip(datasets, said, strict=True):
    data.use_teachers(held, teachers.kept(config))
  if "" in prints:
    return prints[""], teacher.KEY
  of_all = hashlib.blake2b(json.dumps(prints).encode(), digest_size=16).hexdigest()
  return of_all, teachers.KEY


def _most_probable(model: Any, real: int, cfg: Any, chunk: int, params: Any, batch: dict[str, jax.Array]
                   ) -> dict[str, jax.Array]:
  """`ids` and `logprobs`, where the token stands that is predicted, as weights do."""
  side = Side(model.apply(params, batch).hidden, model.unembedding(params), model.final_logit_cap, real)
  ids, logprobs = top_k.most_probable(side, cfg.cached_top_k, chunk=chunk, temperature=cfg.temperature)
  return {"ids": jnp.roll(ids, 1, axis=1), "logprobs": jnp.roll(logprobs, 1, axis=1)}
