"""Checkpoints: Orbax, asynchronous and atomic, restorable onto any mesh.

`checkpoints/<step>/` is the state after <step> updates, and holds `state` (the nested dict of arrays) and `meta`
(JSON: step, data position, time spent, resolved config; fingerprints of what is left out: the base under adapters, a
reference policy; checksums, see trainer/seals.py). It is written to a temporary folder and renamed, so a folder with
that name is complete. A folder that cannot be read all the same, or is not what was saved, is renamed to
`<step>.unreadable`, and the one before it is used.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers as policies

from trainer import patterns, processes, seals
from trainer.config import ConfigError
from trainer.seals import CheckpointError

CHUNK_BYTES = 64 << 20
# What a checkpoint consists of; `arrays` only where there are any.
ITEMS = ("state", "meta", "arrays")


@dataclass(frozen=True)
class Restored:
  state: Any
  meta: dict[str, Any]
  path: Path
  arrays: dict[str, np.ndarray] | None = None


class Checkpoints:
  """The checkpoints of one workdir.

  Args:
    directory: the workdir's `checkpoints` folder.
    keep_last: that many newest ones stay …
    keep_steps: … and those at multiples of this (0: none) …
    keep_best: … and the one with the best value of this metric ("" or None: none), by `best_mode` min or max.
    leave_out: {part of the state: paths in it} that are not saved, since they can be had again: the base of adapters,
      a reference policy.
  """

  def __init__(self, directory: Path, *, keep_last: int = 1, keep_steps: int = 0, keep_best: str | None = None,
               best_mode: str = "min", leave_out: Mapping[str, Collection[str]] | None = None):
    self.directory = Path(directory).absolute()
    self._leave_out = {part: frozenset(paths) for part, paths in (leave_out or {}).items()}
    kept = [policies.LatestN(keep_last)]
    if keep_steps:
      kept.append(policies.EveryNSteps(keep_steps))
    self._best = keep_best
    if keep_best:
      kept.append(policies.BestN(get_metric_fn=_value_of(keep_best), n=1, reverse=best_mode == "min",
                                 keep_checkpoints_without_metrics=False))
    self._options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(kept), cleanup_tmp_directories=True,
        enable_async_checkpointing=True)
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(self.directory, options=self._options, item_names=ITEMS)

  def steps(self) -> list[int]:
    """Steps of the complete checkpoints, oldest first."""
    return sorted(self._manager.all_steps())

  def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what a checkpoint holds of the state, what it leaves out): parts without anything are absent."""
    stored = dict(state)
    left_out: dict[str, Any] = {}
    for part, paths in self._leave_out.items():
      flat = patterns.flatten(state[part])
      for half, chosen in ((stored, flat.keys() - paths), (left_out, flat.keys() & paths)):
        half[part] = patterns.unflatten({path: flat[path] for path in flat if path in chosen})
        if not half[part]:
          del half[part]
    return stored, left_out

  def merge(self, stored: dict[str, Any], left_out: dict[str, Any]) -> dict[str, Any]:
    """The state that `split` took apart."""
    merged = dict(stored)
    for part, tree in left_out.items():
      flat = patterns.flatten(stored.get(part, {})) | patterns.flatten(tree)
      merged[part] = patterns.unflatten(dict(sorted(flat.items())))
    return merged

  def save(self, step: int, state: Any, meta: dict[str, Any], metrics: dict[str, float] | None = None,
           arrays: dict[str, np.ndarray] | None = None) -> bool:
    """Starts to save; returns once the state is copied, so that it may be donated. False if it is there already.

    `arrays` of any number and shape, the same in every process, are given back as they are.

    Raises:
      CheckpointError: if this or the previous, asynchronous save failed (a full disk, say), or if there are parameters
        that are not finite, of which nothing is saved.
    """
    if step in self._manager.all_steps():
      return False
    state, _ = self.split(state)
    self._refuse_nonfinite(step, state)
    metrics = metrics if self._best and metrics and self._best in metrics else None
    # On CPU the arrays handed to the writing thread would otherwise be views of buffers that the next step overwrites.
    state = _own_buffers(state)
    items = {"state": _save_args(state), "meta": ocp.args.JsonSave(seals.seal(meta, _by_path(state), arrays or {}))}
    if arrays is not None:
      items["arrays"] = ocp.args.PyTreeSave({name: np.copy(part) for name, part in arrays.items()})
    with _explained(self, f"save step {step}"):
      self._manager.save(step, force=True, metrics=metrics, args=ocp.args.Composite(**items))
    return True

  def _refuse_nonfinite(self, step: int, state: dict[str, Any]) -> None:
    counts = {path: int(n) for path, n in jax.device_get(_nonfinite(patterns.flatten(state.get("params", {})))).items()}
    bad = [f"{path} ({n:,})" for path, n in counts.items() if n]
    if bad:
      complete = self.steps()
      raise CheckpointError(
          f"the parameters after step {step} are not all finite: {', '.join(bad[:8])}{' …' if bad[8:] else ''}. They "
          f"are not saved. " + (f"The newest checkpoint is that of step {complete[-1]}; " if complete else "")
          + "a lower optimizer.learning_rate, or optimizer.clip_norm, keeps them finite.")

  def wait(self) -> None:
    """Returns when everything is on disk.

    Raises:
      CheckpointError: if it could not be written.
    """
    with _explained(self, "finish saving"):
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Finishes saving and frees the writing threads."""
    self.wait()
    self._manager.close()

  def abandon(self) -> None:
    """After an error: lets the save that is under way finish, and raises nothing of its own."""
    try:
      self._manager.close()
    except Exception as e:
      logging.error("The checkpoint that was being saved in %s is incomplete: %s", self.directory, _in_short(e))

  def restore_newest(self, target: Any) -> Restored | None:
    """The newest checkpoint that can be read, placed as `target` (ShapeDtypeStructs with shardings) says; None if
    there is none. Unreadable ones are named, renamed and passed over.

    Raises:
      CheckpointError: if there are checkpoints, but none can be read.
      ConfigError: if the newest readable one is of another model or optimizer.
    """
    unreadable = []
    for step in reversed(self.steps()):
      try:
        _check_fits(self.directory / str(step), target)
        folder = self.directory / str(step)
        return Restored(*_restore(self._manager, step, target), folder, _read_arrays(folder))
      except ConfigError:
        raise
      except Exception as e:  # Orbax and TensorStore raise many kinds; all mean that it cannot be read
        reason = f"{type(e).__name__}: {_in_short(e)}"
        unreadable.append(f"{self.directory / str(step)} ({reason})")
        logging.error("Checkpoint %s cannot be read: %s. It is renamed to %d.unreadable, and the one before it is "
                      "used.", self.directory / str(step), reason, step)
        self._set_aside(step)
    if unreadable:
      raise CheckpointError("no checkpoint of this workdir can be read:\n  " + "\n  ".join(unreadable)
                            + "\nThey were renamed to *.unreadable; run again to start from scratch, or use a new "
                            "workdir.")
    return None

  def restore(self, step: int, target: Any) -> Restored:
    """The checkpoint of a step, placed as `target` says.

    Raises:
      CheckpointError: it cannot be read.
    """
    folder = self.directory / str(step)
    try:
      return Restored(*_restore(self._manager, step, target), folder, _read_arrays(folder))
    except Exception as e:
      raise CheckpointError(f"cannot read {folder}: {_in_short(e)}") from e

  def forget_after(self, step: int) -> None:
    """Removes the checkpoints of later steps."""
    for later in self.steps():
      if later > step:
        self._manager.delete(later)

  def _set_aside(self, step: int) -> None:
    folder = self.directory / str(step)
    if jax.process_index() == 0 and folder.exists():
      aside = folder.with_name(f"{step}.unreadable")
      while aside.exists():
        aside = aside.with_name(aside.name + "~")
      folder.rename(aside)
    processes.sync("set aside an unreadable checkpoint")
    self._manager.close()
    self._manager = self._open()


def find(path: str) -> Path:
  """The checkpoint folder meant by a workdir (its newest one), its `checkpoints` folder, or one checkpoint.

  Raises:
    ConfigError: if there is none.
  """
  given = Path(path).expanduser().absolute()
  if (given / "state").is_dir():
    return given
  for folder in (given / "checkpoints", given):
    steps = [int(p.name) for p in folder.glob("*") if re.fullmatch(r"\d+", p.name)] if folder.is_dir() else []
    if steps:
      return folder / str(max(steps))
  what = "does not exist" if not given.exists() else "holds no checkpoint"
  raise ConfigError(f"{given} {what}: give a workdir, or one of its checkpoints (WORKDIR/checkpoints/STEP).")


def restore_from(path: str, target: Any) -> Restored:
  """The whole state of another run's checkpoint."""
  folder = find(path)
  options = ocp.CheckpointManagerOptions(read_only=True)
  try:
    _check_fits(folder, target)
    with quietly(), ocp.CheckpointManager(folder.parent, item_names=ITEMS, options=options) as manager:
      restored = Restored(*_restore(manager, int(folder.name), target), folder, _read_arrays(folder))
  except ConfigError:
    raise
  except Exception as e:
    raise CheckpointError(f"cannot resume {folder}: {_in_short(e)}") from e
  return restored


