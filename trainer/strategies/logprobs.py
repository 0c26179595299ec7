"""Token log-probabilities, entropy and cross-entropy from hidden states, chunked over the vocabulary.

B batch, T length, D hidden size, V vocabulary (padded), C chunks, W = V / C entries per chunk.

Logits [B, T, V] never exist, in neither pass, once V exceeds the chunk: each chunk's logits are made,
reduced to a few numbers per token, and made again for the gradient. A hand-written gradient (`_backward`)
serves better than differentiating the loop: the derivative of every statistic with respect to a logit is
a short closed form, so the backward pass is one fused expression between the matrix products, and needs
from the forward pass three numbers per token. When the vocabulary fits into one chunk, its logits are
kept for the backward pass rather than made again: that is the one buffer a chunk is allowed anyway.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import cpu
from models.sharding import logical_axes
from models.sharding.linear import all_inputs, kernel_gradient
from models.sharding.logical_axes import as_rows, constrain
from trainer.strategies.chunked_loss import split_tokens

STATS = ("logprob", "logsumexp", "mean_logit", "entropy", "is_top", "log_square")
# Stands for the logit of an entry that is not real: weighs exactly 0, and has no NaN in products with 0.
UNREAL = -1e30
# Of the unembedding, the logical names of its dimensions.
KERNEL = ("shard", "vocab")
# Whether a GPU reads logits once for their statistics; benchmarks/step_gpu.py compares.
ONE_PASS = True
# With fewer tokens a chunk, adding up the kernel's gradient takes longer than logits of tokens that do not count.
MIN_TOKENS = 256


class TokenStats(NamedTuple):
  """Statistics [B, T], float32, of the next-token distribution at each position; None: not asked for."""

  # log p(target).
  logprob: jax.Array | None = None
  # Log of the softmax normaliser.
  logsumexp: jax.Array | None = None
  # Mean logit over the real vocabulary.
  mean_logit: jax.Array | None = None
  # Entropy in nats.
  entropy: jax.Array | None = None
  # 1 where no entry has a higher logit than the target, else 0. No gradient.
  is_top: jax.Array | None = None
  # log Σ_v p(v)², the log-probability that two draws agree. No gradient.
  log_square: jax.Array | None = None


class Static(NamedTuple):
  """What the compiled program depends on."""

  chunks: int
  logit_cap: float | None
  num_real_vocab: int | None
  temperature: float
  want: tuple[str, ...]


class _Sums(NamedTuple):
  """Running sums over the chunks seen so far, [B, T]; None: not needed."""

  top: jax.Array
  # Sum of exp(z - top).
  total: jax.Array
  # Sum of exp(z - top) * (z - top).
  weighted: jax.Array | None
  # Sum of z.
  plain: jax.Array | None
  # The target's z.
  target: jax.Array | None
  # Sum of exp(z - top)².
  square: jax.Array | None


def token_stats(hidden_BxTxD: jax.Array, kernel_DxV: jax.Array, targets_BxT: jax.Array, *, chunk: int,
                logit_cap: float | None = None, num_real_vocab: int | None = None, temperature: float = 1.0,
                want: tuple[str, ...] = STATS, counts_BxT: jax.Array | None = None) -> TokenStats:
  """Statistics of softmax(cap(hidden @ kernel) / temperature) at the targets.

  Differentiable in `hidden_BxTxD` and `kernel_DxV`. Products are computed in the dtype of the hidden
  states with float32 accumulation, all else in float32.

  Args:
    hidden_BxTxD: hidden states after the final norm.
    kernel_DxV: the unembedding.
    targets_BxT: token ids; where there is nothing to predict any id in range will do, to be weighted 0.
    chunk: at most so many vocabulary entries at a time, besides those that `padded` adds. Chunk c takes the entries c,
      c + C, c + 2C, …, so that a kernel sharded over V stays where it is.
    logit_cap: cap * tanh(logit / cap), before the temperature; None: no cap.
    num_real_vocab: entries from here on have probability 0; None: all are real.
    temperature: divides the logits; a Python number.
    want: which statistics to compute, of STATS; the others are None, and cost nothing.
    counts_BxT: bool, the tokens whose statistics matter; those of others are nothing to rely on, and have no gradient.
      On one device, if there are many tokens, no logits are made of them. None: all matter.
  """
  unknown = [w for w in want if w not in STATS]
  if unknown or chunk < 1 or not temperature > 0:
    raise ValueError(
        f"token_stats: want={want}, chunk={chunk}, temperature={temperature}; allowed: want of {STATS}, "
        "chunk of 1 or more, temperature above 0"
    )
  V = kernel_DxV.shape[1]
  if num_real_vocab is not None and num_real_vocab >= V:
    num_real_vocab = None
  chunks = num_chunks(V, chunk)
  few = targets_BxT.size // chunks < MIN_TOKENS
  by_vocab = counts_BxT is None or chunks == 1 or few or logical_axes.current() is not None
  kernel_DxV, num_real_vocab = padded(kernel_DxV, num_real_vocab, hidden_BxTxD.dtype, chunks if by_vocab else 1)
  static = Static(chunks if by_vocab else 1, logit_cap, num_real_vocab, float(temperature), tuple(want))
  if by_vocab:
    return _token_stats(static, hidden_BxTxD, kernel_DxV, targets_BxT)
  # As much memory for logits, but of some tokens and all entries.
  flat = (x.reshape(-1, *x.shape[2:]) for x in (hidden_BxTxD, targets_BxT, counts_BxT))
  hidden_NxD, targets_N, counts_N = flat
  stats = _chunked_stats(static, chunks, hidden_NxD, kernel_DxV, targets_N, counts_N)
  return jax.tree.map(lambda x: x.reshape(targets_BxT.shape), stats)


def cross_entropy(stats: TokenStats, label_smoothing: float = 0.0, z_loss: float = 0.0) -> jax.Array:
  """Negative log-likelihood [B, T] with label smoothing (Szegedy et al. 2016) and z-loss (PaLM, section 5).

  (1 - ε) (-log p(target)) + ε (logsumexp - mean logit) + z logsumexp²; the middle term is the
  cross-entropy with the uniform distribution over the real vocabulary. Needs the statistics
  `cross_entropy_stats(label_smoothing, z_loss)`.
  """
  nll_BxT = -stats.logprob
  if label_smoothing:
    nll_BxT = (1.0 - label_smoothing) * nll_BxT + label_smoothing * (stats.logsumexp - stats.mean_logit)
  if z_loss:
    nll_BxT = nll_BxT + z_loss * jnp.square(stats.logsumexp)
  return nll_BxT


def cross_entropy_stats(label_smoothing: float = 0.0, z_loss: float = 0.0) -> tuple[str, ...]:
  """The statistics to ask of `token_stats` for `cross_entropy` with these coefficients."""
  want = ["logprob"]
  if label_smoothing or z_loss:
    want.append("logsumexp")
  if label_smoothing:
    want.append("mean_logit")
  return tuple(want)


def num_chunks(vocab_size: int, chunk: int) -> int:
  """The least number of chunks of at most `chunk` entries, or up to twice that if it divides the vocabulary."""
  least = -(-vocab_size // chunk)
  return next((n for n in range(least, 2 * least + 1) if vocab_size % n == 0), least)


def padded(kernel_DxV: jax.Array, num_real_vocab: int | None, dtype: Any, chunks: int = 1
           ) -> tuple[jax.Array, int | None]:
  """(the unembedding, how many of its entries are real), with entries that are not real where chunks would differ in
  size, or rows of logits, products in `dtype`, would lie too evenly (models/cpu/padding.py). A copy: not for loops.
  """
  V = kernel_DxV.shape[1]
  width = -(-V // chunks)
  width += cpu.extra_columns(width, dtype)
  if width * chunks == V:
    return kernel_DxV, num_real_vocab
  return jnp.pad(kernel_DxV, ((0, 0), (0, width * chunks - V))), V if num_real_vocab is None else num_real_vocab


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_stats(static: Static, hidden_BxTxD, kernel_DxV, targets_BxT) -> TokenStats:
  return _forward(static, hidden_BxTxD, kernel_DxV, targets_BxT)[0]


class _Residuals(NamedTuple):
  """What the backward pass needs."""

  hidden_BxTxD: jax.Array
  kernel_DxV: jax.Array
  targets_BxT: jax.Array
  # Log of the softmax normaliser, and with `entropy` that.
  lse_BxT: jax.Array
  entropy_BxT: jax.Array | None
  # The logits, where they are one chunk.
  logits_BxTxV: jax.Array | None


def _forward(static: Static, hidden_BxTxD, kernel_DxV, targets_BxT):
  """The statistics, and what the backward pass needs."""
  want = static.want
  hidden_BxTxD = constrain(hidden_BxTxD, "batch", "length", "embed")
  zeros = jnp.zeros(targets_BxT.shape, jnp.float32)
  sums = _Sums(
      top=jnp.full(targets_BxT.shape, UNREAL, jnp.float32),
      total=zeros,
      weighted=zeros if "entropy" in want else None,
      plain=zeros if "mean_logit" in want else None,
      target=zeros if "logprob" in want or "is_top" in want else None,
      square=zeros if "log_square" in want else None,
  )
  kept_logits = None
  if static.chunks == 1:
    kept_logits = logits_of(static, hidden_BxTxD, kernel_chunk(static, kernel_DxV, 0, hidden_BxTxD.dtype), 0)
    sums = _accumulate(static, sums, kept_logits, targets_BxT, 0)
  else:

    def body(sums, c):
      z_BxTxW = logits_of(static, hidden_BxTxD, kernel_chunk(static, kernel_DxV, c, hidden_BxTxD.dtype), c)
      return _accumulate(static, sums, z_BxTxW, targets_BxT, c), None

    sums, _ = jax.lax.scan(body, sums, jnp.arange(static.chunks))

  lse_BxT = sums.top + jnp.log(sums.total)
  num_real = static.num_real_vocab or kernel_DxV.shape[1]
  # H = lse - E[z] = log(total) - E[z - top].
  entropy_BxT = jnp.log(sums.total) - sums.weighted / sums.total if "entropy" in want else None
  stats = TokenStats(
      logprob=sums.target - lse_BxT if "logprob" in want else None,
      logsumexp=lse_BxT if "logsumexp" in want else None,
      mean_logit=sums.plain / num_real if "mean_logit" in want else None,
      entropy=entropy_BxT,
      is_top=(sums.target >= sums.top).astype(jnp.float32) if "is_top" in want else None,
      log_square=jnp.log(sums.square) - 2.0 * jnp.log(sums.total) if "log_square" in want else None,
  )
  return stats, _Residuals(hidden_BxTxD, kernel_DxV, targets_BxT, lse_BxT, entropy_BxT, kept_logits)


def _backward(static: Static, residuals: _Residuals, grads: TokenStats):
  """Gradients of the hidden states and the kernel.

  With p = softmax(z): d logsumexp / dz = p, d logprob / dz = 1[target] - p, d mean_logit / dz = 1 / n,
  d entropy / dz = -p (log p + H).
  """
  hidden_BxTxD, kernel_DxV, *_, kept_logits = residuals

  def chunk_grads(z_BxTxW, kernel_DxW, c):
    dlogits = _logit_grads(static, grads, residuals, z_BxTxW, c).astype(hidden_BxTxD.dtype)
    dhidden = cpu.einsum("...w,dw->...d", as_rows(dlogits), kernel_DxW)
    dkernel = kernel_gradient(hidden_BxTxD, dlogits, KERNEL)
    return dhidden.reshape(hidden_BxTxD.shape), dkernel.astype(kernel_DxV.dtype)

  if static.chunks == 1:
    dhidden, dkernel = chunk_grads(kept_logits, kernel_chunk(static, kernel_DxV, 0, hidden_BxTxD.dtype), 0)
  else:

    def body(dhidden, c):
      kernel_DxW = kernel_chunk(static, kernel_DxV, c, hidden_BxTxD.dtype)
      z_BxTxW = logits_of(static, hidden_BxTxD, kernel_DxW, c)
      dhidden_c, dkernel_DxW = chunk_grads(z_BxTxW, kernel_DxW, c)
      return dhidden + dhidden_c, dkernel_DxW

    start = jnp.zeros(hidden_BxTxD.shape, jnp.float32)
    dhidden, dkernel_CxDxW = jax.lax.scan(body, start, jnp.arange(static.chunks))
    dkernel = dkernel_CxDxW.transpose(1, 2, 0).reshape(kernel_DxV.shape)
  return dhidden.astype(hidden_BxTxD.dtype), dkernel, None


_token_stats.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_stats(static: Static, chunks: int, hidden_NxD, kernel_DxV, targets_N, counts_N) -> TokenStats:
  """Statistics of the tokens that count, a chunk of them at a time."""
  return _chunked_forward(static, chunks, hidden_NxD, kernel_DxV, targets_N, counts_N)[0]


def _chunked_forward(static, chunks, hidden_NxD, kernel_DxV, targets_N, counts_N):
  split = split_tokens(counts_N, chunks)
  chunked = tuple(split.cut(x, chunks) for x in (hidden_NxD, targets_N))

  def body(_, chunk):
    stats, residuals = _forward(static, chunk[0][None], kernel_DxV, chunk[1][None])
    return None, jax.tree.map(lambda x: x[0], (stats, residuals.lse_BxT, residuals.entropy_BxT))

  _, (stats, lse_Cxn, entropy_Cxn) = split.scan(body, None, chunked)
  return jax.tree.map(split.join, stats), (chunked, kernel_DxV, lse_Cxn, entropy_Cxn, counts_N, split)


def _chunked_backward(static, chunks, residuals, grads: TokenStats):
  (hidden_CxnxD, targets_Cxn), kernel_DxV, lse_Cxn, entropy_Cxn, counts_N, split = residuals
  # Gradients of the kernel add up in float32, whatever it is kept in.
  kernel = kernel_DxV.astype(jnp.float32)
  grads = jax.tree.map(lambda g_N: split.cut(jnp.where(counts_N, g_N, 0.0), chunks), grads)

  def body(dkernel_DxV, chunk):
    hidden, targets, lse, entropy, grads = jax.tree.map(lambda x: x[None], chunk)
    z_1xnxV = logits_of(static, hidden, kernel_chunk(static, kernel, 0, hidden.dtype), 0)
    residuals = _Residuals(hidden, kernel, targets, lse, entropy, z_1xnxV)
    dhidden_1xnxD, more_DxV, _ = _backward(static, residuals, grads)
    return dkernel_DxV + more_DxV, dhidden_1xnxD[0]

  chunked = (hidden_CxnxD, targets_Cxn, lse_Cxn, entropy_Cxn, grads)
  dkernel_DxV, dhidden_CxnxD = split.scan(body, jnp.zeros_like(kernel), chunked)
  return split.join(dhidden_CxnxD), dkernel_DxV.astype(kernel_DxV.dtype), None, None


_chunked_stats.defvjp(_chunked_forward, _chunked_backward)


def kernel_chunk(static: Static, kernel_DxV, c, dtype) -> jax.Array:
  """Columns c, c + C, c + 2C, … in the dtype of the products; on a mesh with all of D on every device."""
  if static.chunks > 1:
    D, V = kernel_DxV.shape
    strided_DxWxC = kernel_DxV.reshape(D, V // static.chunks, static.chunks)
    kernel_DxV = jax.lax.dynamic_index_in_dim(strided_DxWxC, c, axis=2, keepdims=False)
  return all_inputs(kernel_DxV.astype(dtype), KERNEL)


def _ids(static: Static, width: int, c) -> jax.Array:
  """The vocabulary ids [W] of chunk c."""
  return jnp.arange(width) * static.chunks + c


def logits_of(static: Static, hidden_BxTxD, kernel_DxW, c) -> jax.Array:
  """Chunk c of the logits, float32: capped, divided by the temperature, UNREAL at padding."""
  z_BxTxW = cpu.einsum("btd,dw->btw", hidden_BxTxD, kernel_DxW)
  z_BxTxW = constrain(z_BxTxW, "batch", "length", "vocab")
  if static.logit_cap is not None:
    z_BxTxW = static.logit_cap * jnp.tanh(z_BxTxW / static.logit_cap)
  if static.temperature != 1.0:
    z_BxTxW = z_BxTxW / static.temperature
  if static.num_real_vocab is not None:
    z_BxTxW = jnp.where(_ids(static, z_BxTxW.shape[-1], c) < static.num_real_vocab, z_BxTxW, UNREAL)
  return z_BxTxW


def _accumulate(static: Static, sums: _Sums, z_BxTxW, targets_BxT, c) -> _Sums:
  """The sums with chunk c added; `total`, `weighted` and `square` are rescaled when the maximum moves."""
  total = None
  if ONE_PASS and logical_axes.platform() == "gpu" and sums.weighted is None and sums.square is None:
    own_top, total = _top_and_total(z_BxTxW)
  else:
    own_top = z_BxTxW.max(-1)
  top = jnp.maximum(sums.top, own_top)
  shift, rescale = sums.top - top, jnp.exp(sums.top - top)
  centred = z_BxTxW - top[..., None]
  e_BxTxW = jnp.exp(centred)
  total = e_BxTxW.sum(-1) if total is None else jnp.exp(own_top - top) * total
  weighted, plain, target, square = sums.weighted, sums.plain, sums.target, sums.square
  if weighted is not None:
    # 0 · log 0 is 0. XLA's library of sums for CPU, which leaves `where` alone, is slow with a product in it.
    terms_BxTxW = jnp.where(e_BxTxW > 0, e_BxTxW * centred, 0.0)
    weighted = rescale * (weighted + shift * sums.total) + terms_BxTxW.sum(-1)
  ids_W = _ids(static, z_BxTxW.shape[-1], c)
  if plain is not None:
    padded = static.num_real_vocab is not None
    plain = plain + (jnp.where(ids_W < static.num_real_vocab, z_BxTxW, 0.0) if padded else z_BxTxW).sum(-1)
  if target is not None and static.chunks == 1 and logical_axes.current() is None:
    # All entries are here: one is read, not all of them once more.
    target = target + jnp.take_along_axis(z_BxTxW, targets_BxT[..., None], -1, mode="fill", fill_value=0.0)[..., 0]
  elif target is not None:
    target = target + jnp.where(ids_W == targets_BxT[..., None], z_BxTxW, 0.0).sum(-1)
  if square is not None:
    square = jnp.square(rescale) * square + jnp.square(e_BxTxW).sum(-1)
  return _Sums(top, rescale * sums.total + total, weighted, plain, target, square)


def _top_and_total(z_BxTxW: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The largest logit and the sum of exp(z - largest), with logits read once: on a GPU they are far from fitting in a
  cache."""
  def both(one, other):
    (a, sum_a), (b, sum_b) = one, other
    top = jnp.maximum(a, b)
    return top, sum_a * jnp.exp(a - top) + sum_b * jnp.exp(b - top)

  start = jnp.float32(UNREAL), jnp.float32(0)
  return jax.lax.reduce((z_BxTxW, jnp.ones_like(z_BxTxW)), start, both, (z_BxTxW.ndim - 1,))


