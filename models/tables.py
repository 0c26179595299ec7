"""Tables with an entry for each token or position: read by index, and multiplied by to predict tokens.

B batch, T length, D hidden size, V vocabulary, r rank of an adapter, n rows that alone are trained.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from models import lora as lora_lib
from models.layers import Linear, Scope
from models.lookup import read_table
from models.sharding import logical_axes
from models.spec import Spec


class Embedding(nnx.Module):
  """A table [size, D], read by index; one of tokens may have an adapter, or rows that alone are trained."""

  def __init__(self, scope: Scope, size: int, features: int, *, std: float | None):
    """`std`: of the initial table, 0.02 if None."""
    self.embedding = scope.normal("embedding", (size, features), 0.02 if std is None else std)
    self.lora = scope.adapters("embedding") if lora_lib.is_table((scope / "embedding").path) else None
    self.lora_a = scope.constant("lora_a", (size, self.lora.rank), 0.0) if self.lora else None
    self.lora_b = scope.normal("lora_b", (self.lora.rank, features), 1.0) if self.lora else None
    self.lora_rows, self.indices = _rows(scope, "embedding", features)
    self.dtype = scope.compute_dtype

  def __call__(self, ids_BxT: jax.Array) -> jax.Array:
    read = functools.partial(read_table, dtype=self.dtype)
    placed = logical_axes.current()
    if placed is not None:
      read = functools.partial(_read_split_table, placed, read)
    x_BxTxD = read(self.embedding[...], ids_BxT)
    if self.lora is not None:
      low_BxTxr = read(self.lora_a[...], ids_BxT)
      x_BxTxD = x_BxTxD + low_BxTxr @ self.lora_b[...].astype(self.dtype) * self.lora.scale
    if self.lora_rows is not None:
      n = len(self.indices)
      # Of a table of one more entry, which is not there: 0.
      x_BxTxD = x_BxTxD + read_table(self.lora_rows[...], lora_lib.places_of(self.indices, ids_BxT), self.dtype,
                                     size=n + 1)
    return x_BxTxD

  def table(self) -> jax.Array:
    """All its rows in order, [size, D], without adapters, in the compute dtype."""
    return self.embedding[...].astype(self.dtype)


class Unembedding(Linear):
  """The kernel [D, V] that predicts tokens, its adapter, and those of its columns that alone are trained; it is
  multiplied by elsewhere, see `unembedding`."""

  def __init__(self, scope: Scope, features: int, size: int, *, std: float | None):
    super().__init__(scope, features, size, std=std, bias=False)
    self.lora_rows, _ = _rows(scope, "kernel", features)


def _rows(scope: Scope, name: str, features: int) -> tuple[nnx.Param | None, tuple[int, ...]]:
  """(`lora_rows` [n, D], the ids of these rows) of the table of that name, if there are any."""
  of_tokens = scope.lora is not None and lora_lib.is_table((scope / name).path)
  indices = scope.lora.trainable_token_indices if of_tokens else ()
  return scope.constant("lora_rows", (len(indices), features), 0.0) if indices else None, indices


# Among the parameters that decode: the unembedding [D, V] with its adapter, made once and not for each token.
MERGED = "merged_unembedding"


def merged_unembedding(params: Mapping[str, Any], spec: Spec, dtype: Any) -> dict[str, jax.Array]:
  """That entry of the parameters that decode, where what predicts tokens has an adapter; else nothing."""
  head = params.get(_head(spec), {})
  return {MERGED: unembedding(params, spec).astype(dtype)} if "lora_a" in head or "lora_rows" in head else {}


def unembedding(params: Mapping[str, Any], spec: Spec) -> jax.Array:
  """What hidden states are multiplied by to predict tokens, [D, V]; with an adapter, in its dtype.

  An adapter's product is made as a whole, and so is its gradient, as when all of the table is trained: logits are made
  by chunks of the vocabulary, which know one matrix.
  """
  if MERGED in params:
    return params[MERGED]
  parts, lora = params[_head(spec)], spec.lora
  if "embedding" in parts:
    kernel_DxV = parts["embedding"].T
  else:
    kernel_DxV = parts["kernel"] if "kernel" in parts else parts["kernel_across"].T
  if "lora_a" in parts:
    product = parts["lora_a"] @ parts["lora_b"] * lora.scale
    kernel_DxV = kernel_DxV + (product.T if "embedding" in parts else product)
  if "lora_rows" in parts:
    wide = jnp.promote_types(kernel_DxV.dtype, parts["lora_rows"].dtype)
    kernel_DxV = lora_lib.with_rows(kernel_DxV.astype(wide), parts["lora_rows"], lora.trainable_token_indices, True)
  return kernel_DxV


def _head(spec: Spec) -> str:
  """The name of the part that predicts tokens."""
  return "embed" if spec.tie_embeddings else "unembed"


def _read_split_table(placed: logical_axes.Placement, read: Callable, table_VxD: jax.Array, ids_BxT: jax.Array
                      ) -> jax.Array:
  """`read` where devices hold parts of the table: the ids go to the parts, and what is read there goes back.

  By hand, since the partitioner would gather the table, or the whole batch of what was read.
  """
  V = table_VxD.shape[0]
  by_token = placed.spec(("batch", "length"), ids_BxT.shape)
  with_tokens = {axis for axes in by_token for axis in logical_axes.names_of(axes)}
  entries, features = placed.spec(("vocab", "shard"), table_VxD.shape)
  # Only between devices with different tokens can ids be exchanged for features.
  features = tuple(axis for axis in logical_axes.names_of(features) if axis in with_tokens)

  def local(table, ids):
    parts = logical_axes.names_of(entries)
    first = jax.lax.axis_index(parts) * table.shape[0] if parts else 0
    if features:
      ids = jax.lax.all_gather(ids, features)
    rows = read(table, ids, first=first, size=V)
    if features:
      rows = jax.lax.all_to_all(rows, features, split_axis=0, concat_axis=rows.ndim - 1, tiled=True)[0]
    return jax.lax.psum(rows, parts) if parts else rows

  return jax.shard_map(local, mesh=placed.mesh, in_specs=(PartitionSpec(entries, features or None), by_token),
                       out_specs=PartitionSpec(*by_token, None), check_vma=False)(table_VxD, ids_BxT)
