"""What the backward pass recomputes instead of keeping it (`config.remat`).

Some activations of a layer have names (`named`), by which policies keep them:

  layer_input   the residual stream that enters the layer [B, T, D]; what remains of a layer in any case;
  qkv           queries, keys and values as projected, before norms and rotation [B, T, H, K], [B, T, G, K] twice;
  attention     attention's output and log-normalisers, as its implementation needs them backward [B, T, H, K + 1];
  stream        the residual stream after attention [B, T, D];
  mlp           the hidden layer of the MLP before its activation [B, T, F], twice where it is gated; of experts those
                of the assignments of tokens to experts, and what they give [B T k, D];
  product       what is multiplied by hand on a mesh (models/sharding/linear.py), where policies of JAX's see no
  product.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from models import cpu
from models.sharding import logical_axes
from trainer.errors import ConfigError

__all__ = ["HOST_MEMORY", "JAX_POLICIES", "REMAT", "named", "remat_policy"]

# What is kept as bits has a name that ends so.
_BITS = "_bits"
_ATTENTION = ("qkv", "attention")
_or = jax.checkpoint_policies.save_from_both_policies


def _only(*names: str) -> Callable:
  """Keeps these names, as bits too; what enters a layer is kept by JAX, but as bits if it can be."""
  return jax.checkpoint_policies.save_only_these_names(*names, *(name + _BITS for name in ("layer_input", *names)))


def named(values: Any, name: str, in_rule: bool = False) -> Any:
  """An array, or several, of that name; `in_rule`: in the forward rule of a function with a gradient of its own, which
  is not differentiated."""
  as_bits = _bits if in_rule else _differentiable_bits
  return jax.tree.map(lambda x: as_bits(x, name) if cpu.is_bfloat16(x) else checkpoint_name(x, name), values)


def _bits(x: jax.Array, name: str) -> jax.Array:
  """What is kept of a layer of a scan is added to an array for all layers, see models/cpu/bfloat16.py."""
  return cpu.from_bits(checkpoint_name(cpu.as_bits(x), name + _BITS))


_differentiable_bits = jax.custom_jvp(_bits, nondiff_argnums=(1,))


@_differentiable_bits.defjvp
def _bits_jvp(name, primals, tangents):
  # Not the function itself: policies do not look into it.
  return _bits(*primals, name), tangents[0]


def _in_host_memory(*kept: str) -> Callable:
  """Keeps these names on the device, and what enters the layer in the host's memory."""
  return jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[*kept, *(name + _BITS for name in kept)],
      names_which_can_be_offloaded=["layer_input"], offload_src="device", offload_dst="pinned_host")


# Names of config.remat besides those of jax.checkpoint_policies.
REMAT = {
    "full": _only(),
    # Neither attention nor what it needs is computed again.
    "attention": _only(*_ATTENTION),
    # No product with a kernel is computed again, except those of experts that are split over devices.
    "attention_mlp": _only(*_ATTENTION, "stream", "mlp"),
    "offload": _in_host_memory(),
    "offload_attention": _in_host_memory(*_ATTENTION),
    "dots": _or(jax.checkpoint_policies.dots_saveable, _only("product")),
    "dots_no_batch": _or(jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _only("product")),
}
# Those that need a backend with memory of the host (trainer/optim/offload.py).
HOST_MEMORY = ("offload", "offload_attention")
# The members of jax.checkpoint_policies that are policies; the others make one from arguments.
JAX_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


def remat_policy(name: str) -> Callable:
  """`wrap(f, in_scan)`, the transformation of one layer's function that `config.remat` names.

  Names: auto, none, those of REMAT, those of JAX_POLICIES; raises ConfigError for others. auto is `attention_mlp` for
  layers in a scan, and none for others, which gain nothing from it. It is none on several CPU devices, too: XLA for
  CPU may run collectives of the layer and of what is computed again in another order on each of them, and hang.
  """
  if name == "none":
    return lambda f, in_scan: f
  if name == "auto":
    again = remat_policy("attention_mlp")
    return lambda f, in_scan: again(f, in_scan) if in_scan and not _on_several_cpus() else f
  if name not in REMAT and name not in JAX_POLICIES:
    raise ConfigError(f"remat: found {name!r}, allowed: auto, none, {', '.join(REMAT)}, {', '.join(JAX_POLICIES)}.")
  policy = REMAT[name] if name in REMAT else getattr(jax.checkpoint_policies, name)
  # Inside a scan nothing can merge the recomputation with the forward pass, so no barrier is needed.
  return lambda f, in_scan: jax.checkpoint(f, policy=policy, prevent_cse=not in_scan)


def _on_several_cpus() -> bool:
  return logical_axes.current() is not None and logical_axes.platform() == "cpu"
