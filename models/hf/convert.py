"""Parameters of a Hugging Face folder into ours and back: one description of the names, applied both ways.

A family (models/hf/family.py) lists `Tensor`s: their name, the leaves of our tree that it holds, and how. Here that
list is laid over the tensors that a folder has (`plan`), read into sharded parameters (`iter_params`) or written
(`write_tensors`). "Ours" is a leaf such as blocks/attn/q/kernel [L, D, H*K], "theirs" a tensor such as
model.layers.3.self_attn.q_proj.weight [H*K, D].
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from models.hf import files
from models.hf import names as names_lib
from models.hf.entry import Entry, make_entry, paths_of
from models.hf.errors import HFError
from models.hf.family import Family, Tensor
from trainer import tree

# Transposed copies go in blocks of so many rows and columns, which stay in the processor's cache.
BLOCK = 256
# Two tensors that must be equal are compared so many rows at a time.
COMPARED_ROWS = 4096


class Reader(Protocol):
  """What holds tensors: `files.TensorFolder`, say."""

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """A slice of a tensor in its own dtype."""


@dataclass(frozen=True)
class Leaf:
  """Where one of our leaves is read from: `entry` holds it as its part number `part`."""

  shape: tuple[int, ...]
  # Of their tensors; None if they differ.
  dtype: np.dtype | None
  entry: Entry
  part: int


@dataclass(frozen=True)
class Plan:
  """A family's names laid over a folder's tensors: everything fits. `leaves` is {path: Leaf}."""

  leaves: dict[str, Leaf]

  def only(self, paths: Iterable[str]) -> "Plan":
    """For some of the leaves, where others come from elsewhere."""
    return Plan({path: self.leaves[path] for path in paths})


def plan(family: Family, model: Mapping[str, Any], abstract_params: Mapping, folder: files.TensorFolder) -> Plan:
  """Matches a folder's tensors with our leaves, by name and shape; touches no device.

  Args:
    model: {dotted model key: value}, what `family.read` gave.
    abstract_params: nested dict of ShapeDtypeStruct, of the whole model (without adapters); dtypes do not matter.
      Where only some are wanted, call `only` on what is returned.

  Raises:
    HFError: listing what is missing, extra or misshapen, or not a parameter's dtype.
  """
  shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(abstract_params).items()}
  tensors = _tensors(family, model, shapes)
  _check_count(tensors, shapes, folder)
  prefix = _prefix(family, tensors, shapes, folder.tensors)
  entries = [make_entry(tensor, shapes, prefix) for tensor in tensors]
  chosen = {path: _choose(path, entries, folder.tensors, family) for path in shapes}
  wanted = {name: entry.shape for entry in chosen.values() for name in entry.names()}
  twins = set() if "unembed/kernel" in shapes else names_of_unembedding(family, model, prefix) - set(wanted)
  copied = family.ahead.copied(model, shapes) if family.ahead else []
  copies = {make_entry(copy, shapes, prefix).name(()): str(copy.ours) for copy in copied}
  unread = family.ahead and not model["mtp_layers"]
  passed = (*family.passed_over(model), *(family.ahead.of(folder.tensors) if unread else ()))
  lines = _differences(wanted, folder.tensors,
                       lambda name: name in twins or name in copies or any(re.search(regex, name) for regex in passed))
  if lines:
    spellings = [[name for t in tensors for name in make_entry(t, shapes, p).names()] for p in family.prefixes]
    why = names_lib.hint([*folder.tensors], spellings, folder.path) or _no_unembedding(family, model, lines)
    shown = 4 if why else 40
    more = [f"… and {len(lines) - shown} more"] if len(lines) > shown else []
    raise HFError(
        f"{why}{chr(10) if why else ''}the tensors of {folder.path} are not those that its {files.CONFIG} asks for, as "
        f"{family.name} ({len(lines)} differences; -: missing there, +: only there, !: other shape or dtype):\n  "
        + "\n  ".join(lines[:shown] + more) + ("" if why else f"\nFetch the folder again; if its tensors are right, "
        f"{files.CONFIG} must say what they are (sizes, tie_word_embeddings, biases)."))
  for name in twins & set(folder.tensors):
    _check_equal(folder, name, chosen["embed/embedding"].name(()),
                 f"{files.CONFIG} says that the embedding is also the unembedding (tie_word_embeddings). If both are "
                 "meant, --config.model.tie_embeddings=False has them apart.")
  for name in copies.keys() & folder.tensors.keys():
    _check_equal(folder, name, chosen[copies[name]].name(()),
                 "Modules of model.mtp_layers predict with the model's embedding and unembedding, and have copies of "
                 "them here. If these are meant to differ, --config.model.mtp_layers=0 passes them over.")
  leaves = {}
  for path, entry in chosen.items():
    dtypes = {folder.tensors[name].dtype for name in entry.names()}
    dtype = files.DTYPES[dtypes.pop()] if len(dtypes) == 1 else None
    leaves[path] = Leaf(shapes[path], dtype, entry, entry.paths.index(path))
  return Plan(leaves)


def iter_params(plan: Plan, folder: files.TensorFolder, shardings: Mapping[str, Any] | None = None, dtype: Any = None,
                progress: bool = False) -> Iterator[tuple[str, jax.Array]]:
  """Reads parameters straight onto their devices, one (path, array) after another.

  For each leaf, each device of this process gets its shard, of which only the slices that belong to it are read;
  replicas are read once. The host holds one shard of one leaf at a time.

  Args:
    plan: what `plan` returned for `folder`.
    shardings: {path: sharding}; None: everything on the first device.
    dtype: of the parameters; or {path: dtype}; None: that of each tensor.
    progress: show a bar, on the first process.

  Raises:
    HFError: dtype is None and the tensors of a leaf differ in theirs; a value is too large for float16.
  """
  default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  placed = shardings if shardings is not None else dict.fromkeys(plan.leaves, default)
  asked = dtype if isinstance(dtype, Mapping) else dict.fromkeys(plan.leaves, dtype)
  dtypes = {path: leaf.dtype if asked[path] is None else np.dtype(asked[path]) for path, leaf in plan.leaves.items()}
  for path, leaf_dtype in dtypes.items():
    if leaf_dtype is None:
      raise HFError(f"{folder.path}: the tensors of {path} differ in dtype; name the dtype to load them as, e.g. "
                    "float32.")
  shards = {path: _shards(leaf.shape, placed[path]) for path, leaf in plan.leaves.items()}
  total = sum(_size(index) * dtypes[path].itemsize for path, by_index in shards.items() for index in by_index)
  with tqdm(total=total, desc=f"loading {folder.path.name}", unit="B", unit_scale=True,
            disable=not progress or jax.process_index() != 0) as bar:
    for path, leaf in plan.leaves.items():
      arrays = []
      for bounds, devices in shards[path].items():
        values = read_shard(leaf, folder, bounds, dtypes[path])
        arrays += [_put(values, device) for device in devices]
        bar.update(values.nbytes)
        del values
      whole = jax.make_array_from_single_device_arrays(leaf.shape, placed[path], arrays)
      arrays.clear()  # whoever takes the whole may delete it
      yield path, whole


def write_tensors(read_leaf: Callable[[str, tuple[int | slice, ...]], np.ndarray], family: Family,
                  model: Mapping[str, Any], shapes: Mapping[str, Any], out: Path | None, dtype: Any = None,
                  max_shard_bytes: int = files.MAX_SHARD_BYTES, progress: bool = False) -> list[Path]:
  """Writes our leaves as the tensors of a family; the host holds one output shard at a time.

  Args:
    read_leaf: gives `leaf[index]` of the leaf at a path. The index has a number for each layer and expert, and slices
      with both bounds for the other dimensions. Leaf by leaf, in the order of layers.
    family: whose names are written; where it has several for a leaf, the first.
    model: {dotted model key: value}.
    shapes: {path: object with .shape and .dtype}. Smaller than the leaf, its beginning is written.
    out: a folder, made if missing; weights in it are replaced. None: leaves are read, and nothing is written.
    dtype: None: that of each leaf.
    max_shard_bytes: where a new file begins.
    progress: show a bar, on the first process.

  Returns:
    The files written.

  Raises:
    HFError: a leaf that the family has no name for; a value too large for float16; files that cannot be written.
  """
  written = layout(family, model, {path: tuple(leaf.shape) for path, leaf in shapes.items()})
  kinds = {}
  for name, (entry, _) in written.items():
    of_leaves = [shapes[path].dtype for path in entry.paths]
    kinds[name] = (entry.shape, np.dtype(dtype if dtype is not None else np.result_type(*of_leaves)))
  total = sum(math.prod(shape) * kind.itemsize for shape, kind in kinds.values())
  with tqdm(total=total, desc=f"writing {out.name if out else 'nothing'}", unit="B", unit_scale=True,
            disable=not progress or jax.process_index() != 0) as bar:

    def make(name: str) -> np.ndarray:
      values = assemble(*written[name], read_leaf, kinds[name][1], name)
      bar.update(values.nbytes)
      return values

    if out is None:
      for name in kinds:
        make(name)
      return []
    return files.write_tensors(out, kinds, make, max_shard_bytes)


def assemble(entry: Entry, place: tuple[int, ...], read_leaf: Callable[[str, tuple[int | slice, ...]], np.ndarray],
             dtype: np.dtype, name: str) -> np.ndarray:
  """One tensor of a family, made of our leaves; see `write_tensors`."""
  values = np.empty(entry.matrix_shape, dtype)
  for part, (path, shape) in enumerate(zip(entry.paths, entry.parts, strict=True)):
    bounds = tuple(slice(0, n) for n in shape)
    ours = bounds if not entry.tensor.transpose else (*bounds[:-2], bounds[-1], bounds[-2])
    target = values[(*entry.to_theirs(part, ours), ...)]
    copy_into(target, entry.swap(np.asarray(read_leaf(path, (*place, *ours)))), name)
  return entry.to_form(values)


def layout(family: Family, model: Mapping[str, Any], sizes: Mapping[str, tuple[int, ...]], prefix: str | None = None,
           in_memory: bool = False) -> dict[str, tuple[Entry, tuple[int, ...]]]:
  """{name of a tensor: (what it holds, its layer, expert or head)}; where a family has several for a leaf, the first.

  Args:
    prefix: one of the family's; None: that which is written.
    in_memory: of several, the names of a loaded model's parameters.

  Raises:
    HFError: a leaf that the family has no name for.
  """
  written: dict[str, tuple[Entry, tuple[int, ...]]] = {}
  covered: set[str] = set()
  if prefix is None:  # of a body alone names begin with nothing, where the family has that
    prefix = "" if model.get("head") == "embedding" and "" in family.prefixes else family.prefixes[0]
  tensors = family.tensors(dict(model))
  if in_memory:
    tensors = sorted(tensors, key=lambda tensor: not tensor.theirs.startswith(family.in_memory))
  for tensor in tensors:
    if not covered.intersection(paths_of(tensor)):
      entry = make_entry(tensor, sizes, prefix)
      written.update({entry.name(place): (entry, place) for place in entry.places()})
      covered.update(entry.paths)
  for copy in family.ahead.copied(model, sizes) if family.ahead else ():
    entry = make_entry(copy, sizes, prefix)
    written[entry.name(())] = (entry, ())
  if missing := [path for path in sizes if path not in covered]:
    raise HFError(f"the family {family.name} has no tensor for {', '.join(missing)}.")
  return written


def copy_into(target: np.ndarray, values: np.ndarray, name: str) -> None:
  """target[...] = values, cast; fast where one is the other's transpose.

  Raises:
    HFError: a finite value is beyond the range of float16.
  """
  if target.ndim > 2:
    for one, other in zip(target, values, strict=True):
      copy_into(one, other, name)
    return
  with np.errstate(over="ignore"):
    if target.ndim == 2 and not values.flags.c_contiguous:
      for i, j in itertools.product(range(0, target.shape[0], BLOCK), range(0, target.shape[1], BLOCK)):
        block = slice(i, i + BLOCK), slice(j, j + BLOCK)
        target[block] = values[block]
    else:
      target[...] = values
  if target.dtype == np.float16 != values.dtype and not np.array_equal(np.isfinite(target), np.isfinite(values)):
    raise HFError(f"{name} has values beyond float16's range (65504); use bfloat16 or float32.")


# ---------------------------------------------------------------------------------------------------- names


def _prefix(family: Family, tensors: list[Tensor], shapes: Mapping, present: Mapping) -> str:
  """The family's spelling under which most of the names are present; the first if none is."""
  def found(prefix: str) -> int:
    return sum(name in present for t in tensors if t.prefixed for name in make_entry(t, shapes, prefix).names())
  return max(family.prefixes, key=found)