@contextlib.contextmanager
def quietly() -> Iterator[None]:
  """Orbax warns of what is meant to be so here: a folder opened to be read, an item read alone."""
  logger = logging.get_absl_logger()
  level = logger.level
  logger.setLevel(logging.converter.absl_to_standard(logging.ERROR))
  try:
    yield
  finally:
    logger.setLevel(level)


def read_meta(folder: Path) -> dict[str, Any]:
  """What a checkpoint says of itself beside its arrays; empty if nothing.

  Raises:
    CheckpointError: it is not what was saved.
  """
  file = folder / "meta" / "metadata"
  if not file.is_file():
    return {}
  try:
    return seals.unseal(json.loads(file.read_text(encoding="utf-8")))
  except ValueError as e:
    raise CheckpointError(f"{file} is damaged: {e}") from e


def param_shapes(folder: Path) -> dict[str, Any]:
  """{path: array metadata with .shape and .dtype} of a checkpoint's parameters."""
  return patterns.flatten(_saved_tree(folder)["params"])


def _saved_tree(folder: Path) -> dict[str, Any]:
  with quietly(), ocp.PyTreeCheckpointer() as reader:
    return reader.metadata(folder / "state").item_metadata.tree


def _check_fits(folder: Path, target: Any) -> None:
  """Refuses a checkpoint whose arrays are not those of this run; reading it would only look like damage."""
  problems = patterns.compare(patterns.flatten(_as_dicts(target)), patterns.flatten(_saved_tree(folder)))
  if problems:
    raise ConfigError(f"{folder} was saved by another model or optimizer (-: only here, +: only there, !: other shape):"
                      "\n  " + "\n  ".join(problems[:40]) + "\nUse the config it was saved with, or another --workdir; "
                      "init_from takes its parameters alone.")


