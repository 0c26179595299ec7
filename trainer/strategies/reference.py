"""The reference policy of preference and reward strategies: which parameters it has, and that these stay what they are.

It is an artefact, never "the weights we happened to resume": its source is named by `strategy.reference`, its
fingerprint stands in every checkpoint, and a run goes on only with that same reference. In the state it is
`state["reference"]`, which holds the leaves in which it differs from the policy; the frozen ones are shared.

  start   what the run began with: `init_from`, `model.hf`, adapters included
  base    under adapters: the model with the adapter off
  PATH    another run (a workdir or a checkpoint) or a Hugging Face folder

A teacher (teacher.py) takes its place, as the part `teacher`, where a strategy learns from one.

With `strategy.precompute` its log-probs of all data are computed before the first step, and it leaves the memory; with
`strategy.cached_top_k` a teacher's most probable tokens are (cached_teachers.py).
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from input_pipeline import reference as kept_lib
from input_pipeline.batches import Kept
from input_pipeline.evaluation import default_cache_dir
from models import lora
from trainer import strategies, tree
from trainer.checkpoints import init_from
from trainer.checkpoints.fingerprint import fingerprint
from trainer.distributed import mesh as mesh_lib
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.strategies import critic, sequences, teachers


def shapes(config: Any, optimizer: Any, abstract_params: Any) -> Any:
  """The leaves that a reference holds, as part of the abstract parameters.

  Raises:
    ConfigError: a reference that cannot be.
  """
  if strategies.of(config).teacher:
    return {"teacher": teachers.abstract_params(config)}
  kind, adapters, abstract_params = (config.strategy.reference, config.model.lora.rank > 0,
                                     critic.policy_params(abstract_params))
  if kind == "base" and not adapters:
    raise ConfigError("strategy.reference is 'base', the model with its adapter off, but there are no adapters "
                      "(model.lora.rank is 0). Use 'start', or the path of a model.")
  if kind == "base" and config.model.lora.modules_to_save and (config.init_from.path or config.model.lora.peft):
    raise ConfigError("strategy.reference is 'base', the model with its adapter off, but the run begins with an "
                      "adapter that may have its own values of model.lora.modules_to_save. Use 'start', or the path of "
                      "a model.")
  trained, frozen = optimizer.split(abstract_params)
  if kind in ("start", "base") or adapters:
    return trained
  return optimizer.merge(trained, frozen)


def first_reference(config: Any, model: Any, params: Any, target: Any) -> Any:
  """The reference's leaves at the start of a run, in buffers of their own.

  Args:
    params: the parameters with which the run began.
    target: `shapes(…)` with shardings.
  """
  if strategies.of(config).teacher:
    return {"teacher": teachers.load(config, target["teacher"])}
  kind, wanted = config.strategy.reference, tree.flatten(target)
  if kind in ("start", "base"):
    flat = tree.flatten(params if kind == "start" else lora.off(params))
    return tree.unflatten({path: jnp.array(flat[path], copy=True) for path in wanted})
  folder = Path(kind).expanduser()
  is_hf = (folder / "config.json").is_file() and not (folder / "checkpoints").is_dir()
  if not folder.exists():
    raise ConfigError(f"strategy.reference is {kind!r}, which is neither 'start', 'base', nor a folder that exists.")
  if is_hf and config.model.lora.rank > 0:
    raise ConfigError(f"strategy.reference is {kind!r}, a whole model, but this run trains adapters over "
                      f"{config.model.hf or 'a fresh base'}, which the reference shares. Use 'start', 'base', or a run "
                      "that trained adapters over the same base.")
  # A folder that is not the run's base has rows of its own for the run's new tokens.
  origin = dataclasses.replace(init_from.origin_of(config), tokenizer=None, path=None if is_hf else str(folder),
                               folder=str(folder) if is_hf else None, remap=(), ignore=(), peft=None, fresh=False)
  loaded, where = init_from.first_params(origin, critic.policy_of(model), target, partial=True)
  if init_from.has_fresh(where):
    raise ConfigError(f"strategy.reference: {kind} does not have all of the model's parameters ({where}).")
  return loaded


def from_start(config: Any) -> bool:
  """Whether it is made of the parameters that the run began with."""
  return not strategies.of(config).teacher and config.strategy.reference in ("start", "base")


def overlay(params: Any, reference: Any) -> Any:
  """The reference's parameters: its own leaves over those that it shares with the policy."""
  flat = tree.flatten(params) | tree.flatten(reference)
  return tree.unflatten(dict(sorted(flat.items())))


