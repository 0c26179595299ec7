"""Checkpoints: Orbax, asynchronous and atomic, restorable onto any mesh.

`checkpoints/<step>/` is the state after <step> updates, and holds `state` (the nested dict of arrays) and `meta`
(JSON: step, data position, time spent, resolved config; fingerprints of what is left out: the base under adapters, a
reference policy; checksums, see trainer/checkpoints/checksums.py). It is written to a temporary folder and renamed, so
a folder with that name is complete. One that is damaged all the same, which must be proven
(trainer/checkpoints/damage.py), is renamed to `<step>.unreadable`, and the one before it is used.
"""

import contextlib
import json
import logging as std_logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from trainer import tree as tree_lib
from trainer.checkpoints import checksums, damage, retention
from trainer.checkpoints.damage import in_short
from trainer.checkpoints.names import ASIDE, find, listed, set_aside
from trainer.distributed import processes
from trainer.errors import CheckpointError, ConfigError, Damaged

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
    self._metric = keep_best
    self._values = self._saved_values(keep_best) if keep_best else {}
    self._options = ocp.CheckpointManagerOptions(
        preservation_policy=retention.policy(keep_last, keep_steps, self._values if keep_best else None, best_mode),
        cleanup_tmp_directories=True, enable_async_checkpointing=True)
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(self.directory, options=self._options, item_names=ITEMS)

  def steps(self) -> list[int]:
    """Steps of the complete checkpoints, oldest first."""
    return sorted(self._manager.all_steps())

  def _saved_values(self, metric: str) -> dict[int, float]:
    values = {}
    for step in listed(self.directory):
      with contextlib.suppress(Damaged):  # which is told when it is read
        values[step] = read_meta(self.directory / str(step)).get("metrics", {}).get(metric)
    return {step: value for step, value in values.items() if value is not None}

  def split(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what a checkpoint holds of the state, what it leaves out): parts without anything are absent."""
    stored = dict(state)
    left_out: dict[str, Any] = {}
    for part, paths in self._leave_out.items():
      flat = tree_lib.flatten(state[part])
      for half, chosen in ((stored, flat.keys() - paths), (left_out, flat.keys() & paths)):
        half[part] = tree_lib.unflatten({path: flat[path] for path in flat if path in chosen})
        if not half[part]:
          del half[part]
    return stored, left_out

  def merge(self, stored: dict[str, Any], left_out: dict[str, Any]) -> dict[str, Any]:
    """The state that `split` took apart."""
    merged = dict(stored)
    for part, tree in left_out.items():
      flat = tree_lib.flatten(stored.get(part, {})) | tree_lib.flatten(tree)
      merged[part] = tree_lib.unflatten(dict(sorted(flat.items())))
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
    self._values.pop(step, None)
    if metrics:
      meta = meta | {"metrics": {name: float(value) for name, value in metrics.items()}}
    if metrics and self._metric in metrics:
      self._values[step] = float(metrics[self._metric])
    # On CPU the arrays handed to the writing thread would otherwise be views of buffers that the next step overwrites.
    state = _own_buffers(state)
    meta = checksums.add_checksums(meta, _by_path(state), arrays or {})
    items = {"state": _save_args(state), "meta": ocp.args.JsonSave(meta)}
    if arrays is not None:
      items["arrays"] = ocp.args.PyTreeSave({name: np.copy(part) for name, part in arrays.items()})
    with _explained(self, f"save step {step}"):
      self._manager.save(step, force=True, args=ocp.args.Composite(**items))
    return True

  def _refuse_nonfinite(self, step: int, state: dict[str, Any]) -> None:
    counts = {path: int(n) for path, n in jax.device_get(_nonfinite(tree_lib.flatten(state.get("params", {})))).items()}
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
      logging.error("The checkpoint that was being saved in %s is incomplete: %s", self.directory, in_short(e))

  def restore_newest(self, target: Any) -> Restored | None:
    """The newest checkpoint that is not damaged, placed as `target` (ShapeDtypeStructs with shardings) says; None if
    there is none. Damaged ones are named, renamed and passed over.

    Raises:
      CheckpointError: if the newest cannot be read for another reason, or there are none but those that are set aside.
      ConfigError: if the newest is of another model or optimizer.
    """
    damaged = []
    for step in reversed(processes.from_first(listed(self.directory))):
      try:
        return _read_twice(self.directory / str(step), target)
      except Damaged as e:
        damaged.append(f"{self.directory / str(step)} ({in_short(e)})")
        logging.error("%s. It is renamed to %d%s, and the one before it is used.", e, step, ASIDE)
        self._set_aside(step)
    if aside := set_aside(self.directory):
      raise CheckpointError(
          "no checkpoint of this workdir can be read:\n  " + "\n  ".join(damaged or ["all were set aside before"])
          + f"\nThey are set aside, as {', '.join(aside)} in {self.directory}. While they are there, training does not "
          "begin anew. To begin anew, use another --workdir, or move them away. One that is whole after all is used "
          f"when it has its name back (without {ASIDE}).")
    return None

  def restore(self, step: int, target: Any) -> Restored:
    """The checkpoint of a step, placed as `target` says.

    Raises:
      CheckpointError: it cannot be read.
      ConfigError: it is of another model or optimizer.
    """
    return _read(self.directory / str(step), target)

  def forget_after(self, step: int) -> None:
    """Removes the checkpoints of later steps."""
    for later in self.steps():
      if later > step:
        self._manager.delete(later)
        self._values.pop(later, None)

  def _set_aside(self, step: int) -> None:
    folder = self.directory / str(step)
    if jax.process_index() == 0 and folder.exists():
      aside = folder.with_name(f"{step}{ASIDE}")
      while aside.exists():
        aside = aside.with_name(aside.name + "~")
      folder.rename(aside)
    processes.sync("set aside an unreadable checkpoint")
    self._manager.close()
    self._manager = self._open()


def restore_from(path: str, target: Any) -> Restored:
  """The whole state of another run's checkpoint.

  Raises:
    CheckpointError: it cannot be read. ConfigError: it is of another model or optimizer.
  """
  folder = find(path)
  return _read(folder, target)


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
  """What a checkpoint says of itself besides its arrays.

  Raises:
    CheckpointError: it cannot be read.
  """
  with damage.reading(folder):
    return damage.meta_of(folder)


def param_shapes(folder: Path) -> dict[str, Any]:
  """{path: array metadata with .shape and .dtype} of a checkpoint's parameters, without a critic's.

  Raises:
    CheckpointError: it cannot be read.
  """
  with damage.reading(folder):
    return policy_leaves(folder, tree_lib.flatten(saved_tree(folder)["params"]))


def policy_leaves(folder: Path, leaves: dict[str, Any]) -> dict[str, Any]:
  """Of the parameters in a run's checkpoint, by path, those that others begin from or export: all but those of the
  critic that its strategy trains beside its policy (trainer/strategies/critic.py), if so."""
  config = folder.parent.parent / "config.json"
  if not config.is_file() or "critic" not in json.loads(config.read_text(encoding="utf-8")).get("strategy", {}):
    return leaves
  return {path: leaf for path, leaf in leaves.items() if not path.startswith("critic/")}


def saved_tree(folder: Path) -> dict[str, Any]:
  """The tree of arrays' metadata; raises what goes wrong, which Orbax's checkpointer would not."""
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    return handler.metadata(epath.Path(folder / "state")).tree


def _check_fits(folder: Path, target: Any) -> None:
  """Refuses a checkpoint whose arrays are not those of this run; reading it would only look like damage."""
  problems = tree_lib.compare(tree_lib.flatten(_as_dicts(target)), tree_lib.flatten(saved_tree(folder)))
  if problems:
    raise ConfigError(f"{folder} was saved by another model or optimizer (-: only here, +: only there, !: other shape):"
                      "\n  " + "\n  ".join(problems[:40]) + "\nUse the config it was saved with, or another --workdir; "
                      "init_from takes its parameters alone.")


def restore_params(folder: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Reads only the wanted parameters ({path in the checkpoint: shape, dtype and sharding}).

  Raises:
    CheckpointError: some are not what was saved.
  """
  target = {"params": tree_lib.unflatten(wanted)}
  with damage.reading(folder):
    saved = tree_lib.flatten(saved_tree(folder)["params"])
    with quietly(), ocp.PyTreeCheckpointer() as reader:
      restored = reader.restore(folder / "state", args=ocp.args.PyTreeRestore(
          item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True))
    params = tree_lib.flatten(restored["params"])
    # Those that are read in another dtype have other bits.
    same = {path: leaf for path, leaf in params.items() if leaf.dtype == saved[path].dtype}
    checksums.check(damage.meta_of(folder), {f"params/{path}": leaf for path, leaf in same.items()}, folder)
  return params


