"""Attention on GPU: whether the kernels of models/flash_gpu.py are taken, behind the promises of models/attention.py.

Without a GPU they are interpreted, which is slow and gives the same numbers: how they are tested. On a GPU that is here
they are tried before they are trusted.
"""

import concurrent.futures
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from models import flash, flash_gpu
from models.flash import Rule, Side, Span

# The largest head that a tile's accumulators leave registers for.
MAX_HEAD = 256
# Compute capabilities of GPUs (A100, H100, H200, B200, B300) whose warps share much memory, should a device not say it.
MUCH_SHARED = ("8.0", "9.0", "10.0", "10.3")
# On a GPU that is here, results may be off by so much of the largest number; bfloat16 rounds each by up to 0.002.
MOST_OFF = 0.02


def refusal(device: Any, rule: Rule, q_BxTxHxK: jax.Array, k_BxSxGxK: jax.Array, blocks: bool, prompts: bool
            ) -> str | None:
  """Why the kernels are not taken; None: they are.

  On a GPU that is here they are tried first, by few tokens: what does not compile there, or gives other numbers than
  models/flash.py, is not taken.

  Args:
    device: that the program is for.
    rule, q_BxTxHxK, k_BxSxGxK: what is to be computed.
    blocks, prompts: whether some tokens see each other both ways, or a segment beside their own.
  """
  (_, _, H, K), G = q_BxTxHxK.shape, k_BxSxGxK.shape[2]
  if K > MAX_HEAD:
    return f"heads of size {K}, above {MAX_HEAD}"
  if device.platform != "gpu":
    return None
  generation = getattr(device, "compute_capability", "unknown")
  if not re.fullmatch(r"\d+\.\d+", generation) or float(generation) < 8:
    return f"{device.device_kind}, whose compute capability is {generation}; they need 8.0 or above"
  if q_BxTxHxK.dtype.itemsize > 2:
    return f"{q_BxTxHxK.dtype.name}, which tensor cores would round; with precision.compute=bfloat16 they are taken"
  # Each process tries them on a GPU of its own, also where the first of the mesh is another's: all then agree.
  here = jax.local_devices()[0]
  if (here.platform, here.device_kind) != ("gpu", device.device_kind):
    return None
  return _distrust(rule, H // G, K, q_BxTxHxK.dtype.name, blocks, prompts)


@functools.cache
def warn(reason: str) -> None:
  """Says once, for each reason, that the blocked implementation is taken."""
  logging.warning("attention: blocked, since the GPU kernels do not take %s", reason)


def on(device: Any) -> Callable:
  """`flash_gpu.attend` for that device; interpreted where it is no GPU."""
  much = getattr(device, "compute_capability", "") in MUCH_SHARED
  shared_bytes = getattr(device, "shared_memory_per_block_optin",
                         flash_gpu.LARGE if much else flash_gpu.SHARED_BYTES)
  return functools.partial(flash_gpu.attend, shared_bytes=shared_bytes, interpret=device.platform != "gpu")


@functools.cache
def _distrust(rule: Rule, R: int, K: int, dtype: str, blocks: bool, prompts: bool) -> str | None:
  # In a thread of its own, which knows nothing of what is being traced in this one.
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    try:
      off = thread.submit(error, on(jax.local_devices()[0]), rule, R, K, dtype, blocks, prompts).result()
    except Exception as e:  # whatever a compiler or a driver may say
      return f"this GPU, where they fail: {type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
  return None if off <= MOST_OFF else f"this GPU, where their results are off by {off:.2g} of the largest number"


def error(attend: Callable, rule: Rule, R: int = 2, K: int = 64, dtype: Any = jnp.bfloat16, blocks: bool = False,
          prompts: bool = False) -> float:
  """How far `attend` is from models/flash.py in float32 on a row made up, output and gradients: the
  largest difference as a part of the largest number.

  Args:
    attend: `attend(rule, q, k, v, queries, keys)`.
    rule: how scores are made, and who sees whom.
    R, K, dtype: query heads for each of two key/value heads; their size; of queries, keys and values.
    blocks, prompts: whether some tokens see each other both ways, or a segment beside their own.
  """
  T, G = 384, 2
  numbers = np.random.default_rng(0)
  q, dout, k, v = (jnp.asarray(numbers.normal(size=(1, T, heads, K)), dtype) for heads in (G * R, G * R, G, G))
  places = jnp.arange(T)
  segments = jnp.select([places < 40, places < 250, places < 370], [1, 2, 3], 0)[None]
  block_ids = jnp.where((places > 60) & (places < 200), 1, 0)[None] if blocks else None
  prompt_ids = jnp.where(segments == 3, 1, 0) if prompts else None
  queries, keys = Side(segments, places, block_ids, prompt_ids), Side(flash.keys_of(segments), places, block_ids)
  spans = (Span(0, T, 0, T),)

  def reference(q, k, v):
    q = q.reshape(1, T, G, R, K).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return flash.attend(spans, rule, q, k, v, queries, keys).transpose(0, 3, 1, 2, 4).reshape(1, T, G * R, K)

  def run(attend, *given):
    out, pull = jax.vjp(attend, *given[:3])
    return [out, *pull(given[3].astype(out.dtype))]

  ours = jax.jit(functools.partial(run, lambda q, k, v: attend(rule, q, k, v, queries, keys)))(q, k, v, dout)
  exact = jax.jit(functools.partial(run, reference))(*(x.astype(jnp.float32) for x in (q, k, v, dout)))
  # By numpy, which does not lose what is not a number: XLA's largest number on CPU does.
  found = [np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max() for a, b in zip(
      ours, map(np.asarray, exact), strict=True)]
  return math.inf if np.isnan(found).any() else float(max(found))
