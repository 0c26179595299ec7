"""The device mesh, and where every array lives on it.

Mesh axes, the slowest links first:

  slice    several TPU slices, or groups of nodes: parameters are copied to each, gradients summed over them
  data     rows of the batch; parameters are copied
  fsdp     rows of the batch; parameters and optimizer state are split, and gathered a layer at a time (ZeRO-3)
  expert   rows of the batch, and the experts: tokens travel to their experts and back (models/experts/all_to_all.py)
  context  the length of rows: attention passes keys and values round (models/attention/ring.py)
  tensor   the width of layers, heads, the vocabulary; between layers, the length of rows (sequence parallelism)

Parameters are placed by one table of (regex over the path, axes per dimension); optimizer state follows its parameter;
batches are split over the axes of BATCH_AXES; activations by logical names (models/sharding/logical_axes.py). What a
run computes does not depend on any of it (EXACTNESS.md I2).
"""

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from models.sharding import logical_axes
from models.sharding.logical_axes import ACTIVATION_NAMES, Placement, fit, names_of, size_of
from trainer import startup, tree
from trainer.distributed.processes import say
from trainer.errors import ConfigError

AXES = ("slice", "data", "fsdp", "expert", "context", "tensor")
BATCH_AXES = ("slice", "data", "fsdp", "expert")

# Whatever has no use for `expert` or `context` of its own is split over them like over `fsdp`.
_FSDP, _FSDP_OF_EXPERTS = ("fsdp", "expert", "context"), ("fsdp", "context")
# A leaf at least so large that ends up whole on every device is named.
LARGE_BYTES = 2**20