def _read_twice(folder: Path, target: Any) -> Restored:
  """Damage is believed when it is found a second time."""
  with contextlib.suppress(Damaged):
    return _read(folder, target)
  return _read(folder, target)


def _read(folder: Path, target: Any) -> Restored:
  """A whole checkpoint.

  Raises:
    Damaged, CheckpointError: it cannot be read, by this process or another.
    ConfigError: it is of another model or optimizer.
  """
  as_dicts = _as_dicts(target)
  with damage.together(folder), damage.reading(folder):
    _check_fits(folder, target)
    # Not by Orbax's manager, whose processes would wait here for one that failed.
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
      flat = tree_lib.flatten(handler.restore(epath.Path(folder / "state"), args=ocp.args.PyTreeRestore(
          as_dicts, ocp.checkpoint_utils.construct_restore_args(as_dicts))))
    meta = damage.meta_of(folder)
    arrays = None
    if meta.get("arrays"):
      with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        arrays = {name: np.asarray(part) for name, part in handler.restore(epath.Path(folder / "arrays")).items()}
    checksums.check_arrays(meta, arrays or {}, folder)
  # The restored arrays belong to TensorStore's reader; a copy of our own may be donated.
  own = _own_buffers([flat[path] for path in _by_path(target)])
  state = jax.tree.unflatten(jax.tree.structure(target), own)
  checksums.check(meta, _by_path(state), folder)
  return Restored(state, meta, folder, arrays)


