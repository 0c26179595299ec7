"""Rows of a table, read by index, with a gradient that adds in a fixed order on every backend.

The gradient of a read adds the rows of one entry up. XLA for GPU does so by atomic additions, in another order each
time, or where it may not by a loop over all rows. Here, for GPUs, the rows are sorted by their entry, and sums of runs
of equal ones are products with matrices of zeros and ones: exact but for the order of additions, which is fixed. That
is two passes over the rows beside the one that writes the gradient.

N rows that were read, V entries, D features; C chunks of n rows, each of which has up to n runs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from models.sharding import logical_axes

# Rows of a chunk, and so the size of the matrices: products with larger ones take longer than the rows to be read.
CHUNK = 128
# Whether gradients are made so on a GPU; benchmarks/step_gpu.py compares.
IN_ORDER = True


def read_table(table_VxD: jax.Array, ids: jax.Array, dtype: Any, first: Any = 0, size: int | None = None) -> jax.Array:
  """Rows of a table, or of the part of a table of `size` entries that begins with entry `first`, in `dtype`.

  0 for an entry of another part. An id beyond the table gives NaN, which the finite guard reports, rather than another
  entry's row.
  """
  size = table_VxD.shape[0] if size is None else size
  places = jnp.where((ids >= first) & (ids < first + table_VxD.shape[0]), ids - first, size)
  read = _read_in_order if IN_ORDER and logical_axes.platform() == "gpu" else _read
  return jnp.where(((ids >= 0) & (ids < size))[..., None], read(jnp.dtype(dtype), table_VxD, places), jnp.nan)


def _read(dtype: Any, table_VxD: jax.Array, places: jax.Array) -> jax.Array:
  return table_VxD.at[places].get(mode="fill", fill_value=0).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read_in_order(dtype: Any, table_VxD: jax.Array, places: jax.Array) -> jax.Array:
  return _read(dtype, table_VxD, places)


def _read_in_order_fwd(dtype, table_VxD, places):
  # Of the table, its shape and dtype.
  return _read(dtype, table_VxD, places), (places, jnp.zeros((table_VxD.shape[0], 0), table_VxD.dtype))


def _read_in_order_bwd(dtype, saved, g):
  places, table_Vx0 = saved
  sums_VxD = add_rows(g.reshape(-1, g.shape[-1]), places.reshape(-1), len(table_Vx0))
  return sums_VxD.astype(table_Vx0.dtype), None


_read_in_order.defvjp(_read_in_order_fwd, _read_in_order_bwd)


def add_rows(g_NxD: jax.Array, places_N: jax.Array, entries: int) -> jax.Array:
  """For each entry, the sum of the rows at its place: [V, D], float32, always added in the same order.

  Args:
    g_NxD: rows, of any floating dtype.
    places_N: of each, from 0 to V - 1; rows elsewhere count nowhere.
  """
  N, D = g_NxD.shape
  n = min(CHUNK, N)
  C, f32 = -(-N // n), jnp.float32
  order_N = jnp.argsort(places_N, stable=True)
  padding = (0, C * n - N)
  # After the last row come rows of zeros, of an entry that there is not.
  rows_CxnxD = jnp.take(g_NxD, jnp.pad(order_N, padding, constant_values=N), axis=0, mode="fill", fill_value=0)
  rows_CxnxD = rows_CxnxD.reshape(C, n, D)
  sorted_M = jnp.pad(places_N[order_N], padding, constant_values=jnp.iinfo(places_N.dtype).max)
  sorted_Cxn = sorted_M.reshape(C, n)

  # Sums of the runs of each chunk; a product with 1 is exact.
  begins_Cxn = jnp.pad(sorted_Cxn[:, 1:] != sorted_Cxn[:, :-1], ((0, 0), (1, 0)))
  run_Cxn = jnp.cumsum(begins_Cxn, axis=1, dtype=jnp.int32)
  of_run_Cxnxn = (run_Cxn[:, None, :] == jnp.arange(n)[:, None]).astype(g_NxD.dtype)
  sums_CxnxD = _product("crn,cnd->crd", of_run_Cxnxn, rows_CxnxD)

  # What a chunk begins with may belong to a run that has begun in an earlier one: to the last run there.
  chunk_C = jnp.arange(C)
  goes_on_C = jnp.pad(sorted_Cxn[1:, 0] == sorted_Cxn[:-1, -1], (1, 0))
  begins_here_C = ~goes_on_C | (run_Cxn[:, -1] > 0)  # whether the chunk's last run does
  owner_C = jnp.pad(jax.lax.cummax(jnp.where(begins_here_C, chunk_C, 0))[:-1], (1, 0))
  owned_CxC = (goes_on_C[None] & (owner_C[None] == chunk_C[:, None])).astype(f32)
  more_CxD = _product("oc,cd->od", owned_CxC, sums_CxnxD[:, 0])
  last_Cxn = run_Cxn[:, -1:] == jnp.arange(n)
  sums_CxnxD = sums_CxnxD + jnp.where(last_Cxn[..., None], more_CxD[:, None], 0.0)

  # Each entry reads the sum of its run, rather than that sums are written to entries: one pass over the gradient.
  entry_V = jnp.arange(entries, dtype=places_N.dtype)
  begin_V = jnp.searchsorted(sorted_M, entry_V, method="scan_unrolled")
  there_V = jnp.take(sorted_M, begin_V, mode="clip") == entry_V
  slot_V = begin_V // n * n + jnp.take(run_Cxn.reshape(-1), begin_V, mode="clip")
  return jnp.take(sums_CxnxD.reshape(-1, D), jnp.where(there_V, slot_V, C * n), axis=0, mode="fill", fill_value=0)


def _product(product: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """In float32, of numbers that are not rounded before."""
  return jnp.einsum(product, a, b, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