# First match wins. Kernels are stacked over layers: their first dimension is the layer.
PARAM_RULES = (
    (r"^(critic/)?(per_layer_)?embed/embedding$", ("tensor", _FSDP)),
    (r"per_layer_proj/(kernel(_\w+)?|lora_a)$", (_FSDP, None)),
    (r"(per_layer/gate|laurel/left)/(kernel(_\w+)?|lora_a)$", (None, _FSDP, None)),
    (r"(altup/router|(^|/)streams/(split|join))/kernel$", (None, _FSDP, None)),
    (r"(per_layer/out|laurel/right)/(kernel(_\w+)?|lora_b)$", (None, None, _FSDP)),
    # The tower's too; its single class token is small.
    (r"(^|/)pos_embed/embedding$", (None, _FSDP)),
    (r"^vision/axis_embed/embedding$", (None, None, _FSDP)),
    # A kernel may be kept in parts (models/quantization/quantize.py), of which each is split as the kernel would be.
    (r"(attn/([qkv]|q_up|kv_up)|delta/[qkvzba]|mamba/([zx]|dt)|(mlp|shared)/(gate|up))/kernel(_\w+)?$",
     (None, _FSDP, "tensor")),
    # What makes latents, or what groups of heads share: every device has these whole.
    (r"(attn/(q|kv)_down|indexer/(queries|keys|weights)|mamba/[bc]|mtp/eh_proj)/(kernel(_\w+)?|lora_a)$",
     (None, _FSDP, None)),
    (r"((attn|delta|mamba)/o|(mlp|shared)/down)/kernel(_\w+)?$", (None, "tensor", _FSDP)),
    (r"(attn/[qkv]|mlp/(gate|up))/bias$", (None, "tensor")),
    (r"(delta/[qkv]|mamba/x)_conv/taps$", (None, None, "tensor")),
    (r"(delta/(A_log|dt_bias)|mamba/(A_log|dt_bias|D|x_conv/bias)|attn/sinks)$", (None, "tensor")),
    (r"moe/experts/(gate|up)/kernel(_\w+)?$", (None, "expert", _FSDP_OF_EXPERTS, "tensor")),
    (r"moe/experts/down/kernel(_\w+)?$", (None, "expert", "tensor", _FSDP_OF_EXPERTS)),
    (r"moe/experts/(gate|up)/bias$", (None, "expert", "tensor")),
    (r"moe/experts/down/bias$", (None, "expert", None)),
    (r"moe/(router|shared_gate)/kernel$", (None, _FSDP, None)),
    # Adapters: the side that they share with the kernel is split as its is.
    (r"(attn/([qkv]|q_up|kv_up)|delta/[qkvzba]|mamba/([zx]|dt)|(mlp|shared)/(gate|up)|shared_gate)/lora_a$",
     (None, _FSDP, None)),
    (r"(attn/([qkv]|q_up|kv_up)|delta/[qkvzba]|mamba/([zx]|dt)|(mlp|shared)/(gate|up))/lora_b$",
     (None, None, "tensor")),
    (r"((attn|delta|mamba)/o|(mlp|shared)/down)/lora_a$", (None, "tensor", None)),
    (r"((attn|delta|mamba)/o|(mlp|shared)/down)/lora_b$", (None, None, _FSDP)),
    (r"(attn/([qkv]|q_up|kv_up)|delta/[qkvzba]|mamba/([zx]|dt)|(mlp|shared)/(gate|up))/lora_m$", (None, "tensor")),
    (r"((attn|delta|mamba)/o|(mlp|shared)/down)/lora_m$", (None, _FSDP)),
    (r"moe/experts/(gate|up)/lora_a$", (None, "expert", _FSDP_OF_EXPERTS, None)),
    (r"moe/experts/(gate|up)/lora_b$", (None, "expert", None, "tensor")),
    (r"moe/experts/down/lora_a$", (None, "expert", "tensor", None)),
    (r"moe/experts/down/lora_b$", (None, "expert", None, _FSDP_OF_EXPERTS)),
    (r"^(per_layer_)?embed/lora_a$", ("tensor", None)),
    (r"^unembed/lora_b$", (None, "tensor")),
    (r"^unembed/lora_a$", (_FSDP, None)),
    (r"^unembed/kernel$", (_FSDP, "tensor")),
    # Beside the blocks, whose names the tower's have too: matrices without layers. The first has 3 inputs a pixel.
    (r"^(critic/)?vision/patch_embed/kernel$", (None, _FSDP)),
    (r"^(critic/)?projector/(up|linear|merge)/kernel$", (_FSDP, "tensor")),
    (r"^(critic/)?projector/up/bias$", ("tensor",)),
    (r"^(critic/)?projector/down/kernel$", ("tensor", _FSDP)),
    (r"^(critic/)?projector/deepstack/up/kernel$", (None, _FSDP, "tensor")),
    (r"^(critic/)?projector/deepstack/up/bias$", (None, "tensor")),
    (r"^(critic/)?projector/deepstack/down/kernel$", (None, "tensor", _FSDP)),
)