def _check_count(tensors: list[Tensor], shapes: Mapping, folder: files.TensorFolder) -> None:
  """A config.json with an absurd number of layers or experts would have every one of their names spelled out."""
  most = max(math.prod(make_entry(tensor, shapes, "").counts) for tensor in tensors)
  if most > 1000 + 10 * len(folder.tensors):
    raise HFError(f"{folder.path / files.CONFIG} asks for {most:,} tensors of one kind, by its numbers of layers and "
                  f"experts, but the folder has {len(folder.tensors):,} tensors in all. Fetch it again.")


def _choose(path: str, entries: list[Entry], present: Mapping, family: Family) -> Entry:
  """The first entry with that leaf whose tensors are all present and of its shape; else the one of which most are."""
  candidates = [entry for entry in entries if path in entry.paths]
  if not candidates:
    raise HFError(f"the family {family.name} has no tensor for our parameter {path}.")

  def fits(entry: Entry) -> tuple[float, float]:
    found = [present[name].shape for name in entry.names() if name in present]
    return len(found) / math.prod(entry.counts), found.count(entry.shape) / math.prod(entry.counts)

  return max(candidates, key=fits)


def _differences(wanted: Mapping[str, tuple[int, ...]], present: Mapping[str, files.TensorInfo],
                 ignored: Callable[[str], bool]) -> list[str]:
  """Lines that say how two sets of tensors differ; empty if they do not."""
  lines = [f"- {name} {shape}: not in the folder" for name, shape in wanted.items() if name not in present]
  lines += [f"+ {name} {info.shape}: not of this model" for name, info in present.items()
            if name not in wanted and not ignored(name)]
  for name, shape in wanted.items():
    info = present.get(name)
    if info is not None and info.shape != shape:
      lines.append(f"! {name}: {shape} by config.json, {info.shape} in {info.file.name}")
    elif info is not None and info.dtype not in files.DTYPES:
      lines.append(f"! {name}: {info.dtype} in {info.file.name}; parameters are {', '.join(files.DTYPES)}")
  return lines


