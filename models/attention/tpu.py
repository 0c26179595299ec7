"""Attention on TPU: the splash-attention kernel that comes with JAX, behind the promises of
models/attention/dispatch.py.

B batch, T query length, S key length, H query heads, G key/value heads, K head size, C parts of a length that is split.

The kernel goes over blocks of scores that some query can see and skips the others, forward and backward, and holds no
more scores than a block has. It scales nothing, so that queries are scaled before, in their own dtype. Without a TPU it
is interpreted, which is slow and gives the same numbers: how it is tested.

All functions work on what one device holds; within `jax.shard_map` they may be given parts of rows (`attend_in_parts`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from models.attention.mask import QKV, Rule

# Registers of the vector unit are so wide: lengths are multiples of it, head sizes need not be.
LANES = 128
# What the kernel's residuals (its output, the log-normaliser of the scores) are called in models/remat.py.
CHECKPOINT_NAME = "attention"


def refusal(T: int, blocks: bool, C: int = 1, prompts: bool = False, sinks: bool = False) -> str | None:
  """Why the kernel cannot take queries and keys of length `T`; None: it can.

  Args:
    T: length on a device.
    blocks: whether some tokens see each other both ways.
    C: parts of a row, each on a device of its own.
    prompts: whether some tokens see a segment beside their own.
    sinks: whether heads have a score that no key goes with.
  """
  if sinks:
    return "attention sinks"
  if prompts:
    return "prompts that several completions share"
  if blocks:
    return "tokens that see each other both ways (images, prefixes)"
  step = LANES if C == 1 else 2 * LANES
  if T % step:
    return f"rows {f'in {C} parts ' if C > 1 else ''}of {T} tokens{' each' if C > 1 else ''}: no multiple of {step}"
  return None


@functools.cache
def warn(reason: str) -> None:
  """Says once, for each reason, that the blocked implementation is taken."""
  logging.warning("attention: blocked, since the TPU kernel does not take %s", reason)


def attend(rule: Rule, qkv: QKV, segment_ids: jax.Array, key_segment_ids: jax.Array | None = None, *,
           interpret: bool = False) -> jax.Array:
  """`models.attention.dispatch.attention` by the kernel: [B, T, H, K] in the dtype of `v`; the last keys are the
  queries' own.

  Args:
    rule: how scores are made, and the window.
    qkv: queries [B, T, H, K]; keys and values [B, S, G, K] of the queries' tokens, and before them of S - T more of the
      same row; H is a multiple of G. No sinks.
    segment_ids: int32 [B, T], the queries'; 0 is padding.
    key_segment_ids: int32 [B, S], the keys'; -1: not there. None: `segment_ids`, where S is T.
    interpret: run without a TPU.
  """
  T, S, H = qkv.q.shape[1], qkv.k.shape[1], qkv.q.shape[2]
  places = np.arange(S - T, S, dtype=np.int32).tobytes()
  kernel = _kernel(rule._replace(scale=1.0), H, places, S, _block_sizes(qkv.q, T, S, rule.window), 1, interpret)
  return _run(kernel, rule.scale, qkv, segment_ids, segment_ids if key_segment_ids is None else key_segment_ids)


def attend_in_parts(rule: Rule, qkv: QKV, segment_ids: jax.Array, axis: Any, C: int, *, interpret: bool = False
                    ) -> jax.Array:
  """`attend` within `jax.shard_map`, for rows whose length is split over the mesh axis `axis`, part i on device i.

  With a window, each device is sent the end of the part before its own. Without one, it is sent the keys of the whole
  row, and half of the queries change places meanwhile: a causal row is less work at its beginning than at its end, so
  that every device takes the i-th of 2 C pieces from the front and the i-th from the back (as in Llama 3, arXiv
  2407.21783, 3.3.2). Gradients of keys and values are rounded to their dtype once for each device that saw them.

  Args:
    qkv: this device's parts.
    segment_ids: int32 [B, T], those of this part.
    axis: the mesh axis, or axes, over which rows are split.
    C: how many parts.
    rule, interpret: as in `attend`.
  """
  reach = None if rule.window is None else -(-(rule.window - 1) // LANES) * LANES
  if reach is not None and reach <= qkv.q.shape[1]:
    return _with_neighbour(rule, qkv, segment_ids, axis, C, reach, interpret)
  return _zigzag(rule, qkv, segment_ids, axis, C, interpret)


def _with_neighbour(rule: Rule, qkv: QKV, segment_ids, axis, C, reach, interpret) -> jax.Array:
  """Each part's queries against its own keys and the last `reach` of the part before."""
  if reach == 0:
    return attend(rule, qkv, segment_ids, interpret=interpret)
  T = qkv.q.shape[1]

  def prepend(x_BxT):
    # The first part is sent nothing, which arrives as zeros.
    return jnp.concatenate([jax.lax.ppermute(x_BxT[:, T - reach:], axis, [(i, i + 1) for i in range(C - 1)]), x_BxT], 1)

  key_segment_ids = prepend(segment_ids + 1) - 1
  return attend(rule, QKV(qkv.q, prepend(qkv.k), prepend(qkv.v)), segment_ids, key_segment_ids, interpret=interpret)


