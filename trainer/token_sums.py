"""Sums of losses over tokens, whose gradient is made along with them, a few tokens at a time.

The logits of some tokens are made once, give their losses and the gradients of hidden states and kernel, and are gone
when the next ones come (Hsu et al. 2024, arXiv 2410.10989, section 3.2). That needs losses that are sums over tokens
with weights known beforehand: those of SEQ and SFT. Others, whose weights follow from log-probs of whole sequences,
make logits twice (trainer/logprobs.py).

N tokens, C chunks of n tokens, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Each chunk reads and writes the kernel's whole gradient; with fewer tokens that takes longer than making logits twice.
MIN_TOKENS = 1024


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sum_over_tokens(losses_of: Callable, chunks: int, hidden_NxD: jax.Array, kernel_DxV: jax.Array, tokens: Any
                    ) -> tuple[jax.Array, Any]:
  """(the sum of the losses of N tokens, whatever else is to be known of each [N, …]).

  Differentiable once in the hidden states and the kernel, through the sum alone.

  Args:
    losses_of: `(hidden_nxD, kernel_DxV, tokens) -> (losses_n, tree of [n, …])` of some of the tokens.
    chunks: into how many parts the tokens are cut. Padding for the last one is zeros in `hidden_NxD` and `tokens`, for
      which `losses_of` must give 0.
    hidden_NxD: hidden states after the final norm.
    kernel_DxV: the unembedding.
    tokens: tree of arrays [N, …]: targets, weights; no gradient.
  """
  def body(total, part):
    losses_n, more = losses_of(part[0], kernel_DxV, part[1])
    return total + jnp.sum(losses_n), more

  total, more = jax.lax.scan(body, jnp.float32(0), _cut(chunks, (hidden_NxD, tokens)))
  return total, _joined(len(hidden_NxD), more)


def _forward(losses_of, chunks, hidden_NxD, kernel_DxV, tokens):
  # Gradients of the kernel add up in float32, whatever it is kept in.
  kernel = kernel_DxV.astype(jnp.float32)

  def summed(hidden_nxD, kernel_DxV, tokens):
    losses_n, more = losses_of(hidden_nxD, kernel_DxV, tokens)
    return jnp.sum(losses_n), more

  def body(carry, part):
    total, dkernel_DxV = carry
    (value, more), (dhidden_nxD, more_DxV) = jax.value_and_grad(summed, (0, 1), has_aux=True)(part[0], kernel, part[1])
    return (total + value, dkernel_DxV + more_DxV), (dhidden_nxD, more)

  start = jnp.float32(0), jnp.zeros_like(kernel)
  (total, dkernel_DxV), (dhidden, more) = jax.lax.scan(body, start, _cut(chunks, (hidden_NxD, tokens)))
  N = len(hidden_NxD)
  return (total, _joined(N, more)), (_joined(N, dhidden), dkernel_DxV.astype(kernel_DxV.dtype))


def _backward(losses_of, chunks, saved, gradients):
  dhidden_NxD, dkernel_DxV = saved
  factor = gradients[0]
  return (factor * dhidden_NxD).astype(dhidden_NxD.dtype), (factor * dkernel_DxV).astype(dkernel_DxV.dtype), None


sum_over_tokens.defvjp(_forward, _backward)


def _cut(chunks: int, tree: Any) -> Any:
  """[N, …] as [C, n, …], with zeros at the end where C does not divide N."""

  def cut(x):
    x = jnp.pad(x, ((0, -len(x) % chunks), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(chunks, -1, *x.shape[1:])

  return jax.tree.map(cut, tree)


def _joined(N: int, tree: Any) -> Any:
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:N], tree)
