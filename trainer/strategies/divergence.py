"""Divergences between the next-token distributions of two models, from hidden states, chunked over the vocabulary.

p is the student's, q the teacher's, m = (1 - β) p + β q. The generalised Jensen-Shannon divergence (Agarwal et al.
2023, arXiv 2306.13649, eq. 1; its ends, where that is 0, are the two KL divergences, as in TRL):

    D_β = β KL(q ‖ m) + (1 - β) KL(p ‖ m)      0 < β < 1
    D_0 = KL(q ‖ p)                            forward
    D_1 = KL(p ‖ q)                            reverse

Logits [B, T, V] never exist, of neither model and in neither pass: a first pass over the chunks gives both softmax
normalisers, a second one the divergence, and a third the gradient, which is a closed form. With respect to the
student's logits it is p - q for β = 0, else w p (log(p / m) - KL(p ‖ m)) with w = 1 - β, or w = 1 and m = q for β = 1.

B batch, T length, D hidden size of the student, E of the teacher, V vocabulary, C chunks, W = V / C entries per chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import cpu
from models.sharding.linear import kernel_gradient
from models.sharding.logical_axes import as_rows
from trainer.strategies import logprobs
from trainer.strategies.logprobs import KERNEL, Static, kernel_chunk, logits_of, of_uncapped


class Side(NamedTuple):
  """One of the two models at the positions of a batch."""

  # [B, T, D], after the final norm.
  hidden: jax.Array
  # [D, V], the unembedding.
  kernel: jax.Array
  # See `logprobs.token_stats`.
  logit_cap: float | None = None
  num_real_vocab: int | None = None


def jensen_shannon(student: Side, teacher: Side, *, beta: float, chunk: int, temperature: float = 1.0) -> jax.Array:
  """D_β at each position, nats, float32 [B, T]. Differentiable in the student's hidden states and unembedding.

  Args:
    student, teacher: entries of the vocabulary mean the same in both; those that only one has are not real.
    beta: from 0, forward, to 1, reverse.
    chunk: entries of the vocabulary at a time, as in `logprobs.token_stats`.
    temperature: divides the logits of both.
  """
  sizes = [side.kernel.shape[1] for side in (student, teacher)]
  real = min(size if side.num_real_vocab is None else side.num_real_vocab
             for size, side in zip(sizes, (student, teacher), strict=True))
  chunks = logprobs.num_chunks(max(sizes), chunk)
  V = -(-max(sizes) // chunks) * chunks
  kernels = [jnp.pad(side.kernel, ((0, 0), (0, V - size))) if size < V else side.kernel
             for size, side in zip(sizes, (student, teacher), strict=True)]
  statics = tuple(Static(chunks, side.logit_cap, real if real < V else None, float(temperature), ())
                  for side in (student, teacher))
  return _divergence(statics, float(beta), student.hidden, kernels[0], jax.lax.stop_gradient(teacher.hidden),
                     jax.lax.stop_gradient(kernels[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _divergence(statics: tuple[Static, Static], beta: float, hidden_BxTxD, kernel_DxV, teacher_BxTxE, teacher_ExV):
  return _forward(statics, beta, hidden_BxTxD, kernel_DxV, teacher_BxTxE, teacher_ExV)[0]


def _forward(statics, beta, hidden_BxTxD, kernel_DxV, teacher_BxTxE, teacher_ExV):
  sides = (statics[0], hidden_BxTxD, kernel_DxV), (statics[1], teacher_BxTxE, teacher_ExV)
  normalisers = tuple(_logsumexp(*side) for side in sides)

  def body(sums, c):
    logp, logq, logm = _log_probs(sides, normalisers, beta, c)
    p_from_m = jnp.sum(jnp.exp(logp) * (logp - logm), axis=-1) if beta > 0 else 0.0
    q_from_m = jnp.sum(jnp.exp(logq) * (logq - logm), axis=-1) if beta < 1 else 0.0
    return (sums[0] + p_from_m, sums[1] + q_from_m), None

  zeros = jnp.zeros(hidden_BxTxD.shape[:2], jnp.float32)
  (p_from_m, q_from_m), _ = jax.lax.scan(body, (zeros, zeros), jnp.arange(statics[0].chunks))
  if beta in (0.0, 1.0):
    loss_BxT = p_from_m if beta else q_from_m
  else:
    loss_BxT = beta * q_from_m + (1 - beta) * p_from_m
  return loss_BxT, (hidden_BxTxD, kernel_DxV, teacher_BxTxE, teacher_ExV, normalisers, p_from_m)


def _backward(statics, beta, residuals, gradient_BxT):
  hidden_BxTxD, kernel_DxV, teacher_BxTxE, teacher_ExV, normalisers, p_from_m = residuals
  sides = (statics[0], hidden_BxTxD, kernel_DxV), (statics[1], teacher_BxTxE, teacher_ExV)

  def of_logits(z_BxTxW, c):
    logp, logq, logm = _log_probs(sides, normalisers, beta, c, z_BxTxW)
    if beta == 0:
      dz = jnp.exp(logp) - jnp.exp(logq)
    else:
      dz = (1 - beta if beta < 1 else 1.0) * jnp.exp(logp) * (logp - logm - p_from_m[..., None])
    return dz * gradient_BxT[..., None]

  return *gradients(statics[0], hidden_BxTxD, kernel_DxV, of_logits), None, None


_divergence.defvjp(_forward, _backward)


def gradients(static: Static, hidden_BxTxD: jax.Array, kernel_DxV: jax.Array, of_logits: Callable
              ) -> tuple[jax.Array, jax.Array]:
  """Gradients of the hidden states and the kernel, from those of each chunk of the logits.

  Args:
    of_logits: (logits [B, T, W] of chunk c, c) -> their gradient, before the temperature and the cap.
  """
  def body(dhidden, c):
    kernel_DxW = kernel_chunk(static, kernel_DxV, c, hidden_BxTxD.dtype)
    z_BxTxW = logits_of(static, hidden_BxTxD, kernel_DxW, c)
    dz = of_uncapped(static, of_logits(z_BxTxW, c) / static.temperature, z_BxTxW).astype(hidden_BxTxD.dtype)
    dhidden_c = cpu.einsum("...w,dw->...d", as_rows(dz), kernel_DxW).reshape(hidden_BxTxD.shape)
    return dhidden + dhidden_c, kernel_gradient(hidden_BxTxD, dz, KERNEL).astype(kernel_DxV.dtype)

  start = jnp.zeros(hidden_BxTxD.shape, jnp.float32)
  dhidden, dkernel_CxDxW = jax.lax.scan(body, start, jnp.arange(static.chunks))
  return dhidden.astype(hidden_BxTxD.dtype), dkernel_CxDxW.transpose(1, 2, 0).reshape(kernel_DxV.shape)


def _logsumexp(static: Static, hidden_BxTxD: jax.Array, kernel_DxV: jax.Array) -> jax.Array:
  """Log of the softmax normaliser, [B, T]."""
  def body(sums, c):
    z_BxTxW = logits_of(static, hidden_BxTxD, kernel_chunk(static, kernel_DxV, c, hidden_BxTxD.dtype), c)
    top = jnp.maximum(sums[0], z_BxTxW.max(-1))
    return (top, sums[1] * jnp.exp(sums[0] - top) + jnp.exp(z_BxTxW - top[..., None]).sum(-1)), None

  shape = hidden_BxTxD.shape[:2]
  start = jnp.full(shape, logprobs.UNREAL, jnp.float32), jnp.zeros(shape, jnp.float32)
  (top_BxT, total_BxT), _ = jax.lax.scan(body, start, jnp.arange(static.chunks))
  return top_BxT + jnp.log(total_BxT)


def _log_probs(sides: Any, normalisers: tuple[jax.Array, jax.Array], beta: float, c: jax.Array,
               logits: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(log p, log q, log m) of chunk c, [B, T, W]; m is p for β = 0 and q for β = 1. `logits`: the student's, if they are
  there."""
  z_BxTxW, teacher_BxTxW = (
      logits_of(static, hidden, kernel_chunk(static, kernel, c, hidden.dtype), c) if there is None else there
      for (static, hidden, kernel), there in zip(sides, (logits, None), strict=True))
  logp, logq = z_BxTxW - normalisers[0][..., None], teacher_BxTxW - normalisers[1][..., None]
  if beta in (0.0, 1.0):
    logm = logq if beta else logp
  else:
    logm = jnp.logaddexp(logp + math.log1p(-beta), logq + math.log(beta))
  return logp, logq, logm