@jax.jit
def _nonfinite(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """How many numbers of each array are not finite."""
  return {path: jnp.sum(~jnp.isfinite(leaf)) if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.int32(0)
          for path, leaf in leaves.items()}


def _save_args(state: Any) -> ocp.args.PyTreeSave:
  """What is saved, in chunks of at most CHUNK_BYTES. Kernels that are stacked by layer have a chunk for each at least:
  a reader of one layer (trainer/export/command.py) then reads no more than that."""
  item = _as_dicts(state)
  # Orbax cuts `shard_axes` into single entries, which would be the tokens of an embedding.
  whole, chunked = ocp.SaveArgs(), ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
  by_layer = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,))
  kinds = {0: whole, 1: chunked, 2: chunked}
  return ocp.args.PyTreeSave(item, save_args=jax.tree.map(lambda leaf: kinds.get(jnp.ndim(leaf), by_layer), item))


@jax.jit  # once for all checkpoints of a run
def _copied(tree: Any) -> Any:
  return jax.tree.map(jnp.copy, tree)


def _own_buffers(tree: Any) -> Any:
  """On CPU, where arrays may share memory with host code, a copy that nothing else reads or writes."""
  return _copied(tree) if jax.default_backend() == "cpu" else tree


def _as_dicts(tree: Any) -> dict[str, Any]:
  """Any tree as nested dicts by path, so that a checkpoint does not depend on Python classes."""
  return tree_lib.unflatten(_by_path(tree))


def _by_path(tree: Any) -> dict[str, Any]:
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf
          for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _was_retrieved(record: std_logging.LogRecord) -> bool:
  return "exception was never retrieved" not in record.getMessage()


@contextlib.contextmanager
def _explained(checkpoints: Checkpoints, action: str) -> Iterator[None]:
  """Turns what Orbax raises while writing into one message that a user can act on."""
  try:
    yield
  except Exception as error:
    # Of Orbax's other writes that failed with it asyncio prints a traceback each, when their futures are collected.
    std_logging.getLogger("asyncio").addFilter(_was_retrieved)
    complete = checkpoints.steps()
    raise CheckpointError(
        f"could not {action} in {checkpoints.directory}: {in_short(error)}\n"
        + (f"The newest complete checkpoint there is step {complete[-1]}. " if complete else "No checkpoint is there. ")
        + "Free space or fix the folder's permissions, then run the same command: it continues from there.") from error
