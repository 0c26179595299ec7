"""Which of PEFT's modules are which of our kernels, and what tensors of an adapter's file are called.

The families' tensor names (models/hf/family.py) say it. Where several of our kernels are one module of theirs, as
query, key and value of GPT-2's c_attn, their adapters become one. Of experts, transformers 5 has all of a layer in one
parameter, and gate and up side by side in it: the A's of all experts stand above one another, the B's take turns.

r rank, L layers, E experts.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from models import lora as lora_lib
from models.hf.entry import group_order, paths_of
from models.hf.errors import HFError
from models.hf.family import Family, Tensor

ROOT = "base_model.model."
PARTS = {"A": "lora_A.weight", "B": "lora_B.weight", "M": "lora_magnitude_vector"}


class AdapterLayout(NamedTuple):
  """The model that adapters are of: all that a folder of PEFT's is read and written against."""

  # Of the base.
  family: Family
  # {dotted model key: value}.
  keys: Mapping[str, Any]
  # {path: object with .shape} of all our parameters, adapters included, kernels unquantised.
  shapes: Mapping[str, Any]
  # The config's section `model.lora`.
  lora: Mapping[str, Any]
  # |W| [L, out], or [out], of the kernel of that path: their file has lengths, ours are differences from these
  # (models/lora.py). Needed with `lora.dora`.
  lengths: Callable[[str], np.ndarray] | None = None
  # The base's table of that path, one row a token: float32 [V, D]. Needed where tables of tokens have adapters, or rows
  # that are trained.
  table: Callable[[str], np.ndarray] | None = None


