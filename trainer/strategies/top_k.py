"""A teacher's k most probable next tokens, with the mass of all others as one more bucket, and divergences from these.

With q the teacher's distribution and I its k most probable entries, what is kept of it are log q(v) of v in I, and the
log of what is left, log Σ_{v not in I} q(v): k + 1 numbers that are a distribution over k + 1 buckets. The student's
distribution p is put into the same buckets, and the divergence D_β of trainer/strategies/divergence.py is taken between
these. Merging entries never makes a divergence larger (the log sum inequality), and with k = V it is the whole one.

Logits [B, T, V] never exist: each bucket's logit, that of the rest being the log of a sum of exponentials, is gathered
from chunks of the vocabulary; its gradient is one of the entry, or a softmax over the rest.

B batch, T length, D hidden size, V vocabulary, C chunks, W = V / C entries per chunk, K = k.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from trainer.strategies import logprobs
from trainer.strategies.divergence import Side, gradients
from trainer.strategies.logprobs import UNREAL, Static, kernel_chunk, logits_of


def most_probable(side: Side, k: int, *, chunk: int, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
  """The k most probable entries at each position, the first first, int32 [B, T, K], and the log-probs of these and of
  the rest together, float32 [B, T, K + 1]. No gradient.

  Args:
    side: the teacher; `num_real_vocab` entries of it can be among them.
    k: from 1 to the real entries.
    chunk, temperature: see `divergence.jensen_shannon`.
  """
  static, hidden_BxTxD, kernel_DxV = _padded(side, chunk, temperature)

  def body(found, c):
    z_BxTxW = logits_of(static, hidden_BxTxD, kernel_chunk(static, kernel_DxV, c, hidden_BxTxD.dtype), c)
    ids_W = jnp.arange(z_BxTxW.shape[-1], dtype=jnp.int32) * static.chunks + c
    both = jnp.concatenate([found[0], z_BxTxW], -1), jnp.concatenate(
        [found[1], jnp.broadcast_to(ids_W, z_BxTxW.shape)], -1)
    top_BxTxK, at_BxTxK = jax.lax.top_k(both[0], k)
    return (top_BxTxK, jnp.take_along_axis(both[1], at_BxTxK, -1)), None

  shape = (*hidden_BxTxD.shape[:2], k)
  start = jnp.full(shape, 2 * UNREAL, jnp.float32), jnp.full(shape, -1, jnp.int32)
  (_, ids_BxTxK), _ = jax.lax.scan(body, start, jnp.arange(static.chunks))
  return ids_BxTxK, jax.nn.log_softmax(_bucket_logits(static, hidden_BxTxD, kernel_DxV, ids_BxTxK))


def jensen_shannon(student: Side, ids_BxTxK: jax.Array, logprobs_BxTxK1: jax.Array, *, beta: float, chunk: int,
                   temperature: float = 1.0) -> jax.Array:
  """D_β over the buckets at each position, nats, float32 [B, T]. Differentiable in the student's hidden states and
  unembedding.

  Args:
    ids_BxTxK, logprobs_BxTxK1: as `most_probable` gives them for the teacher.
    beta, chunk, temperature: see `divergence.jensen_shannon`.
  """
  logits_BxTxK1 = _bucket_logits(*_padded(student, chunk, temperature), ids_BxTxK)
  logp, logq = jax.nn.log_softmax(logits_BxTxK1), jax.lax.stop_gradient(logprobs_BxTxK1)
  # Log-probs of what has no probability are finite, so that products with it are 0.
  if beta == 0:
    return jnp.sum(jnp.exp(logq) * (logq - logp), -1)
  if beta == 1:
    return jnp.sum(jnp.exp(logp) * (logp - logq), -1)
  logm = jnp.logaddexp(logp + math.log1p(-beta), logq + math.log(beta))
  return jnp.sum(beta * jnp.exp(logq) * (logq - logm) + (1 - beta) * jnp.exp(logp) * (logp - logm), -1)


def _padded(side: Side, chunk: int, temperature: float) -> tuple[Static, jax.Array, jax.Array]:
  """(what the program depends on, the hidden states, the unembedding, in chunks of one size)."""
  size = side.kernel.shape[1]
  chunks = logprobs.num_chunks(size, chunk)
  V = -(-size // chunks) * chunks
  real = size if side.num_real_vocab is None else min(side.num_real_vocab, size)
  kernel_DxV = jnp.pad(side.kernel, ((0, 0), (0, V - size))) if size < V else side.kernel
  return Static(chunks, side.logit_cap, real if real < V else None, float(temperature), ()), side.hidden, kernel_DxV


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bucket_logits(static: Static, hidden_BxTxD, kernel_DxV, ids_BxTxK) -> jax.Array:
  """Logits of these entries, and the log of the sum of the exponentials of all others, float32 [B, T, K + 1]."""
  return _forward(static, hidden_BxTxD, kernel_DxV, ids_BxTxK)[0]


def _forward(static, hidden_BxTxD, kernel_DxV, ids_BxTxK):
  def body(found, c):
    z_BxTxW = logits_of(static, hidden_BxTxD, kernel_chunk(static, kernel_DxV, c, hidden_BxTxD.dtype), c)
    at_BxTxK = _places(static, ids_BxTxK, z_BxTxW.shape[-1], c)
    own_BxTxK = jnp.take_along_axis(z_BxTxW, at_BxTxK, -1, mode="fill", fill_value=2 * UNREAL)
    rest_BxTxW = _put(z_BxTxW, at_BxTxK, jnp.full(at_BxTxK.shape, UNREAL, jnp.float32))
    return (jnp.maximum(found[0], own_BxTxK), jnp.logaddexp(found[1], jax.nn.logsumexp(rest_BxTxW, -1))), None

  start = jnp.full(ids_BxTxK.shape, UNREAL, jnp.float32), jnp.full(ids_BxTxK.shape[:2], UNREAL, jnp.float32)
  (own_BxTxK, rest_BxT), _ = jax.lax.scan(body, start, jnp.arange(static.chunks))
  return jnp.concatenate([own_BxTxK, rest_BxT[..., None]], -1), (hidden_BxTxD, kernel_DxV, ids_BxTxK, rest_BxT)


def _backward(static, residuals, gradient_BxTxK1):
  hidden_BxTxD, kernel_DxV, ids_BxTxK, rest_BxT = residuals

  def of_logits(z_BxTxW, c):
    dz = gradient_BxTxK1[..., -1:] * jnp.exp(jnp.minimum(z_BxTxW - rest_BxT[..., None], 0.0))
    return _put(dz, _places(static, ids_BxTxK, z_BxTxW.shape[-1], c), gradient_BxTxK1[..., :-1])

  return *gradients(static, hidden_BxTxD, kernel_DxV, of_logits), None


_bucket_logits.defvjp(_forward, _backward)


def _places(static: Static, ids_BxTxK: jax.Array, width: int, c: Any) -> jax.Array:
  """Where the entries stand in chunk c, which has every C-th; beyond its end for those of other chunks."""
  return jnp.where(ids_BxTxK % static.chunks == c, ids_BxTxK // static.chunks, width)


def _put(values_BxTxW: jax.Array, at_BxTxK: jax.Array, new_BxTxK: jax.Array) -> jax.Array:
  """The values, with new ones at these places; places beyond the end are left out."""
  return jax.vmap(jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop")))(values_BxTxW, at_BxTxK, new_BxTxK)
