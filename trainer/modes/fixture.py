"""What the equalities of `--mode=verify` are measured on: a short run's model, parameters and first batch.

B rows, T tokens, D hidden size.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from trainer import program as program_lib
from trainer import tree as tree_lib
from trainer import update
from trainer.distributed import mesh as mesh_lib
from trainer.metrics import to_floats

# Arrays of batches that have an entry for each image, not for each token.
OF_IMAGES = ("images", "image_grid")


class Skip(Exception):
  """The equality does not apply; the message says why."""


class Fixture:
  """The short run that the equalities of `--mode=verify` are measured on.

  Args:
    config: the whole config of the slice, resolved, without dropout.
    workdir: of a short run with it, which is over.
    params, reference: what it began with, on the host; None: there is no reference.
    batch: of its first step, on the host.
    compute: `precision.compute` of the run that is meant; that of the slice is float32.
  """

  def __init__(self, config: ConfigDict, workdir: Path, run: Any, params: Any, reference: Any,
               batch: dict[str, np.ndarray], compute: str = "float32"):
    self.config, self.workdir, self.run = config, workdir, run
    self.params, self.reference, self.batch, self.compute = params, reference, batch, compute
    self.mesh, self.model = run.mesh, self.variant()
    self.built_in = "." not in config.model.name
    self._programs: dict[tuple, Callable] = {}
    self._known: dict[tuple, Any] = {}

  def changed(self, **changed: Any) -> ConfigDict:
    """The config with other values; `model__scan_layers` stands for config.model.scan_layers."""
    config = self.config.copy_and_resolve_references().unlock()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changed.items()})
    return config.lock()

  def _value(self, key: str) -> Any:
    """Of the config; `key` as in `changed`."""
    return functools.reduce(lambda node, name: node[name], key.split("__"), self.config)

  def variant(self, **changed: Any) -> Any:
    """The model of the config with other values."""
    return program_lib.make_model(self.changed(**changed), self.run.tokenizer.vocab_size)

  def place(self, tree: Any, mesh: Any) -> Any:
    """Parameters on their devices."""
    return jax.device_put(tree, mesh_lib.param_shardings(tree, mesh, self.config.sharding_rules)[0])

  def gradient(self, batch: Mapping[str, np.ndarray] | None = None, mesh: Any = None, params: Any = None,
               micro_batch_size: int | None = None, **changed: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """({path: gradient}, metrics) of the first step, of another batch or with other values in the config."""
    given = self.batch if batch is None else batch
    changed = {key: value for key, value in changed.items() if self._value(key) != value}  # else it is no other program
    mesh, micro_batch_size = mesh or self.mesh, micro_batch_size or len(given["tokens"])
    key = (mesh, micro_batch_size, tuple(sorted(changed.items())))
    if batch is None and params is None and key in self._known:
      return self._known[key]
    if key not in self._programs:
      self._programs[key] = self._program(self.changed(**changed), micro_batch_size)
    with mesh_lib.activation_rules(mesh, self.config.activation_rules):
      grads, _, metrics = self._programs[key](
          self.place(self.params if params is None else params, mesh),
          self.placed(given, mesh), np.int32(0),
          None if self.reference is None else self.place(self.reference, mesh))
    found = ({k: np.asarray(v) for k, v in tree_lib.flatten(grads).items()}, to_floats(jax.device_get(metrics)))
    if batch is None and params is None:
      self._known[key] = found
    return found

  def _program(self, config: ConfigDict, micro_batch_size: int) -> Callable:
    model = program_lib.make_model(config, self.run.tokenizer.vocab_size)
    options = dataclasses.replace(self.run.program.options, micro_batch_size=micro_batch_size)
    return jax.jit(update.make_gradient_fn(
        program_lib.make_loss_fn(model, config.strategy, self.run.data.source_names),
        program_lib.planned_optimizer(config, model), options))

  def placed(self, batch: Mapping[str, np.ndarray], mesh: Any) -> dict[str, jax.Array]:
    """A batch on its devices."""
    return mesh_lib.place(batch, mesh_lib.batch_sharding(mesh))

  def hidden(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Hidden states [B, T, D]."""
    if not hasattr(self, "_hidden"):
      self._hidden = jax.jit(lambda params, batch: self.model.apply(params, batch).hidden.astype(jnp.float32))
    with mesh_lib.activation_rules(self.mesh, self.config.activation_rules):
      return np.asarray(self._hidden(self.place(self.params, self.mesh), dict(batch)))

  def other_token(self, tokens: np.ndarray) -> np.ndarray:
    """Another id for each, none of which stands for an image or a video."""
    held = [image_token(self.config), self.config.model.vision.video.token or -1]
    ids = np.setdiff1d(np.arange(self.model.num_real_vocab), held)
    return ids[(np.searchsorted(ids, tokens) + 1) % len(ids)].astype(tokens.dtype)