@dataclass(frozen=True)
class Module:
  """A module of theirs, and the kernels of ours that it is.

  Args:
    theirs: its name with the placeholder {layer}, without the family's prefix.
    kernels: paths of ours.
    outs: the number of outputs of each.
    adapted: whether each has adapters.
    plain: its matrix is kept as ours, [in, out] (transformers' Conv1D, PEFT's fan_in_fan_out).
    kind: linear; embedding: a table, of which PEFT calls A and B otherwise; experts: no module but a parameter of one,
      with a matrix for each expert, of which PEFT has the A's and B's in one (target_parameters).
    layers, groups, prefixed: as in `models.hf.family.Tensor`. A name without the placeholder is of one module, whose
      kernels have no dimension of layers (a projector's): its layers are (0,).
  """

  theirs: str
  kernels: tuple[str, ...]
  outs: tuple[int, ...]
  adapted: tuple[bool, ...]
  plain: bool
  layers: tuple[int, ...]
  groups: int = 1
  kind: str = "linear"
  prefixed: bool = True
  # experts: how many, and how many parameters of the same module stand around this one.
  experts: int = 1
  depth: int = 0

  @property
  def stacked(self) -> bool:
    """Whether its kernels have a dimension of layers."""
    return "{layer}" in self.theirs

  @property
  def tokens(self) -> bool:
    """Whether it is the table that tokens are read from, which may be the one that predicts them."""
    return self.kernels == ("embed/embedding",)

  @property
  def order(self) -> np.ndarray:
    """Their outputs, kernel after kernel."""
    return group_order(self.outs, self.groups)

  def index(self, layer: int, *rest: slice) -> tuple[int | slice, ...]:
    """Of a layer of one of our leaves, with all its experts."""
    rest = (slice(None), *rest) if self.kind == "experts" else rest
    return (layer, *rest) if self.stacked else rest

  def name(self, prefix: str, layer: int, part: str = "") -> str:
    """Of a tensor in PEFT's file: A, B, or M for the lengths of DoRA; or of the module, or parameter, itself."""
    module = (prefix if self.prefixed else "") + self.theirs.format(layer=layer)
    if not part:
      return module
    if self.kind == "experts":
      module = module.rpartition(".")[0] + self.depth * ".base_layer"
    return f"{ROOT}{module}.{f'lora_embedding_{part}' if self.kind == 'embedding' else PARTS[part]}"

  def apart(self, a: np.ndarray, b: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(A [r, in], B [out, r]) of each expert, of theirs [E * r, in] and [out, r * E]; or of all there is."""
    if self.kind != "experts":
      return [(a, b)]
    return list(zip(a.reshape(self.experts, -1, a.shape[-1]),
                    np.moveaxis(b.reshape(len(b), -1, self.experts), -1, 0), strict=True))

  def together(self, pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The way back from `apart`."""
    a, b = np.concatenate([a for a, _ in pairs]), np.stack([b for _, b in pairs], axis=-1)
    return a, b.reshape(len(b), -1)

  def of_layers(self, lengths: np.ndarray) -> np.ndarray:
    """[L, out] of what `AdapterLayout.lengths` gives."""
    return lengths if self.stacked else lengths[None]

  @property
  def paths(self) -> list[tuple[str, str]]:
    """(lora_a, lora_b) of each kernel that has adapters."""
    return [lora_lib.pair(kernel) for kernel, adapted in zip(self.kernels, self.adapted, strict=True) if adapted]

  @property
  def magnitudes(self) -> list[tuple[str, str]]:
    """(kernel, lora_m beside it) of each kernel that has adapters, if all have."""
    if not all(self.adapted):
      free = [kernel for kernel, adapted in zip(self.kernels, self.adapted, strict=True) if not adapted]
      raise HFError(f"{self.theirs} holds {', '.join(free)}, too, which model.lora.targets does not match: DoRA trains "
                    "the lengths of a whole module. Add them, or have model.lora.dora=False.")
    return [(kernel, lora_lib.magnitude(kernel)) for kernel in self.kernels]

  @property
  def rows(self) -> list[slice]:
    """Where the outputs of each kernel that has adapters lie among theirs."""
    ends = np.cumsum(self.outs)
    return [slice(int(end) - out, int(end)) for out, end, adapted in zip(self.outs, ends, self.adapted, strict=True)
            if adapted]


def modules(layout: AdapterLayout) -> list[list[Module]]:
  """For every adapted kernel's module, the ways in which the family may name it, the first being the one written.

  Raises:
    HFError: an adapted kernel is no module of this family.
  """
  family, keys, shapes = layout[:3]
  adapted = {lora_lib.kernel_of(path) for path in shapes if path.endswith("/lora_a")}
  ways: dict[frozenset[str], list[Module]] = {}
  # What the model has decides whether the unembedding is the embedding.
  for tensor in family.tensors({**keys, "tie_embeddings": "unembed/kernel" not in shapes}):
    if not adapted.isdisjoint(paths_of(tensor)) and (module := _module(tensor, adapted, shapes)) is not None:
      ways.setdefault(frozenset(adapted.intersection(module.kernels)), []).append(module)
  if missing := adapted - frozenset().union(*ways):
    raise HFError(f"the family {family.name} has no module for {', '.join(sorted(missing))}, so that adapters there "
                  "have no place in PEFT's format. Export them merged, or leave them out of model.lora.targets.")
  found = list(ways.values())
  # Of several parameters of one module, the last is wrapped last, around the others.
  parents = [{_parent(way) for way in group if way.kind == "experts"} for group in found]
  return [[replace(way, depth=sum(_parent(way) in others for others in parents[i + 1:])) for way in group]
          for i, group in enumerate(found)]


def _parent(module: Module) -> str:
  return module.theirs.rpartition(".")[0]


def _module(tensor: Tensor, adapted: Collection[str], shapes: Mapping[str, Any]) -> Module | None:
  """The module that a family's tensor is the matrix of; None: it is none that PEFT would adapt."""
  kernels = paths_of(tensor)
  sizes = [shapes[kernel].shape for kernel in kernels]
  of_experts = all("/experts/" in kernel for kernel in kernels)
  if "{expert}" in tensor.theirs or not of_experts and not tensor.theirs.endswith(".weight"):
    return None
  kind = "experts" if of_experts else "embedding" if kernels[0].endswith("/embedding") else "linear"
  # Of experts, outputs that take turns.
  groups = sizes[0][-1] if tensor.form == "alternating" else tensor.groups if isinstance(tensor.groups, int) else 1
  layers = tensor.layers or tuple(range(sizes[0][0] if "{layer}" in tensor.theirs else 1))
  theirs = tensor.theirs if of_experts else tensor.theirs.removesuffix(".weight")
  return Module(theirs, kernels, tuple(size[-1] for size in sizes), tuple(kernel in adapted for kernel in kernels),
                kind == "linear" and not tensor.transpose, layers, groups, kind, tensor.prefixed,
                sizes[0][1] if of_experts else 1)


def target_of(theirs: str, chosen: Iterable[Module], layout: AdapterLayout) -> str:
  """The shortest end of a module's name that no module without adapters has, as a regex: PEFT finds modules by it.
  Where in some layers the module of that name has none, it has the numbers of the others."""
  adapted: dict[str, set[int]] = {}
  for module in chosen:
    adapted.setdefault(module.theirs, set()).update(module.layers)
  tensors = [tensor for tensor in layout.family.tensors(dict(layout.keys))
             if tensor.theirs.startswith(layout.family.in_memory)]
  free = {name for tensor in tensors if (name := tensor.theirs.rpartition(".")[0]) not in adapted
          or not adapted[name].issuperset(tensor.layers or ())}
  layers = rf"({'|'.join(map(str, sorted(adapted[theirs])))})" if theirs in free else r"\d+"
  parts = theirs.split(".")
  for start in reversed(range(len(parts))):
    end = ".".join(parts[start:])
    others = free - {theirs} if "{layer}" in end else free
    # A number alone also ends the names of layers, which are modules without a matrix.
    if not parts[start].isdigit() and not any(name == end or name.endswith(f".{end}") for name in others):
      return end.replace(".", r"\.").replace("{layer}", layers) if "{layer}" in end else end
  raise AssertionError(f"{theirs} is among its own names")
