"""Mamba 2: a layer that has a state in the place of keys and values (Dao and Gu 2024, arXiv 2405.21060).

As Granite 4 and Nemotron-H have it. B batch, T length, D hidden size, H heads of P inputs each, G groups of heads that
share what their states are written and read with, N its size, W width of the convolution, C channels of all three.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import state_space
from models.attention.cache import Cache
from models.attention.context import LayerContext
from models.attention.short_conv import ShortConv, by_device, convolved, last_inputs
from models.attention.state_space import Inputs
from models.layers import Linear, Norm, Scope, apply_linears
from models.remat import named
from models.sharding.logical_axes import constrain
from models.spec import Spec


class Mamba2(nnx.Module):
  """The state space with its projections, convolutions, gate and norm."""

  def __init__(self, spec: Spec, scope: Scope, out_gain: float):
    """`out_gain`: factor on the initial standard deviation of the last projection."""
    s, D = spec.mamba, spec.hidden_size
    inner, shared = s.num_heads * s.head_dim, s.num_groups * s.state_dim
    wide: dict[str, Any] = dict(std=spec.init_std, bias=False, names=(None, "heads"))
    # What groups share is small, and every device has it whole.
    whole: dict[str, Any] = dict(std=spec.init_std, bias=False, names=(None, None))
    # z gates what is read, x is written; b and c are what the state is written and read with; dt is each head's step.
    self.z = Linear(scope / "z", D, inner, **wide)
    self.x = Linear(scope / "x", D, inner, **wide)
    self.b = Linear(scope / "b", D, shared, **whole)
    self.c = Linear(scope / "c", D, shared, **whole)
    self.dt = Linear(scope / "dt", D, s.num_heads, **wide)
    self.x_conv = ShortConv(scope / "x_conv", s.conv_width, inner, s.conv_bias)
    self.b_conv = ShortConv(scope / "b_conv", s.conv_width, shared, s.conv_bias)
    self.c_conv = ShortConv(scope / "c_conv", s.conv_width, shared, s.conv_bias)
    # Of the paper's code: how fast states fade, steps, and what of the input is added to what is read.
    self.A_log = scope.log_uniform("A_log", (s.num_heads,), 1.0, 16.0)
    self.dt_bias = scope.softplus_log_uniform("dt_bias", (s.num_heads,), 1e-3, 0.1)
    self.D = scope.constant("D", (s.num_heads,), 1.0)
    self.norm = Norm(scope / "norm", inner, kind="rmsnorm", eps=spec.norm_eps, plus_one=False, groups=s.num_groups)
    self.o = Linear(scope / "o", inner, D, std=spec.init_std, bias=False, gain=out_gain, names=("heads", None))
    self.spec, self.dtype = s, scope.compute_dtype

  def __call__(self, u_BxTxD: jax.Array, context: LayerContext
               ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | Cache]:
    """(output, (last inputs of the convolutions [B, W - 1, C], states [B, H, N, P]), or, with a `past` of one
    token, its cache).
    """
    s, f32, tokens, key, past = self.spec, jnp.float32, context.tokens, context.key, context.past
    B, T, _ = u_BxTxD.shape
    parts = apply_linears((self.z, self.x, self.b, self.c, self.dt), u_BxTxD, key)
    z, x, b, c, dt = (named(constrain(part, "batch", "length", name), "qkv")
                      for part, name in zip(parts, ("heads", "heads", None, None, "heads"), strict=True))
    dt_BxTxH = jnp.maximum(jax.nn.softplus(dt.astype(f32) + self.dt_bias[...].astype(f32)), s.min_step)
    g_BxTxH = -jnp.exp(self.A_log[...].astype(f32)) * dt_BxTxH

    (x, b, c), mixed_BxTxC, segment_ids, state = convolved(
        (x, b, c), (self.x_conv, self.b_conv, self.c_conv), tokens.segments, past, self.dtype)
    x_BxTxHxP = x.reshape(B, T, s.num_heads, -1)
    b_BxTxGxN, c_BxTxGxN = (part.reshape(B, T, s.num_groups, -1) for part in (b, c))
    if past is None or past.extends:
      inputs = Inputs(c_BxTxGxN, b_BxTxGxN, x_BxTxHxP, g_BxTxH, dt_BxTxH)
      out_BxTxHxP, state = by_device(state_space.chunked, s.chunk, inputs, x_BxTxHxP.shape, tokens.segments, state)
      new: Any = last_inputs(mixed_BxTxC, segment_ids, s.conv_width - 1), state
    else:
      state, out_BxHxP = state_space.one_token(
          state, c_BxTxGxN[:, 0].astype(f32), b_BxTxGxN[:, 0].astype(f32), x_BxTxHxP[:, 0].astype(f32), g_BxTxH[:, 0],
          dt_BxTxH[:, 0])
      new, out_BxTxHxP = past.with_state(mixed_BxTxC[:, 1:], state, tokens.segments[:, 0] > 0), out_BxHxP[:, None]
    out_BxTxHxP = out_BxTxHxP + self.D[...].astype(f32)[:, None] * x_BxTxHxP.astype(f32)
    # The gate comes before the norm.
    gated_BxTxI = out_BxTxHxP.reshape(B, T, -1) * jax.nn.silu(z.astype(f32))
    return self.o(constrain(self.norm(gated_BxTxI).astype(self.dtype), "batch", "length", "heads"), key), new