def image_token(config: Any) -> int:
  return -1 if config.model.vision.image_token is None else config.model.vision.image_token


def distance(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
  """The largest difference of two gradients, in units of the norm of the first."""
  norm = np.sqrt(sum(np.sum(np.square(part, dtype=np.float64)) for part in one.values()))
  if not np.isfinite(norm) or norm == 0:
    raise Skip(f"the gradient's norm is {norm}: nothing to compare")
  return float(max(np.abs(one[path] - other[path]).max(initial=0.0) for path in one) / norm)


def split_documents(batch: Mapping[str, np.ndarray], most: int) -> tuple[dict, dict]:
  """The first rows with together at most so many documents; and the same documents, each in a row of its own."""
  kept: list = []
  apart: list = []
  documents = 0
  for row, segments in enumerate(batch["segment_ids"]):
    found = np.unique(segments[segments > 0])
    if kept and documents + len(found) > most:
      break
    kept.append(row)
    documents += len(found)
    for segment in found:
      mine = segments == segment
      alone = {key: part[row].copy() for key, part in batch.items()}
      for key, part in alone.items():
        if part.shape[:1] == mine.shape and key not in OF_IMAGES:
          part[~mine] = 0
      alone["segment_ids"] = mine.astype(segments.dtype)
      apart.append(alone)
  return ({key: part[kept] for key, part in batch.items()},
          {key: np.stack([alone[key] for alone in apart]) for key in batch})


def completions_apart(batch: Mapping[str, np.ndarray], together: int = 1) -> dict[str, np.ndarray]:
  """The sequences of a batch whose rows share prompts (`prompt_ids`), each with its prompt to itself, and so many in a
  row of their own (two of a preference), of that many times the length."""
  apart: list[dict[str, np.ndarray]] = []
  for row, segments in enumerate(batch["segment_ids"]):
    for first in range(0, batch["segment_roles"].shape[1], together):
      numbers = [n for n in range(first, first + together) if batch["segment_roles"][row][n]]
      if not numbers:
        continue
      of_tokens = [key for key, part in batch.items()
                   if part[row].shape[:1] == segments.shape and key not in (*OF_IMAGES, "prompt_ids")]
      alone = {key: np.zeros_like(batch[key][row], shape=(together * len(segments), *batch[key][row].shape[1:]))
               for key in of_tokens}
      begin = 0
      for n in numbers:
        mine = segments == n + 1
        prompt = batch["prompt_ids"][row][mine][0]
        places = np.flatnonzero(mine | (segments == prompt) & (prompt > 0))  # the prompt stands before
        for key in of_tokens:
          alone[key][begin:begin + len(places)] = batch[key][row][places]
        alone["segment_ids"][begin:begin + len(places)] = n - first + 1
        begin += len(places)
      for key, part in batch.items():
        if part[row].shape == batch["segment_roles"][row].shape:
          alone[key] = np.zeros_like(part[row])
          alone[key][:together] = part[row][first:first + together]
        elif key not in of_tokens and key != "prompt_ids":
          alone[key] = part[row]
      apart.append(alone)
  return {key: np.stack([alone[key] for alone in apart]) for key in apart[0]}


def padded(batch: Mapping[str, np.ndarray], multiple: int) -> dict[str, np.ndarray]:
  """With empty rows, so that the mesh divides them."""
  more = -len(batch["tokens"]) % multiple
  return {key: np.pad(part, [(0, more), *[(0, 0)] * (part.ndim - 1)]) for key, part in batch.items()}