def mix(reference: Any, params: Any, share: float, now: jax.Array) -> Any:
  """TR-DPO (arXiv 2404.09656, eq. 5): where `now` is true, share × policy + (1 − share) × reference."""
  flat = tree.flatten(params)

  def moved(path, leaf):
    target = share * flat[path].astype(jnp.float32) + (1 - share) * leaf.astype(jnp.float32)
    return jnp.where(now, target.astype(leaf.dtype), leaf)

  return tree.unflatten({path: moved(path, leaf) for path, leaf in tree.flatten(reference).items()})


def kept(config: Any) -> tuple[Kept, ...]:
  """The arrays of batches that hold what is computed before the first step."""
  return teachers.kept(config) if strategies.of(config).teacher else kept_lib.REFERENCE


def precompute(config: Any, start: Any, program: Any, datasets: Sequence[Any], workdir: Path,
               taught: tuple[str, str] | None = None) -> Any:
  """Gives every dataset the reference's log-probs, if the program has them computed before: now, unless they are in the
  cache.

  They are computed row by row as the data stand in the first epoch, a micro-batch at a time, by the function that a
  reference in the state goes through; so in the same rows they are the same to the bit.

  Args:
    start: a `state.Start`.
    datasets: training and evaluation data (`input_pipeline.reference.PackedData`).
    taught: of a strategy with teachers, what `cached_teachers.precompute` has given.

  Returns:
    `start`, whose pinned fingerprints have that of the reference.

  Raises:
    ConfigError: the run was begun with another reference.
  """
  if not program.precompute:
    return start
  if strategies.of(config).teacher:
    return start if taught is None else _pin(start, *taught)
  model, batch_size = program.model, program.options.micro_batch_size
  placed = tree.flatten(program.params_sharding)
  target = tree.unflatten({path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed[path])
                               for path, leaf in tree.flatten(program.reference).items()})
  params = start.state["params"]
  if start.meta and config.strategy.reference in ("start", "base"):
    params, _ = init_from.first_params(init_from.origin_of(config), model, target, partial=True)
  reference = first_reference(config, model, params, target)
  start = _pin(start, fingerprint(reference), "strategy.reference")
  whole = overlay(start.state["params"], reference)
  # All that decides the values: parameters, what is computed with them, in which precision and on how many rows.
  temperature = strategies.temperature(config.strategy)
  computed = repr(model.spec) if hasattr(model, "spec") else config.model.to_dict()  # of a model of a user's own
  identity = json.dumps([fingerprint(whole), computed, config.precision.compute, batch_size, temperature])
  logprobs_of = jax.jit(lambda params, batch: sequences.token_logprobs(model, params, batch, temperature))
  for data in datasets:
    logprobs = data.reference(identity, default_cache_dir(config, workdir))
    complete(logprobs, program, "reference", lambda batch: logprobs_of(whole, batch))
    data.use(logprobs)
  return start


def _pin(start: Any, name: str, key: str) -> Any:
  """`start`, with the fingerprint of the reference, which `key` gives, among those that are pinned.

  Raises:
    ConfigError: the run was begun with another.
  """
  was = start.meta.get("pinned", {}).get("reference")
  if start.meta and was != name:
    raise ConfigError(f"this run was trained with another reference: its fingerprint is {was}, that of the one here is "
                      f"{name}. Give the {key} that it was trained with, as it was.")
  return dataclasses.replace(start, pinned=start.pinned | {"reference": name})


def complete(kept_values: kept_lib.ReferenceLogprobs, program: Any, what: str, compute: Callable) -> None:
  """Computes what is not there yet; `compute(batch)` gives the values of a batch."""
  if kept_values.complete:
    return
  batch_size, first = program.options.micro_batch_size, jax.process_index() == 0
  numbers = range(kept_values.num_batches(batch_size))
  processes.say(f"{what}: computing the log-probs of {len(numbers) * batch_size} rows")
  for index in tqdm(numbers, desc=f"{what} log-probs", unit="batch", disable=None if first else True):
    batch = mesh_lib.place_batch(lambda rows, index=index: kept_values.batch(index, batch_size, rows).arrays,
                                 batch_size, program.batch_sharding)
    values = processes.on_every_host(compute(batch))
    if first:
      kept_values.store(kept_values.batch(index, batch_size), values)
  if first:
    kept_values.finish()
  processes.sync(f"{what} log-probs")
  kept_values.reopen()