# The mesh axes of the logical names of activations' dimensions, see models/sharding/logical_axes.py.
ACTIVATION_RULES = {
    "batch": BATCH_AXES, "length": "context", "stream": ("context", "tensor"), "heads": "tensor", "kv_heads": "tensor",
    "mlp": "tensor", "expert": "expert", "vocab": "tensor", "shard": _FSDP,
}
# When texts are generated, a token at a time: rows are split over `context` too, and nothing over a length of 1.
_SAMPLING = {"batch": (*BATCH_AXES, "context"), "length": None, "stream": None}


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
  """A mesh of all AXES over all devices; those not in `sizes` have size 1, and one may be -1: the devices that remain.

  Args:
    sizes: devices along each axis.
    devices: default: all there are. Those of a topology that is not here will do to compile for it.

  Raises:
    ConfigError: if the sizes do not fit the devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = axis_sizes(sizes, len(devices), devices[0].device_kind)
  if len(devices) > 1 and devices[0].platform == "cpu":
    # What comes from the cache has lost the order of its collectives: one device may wait in one, another in the next.
    startup.compile_anew()
  # Auto axes: the compiler propagates shardings and our constraints steer it; explicit ones would assert.
  return Mesh(_arrange(devices, sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def axis_sizes(sizes: Mapping[str, int], count: int, kind: str) -> dict[str, int]:
  """The size of each of AXES on so many devices of that kind; see `make_mesh`."""
  unknown = [axis for axis in sizes if axis not in AXES]
  if unknown:
    near = difflib.get_close_matches(unknown[0], AXES, 1)
    raise ConfigError(f"mesh has an axis {unknown[0]!r}{f' (do you mean {near[0]}?)' if near else ''}; the axes are "
                      f"{', '.join(AXES)}.")
  sizes = {axis: sizes.get(axis, 1) for axis in AXES}
  given = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "1 on every axis"
  free = [axis for axis, size in sizes.items() if size == -1]
  if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
    raise ConfigError(f"mesh is {given}: sizes are positive, and at most one is -1 (the devices that remain).")
  fixed = int(np.prod([size for size in sizes.values() if size != -1]))
  if free and count % fixed == 0:
    sizes[free[0]] = count // fixed
  if int(np.prod(list(sizes.values()))) != count:
    raise ConfigError(
        f"mesh is {given}, which makes {fixed} devices{' or a multiple' if free else ''}, but there are {count} "
        f"({kind}). The product of the sizes must be {count}; try "
        f"--config.mesh.{free[0] if free else 'data'}=-1.")
  return sizes


def _arrange(devices: list[Any], sizes: Mapping[str, int]) -> np.ndarray:
  """The devices as an array of the mesh's shape, such that neighbours on the last axes are close to one another."""
  slices: dict[int, list[Any]] = {}
  for device in devices:
    slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
  count = sizes["slice"]
  if len(slices) > 1 and count % len(slices):
    raise ConfigError(f"mesh.slice is {count}, but the devices are in {len(slices)} slices, with slow links between "
                      f"them. Use --config.mesh.slice={len(slices)}.")
  groups = list(slices.values())
  if len(slices) == 1:  # groups of nodes, or no slices at all: devices come in the order of the processes
    groups = np.array(devices, object).reshape(count, -1).tolist()
    count = 1
  inner = (count // len(slices), *(size for axis, size in sizes.items() if axis != "slice"))
  return np.concatenate([_arrange_slice(group, inner) for group in groups])


def _arrange_slice(devices: list[Any], shape: tuple[int, ...]) -> np.ndarray:
  try:
    return mesh_utils.create_device_mesh(shape, devices=devices)
  except NotImplementedError:  # an axis does not cover whole dimensions of the slice's torus
    return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)


