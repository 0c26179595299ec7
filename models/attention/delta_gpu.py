"""The gated delta rule where it is computed: by the kernels of models/attention/delta_kernels.py on a GPU that takes
them, else by models/attention/delta_rule.py.

As with attention's (models/attention/gpu.py) they are interpreted where there is no GPU, and on a GPU that is here
they are tried before they are trusted.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import gpu
from models.attention import delta_kernels, delta_rule
from models.attention.delta_rule import Inputs
from models.sharding import logical_axes

# The largest heads whose states registers have room for.
MAX_HEAD = 128


def chunked(impl: str, inputs: Inputs, segment_ids_BxT: jax.Array, chunk: int, state_BxHxKxV: jax.Array | None
            ) -> tuple[jax.Array, jax.Array]:
  """`delta_rule.chunked` of queries and keys [B, T, G, K] of any length, each for H / G heads of values.

  Args:
    impl: as of attention (`dispatch.IMPLEMENTATIONS`): `triton` and `auto` take kernels, the latter on GPUs alone.
    chunk: tokens that `delta_rule.chunked` takes together; the kernels have their own number.
  """
  q, k, v = inputs[:3]
  on_gpu = logical_axes.platform() == "gpu"
  if impl == "triton" or (impl == "auto" and on_gpu):
    reason = refusal(logical_axes.device(), q.dtype, q.shape[3], v.shape[3])
    if reason is None:
      return delta_kernels.chunked(inputs, segment_ids_BxT, state_BxHxKxV, interpret=not on_gpu)
    gpu.warn("gated delta rule", reason)
  q, k = (jnp.repeat(delta_rule.unit_keys(x), v.shape[2] // x.shape[2], axis=2) for x in (q, k))
  return delta_rule.chunked(inputs._replace(q_BxTxHxK=q, k_BxTxHxK=k), segment_ids_BxT, chunk, state_BxHxKxV)


def refusal(device: Any, dtype: Any, K: int, V: int) -> str | None:
  """Why the kernels are not taken for heads of these sizes; None: they are."""
  if any(size < 16 or size > MAX_HEAD or size & (size - 1) for size in (K, V)):
    return f"heads of sizes {K} and {V}; allowed: powers of two from 16 to {MAX_HEAD}"
  if device.platform != "gpu":
    return None
  if (reason := gpu.unsuitable(device, dtype)) is not None:
    return reason
  if dtype != jnp.bfloat16:
    return f"{np.dtype(dtype).name}, but bfloat16"
  return _distrust(K, V) if gpu.is_here(device) else None


@functools.cache
def _distrust(K: int, V: int) -> str | None:
  return gpu.tried(lambda: error(delta_kernels.chunked, K, V))


def error(rule: Callable, K: int, V: int, dtype: Any = jnp.bfloat16) -> float:
  """How far `rule(inputs, segment_ids)` of such numbers is from delta_rule.py in float32, on a row made up: output,
  state and gradients (`gpu.off`)."""
  T, G, H = 200, 1, 2
  numbers = np.random.default_rng(0)
  q, k, v, dout = (jnp.asarray(numbers.normal(size=(1, T, heads, size)), dtype)
                   for heads, size in ((G, K), (G, K), (H, V), (H, V)))
  fades, beta = jnp.asarray(numbers.uniform(size=(2, 1, T, H)), jnp.float32)
  g, dstate = jnp.log(1 - 0.2 * fades), jnp.asarray(numbers.normal(size=(1, H, K, V)), jnp.float32)
  segment_ids = jnp.asarray([1] * 70 + [0] * 3 + [2] * 20 + [3] * 90 + [0] * 17)[None]

  def run(rule, *given):
    (out, state), pull = jax.vjp(lambda *arrays: rule(Inputs(*arrays), segment_ids), *given)
    return [out, state, *pull((dout.astype(out.dtype), dstate))]

  def reference(inputs, segment_ids):
    return chunked("blocked", inputs, segment_ids, delta_rule.CHUNK, None)

  ours = jax.jit(functools.partial(run, rule))(q, k, v, g, beta)
  exact = jax.jit(functools.partial(run, reference))(*(x.astype(jnp.float32) for x in (q, k, v)), g, beta)
  return gpu.off(ours, exact)
