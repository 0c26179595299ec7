"""Sums of losses over tokens, whose gradient is made along with them, a few tokens at a time.

The logits of some tokens are made once, give their losses and the gradients of hidden states and kernel, and are gone
when the next ones come (Hsu et al. 2024, arXiv 2410.10989, section 3.2). That needs losses that are sums over tokens
with weights known beforehand: those of SEQ and SFT. Others, whose weights follow from log-probs of whole sequences,
make logits twice (trainer/strategies/logprobs.py).

Tokens that are not trained, of prompts say, need no logits. How many they are is known when the step runs: tokens are
sorted, those that count first, and the loop ends after the last of these.

On a mesh every device sums over its own tokens, with the whole kernel; the gradients of kernels are summed over devices
in float32, once.

B rows, T length, N tokens, C chunks of n tokens, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models.attention import blocked
from models.sharding import logical_axes
from models.sharding.linear import gather, scatter
from models.sharding.logical_axes import names_of

# Each chunk reads and writes the kernel's whole gradient; with fewer tokens that takes longer than making logits twice.
MIN_TOKENS = 1024
# On a mesh, the largest gradient of a kernel, in float32, that each device has a whole one of meanwhile.
MOST_BYTES = 2 * 2**30


class TokenChunks(NamedTuple):
  """N tokens in C chunks of n. Tokens that count come first, and only chunks that hold some are computed."""

  # The token at each place [C n], and the place of each token [N].
  order: jax.Array
  places: jax.Array
  # How many chunks hold tokens that count.
  number: jax.Array

  def cut(self, x_N: jax.Array, chunks: int) -> jax.Array:
    """[N, …] as [C, n, …], with zeros after the last."""
    return jnp.take(x_N, self.order, axis=0, mode="fill", fill_value=0).reshape(chunks, -1, *x_N.shape[1:])

  def join(self, x_Cxn: jax.Array) -> jax.Array:
    """[C, n, …] as [N, …]."""
    return x_Cxn.reshape(-1, *x_Cxn.shape[2:])[self.places]

  def scan(self, body: Callable, carry: Any, chunked: Any) -> tuple[Any, Any]:
    """As `jax.lax.scan(body, carry, chunked)`; 0 where no token counts. Not differentiable."""
    made = jax.eval_shape(body, carry, jax.tree.map(lambda x: x[0], chunked))[1]
    C = len(jax.tree.leaves(chunked)[0])
    outs = jax.tree.map(lambda x: jnp.zeros((C, *x.shape), x.dtype), made)

    def step(c: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
      carry, out = body(state[0], jax.tree.map(lambda x: x[c], chunked))
      return carry, jax.tree.map(lambda all, new: all.at[c].set(new), state[1], out)

    with jax.named_scope(f"{blocked.TIMES}{C}"):
      return jax.lax.fori_loop(0, self.number, step, (carry, outs))


def split_tokens(counts_N: jax.Array, chunks: int) -> TokenChunks:
  """Splits tokens into `chunks` chunks; `counts_N`: which of them count, bool."""
  N = len(counts_N)
  size = -(-N // chunks)
  order_N = jnp.argsort(~counts_N, stable=True)
  # N: no token.
  order = jnp.pad(order_N, (0, size * chunks - N), constant_values=N)
  return TokenChunks(order, jnp.argsort(order_N), -(-jnp.sum(counts_N) // size))


def token_chunks(hidden_BxTxD: jax.Array, kernel_DxV: jax.Array, vocab_chunks: int) -> int:
  """The number of chunks into which `sum_over_rows` splits each device's tokens.

  It is `vocab_chunks`: logits of a chunk of tokens over the vocabulary then take as much memory as those of all tokens
  over a chunk of the vocabulary. It is 1, no split, where chunks would be too small to gain anything, where the kernel
  is split over the vocabulary, and where its gradient is too large to be whole on each device.
  """
  placed, shape = logical_axes.current(), hidden_BxTxD.shape[:2]
  devices = 1
  if placed is not None:
    devices = logical_axes.size_of(placed.mesh, sum(map(names_of, placed.spec(("batch", "length"), shape)), ()))
    split = placed.spec(("shard", "vocab"), kernel_DxV.shape)[1] is not None
    if split or devices < placed.mesh.size or 4 * kernel_DxV.size > MOST_BYTES:
      return 1
  return vocab_chunks if shape[0] * shape[1] // devices // vocab_chunks >= MIN_TOKENS else 1


def sum_over_rows(losses_of: Callable, chunks: int, hidden_BxTxD: jax.Array, kernel_DxV: jax.Array, tokens: Any,
                  counts_BxT: jax.Array) -> tuple[jax.Array, Any]:
  """`sum_over_tokens` of rows: tokens and further results are [B, T, …]. On a mesh, the kernel's vocabulary is not
  split."""
  def local(hidden, kernel, tokens, counts, shard=()):
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (hidden, tokens, counts))
    total, more = sum_over_tokens(losses_of, chunks, shard, flat[0], kernel, *flat[1:])
    return total[None], jax.tree.map(lambda x: x.reshape(*counts.shape, *x.shape[1:]), more)

  placed, run = logical_axes.current(), local
  if placed is not None:
    by_token = placed.spec(("batch", "length"), counts_BxT.shape)
    kernel = placed.spec(("shard", None), kernel_DxV.shape)
    everywhere = PartitionSpec(sum(map(names_of, by_token), ()))
    run = jax.shard_map(functools.partial(local, shard=names_of(kernel[0])), mesh=placed.mesh, check_vma=False,
                        in_specs=(by_token, kernel, by_token, by_token), out_specs=(everywhere, by_token))
  total_devices, more = run(hidden_BxTxD, kernel_DxV, tokens, counts_BxT)
  return jnp.sum(total_devices), more


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
@logical_axes.placed(None)  # what one device has is on no mesh
def sum_over_tokens(losses_of: Callable, chunks: int, shard: tuple[str, ...], hidden_NxD: jax.Array,
                    kernel_DxV: jax.Array, tokens: Any, counts_N: jax.Array) -> tuple[jax.Array, Any]:
  """(the sum of the losses of N tokens, further results of each token [N, …]).

  Differentiable once in the hidden states and the kernel, through the sum alone.

  Args:
    losses_of: `(hidden_nxD, kernel_DxV, tokens) -> (losses_n, tree of [n, …])` for a chunk of tokens.
    chunks: the number of chunks. The last is padded with zeros in `hidden_NxD` and `tokens`, whose losses must be 0.
    shard: inside `shard_map`, the axes over which the kernel's first dimension is split.
    hidden_NxD: hidden states after the final norm.
    kernel_DxV: the unembedding, or this device's part of it.
    tokens: tree of arrays [N, …]: targets, weights; no gradient.
    counts_N: bool, which tokens count. The others' losses must be 0; their further results are arbitrary, since no
      logits are made of them, but for those that fill up a chunk.
  """
  split, kernel = split_tokens(counts_N, chunks), gather(kernel_DxV.astype(hidden_NxD.dtype), shard, 0)

  def body(total, chunk):
    losses_n, more = losses_of(chunk[0], kernel, chunk[1])
    return total + jnp.sum(losses_n), more

  chunked = jax.tree.map(lambda x: split.cut(x, chunks), (hidden_NxD, tokens))
  total, more = split.scan(body, jnp.float32(0), chunked)
  return total, jax.tree.map(split.join, more)


@logical_axes.placed(None)
def _forward(losses_of, chunks, shard, hidden_NxD, kernel_DxV, tokens, counts_N):
  # Rounded once, not for each chunk, to the dtype that it is multiplied in.
  kernel, split = gather(kernel_DxV.astype(hidden_NxD.dtype), shard, 0), split_tokens(counts_N, chunks)

  def summed(hidden_nxD, kernel_DxV, tokens):
    losses_n, more = losses_of(hidden_nxD, kernel_DxV, tokens)
    return jnp.sum(losses_n), more

  def body(carry, chunk):
    total, dkernel_DxV = carry
    # Gradients of the kernel are made and add up in float32, whatever it is kept or multiplied in.
    (value, more), (dhidden_nxD, more_DxV) = jax.value_and_grad(summed, (0, 1), has_aux=True)(
        chunk[0], kernel.astype(jnp.float32), chunk[1])
    return (total + value, dkernel_DxV + more_DxV), (dhidden_nxD, more)

  chunked = jax.tree.map(lambda x: split.cut(x, chunks), (hidden_NxD, tokens))
  zeros = jnp.float32(0), jnp.zeros(kernel.shape, jnp.float32)
  (total, dkernel_DxV), (dhidden, more) = split.scan(body, zeros, chunked)
  # The total is part of one sum, so that what its gradient will be multiplied by is the same on every device.
  dkernel_DxV = scatter(dkernel_DxV, shard, 0)
  return (total, jax.tree.map(split.join, more)), (split.join(dhidden), dkernel_DxV.astype(kernel_DxV.dtype))


def _backward(losses_of, chunks, shard, saved, gradients):
  dhidden_NxD, dkernel_DxV = saved
  factor = gradients[0]
  return (factor * dhidden_NxD).astype(dhidden_NxD.dtype), (factor * dkernel_DxV).astype(dkernel_DxV.dtype), None, None


sum_over_tokens.defvjp(_forward, _backward)
