"""The device mesh, and where every array lives on it.

Parameters are placed by one table of (regex over the path, axis per dimension); optimizer state follows its
parameter; batches are split over `data` and `fsdp`; activations by logical names. What a run computes does not
depend on any of it (EXACTNESS.md I2).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models import api, moe
from trainer import patterns
from trainer.config import ConfigError

BATCH_AXES = ("data", "fsdp")

# First match wins. Kernels are stacked over layers: their first dimension is the layer.
PARAM_RULES = (
    (r"^embed/embedding$", ("tensor", "fsdp")),
    # The tower's too; its single class token is small.
    (r"(^|/)pos_embed/embedding$", (None, "fsdp")),
    # A kernel may be kept in parts (models/quantize.py), of which each is split as the kernel would be.
    (r"(attn/[qkv]|(mlp|shared)/(gate|up)|shared_gate)/kernel(_\w+)?$", (None, "fsdp", "tensor")),
    (r"(attn/o|(mlp|shared)/down)/kernel(_\w+)?$", (None, "tensor", "fsdp")),
    (r"(attn/[qkv]|mlp/(gate|up))/bias$", (None, "tensor")),
    (r"moe/experts/(gate|up)/kernel(_\w+)?$", (None, None, "fsdp", "tensor")),
    (r"moe/experts/down/kernel(_\w+)?$", (None, None, "tensor", "fsdp")),
    (r"moe/router/kernel$", (None, "fsdp", None)),
    # Adapters: the side that they share with the kernel is split as its is.
    (r"(attn/[qkv]|(mlp|shared)/(gate|up)|shared_gate)/lora_a$", (None, "fsdp", None)),
    (r"(attn/[qkv]|(mlp|shared)/(gate|up)|shared_gate)/lora_b$", (None, None, "tensor")),
    (r"(attn/o|(mlp|shared)/down)/lora_a$", (None, "tensor", None)),
    (r"(attn/o|(mlp|shared)/down)/lora_b$", (None, None, "fsdp")),
    (r"^unembed/kernel$", ("fsdp", "tensor")),
    # Beside the blocks, whose names the tower's have too: matrices without layers. The first has 3 inputs a pixel.
    (r"^vision/patch_embed/kernel$", (None, "fsdp")),
    (r"^projector/(up|linear)/kernel$", ("fsdp", "tensor")),
    (r"^projector/up/bias$", ("tensor",)),
    (r"^projector/down/kernel$", ("tensor", "fsdp")),
)

# Logical names of activation dimensions (models/api.py `constrain`).
ACTIVATION_RULES = {"batch": BATCH_AXES, "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
  """A mesh over all devices; one size may be -1, for the devices that remain.

  Raises:
    ConfigError: if the sizes do not fit the devices.
  """
  sizes = {axis: sizes[axis] for axis in sizes}
  count = jax.device_count()
  shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
  free = [axis for axis, size in sizes.items() if size == -1]
  if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
    raise ConfigError(f"mesh is {shown}: sizes are positive, and at most one is -1 (the devices that remain).")
  fixed = int(np.prod([size for size in sizes.values() if size != -1]))
  if free and count % fixed == 0:
    sizes[free[0]] = count // fixed
  if int(np.prod(list(sizes.values()))) != count:
    axis = free[0] if free else next(iter(sizes))
    raise ConfigError(
        f"mesh is {shown}, which makes {fixed} devices{' or a multiple' if free else ''}, but there are {count} "
        f"({jax.devices()[0].device_kind}). The product of the sizes must be {count}; try --config.mesh.{axis}=-1.")
  # Auto axes: the compiler propagates shardings and our constraints steer it; explicit ones would assert.
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def param_shardings(abstract: Any, mesh: Mesh, user_rules=()) -> tuple[Any, list[str]]:
  """The NamedSharding of each parameter, and notes on dimensions that an axis does not divide.

  Args:
    abstract: nested dict of ShapeDtypeStruct.
    user_rules: ((regex, axis or None per dimension), …), tried before PARAM_RULES.

  Raises:
    ConfigError: if one of the user's rules matches nothing, names an unknown axis, or does not divide a dimension.
  """
  leaves = patterns.flatten(abstract)
  by_user = patterns.match(user_rules, leaves, "sharding_rules")
  built_in = patterns.match(PARAM_RULES, leaves, "the built-in sharding rules", must_match=False)
  placed, notes = {}, []
  for path, leaf in leaves.items():
    chosen = by_user.get(path)
    spec = tuple(chosen if chosen is not None else built_in.get(path) or ())
    if chosen is not None:
      _check_user_spec(path, leaf.shape, spec, mesh)
    fitted = _fit(spec, leaf.shape, mesh)
    for dim, (wanted, got) in enumerate(zip(spec, fitted, strict=False)):
      if wanted != got:
        notes.append(f"{path}: dimension {dim} of {leaf.shape} is not divisible by mesh axis {wanted!r} "
                     f"({mesh.shape[wanted]}); replicated over it")
    placed[path] = NamedSharding(mesh, PartitionSpec(*fitted))
  return patterns.unflatten(placed), notes


def _check_user_spec(path: str, shape: tuple[int, ...], spec: tuple, mesh: Mesh) -> None:
  if len(spec) > len(shape):
    raise ConfigError(f"sharding_rules: {spec} has {len(spec)} dimensions, but {path} has shape {shape}.")
  for dim, axis in enumerate(spec):
    for name in axis if isinstance(axis, tuple) else (axis,):
      if name is not None and name not in mesh.shape:
        raise ConfigError(f"sharding_rules: unknown mesh axis {name!r} for {path}; axes: {', '.join(mesh.shape)}.")
    if axis is not None and shape[dim] % _size(mesh, axis):
      raise ConfigError(f"sharding_rules: dimension {dim} of {path} {shape} is not divisible by {axis!r} "
                        f"({_size(mesh, axis)} devices).")


def _size(mesh: Mesh, axis: str | tuple[str, ...]) -> int:
  return int(np.prod([mesh.shape[name] for name in (axis if isinstance(axis, tuple) else (axis,))]))


def _fit(spec: tuple, shape: tuple[int, ...], mesh: Mesh) -> tuple:
  """The spec without the axes that do not divide their dimension or are not in the mesh."""

  def fits(axis, size) -> bool:
    names = axis if isinstance(axis, tuple) else (axis,)
    return axis is not None and all(name in mesh.shape for name in names) and size % _size(mesh, axis) == 0

  return tuple(axis if fits(axis, size) else None for axis, size in zip(spec, shape, strict=False))


def state_shardings(abstract_state: Any, abstract_params: Any, params_sharding: Any, mesh: Mesh) -> Any:
  """Shardings of the whole training state: a leaf whose path ends in a parameter's path and that has its shape
  (moments, averages) is placed like that parameter; everything else (counters, factored moments) is replicated."""
  shapes = {path: leaf.shape for path, leaf in patterns.flatten(abstract_params).items()}
  placed = patterns.flatten(params_sharding)

  def place(key_path, leaf):
    parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in key_path]
    for start in range(len(parts)):
      path = "/".join(parts[start:])
      if shapes.get(path) == leaf.shape:
        return placed[path]
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree_util.tree_map_with_path(place, abstract_state)


def activation_sharding(mesh: Mesh, names: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
  """Where ACTIVATION_RULES put an array whose dimensions have these logical names."""
  spec = _fit(tuple(ACTIVATION_RULES.get(name) for name in names), shape, mesh)
  return NamedSharding(mesh, PartitionSpec(*spec))


@contextlib.contextmanager
def activation_rules(mesh: Mesh) -> Iterator[None]:
  """Within it, `models.api.constrain` places activations on the mesh by ACTIVATION_RULES."""

  def constrain(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, activation_sharding(mesh, names, x.shape))

  several = mesh.size > 1
  with (api.activation_rules(constrain if several else None),
        moe.mapped_by(functools.partial(_map_rows, mesh) if several else None)):
    yield


def _map_rows(mesh: Mesh, run: Callable, rows: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...],
              names: tuple[tuple[str | None, ...], ...]) -> Any:
  """`models.moe.mapped_by`: each device works on the rows that it holds, with its part of each kernel.

  By hand, since the partitioner would gather the whole batch to sort its tokens by expert.
  """
  by_row = PartitionSpec(*_fit((ACTIVATION_RULES["batch"],), rows[0].shape, mesh))
  specs = tuple(PartitionSpec(*_fit(tuple(ACTIVATION_RULES.get(name) for name in dims), kernel.shape, mesh))
                for dims, kernel in zip(names, kernels, strict=True))
  split = sorted({axis for spec in specs for axis in spec if axis is not None})

  def local(rows, kernels):
    partial = run(rows, kernels)
    return jax.lax.psum(partial, split) if split else partial

  # check_vma would want every loop inside to say over which axes its values differ.
  return jax.shard_map(local, mesh=mesh, in_specs=(by_row, specs), out_specs=by_row, check_vma=False)(rows, kernels)


def check_batch(mesh: Mesh, batch_size: int, what: str = "batch_size / grad_accum_steps") -> None:
  """Refuses a batch that the mesh cannot split evenly.

  Raises:
    ConfigError: naming the sizes.
  """
  shards = _size(mesh, tuple(axis for axis in BATCH_AXES if axis in mesh.shape))
  if batch_size % shards:
    raise ConfigError(
        f"{what} is {batch_size}, which cannot be split over {shards} devices "
        f"({', '.join(f'{a}={mesh.shape[a]}' for a in BATCH_AXES if a in mesh.shape)}). Use a multiple of {shards}, "
        "or move devices to another mesh axis, e.g. --config.mesh.tensor.")


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows split over the batch axes."""
  return NamedSharding(mesh, PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in mesh.shape)))


def place_batch(rows_fn: Callable[[np.ndarray], Mapping[str, np.ndarray]], batch_size: int,
                sharding: NamedSharding) -> dict[str, jax.Array]:
  """Global arrays of one batch; each process builds only the rows that its devices hold.

  Args:
    rows_fn: given row numbers within the batch, returns arrays with those rows.
    batch_size: rows in the batch over all processes.
  """
  needed = sharding.addressable_devices_indices_map((batch_size,)).values()
  rows = np.unique(np.concatenate([np.arange(batch_size)[index] for index in needed]))
  host = rows_fn(rows)

  def global_array(local: np.ndarray) -> jax.Array:
    def shard(index):
      start, stop, _ = index[0].indices(batch_size)
      first = np.searchsorted(rows, start)
      return local[first:first + stop - start]

    return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, shard)

  return {name: global_array(local) for name, local in host.items()}
