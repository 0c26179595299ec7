"""The gated delta rule over packed rows, in chunks, and of one token.

Each head keeps a state S [K, V], which maps keys to values. A token lets it fade by exp(g), corrects what it says of
the token's key by the share beta, and reads it with the token's query (Yang et al. 2024, arXiv 2412.06464, eq. 10):

    S <- exp(g) S;  S <- S + k (beta (v - kᵀ S));  out = Sᵀ q

A segment begins with a state of zeros. `one_token` is these lines; `chunked` is equal to them in a loop but for
rounding, with products of matrices over C tokens at a time (the WY representation, section 3.3 there). It is exact
across segments: what belongs to others is multiplied by zeros, so that it changes no bit.

B batch, T length, N chunks of C tokens, H heads, K size of keys, V size of values.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64
# Triangular systems of so many equations are solved one equation after another.
_SMALLEST = 8
# Of the sum of squares that queries and keys are divided by the root of.
EPS = 1e-6

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def owners(segment_ids_BxT: jax.Array) -> jax.Array:
  """The segment of each token, and for padding that of the last token before it, int32 [B, T]; 0: there is none.

  The state is that of these segments: padding leaves it as it is.
  """
  T = segment_ids_BxT.shape[1]
  last_BxT = jax.lax.cummax(jnp.where(segment_ids_BxT > 0, jnp.arange(T), -1), axis=1)
  owner_BxT = jnp.take_along_axis(segment_ids_BxT, jnp.maximum(last_BxT, 0), axis=1)
  return jnp.where(last_BxT >= 0, owner_BxT, 0)


def edges(owner_BxT: jax.Array, C: int, before: int) -> tuple[jax.Array, ...]:
  """What the tokens of each of N chunks have to do with each other and with what is around.

  Args:
    owner_BxT: see `owners`.
    C: tokens of a chunk, by which T can be divided.
    before: the owner of what came before the row.

  Returns:
    (whether token j is of the owner of i and not after it [B, N, C, C]; whether what comes into the chunk is a token's
    [B, N, C]; whether what leaves it is; whether these two are of one owner [B, N]).
  """
  owner_BxNxC = owner_BxT.reshape(len(owner_BxT), -1, C)
  last_BxN = owner_BxNxC[..., -1]
  before_BxN = jnp.concatenate([jnp.full_like(last_BxN[:, :1], before), last_BxN[:, :-1]], axis=1)
  same_BxNxCxC = owner_BxNxC[..., :, None] == owner_BxNxC[..., None, :]
  return (same_BxNxCxC & jnp.tri(C, dtype=bool), owner_BxNxC == before_BxN[..., None],
          owner_BxNxC == last_BxN[..., None], last_BxN == before_BxN)


def unit_keys(x: jax.Array) -> jax.Array:
  """Queries or keys of length one, float32, or as wide as they are."""
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + EPS)


def one_token(state_BxHxKxV: jax.Array, q_BxHxK: jax.Array, k_BxHxK: jax.Array, v_BxHxV: jax.Array, g_BxH: jax.Array,
              beta_BxH: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(the state after one more token, what it reads [B, H, V])."""
  state = state_BxHxKxV * jnp.exp(g_BxH)[..., None, None]
  known_BxHxV = _einsum("bhkv,bhk->bhv", state, k_BxHxK)
  change_BxHxV = (v_BxHxV - known_BxHxV) * beta_BxH[..., None]
  state = state + k_BxHxK[..., None] * change_BxHxV[..., None, :]
  return state, _einsum("bhkv,bhk->bhv", state, q_BxHxK)


class Inputs(NamedTuple):
  """What a row's tokens do with the state."""

  # Queries and keys; keys of length one (`unit_keys`) keep the state bounded.
  q_BxTxHxK: jax.Array
  k_BxTxHxK: jax.Array
  v_BxTxHxV: jax.Array
  # Logarithm of the share of the state that is kept, 0 or less.
  g_BxTxH: jax.Array
  # The share by which the state is corrected, 0 to 1.
  beta_BxTxH: jax.Array