def _logit_grads(static: Static, grads: TokenStats, residuals: _Residuals, z_BxTxW, c):
  """Gradient of the raw logits (before cap and temperature) of chunk c, from those of the statistics."""
  want, (_, kernel_DxV, targets_BxT, lse_BxT, entropy_BxT, _) = static.want, residuals
  logp_BxTxW = z_BxTxW - lse_BxT[..., None]
  factor = jnp.zeros_like(lse_BxT)
  if "logsumexp" in want:
    factor = factor + grads.logsumexp
  if "logprob" in want:
    factor = factor - grads.logprob
  factor = factor[..., None]
  if "entropy" in want:
    factor = factor - grads.entropy[..., None] * (logp_BxTxW + entropy_BxT[..., None])
  dz = jnp.exp(logp_BxTxW) * factor
  ids_W = _ids(static, z_BxTxW.shape[-1], c)
  if "logprob" in want:
    dz = dz + jnp.where(ids_W == targets_BxT[..., None], grads.logprob[..., None], 0.0)
  if "mean_logit" in want:
    dz = dz + grads.mean_logit[..., None] / (static.num_real_vocab or kernel_DxV.shape[1])
  dz = dz / static.temperature if static.temperature != 1.0 else dz
  if static.num_real_vocab is not None and {"entropy", "mean_logit"} & set(want):
    # Else exp(UNREAL - lse), which is 0, is all that dz has of them.
    dz = jnp.where(ids_W < static.num_real_vocab, dz, 0.0)
  return of_uncapped(static, dz, z_BxTxW)


def of_uncapped(static: Static, dz_BxTxW: jax.Array, z_BxTxW: jax.Array) -> jax.Array:
  """The gradient with respect to logits before their cap, of that after it; `z_BxTxW` as `logits_of` gives them."""
  if static.logit_cap is None:
    return dz_BxTxW
  # d tanh(x) = 1 - tanh(x)², and z * temperature / cap is that tanh. Padding has no finite square.
  slope = 1.0 - jnp.square(z_BxTxW * static.temperature / static.logit_cap)
  return dz_BxTxW * (slope if static.num_real_vocab is None else jnp.where(z_BxTxW > UNREAL / 2, slope, 0.0))