def restore_params(folder: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Reads only the wanted parameters ({path in the checkpoint: shape, dtype and sharding}).

  Raises:
    CheckpointError: some are not what was saved.
  """
  target = {"params": patterns.unflatten(wanted)}
  saved = param_shapes(folder)
  with quietly(), ocp.PyTreeCheckpointer() as reader:
    restored = reader.restore(folder / "state", args=ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True))
  params = patterns.flatten(restored["params"])
  # Those that are read in another dtype have other bits.
  same = {path: leaf for path, leaf in params.items() if leaf.dtype == saved[path].dtype}
  seals.check(read_meta(folder), {f"params/{path}": leaf for path, leaf in same.items()}, folder)
  return params


def _restore(manager: ocp.CheckpointManager, step: int, target: Any) -> tuple[Any, dict[str, Any]]:
  as_dicts = _as_dicts(target)
  restored = manager.restore(step, args=ocp.args.Composite(
      state=ocp.args.PyTreeRestore(as_dicts, ocp.checkpoint_utils.construct_restore_args(as_dicts)),
      meta=ocp.args.JsonRestore()))
  flat = patterns.flatten(restored.state)
  leaves, treedef = jax.tree_util.tree_flatten_with_path(target)
  # The restored arrays belong to TensorStore's reader; a copy of our own may be donated.
  own = _own_buffers([flat["/".join(_names(path))] for path, _ in leaves])
  state, meta = jax.tree_util.tree_unflatten(treedef, own), seals.unseal(restored.meta)
  seals.check(meta, _by_path(state), Path(manager.directory) / str(step))
  return state, meta


def _read_arrays(folder: Path) -> dict[str, np.ndarray] | None:
  if not (folder / "arrays").is_dir():
    seals.check_arrays({"arrays": {}} | read_meta(folder), {}, folder)
    return None
  with quietly(), ocp.PyTreeCheckpointer() as reader:
    arrays = {name: np.asarray(part) for name, part in reader.restore(folder / "arrays").items()}
  seals.check_arrays(read_meta(folder), arrays, folder)
  return arrays


@jax.jit
def _nonfinite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """How many numbers of each array are not finite."""
  return {path: jnp.sum(~jnp.isfinite(leaf)) if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.int32(0)
          for path, leaf in leaves.items()}


def _save_args(state: Any) -> ocp.args.PyTreeSave:
  """What is saved, in chunks of at most CHUNK_BYTES. Kernels that are stacked by layer have a chunk for each at least:
  a reader of one layer (trainer/export.py) then reads no more than that."""
  item = _as_dicts(state)
  # Orbax cuts `shard_axes` into single entries, which would be the tokens of an embedding.
  whole, chunked = ocp.SaveArgs(), ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
  by_layer = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,))
  kinds = {0: whole, 1: chunked, 2: chunked}
  return ocp.args.PyTreeSave(item, save_args=jax.tree.map(lambda leaf: kinds.get(jnp.ndim(leaf), by_layer), item))


def _own_buffers(tree: Any) -> Any:
  """On CPU, where arrays may share memory with host code, a copy that nothing else reads or writes."""
  return jax.jit(lambda t: jax.tree.map(jnp.copy, t))(tree) if jax.default_backend() == "cpu" else tree


def _in_short(error: Exception) -> str:
  """The first line of a message, without its middle if it is long: the cause stands at the end."""
  line = (str(error) or type(error).__name__).splitlines()[0]
  return line if len(line) <= 300 else f"{line[:140]} … {line[-140:]}"


def _names(key_path) -> list[str]:
  return [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in key_path]


def _as_dicts(tree: Any) -> dict[str, Any]:
  """Any tree as nested dicts by path, so that a checkpoint does not depend on Python classes."""
  return patterns.unflatten(_by_path(tree))


def _by_path(tree: Any) -> dict[str, Any]:
  return {"/".join(_names(path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _value_of(metric: str) -> Callable[[Any], float]:
  def value(metrics: dict[str, float]) -> float:
    return metrics[metric]
  return value


class _explained:
  """Turns what Orbax raises while writing into one message that a user can act on."""

  def __init__(self, checkpoints: Checkpoints, action: str):
    self._checkpoints, self._action = checkpoints, action

  def __enter__(self):
    return self

  def __exit__(self, kind, error, traceback):
    if error is None or not isinstance(error, Exception):
      return False
    complete = self._checkpoints.steps()
    raise CheckpointError(
        f"could not {self._action} in {self._checkpoints.directory}: {_in_short(error)}\n"
        + (f"The newest complete checkpoint there is step {complete[-1]}. " if complete else "No checkpoint is there. ")
        + "Free space or fix the folder's permissions, then run the same command: it continues from there.") from error
