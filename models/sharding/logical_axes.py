"""Where activations live on a mesh: models name the dimensions, the trainer's rules say which mesh axes these mean.

Models know no mesh. They call `constrain(x, "batch", "length", "embed")` where the partitioner needs to be told, and
ask `current()` where a part has to be written per device (attention, mixtures of experts). Without a mesh, or on one
device, `current()` is None and `constrain` does nothing.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# length: of rows as attention and the MLPs' inside have it; stream: of rows in the residual stream; embed: D of
# activations; shard: the dimension of a parameter that is split only to save memory; vocab: entries of tables, logits.
ACTIVATION_NAMES = ("batch", "length", "stream", "embed", "shard", "heads", "kv_heads", "mlp", "expert", "vocab")

Axes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Placement:
  """A mesh, and the mesh axes that each of ACTIVATION_NAMES is split over (none, where it is not in `rules`)."""

  mesh: Mesh
  rules: Mapping[str, Axes]

  def spec(self, names: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """How an array of that shape is split whose dimensions have these names; axes that do not divide are left out."""
    unknown = [name for name in names if name is not None and name not in ACTIVATION_NAMES]
    if unknown or len(names) != len(shape):
      raise ValueError(f"{names} for shape {shape}; a name of {ACTIVATION_NAMES} or None each")
    return PartitionSpec(*fit(tuple(self.rules.get(name) for name in names), shape, self.mesh))

  def constrain(self, x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Tells the partitioner to lay out `x` as `spec` says."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(names, x.shape)))


_current: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("placement", default=None)


def current() -> Placement | None:
  """The placement within `placed`; None without one, or on one device."""
  placement = _current.get()
  return None if placement is None or placement.mesh.size == 1 else placement


def platform() -> str:
  """What the program that is traced is for: `cpu`, `gpu` or `tpu`; the mesh's devices need not be here."""
  return jax.default_backend() if _current.get() is None else device().platform


def device() -> Any:
  """One of those."""
  placement = _current.get()
  return jax.local_devices()[0] if placement is None else placement.mesh.devices.flat[0]


@contextlib.contextmanager
def placed(placement: Placement | None) -> Iterator[None]:
  """While active, `current()` is this one. Wrap what traces a step: its first call."""
  token = _current.set(placement)
  try:
    yield
  finally:
    _current.reset(token)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Tells the partitioner how to lay out an activation, one of ACTIVATION_NAMES (or None) per dimension."""
  placement = _current.get()
  return x if placement is None else placement.constrain(x, names)


def as_rows(x: jax.Array) -> jax.Array:
  """[…, D] as a matrix [N, D]; on a mesh as it is, since one dimension cannot be split as two were.

  Without a mesh, XLA on CPU multiplies matrices faster: with [B, T] in front it writes the transposed operand of a
  kernel's gradient in a strided loop that takes longer than the product itself.
  """
  return x.reshape(-1, x.shape[-1]) if current() is None else x


def made_once(x: Any) -> Any:
  """What several products read, arrays or a tree of them, made before these on TPU; so are its gradients.

  XLA would take what leads to it into each product, whose every tile would compute it again: by the compiler's own
  count of cycles longer than to write and read it.
  """
  return jax.lax.optimization_barrier(x) if platform() == "tpu" else x


def names_of(axes: Axes) -> tuple[str, ...]:
  """The mesh axes of one dimension of a spec, as a tuple."""
  return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def size_of(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
  """How many parts these axes make."""
  return int(np.prod([mesh.shape.get(name, 1) for name in names_of(axes)], dtype=int))


def fit(spec: tuple[Axes, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> tuple[Axes, ...]:
  """`spec` for that shape on that mesh: of each dimension's axes the first ones that divide it together.

  Axes of size 1, or not in the mesh, or used by an earlier dimension, are left out.
  """
  used: set[str] = set()
  fitted: list[Axes] = []
  for axes, size in zip(spec, shape, strict=False):
    chosen: tuple[str, ...] = ()
    for name in names_of(axes):
      if mesh.shape.get(name, 1) == 1 or name in used:
        continue
      if size % (size_of(mesh, chosen) * mesh.shape[name]):
        break
      chosen += (name,)
    used.update(chosen)
    fitted.append(None if not chosen else chosen[0] if len(chosen) == 1 else chosen)
  return tuple(fitted)