def start(config: Any) -> Mesh:
  """The mesh of a run, on the devices of all processes; says what they are.

  Raises:
    ConfigError: the sizes do not fit the devices, or a micro-batch cannot be split over them.
  """
  mesh = training_mesh(config)
  check_batch(mesh, config.batch_size // config.grad_accum_steps)
  apart = num_sampling(config)
  say(f"{jax.device_count()} × {jax.devices()[0].device_kind} in {jax.process_count()} process(es), "
      f"mesh: {describe(mesh)}" + f"; {apart} more that sample: {describe(sampling_mesh(config, mesh))}" * bool(apart))
  return mesh


def num_sampling(config: Any) -> int:
  """Devices that sample rollouts and do nothing else."""
  return config.rollout.devices if config.rollout.num_prompts else 0


def training_mesh(config: Any, devices: Sequence[Any] | None = None) -> Mesh:
  """The mesh of a config's updates: all devices (see `make_mesh`) but the last ones, which sample.

  Raises:
    ConfigError: as `make_mesh`; or none would be left.
  """
  devices = list(jax.devices() if devices is None else devices)
  return make_mesh(config.mesh, devices[:num_training(config, len(devices))])


def num_training(config: Any, count: int) -> int:
  """Of so many devices, those that train.

  Raises:
    ConfigError: none would.
  """
  if (apart := num_sampling(config)) >= count:
    raise ConfigError(f"rollout.devices is {apart}, and there are {count} devices in all: none would be left to train. "
                      f"Use {f'at most {count - 1}' if count > 1 else '0'}.")
  return count - apart


def sampling_mesh(config: Any, mesh: Mesh) -> Mesh:
  """The mesh that samples rollouts: that of the updates, or of the devices that are kept for it."""
  apart = num_sampling(config)
  return make_mesh(dict(data=-1, tensor=config.rollout.tensor), jax.devices()[-apart:]) if apart else mesh


def describe(mesh: Mesh) -> str:
  """The axes that have more than one device, e.g. `data=4, tensor=2`."""
  return ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"


def param_shardings(abstract: Any, mesh: Mesh | AbstractMesh, user_rules=()) -> tuple[Any, list[str]]:
  """The NamedSharding of each parameter, and notes on what is not split although the mesh would have it.

  Args:
    abstract: nested dict of ShapeDtypeStruct.
    user_rules: ((regex, axes or None per dimension), …), tried before PARAM_RULES.

  Raises:
    ConfigError: if one of the user's rules matches nothing, names an unknown axis, or does not divide a dimension.
  """
  leaves = tree.flatten(abstract)
  by_user = tree.match(user_rules, leaves, "sharding_rules")
  built_in = tree.match(PARAM_RULES, leaves, "the built-in sharding rules", must_match=False)
  splitting = any(mesh.shape.get(axis, 1) > 1 for axis in (*_FSDP, "tensor"))
  result, notes = {}, []
  for path, leaf in leaves.items():
    chosen = by_user.get(path)
    spec = tuple(chosen if chosen is not None else built_in.get(path) or ())
    if chosen is not None:
      _check_user_spec(path, leaf.shape, spec, mesh)
    fitted = fit(spec, leaf.shape, mesh)
    for dim, (wanted, got) in enumerate(zip(spec, fitted, strict=False)):
      lost = [axis for axis in names_of(wanted) if mesh.shape.get(axis, 1) > 1 and axis not in names_of(got)]
      if lost:
        notes.append(f"{path}: dimension {dim} of {leaf.shape} is not divisible by mesh axis "
                     f"{', '.join(f'{axis!r} ({mesh.shape[axis]})' for axis in lost)}; replicated over it")
    size = int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    if splitting and size >= LARGE_BYTES and not any(fitted):
      notes.append(f"{path} {leaf.shape} is whole on every device: {size / 2**20:.1f} MiB each, since no rule splits "
                   f"it on this mesh. --config.sharding_rules=\"(('{path}', (axis or None per dimension)),)\" does.")
    result[path] = NamedSharding(mesh, PartitionSpec(*fitted))
  return tree.unflatten(result), notes


def placed_shapes(abstract: Any, mesh: Mesh | AbstractMesh, user_rules=()) -> Any:
  """The abstract parameters with their shardings; see `param_shardings`."""
  shardings, _ = param_shardings(abstract, mesh, user_rules)
  return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract,
                      shardings)


def _check_user_spec(path: str, shape: tuple[int, ...], spec: tuple, mesh: Mesh | AbstractMesh) -> None:
  if len(spec) > len(shape):
    raise ConfigError(f"sharding_rules: {spec} has {len(spec)} dimensions, but {path} has shape {shape}.")
  seen: set[str] = set()
  for dim, axes in enumerate(spec):
    for name in names_of(axes):
      if name not in mesh.shape:
        raise ConfigError(f"sharding_rules: unknown mesh axis {name!r} for {path}; axes: {', '.join(mesh.shape)}.")
      if name in seen:
        raise ConfigError(f"sharding_rules: {spec} for {path} names the mesh axis {name!r} twice; once is enough.")
      seen.add(name)
    if shape[dim] % size_of(mesh, axes):
      raise ConfigError(f"sharding_rules: dimension {dim} of {path} {shape} is not divisible by {axes!r} "
                        f"({size_of(mesh, axes)} devices).")


