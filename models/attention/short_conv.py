"""What layers with a state in the place of keys and values share: a short convolution before it, and their split over
devices.

B batch, T length, W width of the convolution, C channels, H heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention.cache import Past
from models.layers import Scope
from models.sharding import logical_axes


class ShortConv(nnx.Module):
  """The taps [W, C] of a convolution of each channel over the last W tokens, and its bias [C] if it has one."""

  def __init__(self, scope: Scope, width: int, channels: int, bias: bool = False):
    # As torch's Conv1d of one channel each.
    self.taps = scope.uniform("taps", (width, channels), width**-0.5)
    self.bias = scope.constant("bias", (channels,), 0.0) if bias else None


def convolved(parts: Sequence[jax.Array], convs: Sequence[ShortConv], segment_ids_BxT: jax.Array, past: Past | None,
              dtype: Any) -> tuple[list[jax.Array], jax.Array, jax.Array, Any]:
  """Of tokens that go on from `past`, or begin (None): (the parts [B, T, C_i] after their convolutions, in `dtype`; all
  inputs of these side by side, with the W - 1 before them; the segments of those; the state)."""
  mixed_BxTxC, before, state = jnp.concatenate(parts, axis=-1), 0, None
  if past is not None:
    before = convs[0].taps.shape[0] - 1
    earlier, state = past.state()
    mixed_BxTxC = jnp.concatenate([earlier.astype(mixed_BxTxC.dtype), mixed_BxTxC], axis=1)
    # Before the begin of a text they are zeros, as before the begin of a row.
    segment_ids_BxT = jnp.concatenate([jnp.ones((len(mixed_BxTxC), before), jnp.int32), segment_ids_BxT], axis=1)
    parts = jnp.split(mixed_BxTxC, np.cumsum([part.shape[-1] for part in parts[:-1]]), axis=-1)
  found = [short_convolution(part, conv.taps[...], segment_ids_BxT, None if conv.bias is None else conv.bias[...])
           for part, conv in zip(parts, convs, strict=True)]
  return [part[:, before:].astype(dtype) for part in found], mixed_BxTxC, segment_ids_BxT, state


def short_convolution(x_BxTxC: jax.Array, taps_WxC: jax.Array, segment_ids_BxT: jax.Array,
                      bias_C: jax.Array | None = None) -> jax.Array:
  """SiLU of the sum over w of taps[w] times the channel's input W - 1 - w tokens before, within segments, and of the
  bias if there is one; float32, or as wide as the input."""
  kind = jnp.promote_types(x_BxTxC.dtype, jnp.float32)
  x, taps = x_BxTxC.astype(kind), taps_WxC.astype(kind)
  W, T = taps.shape[0], x.shape[1]
  y = x * taps[-1]
  for back in range(1, min(W, T)):
    same_BxT = segment_ids_BxT[:, back:] == segment_ids_BxT[:, :-back]
    earlier = jnp.where(same_BxT[..., None], x[:, :-back], 0.0) * taps[W - 1 - back]
    y = y + jnp.pad(earlier, ((0, 0), (back, 0), (0, 0)))
  return jax.nn.silu(y if bias_C is None else y + bias_C.astype(kind))


def last_inputs(x_BxTxC: jax.Array, segment_ids_BxT: jax.Array, count: int) -> jax.Array:
  """The last `count` inputs of each row's last segment [B, count, C], zeros before its begin: what the convolution sees
  of them once the text goes on."""
  T = x_BxTxC.shape[1]
  last_Bx1 = jnp.max(jnp.where(segment_ids_BxT > 0, jnp.arange(T), -1), axis=1)[:, None]
  at = last_Bx1 - (count - 1) + jnp.arange(count)
  place, end_Bx1 = jnp.maximum(at, 0), jnp.maximum(last_Bx1, 0)
  same = jnp.take_along_axis(segment_ids_BxT, place, 1) == jnp.take_along_axis(segment_ids_BxT, end_Bx1, 1)
  return jnp.where((same & (at >= 0))[..., None], jnp.take_along_axis(x_BxTxC, place[..., None], 1), 0)


def by_device(chunked: Callable, chunk: int, inputs: Any, shape: tuple[int, ...], segment_ids_BxT: jax.Array,
              state: Any) -> tuple[jax.Array, jax.Array]:
  """`chunked(inputs, segment_ids, chunk, state)`, on a mesh each device for its rows and heads, so that no partitioner
  gathers anything.

  Args:
    inputs: a named tuple of two arrays [B, T, G, …], of groups of heads, one [B, T, H, …] and two [B, T, H].
    shape: of what is split by heads.
    state: [B, H, …], or None.
  """
  def run(inputs: Any, segment_ids: jax.Array, state: Any) -> tuple[jax.Array, jax.Array]:
    return chunked(inputs, segment_ids, chunk, state)

  placed = logical_axes.current()
  if placed is None:
    return run(inputs, segment_ids_BxT, state)
  batch, _, heads, _ = by_head = placed.spec(("batch", None, "heads", None), shape)
  # As many groups as can be split as the heads are, of which some are alike.
  groups, devices = inputs[0].shape[2], logical_axes.size_of(placed.mesh, heads)
  again = np.lcm(groups, devices) // groups
  inputs = type(inputs)(*(jnp.repeat(part, again, axis=2) for part in inputs[:2]), *inputs[2:])
  spec = jax.sharding.PartitionSpec
  of_tokens, of_state = spec(batch, None, heads), spec(batch, heads, None, None)
  of_inputs = type(inputs)._make((by_head, by_head, by_head, of_tokens, of_tokens))
  return jax.shard_map(run, mesh=placed.mesh, in_specs=(of_inputs, spec(batch, None), of_state),
                       out_specs=(by_head, of_state), check_vma=False)(inputs, segment_ids_BxT, state)