def chunked(inputs: Inputs, segment_ids_BxT: jax.Array, chunk: int = CHUNK, state_BxHxKxV: jax.Array | None = None
            ) -> tuple[jax.Array, jax.Array]:
  """(what the tokens read [B, T, H, V], zeros at padding; the state of each row after its last token [B, H, K, V]).

  In float32, or as wide as the inputs.

  Args:
    inputs: of all tokens.
    segment_ids_BxT: int32; 0 is padding. The tokens of a segment are contiguous.
    chunk: C, tokens that are taken together.
    state_BxHxKxV: what rows of one segment, 1, go on with; None: rows begin here.
  """
  T = inputs.q_BxTxHxK.shape[1]
  C = min(chunk, T)
  pad = -T % C
  given: tuple[jax.Array, ...] = *inputs, segment_ids_BxT
  if pad:  # with padding, which changes nothing
    given = tuple(jnp.pad(x, [(0, pad if d == 1 else 0) for d in range(x.ndim)]) for x in given)
  before = 0 if state_BxHxKxV is None else 1  # the segment of what came before the row
  q, k, v, g, beta, owner_BxT = _prepared(*given)
  owner_BxT = jnp.maximum(owner_BxT, before)
  B, H = q.shape[0], q.shape[2]

  def in_chunks(x: jax.Array) -> jax.Array:
    """[B, T, H, …] to [N, B, H, C, …]."""
    return jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), (1, 3), (0, 2))

  q, k, v, g, beta = map(in_chunks, (q, k, v, g, beta))
  earlier, enters, leaves, stays = (x.swapaxes(0, 1) for x in edges(owner_BxT, C, before))
  earlier_NxBx1xCxC, enters_NxBx1xC, leaves_NxBx1xC, stays_NxB = (
      earlier[:, :, None], enters[:, :, None], leaves[:, :, None], stays)

  # Sums of g from the begin of the segment, or of the chunk, to the token: without a term of any other segment.
  total_NxBxHxC = _einsum("nbhij,nbhj->nbhi", earlier_NxBx1xCxC.astype(g.dtype), g)
  between = jnp.where(earlier_NxBx1xCxC, total_NxBxHxC[..., :, None] - total_NxBxHxC[..., None, :], 0.0)
  decay_NxBxHxCxC = jnp.where(earlier_NxBx1xCxC, jnp.exp(between), 0.0)
  since_NxBxHxC = jnp.where(enters_NxBx1xC, jnp.exp(total_NxBxHxC), 0.0)

  # Each token's correction depends on those before it in the chunk: a triangular system for all of them.
  system = _einsum("nbhik,nbhjk->nbhij", k * beta[..., None], k) * decay_NxBxHxCxC
  system = jnp.where(jnp.tri(C, k=-1, dtype=bool), system, 0.0) + jnp.eye(C, dtype=system.dtype)
  right = jnp.concatenate([v * beta[..., None], k * (beta * since_NxBxHxC)[..., None]], axis=-1)
  solved = _solved(system, right)
  new_NxBxHxCxV, reads_NxBxHxCxK = solved[..., :v.shape[-1]], solved[..., v.shape[-1]:]
  weights_NxBxHxCxC = _einsum("nbhik,nbhjk->nbhij", q, k) * decay_NxBxHxCxC
  left_NxBxHxC = jnp.where(leaves_NxBx1xC, decay_NxBxHxCxC[..., -1, :], 0.0)
  kept_NxBxH = jnp.where(stays_NxB[..., None], jnp.exp(total_NxBxHxC[..., -1]), 0.0)

  def step(state_BxHxKxV, part):
    q_in, weights, new, reads, k_out, kept, stays = part
    change_BxHxCxV = new - _einsum("bhck,bhkv->bhcv", reads, state_BxHxKxV)
    out = _einsum("bhck,bhkv->bhcv", q_in, state_BxHxKxV) + _einsum("bhij,bhjv->bhiv", weights, change_BxHxCxV)
    state = jnp.where(stays[:, None, None, None], state_BxHxKxV * kept[..., None, None], 0.0)
    return state + _einsum("bhck,bhcv->bhkv", k_out, change_BxHxCxV), out

  parts = (q * since_NxBxHxC[..., None], weights_NxBxHxCxC, new_NxBxHxCxV, reads_NxBxHxCxK,
           k * left_NxBxHxC[..., None], kept_NxBxH, stays_NxB)
  begin = jnp.zeros((B, H, k.shape[-1], v.shape[-1]), q.dtype) if state_BxHxKxV is None else state_BxHxKxV
  state, out_NxBxHxCxV = jax.lax.scan(step, begin.astype(q.dtype), parts)
  out_BxTxHxV = jnp.moveaxis(out_NxBxHxCxV, (0, 2), (1, 3)).reshape(B, -1, H, v.shape[-1])[:, :T]
  return jnp.where((segment_ids_BxT > 0)[..., None, None], out_BxTxHxV, 0.0), state


