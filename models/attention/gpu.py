"""Attention on GPU: whether the kernels of models/attention/gpu_kernels.py and past_kernel.py are taken, behind the
promises of models/attention/dispatch.py.

Without a GPU they are interpreted, which is slow and gives the same numbers: how they are tested. On a GPU that is here
they are tried before they are trusted.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import gpu
from models.attention import blocked, mask, past_kernel
from models.attention import gpu_kernels as flash_gpu
from models.attention.blocked import Span
from models.attention.mask import QKV, Rule, Side
from models.attention.pages import PAGE, Seen, Table

# The largest head that a tile's accumulators leave registers for.
MAX_HEAD = 256
# Compute capabilities of GPUs (A100, H100, H200, B200, B300) whose warps share much memory, should a device not say it.
MUCH_SHARED = ("8.0", "9.0", "10.0", "10.3")


def refusal(device: Any, rule: Rule, qkv: QKV, blocks: bool, prompts: bool) -> str | None:
  """Why the kernels are not taken; None: they are.

  On a GPU that is here they are tried first, by few tokens: what does not compile there, or gives other numbers than
  models/attention/blocked.py, is not taken.

  Args:
    rule, qkv: what is to be computed.
    blocks, prompts: whether some tokens see each other both ways, or a segment beside their own.
  """
  (_, _, H, K), G = qkv.q.shape, qkv.k.shape[2]
  if K > MAX_HEAD:
    return f"heads of size {K}, above {MAX_HEAD}"
  if device.platform != "gpu":
    return None
  if (reason := gpu.unsuitable(device, qkv.q.dtype)) is not None or not gpu.is_here(device):
    return reason
  return _distrust(rule, H // G, K, qkv.q.dtype.name, blocks, prompts)


def on(device: Any) -> Callable:
  """`flash_gpu.attend` for that device; interpreted where it is no GPU."""
  much = getattr(device, "compute_capability", "") in MUCH_SHARED
  shared_bytes = getattr(device, "shared_memory_per_block_optin",
                         flash_gpu.LARGE if much else flash_gpu.SHARED_BYTES)
  return functools.partial(flash_gpu.attend, shared_bytes=shared_bytes, interpret=device.platform != "gpu")


@functools.cache
def _distrust(rule: Rule, R: int, K: int, dtype: str, blocks: bool, prompts: bool) -> str | None:
  return gpu.tried(lambda: error(on(jax.local_devices()[0]), rule, R, K, dtype, blocks, prompts))


def error(attend: Callable, rule: Rule, R: int = 2, K: int = 64, dtype: Any = jnp.bfloat16, blocks: bool = False,
          prompts: bool = False) -> float:
  """How far `attend` is from models/attention/blocked.py in float32 on a row made up, output and gradients (`gpu.off`).

  Args:
    attend: `attend(rule, qkv, queries, keys)`.
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
  queries, keys = Side(segments, places, block_ids, prompt_ids), Side(mask.keys_of(segments), places, block_ids)
  spans = (Span(0, T, 0, T),)

  def reference(q, k, v):
    q = q.reshape(1, T, G, R, K).transpose(0, 2, 3, 1, 4)
    qkv = QKV(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
    return blocked.attend(spans, rule, qkv, queries, keys).transpose(0, 3, 1, 2, 4).reshape(1, T, G * R, K)

  def run(attend, *given):
    out, pull = jax.vjp(attend, *given[:3])
    return [out, *pull(given[3].astype(out.dtype))]

  ours = jax.jit(functools.partial(run, lambda q, k, v: attend(rule, QKV(q, k, v), queries, keys)))(q, k, v, dout)
  exact = jax.jit(functools.partial(run, reference))(*(x.astype(jnp.float32) for x in (q, k, v, dout)))
  return gpu.off(ours, exact)


def refusal_to_past(device: Any, rule: Rule, q_Bx1xHxK: jax.Array, seen: Seen) -> str | None:
  """Why the kernel for one more token per row is not taken, as `refusal` says it."""
  (_, G, S, K), H = seen.keys_BxGxSxK.shape, q_Bx1xHxK.shape[2]
  if K < 16 or K > MAX_HEAD or K & (K - 1):
    return f"heads of size {K}; allowed: powers of two from 16 to {MAX_HEAD}"
  if past_kernel.tile(seen) < 16:
    return f"a cache of {S} slots, which is no multiple of 16"
  if device.platform != "gpu":
    return None
  if (reason := gpu.unsuitable(device, q_Bx1xHxK.dtype)) is not None or not gpu.is_here(device):
    return reason
  # Who is seen has been decided: layers with other windows are tried once.
  of_scores = Rule(rule.scale, rule.logit_cap)
  return _distrust_to_past(of_scores, H // G, K, q_Bx1xHxK.dtype.name, seen.keys_BxGxSxK.dtype.name)


@functools.cache
def _distrust_to_past(rule: Rule, R: int, K: int, dtype: str, of_cache: str) -> str | None:
  return gpu.tried(lambda: error_to_past(past_kernel.attend, rule, R, K, dtype, of_cache))


def error_to_past(attend: Callable, rule: Rule, R: int = 2, K: int = 64, dtype: Any = jnp.bfloat16,
                  of_cache: Any = jnp.bfloat16) -> float:
  """How far `attend(rule, q, seen)` of a cache made up, in rows and in pages, is from a float32 softmax (`gpu.off`)."""
  B, G, S = 3, 2, 1024
  numbers, slots = np.random.default_rng(0), np.arange(S)
  q, k, v = (jnp.asarray(numbers.normal(size=shape), kind).astype(jnp.float32)
             for shape, kind in (((B, G * R, K), dtype), ((B, G, S, K), of_cache), ((B, G, S, K), of_cache)))
  seen_BxS = jnp.asarray(np.stack([slots < 1000, slots < 70, (slots > 300) & (slots < 900)]))

  def exact(q, k, v):
    scores = rule.scale * jnp.einsum("bgrk,bgsk->bgrs", q.reshape(B, G, R, K), k, precision="highest")
    scores = scores if rule.logit_cap is None else rule.logit_cap * jnp.tanh(scores / rule.logit_cap)
    weights = jax.nn.softmax(jnp.where(seen_BxS[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bgrs,bgsk->bgrk", weights, v, precision="highest").reshape(B, G * R, K)

  last, number, by_page = B * S // PAGE - 1, jnp.arange(B * S // PAGE), seen_BxS.reshape(-1, PAGE)[::-1]
  table = Table((last - number).reshape(B, -1), (last - number) // (S // PAGE), (last - number) % (S // PAGE) * PAGE)
  rows = [x.astype(of_cache) for x in (k, v)]
  pages = [x.reshape(B, G, -1, PAGE, K).swapaxes(1, 2).reshape(-1, G, PAGE, K)[::-1] for x in rows]
  run = jax.jit(functools.partial(attend, rule))
  ours = [run(q.astype(dtype), Seen(rows[0], rows[1], seen_BxS)),
          run(q.astype(dtype), Seen(pages[0], pages[1], by_page, table))]
  return gpu.off(ours, [jax.jit(exact)(q, k, v)] * 2)