def state_shardings(abstract_state: Any, abstract_params: Any, params_sharding: Any, mesh: Mesh) -> Any:
  """Shardings of the whole training state: a leaf whose path ends in a parameter's path and that has its shape
  (moments, averages) is placed like that parameter, also without its last dimension (of which rows have one number);
  everything else (counters, factored moments) is replicated."""
  shapes = {path: leaf.shape for path, leaf in tree.flatten(abstract_params).items()}
  placed = tree.flatten(params_sharding)

  def place(key_path, leaf):
    parts = jax.tree_util.keystr(key_path, simple=True, separator="/").split("/")
    for start in range(len(parts)):
      path = "/".join(parts[start:])
      if shapes.get(path) == leaf.shape:
        return placed[path]
      if path in shapes and leaf.shape == (*shapes[path][:-1], 1):
        return NamedSharding(mesh, PartitionSpec(*placed[path].spec[:len(leaf.shape) - 1]))
    return NamedSharding(mesh, PartitionSpec())

  return jax.tree_util.tree_map_with_path(place, abstract_state)


def check_activation_rules(rules: Sequence[tuple[str, Any]]) -> None:
  """Refuses rules of names or axes that there are not. Raises ConfigError."""
  for rule in rules:
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
      raise ConfigError(f"activation_rules: found {rule!r}; each is (name, mesh axis, tuple of axes, or None).")
    name, axes = rule
    if name not in ACTIVATION_NAMES:
      raise ConfigError(f"activation_rules: unknown name {name!r}; names: {', '.join(ACTIVATION_NAMES)}.")
    wrong = [axis for axis in names_of(axes) if axis not in AXES]
    if wrong:
      raise ConfigError(f"activation_rules: unknown mesh axis {wrong[0]!r} for {name!r}; axes: {', '.join(AXES)}.")


def make_placement(mesh: Mesh, rules: Sequence[tuple[str, Any]] = (), *, sampling: bool = False) -> Placement:
  """Where activations live: ACTIVATION_RULES on that mesh.

  Args:
    mesh: may have one device; the placement then only says what that is.
    rules: ((name, axes), …), before the built-in ones.
    sampling: for generation, which works on one token of each row at a time.

  Raises:
    ConfigError: see `check_activation_rules`.
  """
  check_activation_rules(rules)
  return Placement(mesh, ACTIVATION_RULES | (_SAMPLING if sampling else {}) | dict(rules))


@contextlib.contextmanager
def activation_rules(mesh: Mesh, rules: Sequence[tuple[str, Any]] = ()) -> Iterator[None]:
  """Within it, models place activations as `make_placement` says."""
  with logical_axes.placed(make_placement(mesh, rules)):
    yield


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
  """Into how many parts the rows of a batch are split."""
  return size_of(mesh, tuple(axis for axis in BATCH_AXES if axis in mesh.shape))


def check_batch(mesh: Mesh | AbstractMesh, batch_size: int, what: str = "batch_size / grad_accum_steps") -> None:
  """Refuses a batch that the mesh cannot split evenly. Raises ConfigError, naming the sizes."""
  shards = batch_shards(mesh)
  if batch_size % shards:
    raise ConfigError(
        f"{what} is {batch_size}, which cannot be split over {shards} devices "
        f"({', '.join(f'{a}={mesh.shape[a]}' for a in BATCH_AXES if mesh.shape.get(a, 1) > 1)}). Use a multiple of "
        f"{shards}, or move devices to another mesh axis, e.g. --config.mesh.tensor.")


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


def place(batch: Mapping[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
  """Global arrays of a batch that every process has whole."""
  rows = len(next(iter(batch.values())))
  return place_batch(lambda some: {name: part[some] for name, part in batch.items()}, rows, sharding)