def _solved(system: jax.Array, right: jax.Array) -> jax.Array:
  """x [..., C, V] of system x = right, for a lower triangular system [..., C, C] with ones on its diagonal.

  By products, not by the libraries' solver: that of LAPACK waits in a thread of XLA's for others of these, and two at a
  time on two processors wait for ever.
  """
  inverse = _inverse(jax.lax.stop_gradient(system))

  def multiply(x: jax.Array) -> jax.Array:
    return _einsum("...ij,...jv->...iv", system, x)

  return jax.lax.custom_linear_solve(
      multiply, right, lambda _, b: _einsum("...ij,...jv->...iv", inverse, b),
      transpose_solve=lambda _, b: _einsum("...ji,...jv->...iv", inverse, b))


def _inverse(system: jax.Array) -> jax.Array:
  """The inverse of a lower triangular [..., C, C] with ones on its diagonal: row by row in small blocks, then of blocks
  of twice the size, whose lower left is -D⁻¹ B A⁻¹."""
  C = system.shape[-1]
  size, width = min(C, _SMALLEST), min(C, _SMALLEST)
  while width < C:
    width *= 2
  eye = jnp.eye(width, dtype=system.dtype)
  whole = jnp.broadcast_to(eye, (*system.shape[:-2], width, width)).at[..., :C, :C].set(system)

  def blocks(size: int) -> jax.Array:
    """Those on the diagonal, [..., width / size, size, size]."""
    cut = whole.reshape(*whole.shape[:-2], width // size, size, width // size, size)
    return jnp.moveaxis(jnp.diagonal(cut, axis1=-4, axis2=-2), -1, -3)

  small, rows = blocks(size), [jnp.broadcast_to(eye[0, :size], (*whole.shape[:-2], width // size, size))]
  for i in range(1, size):
    rows.append(eye[i, :size] - _einsum("...j,...jk->...k", small[..., i, :i], jnp.stack(rows, axis=-2)))
  inverse = jnp.stack(rows, axis=-2)
  while size < width:
    first, second, below = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :], blocks(2 * size)[..., size:, :size]
    below = -_einsum("...ij,...jk,...kl->...il", second, below, first)
    inverse = jnp.concatenate([jnp.concatenate([first, jnp.zeros_like(first)], axis=-1),
                               jnp.concatenate([below, second], axis=-1)], axis=-2)
    size *= 2
  return inverse[..., 0, :C, :C]


def _prepared(q, k, v, g, beta, segment_ids_BxT) -> tuple[jax.Array, ...]:
  """(q / sqrt(K), k, v, g, beta, `owners`), float32 or as wide as they are; padding changes no state."""
  kind = jnp.promote_types(q.dtype, jnp.float32)
  q, k, v, g, beta = (x.astype(kind) for x in (q, k, v, g, beta))
  real_BxTx1 = segment_ids_BxT[..., None] > 0
  g, beta = (jnp.where(real_BxTx1, x, 0.0) for x in (g, beta))
  return q * q.shape[-1] ** -0.5, k, v, g, beta, owners(segment_ids_BxT)
