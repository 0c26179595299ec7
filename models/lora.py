"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): which kernels have them, and parameters without them.

Beside a kernel W [.., in, out] stand `lora_a` [.., in, r] and `lora_b` [.., r, out]; what is computed is
x @ W + dropout(x) @ lora_a @ lora_b * scale (models/layers.py, `Linear`), with scale = alpha / r, or alpha / sqrt(r)
with rsLoRA (Kalajdzievski 2023, arXiv 2312.03732). Only adapters are trained, and what `modules_to_save` (PEFT's word)
names as a whole.

With DoRA (Liu et al. 2024, arXiv 2402.09353) each column of W + lora_a @ lora_b * scale, its weights for one output, is
brought to a length of its own, |W| + `lora_m` [.., out]. The paper trains that length m itself; its difference from the
base's, which is kept here, begins at 0 whatever the base is, and has the same gradient. Weight decay draws it to the
base's.

A routed expert has a pair of its own, `lora_a` [E, in, r] and `lora_b` [E, r, out]. A table [V, D] of tokens has
`lora_a` [V, r] and `lora_b` [r, D], of which a token reads its row of the first, and begins with `lora_a` 0 and
`lora_b` from a normal distribution, as in PEFT. Or of a table some rows alone are trained: `lora_rows` [n, D] is their
difference from the base's, and begins at 0. Where a table also predicts tokens, both uses have the same change.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer import tree
from trainer.errors import ConfigError

_ADAPTER = r"/lora_([abm]|rows)$"
# The tables of tokens. That which predicts is a kernel, [D, V].
_EMBEDDING, _UNEMBEDDING = r"^(per_layer_)?embed/embedding$", r"^unembed/kernel$"
# A column of zeros has no direction.
_TINY = 1e-30
# A head that scores, or what is learned of similarities, is new, and so trained as a whole.
_ALWAYS = rf"{_ADAPTER}|^(score|similarity)/"

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
  """The path of the kernel, or table, that an adapter's parameter stands beside."""
  return re.sub(_ADAPTER, "/embedding" if re.match(r"(per_layer_)?embed/", path) else "/kernel", path)


def is_table(path: str) -> bool:
  """Whether the parameter of that path has an entry for each token."""
  return re.search(rf"{_EMBEDDING}|{_UNEMBEDDING}", path) is not None


def pair(kernel: str) -> tuple[str, str]:
  """The paths of a kernel's adapter, lora_a and lora_b."""
  return _beside(kernel, "lora_a"), _beside(kernel, "lora_b")


def magnitude(kernel: str) -> str:
  """The path of the lengths that DoRA trains beside a kernel."""
  return _beside(kernel, "lora_m")


def rows(table: str) -> str:
  """The path of the rows that alone are trained of a table of tokens."""
  return _beside(table, "lora_rows")


def places_of(indices: tuple[int, ...], ids: jax.Array) -> jax.Array:
  """Where each id stands among some indices; their number where it does not: int32, of the shape of `ids`."""
  order = np.argsort(indices)
  ordered = jnp.asarray(np.asarray(indices, np.int32)[order])
  near = jnp.minimum(jnp.searchsorted(ordered, ids, method="scan_unrolled"), len(indices) - 1)
  return jnp.where(ordered[near] == ids, jnp.asarray(order, jnp.int32)[near], len(indices))


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


def check_patterns(lora: Any) -> None:
  """Refuses what is no regular expression, and nothing to be trained at all: ConfigError. `lora`: `spec.lora`."""
  targets, modules_to_save = lora.targets, lora.modules_to_save
  if not targets and not lora.trainable_token_indices:
    raise ConfigError("model.lora.targets is empty, so that there would be nothing to train. Name kernels, e.g. "
                      "('blocks/attn/[qkvo]/kernel',), or set model.lora.rank=0.")
  for target in targets:
    tree.search(target, (), "model.lora.targets", must_match=False)
  for pattern in modules_to_save:
    tree.search(pattern, (), "model.lora.modules_to_save", must_match=False)


def check_targets(lora: Any, paths: Iterable[str], vocab_size: int) -> None:
  """Refuses targets without effect and those that cannot have adapters, whole parameters that have some, and rows of
  tables that there are not.

  Args:
    paths: of all the model's parameters, adapters included, quantised kernels by their own name.
    vocab_size: how many tokens there are.

  Raises:
    ConfigError: naming the target and the kernels that there are.
  """
  paths, where = list(paths), "model.lora.targets"
  matrices = [path for path in paths if re.search(r"/(kernel|embedding)$", path)]
  adapted = {kernel_of(path) for path in paths if path.endswith("/lora_a")}
  for target in lora.targets:
    if refused := [path for path in tree.search(target, matrices, where) if path not in adapted]:
      raise ConfigError(f"{where}: {target!r} matches {', '.join(refused)}, which cannot have adapters: they are for "
                        "the kernels of attention, of MLPs and of experts, and for the tables of tokens, not for "
                        "routers, indexers and tables of positions. A regex is found anywhere in a path; e.g. "
                        "'blocks/attn/[qkvo]/kernel'. What is to be trained as a whole is named by "
                        "model.lora.modules_to_save.")
  _check_kinds(lora, adapted, tied="unembed/kernel" not in paths)
  _check_rows(lora, adapted, [path for path in paths if path.endswith("/lora_rows")], vocab_size)
  where = "model.lora.modules_to_save"
  for pattern in lora.modules_to_save:
    whole = tree.search(pattern, [path for path in paths if not is_adapter(path)], where)
    if both := adapted.union(kernel_of(path) for path in paths if is_adapter(path)).intersection(whole):
      raise ConfigError(f"{where}: {pattern!r} matches {', '.join(sorted(both))}, which have adapters, too. A kernel "
                        "is trained by one or the other: narrow model.lora.targets, trainable_token_indices or "
                        "modules_to_save.")


def _check_kinds(lora: Any, adapted: set[str], tied: bool) -> None:
  """Refuses DoRA and dropout where there is none (nor is in PEFT, but for DoRA on tables)."""
  experts = sorted(path for path in adapted if "/experts/" in path)
  tables = sorted(filter(is_table, adapted))
  heads = [path for path in tables if path == "unembed/kernel" or tied and path == "embed/embedding"]
  for key, on, kinds in (("dora", lora.dora, (experts, tables)), ("dropout", lora.dropout, (experts, heads))):
    if on and (found := [path for kind in kinds for path in kind]):
      raise ConfigError(f"model.lora.{key} is {on}, but model.lora.targets matches {', '.join(found)}: adapters of "
                        f"{'routed experts' if kinds[0] else 'tables'} have none. Set model.lora.{key}="
                        f"{type(on)()!r}, or narrow model.lora.targets.")


def _check_rows(lora: Any, adapted: set[str], rows: list[str], vocab_size: int) -> None:
  where, indices = "model.lora.trainable_token_indices", lora.trainable_token_indices
  if wrong := [i for i in indices if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]:
    raise ConfigError(f"{where}: found {', '.join(map(repr, wrong[:8]))}; ids of tokens are whole numbers from 0 to "
                      f"{vocab_size - 1}.")
  if len(set(indices)) < len(indices):
    twice = sorted({i for i in indices if indices.count(i) > 1})
    raise ConfigError(f"{where} has {', '.join(map(str, twice[:8]))} more than once. Name every token once.")
  if both := [kernel_of(path) for path in rows if kernel_of(path) in adapted]:
    raise ConfigError(f"{where} trains rows of {', '.join(both)}, which model.lora.targets matches, too. A table is "
                      "trained by one or the other: narrow model.lora.targets, or leave out the indices.")


def off(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters with adapters that change nothing: the base model, in the same tree (a reference for DPO, say)."""
  flat = tree.flatten(params)
  return tree.unflatten(
      {path: jnp.zeros_like(leaf) if path.endswith(("/lora_b", "/lora_m", "/lora_rows")) else leaf
       for path, leaf in flat.items()})


def merge(params: Mapping[str, Any], lora: Any) -> dict[str, Any]:
  """The parameters without adapters, each kernel W + lora_a @ lora_b * scale, computed in float32, in W's dtype; with
  DoRA its columns have their own lengths.

  Args:
    params: nested dict; kernels not quantised.
  """
  flat = tree.flatten(params)
  merged = {path: leaf for path, leaf in flat.items() if not is_adapter(path)}
  for path in merged:
    a, b = (flat.get(beside) for beside in pair(path))
    if re.search(r"/(kernel|embedding)$", path) and a is not None:
      product = jnp.matmul(*(x.astype(jnp.float32) for x in (a, b)), precision=jax.lax.Precision.HIGHEST)
      base, product = merged[path].astype(jnp.float32), product * lora.scale
      moved = base + product
      if magnitude(path) in flat:
        moved += moved * gain(base, product, flat[magnitude(path)].astype(jnp.float32))[..., None, :]
      merged[path] = moved.astype(merged[path].dtype)
    elif is_table(path) and rows(path) in flat:
      merged[path] = with_rows(merged[path], flat[rows(path)], lora.trainable_token_indices, path == "unembed/kernel")
  return tree.unflatten(merged)


def with_rows(table: jax.Array, rows_NxD: jax.Array, indices: tuple[int, ...], across: bool) -> jax.Array:
  """A table of tokens, [V, D] or `across` [D, V], with its trained rows, in its dtype; these are added in float32."""
  at = (slice(None), np.asarray(indices)) if across else np.asarray(indices)
  old = table.at[at].get(unique_indices=True).astype(jnp.float32)
  moved = old + (rows_NxD.T if across else rows_NxD).astype(jnp.float32)
  return table.at[at].set(moved.astype(table.dtype), unique_indices=True)


def merged_reader(read_base: ReadLeaf, read_adapter: ReadLeaf, adapters: Iterable[str], lora: Any) -> ReadLeaf:
  """`read(path, index)` of the merged parameters, a slice at a time, for an export that holds one layer at a time.

  Args:
    read_base: gives `leaf[index]` of the base; index has a number for each layer and slices for the other dimensions.
    read_adapter: the same of the adapters' leaves.
    adapters: paths of the adapters' leaves.
  """
  adapters, scale = frozenset(adapters), lora.scale

  def moved_rows(path: str, index: tuple[int | slice, ...], base: np.ndarray) -> np.ndarray:
    across = path == "unembed/kernel"
    entries, features = reversed(index) if across else index
    begin = entries.start or 0 if isinstance(entries, slice) else entries
    moved = np.array(base, np.float32)
    changed = np.asarray(read_adapter(rows(path), (slice(None), features)), np.float32)
    moved = moved.T if across else moved  # a view
    for token, row in zip(lora.trainable_token_indices, changed, strict=True):
      if 0 <= token - begin < len(moved):
        moved[token - begin] += row
    return (moved.T if across else moved).astype(base.dtype)

  def read(path: str, index: tuple[int | slice, ...]) -> np.ndarray:
    base = read_base(path, index)
    path_a, path_b = pair(path)
    if is_table(path) and _beside(path, "lora_rows") in adapters:
      return moved_rows(path, index, base)
    if not path.endswith(("/kernel", "/embedding")) or path_a not in adapters:
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