def _tensors(family: Family, model: Mapping, shapes: Mapping) -> list[Tensor]:
  """The tensors that hold these leaves. Where embedding and unembedding are one matrix, either name may have it."""
  table = family.tensors({**model, "tie_embeddings": "unembed/kernel" not in shapes})
  if not model["tie_embeddings"]:
    return table
  other = {"embed/embedding": "unembed/kernel", "unembed/kernel": "embed/embedding"}
  return table + [replace(t, ours=other[path], transpose=not t.transpose)
                  for t in family.tensors({**model, "tie_embeddings": False})
                  for path in paths_of(t)[:1] if other.get(path) in shapes]


def names_of_unembedding(family: Family, model: Mapping, prefix: str) -> set[str]:
  """What the unembedding is called where it is not the embedding."""
  untied = family.tensors({**model, "tie_embeddings": False})
  return {(prefix if t.prefixed else "") + t.theirs for t in untied if paths_of(t) == ("unembed/kernel",)}


def _no_unembedding(family: Family, model: Mapping, lines: list[str]) -> str:
  """What to do where nothing but the unembedding is missing; "" where it is something else."""
  heads = {name for prefix in family.prefixes for name in names_of_unembedding(family, model, prefix)}
  if len(lines) > 1 or not any(lines[0].startswith(f"- {name} ") for name in heads):
    return ""
  return (f"Only the unembedding is missing, and by {files.CONFIG} it is not the embedding (tie_word_embeddings is "
          "false or absent). If it is, write \"tie_word_embeddings\": true there; else fetch the folder again.")


