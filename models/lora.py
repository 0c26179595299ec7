"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): which kernels have them, and parameters without them.

Beside a kernel W [.., in, out] stand `lora_a` [.., in, r] and `lora_b` [.., r, out]; what is computed is
x @ W + dropout(x) @ lora_a @ lora_b * scale (models/layers.py, `Linear`), with scale = alpha / r, or alpha / sqrt(r)
with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732). Only adapters are trained.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer import tree
from trainer.errors import ConfigError

_ADAPTER = r"/lora_[ab]$"
# The parameters that are trained where there are adapters; a head that scores is new, and so trained as a whole.
TRAINED = rf"{_ADAPTER}|^score/"

ReadLeaf = Callable[[str, tuple[int | slice, ...]], np.ndarray]


def is_adapter(path: str) -> bool:
  """Whether the parameter of that path is part of an adapter."""
  return re.search(_ADAPTER, path) is not None


def is_trained(path: str) -> bool:
  """Whether the parameter of that path is trained where there are adapters."""
  return re.search(TRAINED, path) is not None


def kernel_of(path: str) -> str:
  """The path of the kernel that an adapter's parameter stands beside."""
  return re.sub(_ADAPTER, "/kernel", path)


def pair(kernel: str) -> tuple[str, str]:
  """The paths of a kernel's adapter, lora_a and lora_b."""
  return _beside(kernel, "lora_a"), _beside(kernel, "lora_b")


def adapts(targets: Iterable[str], path: str) -> bool:
  """Whether the kernel of that path matches one of the targets, regexes."""
  return any(re.search(target, path) for target in targets)


def check_patterns(targets: tuple[str, ...]) -> None:
  """Refuses targets that are no regular expressions, or none at all; raises ConfigError."""
  if not targets:
    raise ConfigError("model.lora.targets is empty, so that there would be nothing to train. Name kernels, e.g. "
                      "('blocks/attn/[qkvo]/kernel',), or set model.lora.rank=0.")
  for target in targets:
    tree.search(target, (), "model.lora.targets", must_match=False)


def check_targets(targets: tuple[str, ...], paths: Iterable[str]) -> None:
  """Refuses targets without effect and those that cannot have adapters.

  Args:
    targets: regexes, `model.lora.targets`.
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
                        "and embeddings. A regex is found anywhere in a path; e.g. 'blocks/attn/[qkvo]/kernel'.")


def off(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters with adapters that change nothing: the base model, in the same tree (a reference for DPO, say)."""
  flat = tree.flatten(params)
  return tree.unflatten(
      {path: jnp.zeros_like(leaf) if path.endswith("/lora_b") else leaf for path, leaf in flat.items()})


def merge(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
  """The parameters without adapters, each kernel W + lora_a @ lora_b * scale, computed in float32, in W's dtype.

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
      merged[path] = (merged[path].astype(jnp.float32) + product * scale).astype(merged[path].dtype)
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
    return (np.asarray(base, np.float32) + a @ b * np.float32(scale)).astype(base.dtype)

  return read


def _beside(kernel: str, name: str) -> str:
  return f"{kernel.rpartition('/')[0]}/{name}"
