"""Parameters of one mesh on another that shares no device with it."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from trainer import tree
from trainer.distributed import mesh as mesh_lib

# (start, stop) of each dimension.
Bounds = tuple[tuple[int, int], ...]


def move(array: jax.Array, sharding: Sharding) -> jax.Array:
  """The array on other devices, which are sent what they need from where it lies.

  There is no program of several devices in it: nothing waits for what the devices on either side do otherwise, and the
  array is whole nowhere unless `sharding` says so. One process.
  """
  shards = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
  parts = [_part(shards, _bounds(index, array.shape), device)
           for device, index in sharding.addressable_devices_indices_map(array.shape).items()]
  return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _part(shards: Mapping[Bounds, jax.Array], wanted: Bounds, device: Any, dim: int = 0) -> jax.Array:
  """What is `wanted` of an array, on a device, from shards that make up the array from dimension `dim` on."""
  if dim == len(wanted):
    (bounds, shard), = shards.items()
    inside = tuple(slice(max(first - start, 0), min(last, stop) - start)
                   for (first, last), (start, stop) in zip(wanted, bounds, strict=True))
    is_all = inside == tuple(slice(0, size) for size in shard.shape)  # a slice would be one more copy
    return jax.device_put(shard if is_all else shard[inside], device)
  first, last = wanted[dim]
  sections: dict[tuple[int, int], dict[Bounds, jax.Array]] = {}
  for bounds in sorted(shards):
    start, stop = bounds[dim]
    if start < last and first < stop:
      sections.setdefault(bounds[dim], {})[bounds] = shards[bounds]
  parts = [_part(section, wanted, device, dim + 1) for section in sections.values()]
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, dim)


class Handover:
  """Gives the parameters of a run to another mesh, as often as they change; those that are frozen once.

  Args:
    mesh: to be given them.
    rules: `config.sharding_rules`.

  Attributes:
    device: the first of the mesh.
  """

  def __init__(self, mesh: Mesh, rules: Any = ()):
    self._mesh, self._rules = mesh, rules
    self._frozen: dict[str, jax.Array] = {}
    self._shardings: dict[str, Sharding] = {}
    self.device = mesh.devices.flat[0]

  def __call__(self, params: Any, trained: Collection[str]) -> Any:
    """Copies that outlive the donation of the arrays; `trained`: paths of those that change."""
    self._shardings = self._shardings or tree.flatten(mesh_lib.param_shardings(params, self._mesh, self._rules)[0])
    moved = {path: self._frozen[path] if path in self._frozen else move(leaf, self._shardings[path])
             for path, leaf in tree.flatten(params).items()}
    self._frozen |= {path: leaf for path, leaf in moved.items() if path not in trained}
    return tree.unflatten(moved)