def _zigzag(rule: Rule, qkv: QKV, segment_ids, axis, C, interpret) -> jax.Array:
  """All keys of the row against queries of its front and of its back."""
  T, H = qkv.q.shape[1:3]
  # Piece 2 i and piece 2 i + 1 are device i's; afterwards it has, of pieces i and 2 C - 1 - i, first the even one.
  to_even = [(i, min(2 * i, 2 * C - 1 - 2 * i)) for i in range(C)]
  to_odd = [(i, min(2 * i + 1, 2 * C - 2 - 2 * i)) for i in range(C)]
  pieces = np.arange(2 * C * (T // 2), dtype=np.int32).reshape(2 * C, T // 2)
  order = [sorted((i, 2 * C - 1 - i), key=lambda piece: piece % 2) for i in range(C)]
  q_sequence = np.concatenate([pieces[both].reshape(-1) for both in order])

  def there(x_BxT):
    first, second = jnp.split(x_BxT, 2, axis=1)
    return jnp.concatenate([jax.lax.ppermute(first, axis, to_even), jax.lax.ppermute(second, axis, to_odd)], axis=1)

  def back(x_BxT):
    first, second = jnp.split(x_BxT, 2, axis=1)
    home = [[(there, here) for here, there in pairs] for pairs in (to_even, to_odd)]
    return jnp.concatenate([jax.lax.ppermute(first, axis, home[0]), jax.lax.ppermute(second, axis, home[1])], axis=1)

  k_BxSxGxK, v_BxSxGxK, key_segment_ids = (
      jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (qkv.k, qkv.v, segment_ids))
  sizes = _block_sizes(qkv.q, T // 2, C * T, rule.window)
  kernel = _kernel(rule._replace(scale=1.0), H, q_sequence.tobytes(), C * T, sizes, C, interpret)
  kernel = _part_of(kernel, C, jax.lax.axis_index(axis))
  return back(_run(kernel, rule.scale, QKV(there(qkv.q), k_BxSxGxK, v_BxSxGxK), there(segment_ids), key_segment_ids))


def _run(kernel, scale, qkv: QKV, segment_ids, key_segment_ids) -> jax.Array:
  q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, _ = qkv
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  q_BxHxTxK = (q_BxTxHxK.astype(jnp.float32) * scale).astype(q_BxTxHxK.dtype).transpose(0, 2, 1, 3)
  k_BxGxSxK, v_BxGxSxK = k_BxSxGxK.transpose(0, 2, 1, 3), v_BxSxGxK.transpose(0, 2, 1, 3)

  def row(q_HxTxK, k_GxSxK, v_GxSxK, segments_T, segments_S):
    return kernel(q_HxTxK, k_GxSxK, v_GxSxK, splash.SegmentIds(segments_T, segments_S))

  out_BxHxTxK = jax.vmap(row)(q_BxHxTxK, k_BxGxSxK, v_BxGxSxK, segment_ids, key_segment_ids)
  # Padding has seen padding, which spares the kernel queries that see nothing.
  return jnp.where(segment_ids[:, :, None, None] != 0, out_BxHxTxK.transpose(0, 2, 1, 3), 0).astype(v_BxSxGxK.dtype)


def _block_sizes(q_BxTxHxK: jax.Array, T: int, S: int, window: int | None) -> Any:
  """Blocks of scores: wide enough that arithmetic takes longer than fetching keys, small enough for the fast memory.

  A block of n queries does n operations for each byte of keys. TPUs do 170 (v5p) to 560 (v6e) in the time that a byte
  takes, hence 1024 where rows are long; bands as narrow as a window are better covered by smaller ones.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  wide = q_BxTxHxK.dtype.itemsize > 2 or q_BxTxHxK.shape[-1] > 128
  largest = 1024 if S >= 8192 and not wide and window is None else 512
  q, kv = (next(n for n in (1024, 512, 256, 128) if n <= largest and length % n == 0) for length in (T, S))
  compute = min(kv, 512)
  return splash.BlockSizes(block_q=q, block_kv=kv, block_kv_compute=compute, block_q_dkv=q, block_kv_dkv=kv,
                           block_kv_dkv_compute=compute, block_q_dq=q, block_kv_dq=kv)


@functools.lru_cache(maxsize=64)
def _kernel(rule: Rule, H: int, q_sequence: bytes, S: int, block_sizes: Any, C: int, interpret: bool) -> Any:
  """The kernel for H heads, with what it must know of the mask: which blocks there are to visit. It does not scale.

  `q_sequence`: the index among the S keys of each query's own, int32, over all C parts.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  window = rule.window

  class Band(masks.Mask):
    """Key s is seen by queries s, …, s + window - 1; computed where it is needed, from these two attributes."""

    def __init__(self):
      self.q_sequence = np.frombuffer(q_sequence, np.int32)

    def mask_function(self, q_ids, k_ids):
      seen = q_ids >= k_ids
      return seen if window is None else seen & (q_ids - k_ids < window)

    @property
    def shape(self) -> tuple[int, int]:
      return len(self.q_sequence), S

    def __getitem__(self, index) -> np.ndarray:
      q_ids, k_ids = self.q_sequence[index[0]], np.arange(S, dtype=np.int32)[index[1]]
      if self.mask_function(q_ids.min(), k_ids.max()) and self.mask_function(q_ids.max(), k_ids.min()):
        return np.ones((1, 1), bool)  # one entry says that all are, at a millionth of the cost
      if q_ids.max() < k_ids.min() or (window is not None and q_ids.min() - k_ids.max() >= window):
        return np.zeros((1, 1), bool)
      return self.mask_function(q_ids[:, None], k_ids[None, :])

  with jax.ensure_compile_time_eval():  # else what is kept here would belong to whatever is being traced
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([Band()] * H), block_sizes=block_sizes, head_shards=1, q_seq_shards=C,
        attn_logits_soft_cap=rule.logit_cap, residual_checkpoint_name=CHECKPOINT_NAME, interpret=interpret)
    return jax.tree.map(np.asarray, kernel)


def _part_of(kernel: Any, C: int, index: jax.Array) -> Any:
  """The kernel of part `index` of C: what it knows of the mask is split over queries."""

  def mine(x):
    at = x.ndim - 2 if x.ndim == 3 else 0
    return jax.lax.dynamic_slice_in_dim(x, index * (x.shape[at] // C), x.shape[at] // C, at)

  return jax.tree.map(lambda x: mine(jnp.asarray(x)), kernel)
