"""Gated DeltaNet: the layer that has a state in the place of keys and values (Yang et al. 2024, arXiv 2412.06464).

As Qwen3-Next and Qwen3.5 have it. B batch, T length, D hidden size, G heads of queries and keys, H heads of values
(G divides H), K and V their sizes, W width of the convolution, C channels of all three.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import delta_gpu, delta_rule
from models.attention.cache import Cache
from models.attention.context import LayerContext
from models.attention.delta_rule import Inputs
from models.attention.short_conv import ShortConv, by_device, convolved, last_inputs
from models.layers import Linear, Norm, Scope, apply_linears
from models.remat import named
from models.sharding.logical_axes import constrain
from models.spec import Spec


class GatedDeltaNet(nnx.Module):
  """The gated delta rule with its projections, convolutions and gates."""

  def __init__(self, spec: Spec, scope: Scope, out_gain: float):
    """`out_gain`: factor on the initial standard deviation of the last projection."""
    s, D = spec.delta, spec.hidden_size
    wide: dict[str, Any] = dict(std=spec.init_std, bias=False, names=(None, "heads"))
    of_keys, of_values = s.num_key_heads * s.key_head_dim, s.num_value_heads * s.value_head_dim
    self.q = Linear(scope / "q", D, of_keys, **wide)
    self.k = Linear(scope / "k", D, of_keys, **wide)
    self.v = Linear(scope / "v", D, of_values, **wide)
    # z gates what is read; b says by how much the state is corrected, a how fast it fades.
    self.z = Linear(scope / "z", D, of_values, **wide)
    self.b = Linear(scope / "b", D, s.num_value_heads, **wide)
    self.a = Linear(scope / "a", D, s.num_value_heads, **wide)
    self.q_conv = ShortConv(scope / "q_conv", s.conv_width, of_keys)
    self.k_conv = ShortConv(scope / "k_conv", s.conv_width, of_keys)
    self.v_conv = ShortConv(scope / "v_conv", s.conv_width, of_values)
    self.A_log = scope.log_uniform("A_log", (s.num_value_heads,), 0.01, 16.0)
    self.dt_bias = scope.constant("dt_bias", (s.num_value_heads,), 1.0)
    self.norm = Norm(scope / "norm", s.value_head_dim, kind="rmsnorm", eps=spec.norm_eps, plus_one=False)
    self.o = Linear(scope / "o", of_values, D, std=spec.init_std, bias=False, gain=out_gain, names=("heads", None))
    self.spec, self.impl, self.dtype = s, spec.attention, scope.compute_dtype

  def __call__(self, x_BxTxD: jax.Array, context: LayerContext
               ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | Cache]:
    """(output, (last inputs of the convolutions [B, W - 1, C], states [B, H, K, V]), or, with a `past` of one
    token, its cache).
    """
    s, f32, tokens, key, past = self.spec, jnp.float32, context.tokens, context.key, context.past
    B, T, _ = x_BxTxD.shape
    parts = apply_linears((self.q, self.k, self.v, self.z, self.b, self.a), x_BxTxD, key)
    q, k, v, z, b, a = (named(constrain(part, "batch", "length", "heads"), "qkv") for part in parts)
    beta_BxTxH = jax.nn.sigmoid(b.astype(f32))
    g_BxTxH = -jnp.exp(self.A_log[...].astype(f32)) * jax.nn.softplus(a.astype(f32) + self.dt_bias[...].astype(f32))

    (q, k, v), mixed_BxTxC, segment_ids, state = convolved(
        (q, k, v), (self.q_conv, self.k_conv, self.v_conv), tokens.segments, past, self.dtype)
    q_BxTxGxK, k_BxTxGxK = (part.reshape(B, T, s.num_key_heads, -1) for part in (q, k))
    v_BxTxHxV = v.reshape(B, T, s.num_value_heads, -1)
    if past is None or past.extends:
      inputs = Inputs(q_BxTxGxK, k_BxTxGxK, v_BxTxHxV, g_BxTxH, beta_BxTxH)
      rule = functools.partial(delta_gpu.chunked, self.impl)
      out_BxTxHxV, state = by_device(rule, s.chunk, inputs, v_BxTxHxV.shape, tokens.segments, state)
      new: Any = last_inputs(mixed_BxTxC, segment_ids, s.conv_width - 1), state
    else:
      q_BxHxK, k_BxHxK = (jnp.repeat(delta_rule.unit_keys(part[:, 0]), s.num_value_heads // s.num_key_heads, axis=1)
                          for part in (q_BxTxGxK, k_BxTxGxK))
      state, out_BxHxV = delta_rule.one_token(
          state, q_BxHxK * s.key_head_dim**-0.5, k_BxHxK, v_BxTxHxV[:, 0].astype(f32), g_BxTxH[:, 0], beta_BxTxH[:, 0])
      active_B = tokens.segments[:, 0] > 0
      new = past.with_state(mixed_BxTxC[:, 1:], state, active_B)
      out_BxTxHxV = jnp.where(active_B[:, None, None], out_BxHxV, 0.0)[:, None]
    # Rounded before the gate, and after it.
    out_BxTxHxV = self.norm(out_BxTxHxV.astype(self.dtype)).astype(f32)
    out_BxTxHxV = (out_BxTxHxV * jax.nn.silu(z.astype(f32).reshape(out_BxTxHxV.shape))).astype(self.dtype)
    out_BxTxHxV = constrain(out_BxTxHxV, "batch", "length", "heads", None)
    return self.o(out_BxTxHxV.reshape(B, T, -1), key), new
