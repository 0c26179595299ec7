"""Tables of tokens in PEFT's files: rows that alone are trained, and what stands beside an adapter of a table.

PEFT keeps the trained rows themselves (`trainable_tokens_delta`, in spite of its name), ours are differences from the
base's (models/lora.py). Where the embedding is the unembedding, one adapter moves both: PEFT's `ensure_weight_tying`,
with which it writes the adapter twice. It also writes the base's own table, which is compared and not read.

V entries, D features, n rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models import lora as lora_lib
from models.hf import convert
from models.hf.entry import paths_of
from models.hf.errors import HFError
from models.hf.peft_modules import ROOT, AdapterLayout, Module

ROWS = ".token_adapter.trainable_tokens_delta"
# What a base that is kept in bfloat16 may differ by from the one in a file.
_ROUNDED = 2.0**-7


def tied(shapes: Mapping[str, Any]) -> bool:
  """Whether the embedding is the unembedding."""
  return "unembed/kernel" not in shapes and "score/kernel" not in shapes


def twins(module: Module, prefix: str, tensors: Mapping[str, np.ndarray], layout: AdapterLayout
          ) -> dict[str, np.ndarray]:
  """{name: values} of the adapter of the unembedding where it is the embedding, whose adapter is `module`'s."""
  if not tied(layout.shapes):
    return {}
  a, b = (tensors[module.name(prefix, 0, part)] for part in "AB")
  return {f"{ROOT}{name.removesuffix('.weight')}.lora_{part}.weight": np.ascontiguousarray(values)
          for name in convert.names_of_unembedding(layout.family, layout.keys, prefix)
          for part, values in (("A", b.T), ("B", a.T))}


def check(module: Module, prefix: str, tensors: Mapping[str, np.ndarray], layout: AdapterLayout,
          config: Mapping[str, Any], where: Path) -> set[str]:
  """Names of tensors that say again what a table's adapter and the base say.

  Raises:
    HFError: they say something else.
  """
  again = {}
  if module.tokens:
    _check_tying(config, layout, where)
    again = {name: values for name, values in twins(module, prefix, tensors, layout).items() if name in tensors}
  for name, values in again.items():
    if not np.array_equal(tensors[name], values):
      raise HFError(f"{where}: {name} is not the adapter of the embedding; here the two are one matrix. Set "
                    "model.tie_embeddings=False, so that they are two here, too.")
  modules = {module.name(prefix, 0), *(name.removeprefix(ROOT).rpartition(".lora_")[0] for name in again)}
  bases = {name for module_name in modules if (name := f"{ROOT}{module_name}.base_layer.weight") in tensors}
  for name in bases:
    base = None if layout.table is None else layout.table(module.kernels[0])
    there = tensors[name].astype(np.float32)
    if base is None or base.shape != there.shape or np.any(np.abs(base - there) > _ROUNDED * np.abs(there)):
      raise HFError(f"{where}: {name} {there.shape} is not the base's own table, so that the adapter belongs to "
                    "another base, or to one with more tokens. Merge it there with PEFT (merge_and_unload) and load "
                    "the result as model.hf.")
  return bases | again.keys()


def _check_tying(config: Mapping[str, Any], layout: AdapterLayout, where: Path) -> None:
  both = bool(config.get("ensure_weight_tying"))
  if tied(layout.shapes) and not both:
    raise HFError(f"{where}: ensure_weight_tying is {config.get('ensure_weight_tying')}, so that the embedding's "
                  "adapter leaves the unembedding as it is; here they are one matrix. Set model.tie_embeddings=False.")
  if both and layout.keys["tie_embeddings"] and not tied(layout.shapes):
    raise HFError(f"{where}: ensure_weight_tying is true, so that the embedding's adapter moves the unembedding, too, "
                  "which is another matrix here. Leave model.tie_embeddings unset.")


def modules(layout: AdapterLayout, prefix: str) -> dict[str, str]:
  """{path of a table with trained rows: the name of its module}."""
  family, keys, shapes = layout[:3]
  tables = {lora_lib.kernel_of(path) for path in shapes if path.endswith("/lora_rows")}
  found: dict[str, str] = {}
  for tensor in family.tensors({**keys, "tie_embeddings": "unembed/kernel" not in shapes}):
    if len(paths_of(tensor)) == 1 and (path := paths_of(tensor)[0]) in tables:
      found.setdefault(path, (prefix if tensor.prefixed else "") + tensor.theirs.removesuffix(".weight"))
  return found


def read(tensors: Mapping[str, np.ndarray], wanted: Mapping[str, Any], unused: set[str], layout: AdapterLayout,
         config: Mapping[str, Any], where: Path) -> dict[str, np.ndarray]:
  """{path of ours: [n, D]} of those tables whose rows the file has; their names leave `unused`.

  Raises:
    HFError: they are the rows of other tokens, or have another shape.
  """
  _check_indices(config, layout, where)
  found, table = {}, layout.table
  for prefix in layout.family.prefixes:
    for path, module in modules(layout, prefix).items():
      name, ours = f"{ROOT}{module}{ROWS}", lora_lib.rows(path)
      if name in tensors and ours in wanted and table is not None:
        if tensors[name].shape != wanted[ours].shape:
          raise HFError(f"{where}: {name} is {tensors[name].shape}; by the model it is {wanted[ours].shape}.")
        unused.discard(name)
        found[ours] = tensors[name].astype(np.float32) - table(path)[list(layout.lora["trainable_token_indices"])]
  return found


def _check_indices(config: Mapping[str, Any], layout: AdapterLayout, where: Path) -> None:
  ours = tuple(layout.lora["trainable_token_indices"])
  theirs = config.get("trainable_token_indices") or []
  lists = list(theirs.values()) if isinstance(theirs, dict) else [theirs]
  for indices in lists:
    if not isinstance(indices, list) or tuple(indices) != ours and indices:
      raise HFError(f"{where}: trainable_token_indices is {theirs!r:.200}, but the config trains {ours}. Set "
                    f"model.lora.trainable_token_indices={tuple(indices) if isinstance(indices, list) else ()!r}; all "
                    "tables have the same.")
  if any(lists) and layout.keys["tie_embeddings"] and "unembed/kernel" in layout.shapes:
    raise HFError(f"{where}: of a base whose embedding is the unembedding, trainable_token_indices trains the rows of "
                  "both as one. Leave model.tie_embeddings unset.")


def write(read: lora_lib.ReadLeaf, prefix: str, layout: AdapterLayout, dtype: Any
          ) -> tuple[dict[str, np.ndarray], list[int] | dict[str, list[int]] | None]:
  """({name: values}, adapter_config.json's trainable_token_indices).

  Raises:
    HFError: PEFT cannot tell the rows of the two tables apart.
  """
  found = modules(layout, prefix)
  indices = list(layout.lora["trainable_token_indices"])
  if found and layout.keys["tie_embeddings"] and "unembed/kernel" in layout.shapes:
    raise HFError("the base's embedding is its unembedding, and here model.tie_embeddings=False: PEFT would give "
                  "both the same rows. Export the adapters merged.")
  tensors = {}
  for path, module in found.items():
    rows = np.asarray(read(lora_lib.rows(path), (slice(None), slice(None))), np.float32)
    assert layout.table is not None
    tensors[f"{ROOT}{module}{ROWS}"] = (layout.table(path)[indices] + rows).astype(dtype or np.float32)
  if not found or list(found) == ["embed/embedding"]:
    return tensors, indices or None
  return tensors, {module.rpartition(".")[2]: indices for module in found.values()}