def _check_equal(folder: files.TensorFolder, copy: str, name: str, why: str) -> None:
  """A folder may hold the same matrix twice, but not two matrices; `why`: what the message says of it."""
  shapes = [folder.tensors[found].shape for found in (copy, name)]
  equal = shapes[0] == shapes[1]
  for start in range(0, shapes[1][0] if equal else 0, COMPARED_ROWS):
    rows = (slice(start, start + COMPARED_ROWS),)
    one, other = (folder.read(found, rows).astype(np.float32) for found in (copy, name))
    equal = equal and np.array_equal(one, other, equal_nan=True)
  if not equal:
    raise HFError(f"{folder.path}: {copy} {shapes[0]} is not equal to {name} {shapes[1]}. {why}")


# ---------------------------------------------------------------------------------------------------- reading

Bounds = tuple[tuple[int, int], ...]


def _shards(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[Bounds, list[jax.Device]]:
  """{(start, stop) per dimension: devices of this process that hold it}."""
  by_bounds: dict[Bounds, list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (slice(None),) * len(shape), shape, strict=True))
    by_bounds.setdefault(bounds, []).append(device)
  return by_bounds


def _size(bounds: Bounds) -> int:
  return math.prod(stop - start for start, stop in bounds)


def read_shard(leaf: Leaf, folder: Reader, bounds: Bounds, dtype: np.dtype) -> np.ndarray:
  """The part of a leaf between `bounds` ((start, stop) per dimension), read tensor by tensor and cast."""
  entry, lead = leaf.entry, len(leaf.entry.counts)
  values = np.empty([stop - start for start, stop in bounds], dtype)
  index = entry.to_theirs(leaf.part, tuple(slice(*pair) for pair in bounds[lead:]))
  for place in itertools.product(*(range(*pair) for pair in bounds[:lead])):
    within = tuple(n - start for n, (start, _) in zip(place, bounds, strict=False))
    name = entry.name(place)
    copy_into(values[(*within, ...)], entry.swap(entry.read(functools.partial(folder.read, name), index)), name)
  return values


def _put(values: np.ndarray, device: jax.Device) -> jax.Array:
  """On the device, in a buffer of its own: on CPU it could otherwise be the host's, which cannot be donated."""
  array = jax.device_put(values, device)
  if device.platform == "cpu":
    array = jnp.copy(array)
  return array.block_until_ready()  # so that the host's copy can go before the next is made
