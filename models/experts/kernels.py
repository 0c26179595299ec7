"""What experts multiply by: the kernels of MLPs, their biases and adapters, all experts of a layer in one array.

B batch, T length, D hidden size, E experts, k experts per token, F width of an expert, r rank of an adapter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.activations import GATED
from models.layers import Kernel, Scope, with_kernels
from models.spec import Moe, Spec


class LowRank(NamedTuple):
  """Which of an expert's matrices have adapters (models/lora.py), `gate`, `up` or `down`, and their scale; static."""

  of: tuple[str, ...] = ()
  scale: float = 1.0


NO_ADAPTERS = LowRank()


class Biased(Kernel):
  """A kernel [..., in, out], and, if it has one, its bias [..., out]."""

  def __init__(self, scope: Scope, shape: tuple[int, ...], std: float, bias: bool):
    super().__init__(scope, shape, std)
    self.bias = scope.constant("bias", (*shape[:-2], shape[-1]), 0.0) if bias else None


class ExpertKernel(Biased):
  """Those of E experts [E, in, out], and of each its adapter."""

  def __init__(self, scope: Scope, shape: tuple[int, int, int], std: float, bias: bool):
    super().__init__(scope, shape, std, bias)
    E, d_in, d_out = shape
    self.lora = scope.adapters("kernel")
    self.lora_a = scope.uniform("lora_a", (E, d_in, self.lora.rank), d_in**-0.5) if self.lora else None
    self.lora_b = scope.constant("lora_b", (E, self.lora.rank, d_out), 0.0) if self.lora else None


class Experts(nnx.Module):
  """The kernels of E MLPs, with a gate or without, and their biases."""

  def __init__(self, scope: Scope, spec: Spec, moe: Moe, out_gain: float):
    """`out_gain`: factor on the initial standard deviation of `down`."""
    wide, gated = (moe.num_experts, spec.hidden_size, moe.expert_size), spec.activation in GATED
    std_in, std_out = (size**-0.5 if spec.init_std is None else spec.init_std for size in wide[1:])
    self.gate = ExpertKernel(scope / "gate", wide, std_in, spec.mlp_bias) if gated else None
    self.up = ExpertKernel(scope / "up", wide, std_in, spec.mlp_bias)
    self.down = ExpertKernel(scope / "down", (wide[0], *wide[:0:-1]), std_out * out_gain, spec.mlp_bias)
    self.names = ("gate", "up", "down") if gated else ("up", "down")
    self.matmuls = tuple(getattr(self, name).matmul for name in self.names)
    adapted = tuple(name for name in self.names if getattr(self, name).lora)
    self.low_rank = LowRank(adapted, scope.lora.scale) if adapted else NO_ADAPTERS
    self.dtype = scope.compute_dtype

  def with_kernels(self, function: Callable, *args: Any) -> Any:
    """`function((gate [E, D, F], up [E, D, F], down [E, F, D]), *args)`, the gate if there is one; quantised kernels in
    the compute dtype. With biases, those of gate and up [E, F] come after the kernels; then the pairs of adapters
    [E, in, r], [E, r, out]."""
    kernels = tuple(getattr(self, name) for name in self.names)
    more = () if self.up.bias is None else tuple(kernel.bias[...] for kernel in kernels[:-1])
    for name in self.low_rank.of:
      more += (getattr(self, name).lora_a[...], getattr(self, name).lora_b[...])
    if self.up.kernel is not None:
      return function((*(kernel.kernel[...] for kernel in kernels), *more), *args)
    return with_kernels(kernels, lambda kernels, *args: function((*kernels, *more), *args), self.dtype, *args)

  @property
  def dimensions(self) -> tuple[tuple[str | None, ...], ...]:
    """The logical names (models/sharding/logical_axes.py) of the dimensions of all that `with_kernels` gives."""
    ends = {"gate": ("shard", "mlp"), "up": ("shard", "mlp"), "down": ("mlp", "shard")}
    biases = [("expert", "mlp")] * (0 if self.up.bias is None else len(self.names) - 1)
    pairs = [dims for name in self.low_rank.of
             for dims in (("expert", ends[name][0], None), ("expert", None, ends[name][1]))]
    return (*(("expert", *ends[name]) for name in self.names), *biases, *pairs)

  def mean_bias(self, experts_BxTxk: jax.Array, weights_BxTxk: jax.Array) -> jax.Array:
    """Σ_j weight_j × down's bias of expert_j: float32 [B, T, D]; of expert E, none, nothing."""
    bias_ExD = self.down.bias[...].astype(jnp.float32)
    share_BxTxE = jnp.sum(jax.nn.one_hot(experts_BxTxk, len(bias_ExD)) * weights_BxTxk[..., None], axis=2)
    return jnp.matmul(share_BxTxE, bias_ExD, precision=jax.lax.Precision.HIGHEST)
