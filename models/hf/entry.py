"""A family's `Tensor` laid over the shapes of one model: its names, its shape, where each of our values lies in it."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.hf.errors import HFError
from models.hf.family import Tensor
from models.spec_vision import UNBOUNDED

# Of convolutions over patches, the dimensions between channels and pixels.
_FRAMES: Mapping[str | None, tuple[int, ...]] = {"patches": (), "videos": (2,)}


@dataclass(frozen=True)
class Entry:
  """A `Tensor` of a family, laid over the shapes of one model."""

  tensor: Tensor
  prefix: str
  # Numbers of layers and experts or heads, as far as the name has such placeholders: the leading dimensions of ours.
  counts: tuple[int, ...]
  # The shape of each of ours without these dimensions, in their layout.
  parts: tuple[tuple[int, ...], ...]

  @property
  def paths(self) -> tuple[str, ...]:
    return paths_of(self.tensor)

  @property
  def matrix_shape(self) -> tuple[int, ...]:
    """The parts laid end to end along `axis`: the shape of their tensor, unless `form` says otherwise."""
    shape = list(self.parts[0])
    if len(self.parts) > 1:
      shape[self.tensor.axis] = sum(part[self.tensor.axis] for part in self.parts)
    return tuple(shape)

  @property
  def shape(self) -> tuple[int, ...]:
    """Of their tensor."""
    shape = self.matrix_shape
    if self.tensor.form == "row":
      return shape[1:]
    if self.tensor.form == "taps":
      return (shape[0], 1, shape[1])
    if self.tensor.form in _FRAMES:
      frames = _FRAMES[self.tensor.form]
      size = math.isqrt(shape[1] // (3 * math.prod(frames)))
      return (shape[0], 3, *frames, size, size)
    return shape

  def places(self) -> Iterator[tuple[int, ...]]:
    """Every (layer, expert or head), as far as the name has them."""
    return itertools.product(*map(range, self.counts))

  def name(self, place: tuple[int, ...]) -> str:
    numbers = dict(zip(_placeholders(self.tensor), place, strict=True))
    if self.tensor.layers is not None:
      numbers["layer"] = self.tensor.layers[numbers["layer"]]
    return self.prefix + self.tensor.theirs.format(**numbers)

  def names(self) -> Iterator[str]:
    return map(self.name, self.places())

  def to_theirs(self, part: int, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """Where a slice of one of ours (without its leading dimensions) lies in their tensor, in `matrix_shape`."""
    theirs = list(index)
    if self.tensor.transpose:
      theirs[-2:] = theirs[-1], theirs[-2]
    if len(self.parts) > 1:
      axis = self.tensor.axis
      start = sum(shape[axis] for shape in self.parts[:part])
      theirs[axis] = slice(theirs[axis].start + start, theirs[axis].stop + start)
    return tuple(theirs)

  def swap(self, values: np.ndarray) -> np.ndarray:
    """From our layout to theirs, and back; a view."""
    return values.swapaxes(-1, -2) if self.tensor.transpose else values

  def read(self, read: Callable[[tuple[slice, ...]], np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
    """A slice of their tensor, which `read` gives slices of, in `matrix_shape`."""
    if self.tensor.form == "row":
      return read(index[1:])[None][index[:1]]
    if self.tensor.form in _FRAMES:  # small, and no slice of ours is one of theirs
      return np.moveaxis(read(()), 1, -1).reshape(self.matrix_shape)[index]
    if self.tensor.form == "taps":
      return read((index[0], slice(0, 1), index[1]))[:, 0]
    if self.tensor.form == "alternating":
      half, last = self.matrix_shape[-1] // len(self.parts), index[-1]
      part = last.start // half
      near = slice(len(self.parts) * (last.start - part * half), len(self.parts) * (last.stop - part * half))
      return read((*index[:-1], near))[..., part::len(self.parts)]
    if self.tensor.form == "bound":
      return np.clip(np.asarray(read(index), np.float32), -UNBOUNDED, UNBOUNDED)
    if isinstance(self.tensor.groups, int):  # a slice of ours is one of each group's
      return read(())[self._order(self.tensor.groups)][index]
    return read(index)

  def to_form(self, values: np.ndarray) -> np.ndarray:
    """Their tensor, of its values in `matrix_shape`."""
    if self.tensor.form in _FRAMES:
      out, channels, *sizes = self.shape
      return np.ascontiguousarray(np.moveaxis(values.reshape(out, *sizes, channels), -1, 1))
    if self.tensor.form == "alternating":
      return np.stack(np.split(values, len(self.parts), axis=-1), axis=-1).reshape(self.shape)
    if self.tensor.form == "bound":
      return np.where(np.abs(values) < UNBOUNDED, values, np.copysign(values.dtype.type(np.inf), values))
    if isinstance(self.tensor.groups, int):
      theirs = np.empty_like(values)
      theirs[self._order(self.tensor.groups)] = values
      return theirs
    return values.reshape(self.shape)

  def _order(self, groups: int) -> np.ndarray:
    return group_order([part[0] for part in self.parts], groups)


def group_order(sizes: Sequence[int], groups: int) -> np.ndarray:
  """Of parts of these sizes, laid end to end: where each row lies once every group has its share of each part."""
  shares = [size // groups for size in sizes]
  starts = np.cumsum([0, *shares])
  return np.concatenate([(np.arange(groups)[:, None] * starts[-1] + start + np.arange(share)).reshape(-1)
                         for start, share in zip(starts, shares, strict=False)])


def paths_of(tensor: Tensor) -> tuple[str, ...]:
  """The paths of our parameters that it holds."""
  return (tensor.ours,) if isinstance(tensor.ours, str) else tuple(tensor.ours)


def make_entry(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], prefix: str) -> Entry:
  """Lays a tensor over our shapes.

  Args:
    shapes: {path: shape} of our parameters.
    prefix: what the names of the family begin with.

  Raises:
    HFError: the model lacks one of ours, or their shapes do not fit together.
  """
  paths, lead = paths_of(tensor), len(_placeholders(tensor))
  if unknown := [path for path in paths if path not in shapes]:
    raise HFError(f"{tensor.theirs} is made of {', '.join(unknown)}, which this model does not have. Does config.model "
                  "say something else of the architecture than config.json?")
  counts = {shapes[path][:lead] for path in paths}
  parts = [shapes[path][lead:] for path in paths]
  if tensor.transpose:
    parts = [(*part[:-2], part[-1], part[-2]) for part in parts]
  others = {(*part[:tensor.axis], *part[tensor.axis + 1:]) for part in parts}
  if len(counts) > 1 or len(others) > 1:
    raise HFError(f"{tensor.theirs}: {', '.join(paths)} cannot be laid end to end, their shapes are "
                  f"{[shapes[path] for path in paths]}.")
  return Entry(tensor, prefix if tensor.prefixed else "", counts.pop(), tuple(parts))


def _placeholders(tensor: Tensor) -> list[str]:
  """Those that the name has, in the order of our leading dimensions."""
  return [key for key in ("layer", "expert", "head") if f"{{{key}}}" in tensor.theirs]
