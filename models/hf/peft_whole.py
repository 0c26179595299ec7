"""What PEFT calls modules_to_save: parameters that stand in an adapter's file as a whole, under their own names.

A module of theirs is saved as a whole or not at all, and so is what it holds of ours. Where the embedding is also the
unembedding, both of their modules are written, since PEFT takes the two apart as soon as it saves one of them.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from models import lora
from models.hf import convert
from models.hf.entry import Entry
from models.hf.errors import HFError
from models.hf.peft_modules import AdapterLayout

EMBEDDING, SCORE = "embed/embedding", "score/kernel"


def paths(shapes: Iterable[str], options: Mapping[str, Any]) -> set[str]:
  """Those parameters that are trained as a whole; `options`: the config's section `model.lora`."""
  pattern = lora.trained(options["modules_to_save"])
  return {path for path in shapes if not lora.is_adapter(path) and re.search(pattern, path)}


class Tensors:
  """Their tensors for parameters of ours.

  Args:
    wanted: paths of the parameters.
    where: names the file or folder in errors.
    names: of the tensors in a file, without PEFT's root, which decide on the family's prefix; None: the first.

  Raises:
    HFError: one of them holds others of ours, too.
  """

  def __init__(self, layout: AdapterLayout, wanted: Collection[str], where: str, names: Collection[str] | None = None):
    family, keys, shapes = layout[:3]
    sizes = {path: tuple(leaf.shape) for path, leaf in shapes.items() if not lora.is_adapter(path)}
    # What the model has decides: a head may be new, and an unembedding apart from the embedding.
    head, tied = "score" if SCORE in sizes else "lm", "unembed/kernel" not in sizes
    keys = {**keys, "head": head, "tie_embeddings": tied}
    layouts = {prefix: convert.layout(family, keys, sizes, prefix, in_memory=names is None)
               for prefix in (family.prefixes if names is not None else family.prefixes[:1])}
    prefix = max(layouts, key=lambda prefix: sum(name in layouts[prefix] for name in names or ()))
    self.all = layouts[prefix]
    # {name: (what it holds, its layer)}
    self.of: dict[str, tuple[Entry, tuple[int, ...]]] = {
        name: (entry, place) for name, (entry, place) in self.all.items() if not set(entry.paths).isdisjoint(wanted)}
    for name, (entry, _) in self.of.items():
      if others := sorted(set(entry.paths).difference(wanted)):
        raise HFError(f"{where}: {name} holds {', '.join(others)}, too, which model.lora.modules_to_save does not "
                      "match. Add it.")
    # The names under which the embedding is the unembedding, too.
    both = EMBEDDING in wanted and tied and head == "lm"
    self.twins = sorted(convert.names_of_unembedding(family, keys, prefix) - set(self.of)) if both else []
    self._embedding = next((name for name, (entry, _) in self.of.items() if EMBEDDING in entry.paths), "")

  def read(self, tensors: Mapping[str, np.ndarray], wanted: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    """{path: values} of those of ours whose tensors are all there; the others are to come from the base.

    Args:
      tensors: {name without PEFT's root: values}.
      wanted: {path: object with .shape and .dtype}.

    Raises:
      HFError: layers that are missing, another shape, an unembedding that is not the embedding, here the same.
    """
    found: dict[str, list[str]] = {path: [] for path in wanted}
    for name, (entry, _) in self.of.items():
      for path in entry.paths:
        found[path].append(name)
    present = {path: names for path, names in found.items() if any(name in tensors for name in names)}
    lines = [f"- {name}: not in the file" for names in present.values() for name in names if name not in tensors]
    lines += [f"! {name}: {tensors[name].shape} in the file, {entry.shape} by the model"
              for name, (entry, _) in self.of.items() if name in tensors and tensors[name].shape != entry.shape]
    if lines:
      raise HFError(f"{where}: its modules_to_save do not fit the model:\n  " + "\n  ".join(lines[:20]))
    apart = "Set model.tie_embeddings=False, so that they are two here, too."
    for twin in self.twins if self._embedding in tensors else []:
      if twin not in tensors:
        raise HFError(f"{where} holds {self._embedding} and no {twin}, so that PEFT leaves the unembedding as the base "
                      f"has it; here they are one matrix. {apart}")
      if not np.array_equal(tensors[twin], tensors[self._embedding]):
        raise HFError(f"{where}: {twin} is not {self._embedding}; here they are one matrix. {apart}")
    reader = _Reader(tensors)
    return {path: self._leaf(path, names[0], wanted[path], reader) for path, names in present.items()}

  def _leaf(self, path: str, name: str, leaf: Any, reader: "_Reader") -> np.ndarray:
    entry = self.of[name][0]
    described = convert.Leaf(tuple(leaf.shape), None, entry, entry.paths.index(path))
    return convert.read_shard(described, reader, tuple((0, n) for n in leaf.shape), np.dtype(leaf.dtype))

  def write(self, read: lora.ReadLeaf, shapes: Mapping[str, Any], dtype: Any) -> dict[str, np.ndarray]:
    """{name without PEFT's root: values}; `read`, `dtype` as in `peft.save_adapters`."""
    tensors = {}
    for name, (entry, place) in self.of.items():
      kind = np.result_type(*(shapes[path].dtype for path in entry.paths)) if dtype is None else np.dtype(dtype)
      tensors[name] = convert.assemble(entry, place, read, kind, name)
    return tensors | {twin: tensors[self._embedding].copy() for twin in self.twins}

  def modules(self) -> list[str] | None:
    """adapter_config.json's modules_to_save: of each module the shortest end that no other module's name ends with.

    Raises:
      HFError: a module of which a part is not trained.
    """
    ours = {name.rpartition(".")[0] for name in (*self.of, *self.twins)}
    others = {name.rpartition(".")[0] for name in self.all} - ours
    for name in self.all:
      if name.rpartition(".")[0] in ours and name not in self.of:
        raise HFError(f"PEFT saves modules as a whole, and {name} is not among model.lora.modules_to_save: add "
                      f"{', '.join(self.all[name][0].paths)}.")
    ends = set()
    for module in ours:
      parts = module.split(".")
      tails = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
      ends.add(next((tail for tail in tails if not any(other.endswith(tail) for other in others)), module))
    return sorted(ends) or None


class _Reader:
  """Reads slices of tensors that are in memory, as `files.TensorFolder.read` does of a file's."""

  def __init__(self, tensors: Mapping[str, np.ndarray]):
    self._tensors = tensors

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    return self._tensors[name][index]
