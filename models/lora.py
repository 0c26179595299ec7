"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): which kernels have them, and parameters without them.

Beside a kernel W [.., in, out] stand `lora_a` [.., in, r] and `lora_b` [.., r, out]; what is computed is
x @ W + dropout(x) @ lora_a @ lora_b * scale (models/layers.py, `Linear`), with scale = alpha / r, or alpha / sqrt(r)
with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732). Only adapters are trained, and what `modules_to_save` (PEFT's word)
names as a whole.

With DoRA (Liu et al. 2024, arXiv 2402.09353) each column of W + lora_a @ lora_b * scale, its weights for one output, is
brought to a length of its own, |W| + `lora_m` [.., out]. The paper trains that length m itself; its difference from the
base's, which is kept here, begins at 0 whatever the base is, and has the same gradient. Weight decay draws it to the
base's.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer import tree
from trainer.errors import ConfigError

_ADAPTER = r"/lora_[abm]$"
# A column of zeros has no direction.
_TINY = 1e-30
# A head that scores is new, and so trained as a whole.
_ALWAYS = rf"{_ADAPTER}|^score/"

ReadLeaf = Callable[[str, tuple[int | slice, ...]], np.ndarray]


def is_adapter(path: str) -> bool:
  """Whether the parameter of that path is part of an adapter."""
  return re.search(_ADAPTER, path) is not None


def is_new(path: str) -> bool:
  """Whether the parameter of that path is one that a base does not have: part of an adapter, or a head that scores."""
  return re.search(_ALWAYS, path) is not None


def trained(modules_to_save: Iterable[str]) -> str:
  """A regex of the parameters that are trained where there are adapters; `modules_to_save`: regexes of whole ones."""
  return "|".join([_ALWAYS, *(f"(?:{pattern})" for pattern in modules_to_save)])


def kernel_of(path: str) -> str:
  """The path of the kernel that an adapter's parameter stands beside."""
  return re.sub(_ADAPTER, "/kernel", path)


def pair(kernel: str) -> tuple[str, str]:
  """The paths of a kernel's adapter, lora_a and lora_b."""
  return _beside(kernel, "lora_a"), _beside(kernel, "lora_b")


def magnitude(kernel: str) -> str:
  """The path of the lengths that DoRA trains beside a kernel."""
  return _beside(kernel, "lora_m")


def lengths(matrix: Any) -> Any:
  """Of each column of a float32 matrix [.., in, out]: [.., out]."""
  return (matrix * matrix).sum(axis=-2) ** 0.5


def gain(base: Any, product: Any, more: Any) -> Any:
  """DoRA's factor on each output, less 1: (|W| + more) / |W + product| - 1, exactly 0 where product and more are.

  Args:
    base, product: W and lora_a @ lora_b * scale, float32 [.., in, out].
    more: `lora_m`, float32 [.., out].
  """
  before, after = lengths(base), lengths(base + product)
  # after - before, with all its digits.
  longer = (product * (base + base + product)).sum(axis=-2) / (before + after + _TINY)
  return (more - longer) / (after + _TINY)


def adapts(targets: Iterable[str], path: str) -> bool:
  """Whether the kernel of that path matches one of the targets, regexes."""
  return any(re.search(target, path) for target in targets)


def check_patterns(targets: tuple[str, ...], modules_to_save: tuple[str, ...]) -> None:
  """Refuses what is no regular expression, and no targets at all; raises ConfigError."""
  if not targets:
    raise ConfigError("model.lora.targets is empty, so that there would be nothing to train. Name kernels, e.g. "
                      "('blocks/attn/[qkvo]/kernel',), or set model.lora.rank=0.")
  for target in targets:
    tree.search(target, (), "model.lora.targets", must_match=False)
  for pattern in modules_to_save:
    tree.search(pattern, (), "model.lora.modules_to_save", must_match=False)


def check_targets(targets: tuple[str, ...], modules_to_save: tuple[str, ...], paths: Iterable[str]) -> None:
  """Refuses targets without effect and those that cannot have adapters, and whole parameters that have some.

  Args:
    targets: regexes, `model.lora.targets`.
    modules_to_save: regexes, `model.lora.modules_to_save`.
    paths: of all the model's parameters, adapters included, quantised kernels by their own name.

  Raises:
    ConfigError: naming the target and the kernels that there are.
  """
  paths, where = list(paths), "model.lora.targets"
  matrices = [path for path in paths if re.search(r"/(kernel|embedding)$", path)]
  adapted = {kernel_of(path) for path in paths if is_adapter(path)}
  for target in targets:
    if refused := [path for path in tree.search(target, matrices, where) if path not in adapted]:
      raise ConfigError(f"{where}: {target!r} matches {', '.join(refused)}, which cannot have adapters: they are for "
                        "the kernels of attention, of the MLP and of shared experts, not for routers, routed experts "
                        "and embeddings. A regex is found anywhere in a path; e.g. 'blocks/attn/[qkvo]/kernel'. What "
                        "is to be trained as a whole is named by model.lora.modules_to_save.")
  where = "model.lora.modules_to_save"
  for pattern in modules_to_save:
    whole = tree.search(pattern, [path for path in paths if not is_adapter(path)], where)
    if both := adapted.intersection(whole):
      raise ConfigError(f"{where}: {pattern!r} matches {', '.join(sorted(both))}, which have adapters, too. A kernel "
                        "is trained by one or the other: narrow model.lora.targets or model.lora.modules_to_save.")


def off(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters with adapters that change nothing: the base model, in the same tree (a reference for DPO, say)."""
  flat = tree.flatten(params)
  return tree.unflatten(
      {path: jnp.zeros_like(leaf) if path.endswith(("/lora_b", "/lora_m")) else leaf for path, leaf in flat.items()})


def merge(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
  """The parameters without adapters, each kernel W + lora_a @ lora_b * scale, computed in float32, in W's dtype; with
  DoRA its columns have their own lengths.

  Args:
    params: nested dict; kernels not quantised (see `quantize.restore`).
    scale: `spec.lora.scale`.
  """
  flat = tree.flatten(params)
  merged = {path: leaf for path, leaf in flat.items() if not is_adapter(path)}
  for path in merged:
    a, b = (flat.get(beside) for beside in pair(path))
    if path.endswith("/kernel") and a is not None:
      product = jnp.matmul(*(x.astype(jnp.float32) for x in (a, b)), precision=jax.lax.Precision.HIGHEST)
      base, product = merged[path].astype(jnp.float32), product * scale
      moved = base + product
      if magnitude(path) in flat:
        moved += moved * gain(base, product, flat[magnitude(path)].astype(jnp.float32))[..., None, :]
      merged[path] = moved.astype(merged[path].dtype)
  return tree.unflatten(merged)


def merged_reader(read_base: ReadLeaf, read_adapter: ReadLeaf, adapters: Iterable[str], scale: float) -> ReadLeaf:
  """`read(path, index)` of the merged parameters, a slice at a time, for an export that holds one layer at a time.

  Args:
    read_base: gives `leaf[index]` of the base; index has a number for each layer and slices for the other dimensions.
    read_adapter: the same of the adapters' leaves.
    adapters: paths of the adapters' leaves.
    scale: `spec.lora.scale`.
  """
  adapters = frozenset(adapters)

  def read(path: str, index: tuple[int | slice, ...]) -> np.ndarray:
    base = read_base(path, index)
    path_a, path_b = pair(path)
    if not path.endswith("/kernel") or path_a not in adapters:
      return base
    *lead, rows, columns = index
    a = np.asarray(read_adapter(path_a, (*lead, rows, slice(None))), np.float32)
    b = np.asarray(read_adapter(path_b, (*lead, slice(None), columns)), np.float32)
    moved = np.asarray(base, np.float32) + a @ b * np.float32(scale)
    if magnitude(path) in adapters:  # the length of a column is that of all its rows
      all_rows = slice(None)
      whole = np.asarray(read_base(path, (*lead, all_rows, columns)), np.float32)
      a = np.asarray(read_adapter(path_a, (*lead, all_rows, all_rows)), np.float32)
      more = np.asarray(read_adapter(magnitude(path), (*lead, columns)), np.float32)
      moved += moved * gain(whole, a @ b * np.float32(scale), more)[..., None, :]
    return moved.astype(base.dtype)

  return read


def _beside(kernel: str, name: str) -> str:
  return f"{kernel.rpartition('/')[0]}/{name}"
