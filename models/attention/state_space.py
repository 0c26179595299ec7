"""The state space duality of Mamba 2 over packed rows, in chunks, and of one token.

Each head keeps a state S [N, P]. A token lets it fade by exp(g), where g is its step dt times a negative number of the
head, writes its input x with its b, and reads the state with its c (Dao and Gu 2024, arXiv 2405.21060, eq. 2 and 16):

    S <- exp(g) S + b (dt x)ᵀ;  out = Sᵀ c

Heads of a group have the same b and c. A segment begins with a state of zeros. `one_token` is these lines; `chunked` is
equal to them in a loop but for rounding, with products of matrices over L tokens at a time (section 6 there), one chunk
after another, so that no more than one chunk's matrices are held at a time. It is exact across segments: what belongs
to others is multiplied by zeros, so that it changes no bit.

B batch, T length, L tokens of a chunk, G groups, R heads of each, H = G R heads, N size of b and c, P size of inputs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention.delta_rule import owners

CHUNK = 64
# Sums of multiples of this are exact in float32 up to 2^18.
_GRID = 2.0**-6
# The share that is kept, exp of it, is 0.
_ALL_GONE = -1000.0

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def one_token(state_BxHxNxP: jax.Array, c_BxGxN: jax.Array, b_BxGxN: jax.Array, x_BxHxP: jax.Array, g_BxH: jax.Array,
              dt_BxH: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(the state after one more token, what it reads [B, H, P])."""
  heads = x_BxHxP.shape[1] // b_BxGxN.shape[1]
  c_BxHxN, b_BxHxN = (jnp.repeat(part, heads, axis=1) for part in (c_BxGxN, b_BxGxN))
  written = b_BxHxN[..., None] * (x_BxHxP * dt_BxH[..., None])[..., None, :]
  state = state_BxHxNxP * jnp.exp(g_BxH)[..., None, None] + written
  return state, _einsum("bhnp,bhn->bhp", state, c_BxHxN)


class Inputs(NamedTuple):
  """What a row's tokens do with the state."""

  # What it is read and written with.
  c_BxTxGxN: jax.Array
  b_BxTxGxN: jax.Array
  x_BxTxHxP: jax.Array
  # Logarithm of the share of the state that is kept, 0 or less.
  g_BxTxH: jax.Array
  # The step, which the input is multiplied by.
  dt_BxTxH: jax.Array


def chunked(inputs: Inputs, segment_ids_BxT: jax.Array, chunk: int = CHUNK, state_BxHxNxP: jax.Array | None = None
            ) -> tuple[jax.Array, jax.Array]:
  """(what the tokens read [B, T, H, P], zeros at padding; the state of each row after its last token [B, H, N, P]).

  In float32, or as wide as the inputs.

  Args:
    inputs: of all tokens.
    segment_ids_BxT: int32; 0 is padding. The tokens of a segment are contiguous.
    chunk: tokens that are taken together.
    state_BxHxNxP: what rows of one segment, 1, go on with; None: rows begin here.
  """
  (B, T, H, P), (G, N) = inputs.x_BxTxHxP.shape, inputs.b_BxTxGxN.shape[2:]
  L = min(chunk, T)
  pad = -T % L
  given: tuple[jax.Array, ...] = *inputs, segment_ids_BxT
  if pad:  # with padding, which changes nothing
    given = tuple(jnp.pad(part, [(0, pad if d == 1 else 0) for d in range(part.ndim)]) for part in given)
  before = 0 if state_BxHxNxP is None else 1  # the segment of what came before the row
  c, b, x, g, dt, owner_BxT = _prepared(*given)
  owner_BxT = jnp.maximum(owner_BxT, before)

  def in_chunks(part: jax.Array) -> jax.Array:
    """[B, T, heads, …] to [chunks, B, G, heads / G, L, …]."""
    parts = part.reshape(B, -1, L, G, part.shape[2] // G, *part.shape[3:])
    return jnp.moveaxis(parts, (1, 2), (0, 4))

  owner_NxBxL = owner_BxT.reshape(B, -1, L).swapaxes(0, 1)
  last_NxB = owner_NxBxL[..., -1]
  before_NxB = jnp.concatenate([jnp.full_like(last_NxB[:1], before), last_NxB[:-1]])
  chunks = (in_chunks(c)[:, :, :, 0], in_chunks(b)[:, :, :, 0], in_chunks(x * dt[..., None]), in_chunks(g), owner_NxBxL,
            before_NxB)
  begin = jnp.zeros((B, H, N, P), x.dtype) if state_BxHxNxP is None else state_BxHxNxP.astype(x.dtype)
  state, out = jax.lax.scan(jax.checkpoint(_one_chunk, prevent_cse=False), begin.reshape(B, G, H // G, N, P), chunks)
  out_BxTxHxP = jnp.moveaxis(out, (0, 4), (1, 2)).reshape(B, -1, H, P)[:, :T]
  return jnp.where((segment_ids_BxT > 0)[..., None, None], out_BxTxHxP, 0.0), state.reshape(B, H, N, P)


def _one_chunk(state_BxGxRxNxP: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """(the state after one more chunk, what its tokens read [B, G, R, L, P])."""
  c_BxGxLxN, b_BxGxLxN, x_BxGxRxLxP, g_BxGxRxL, owner_BxL, before_B = part
  L, last_B = owner_BxL.shape[1], owner_BxL[:, -1]
  # What came into the chunk belongs to these tokens, and what leaves it comes from those.
  enters_Bx1x1xL = (owner_BxL == before_B[:, None])[:, None, None]
  leaves_Bx1x1xL = (owner_BxL == last_B[:, None])[:, None, None]
  stays_Bx1x1 = (last_B == before_B)[:, None, None]
  earlier_Bx1x1xLxL = ((owner_BxL[:, :, None] == owner_BxL[:, None]) & jnp.tri(L, dtype=bool))[:, None, None]
  coarse, fine = _sums(g_BxGxRxL, earlier_Bx1x1xLxL)
  between = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
  decay_BxGxRxLxL = jnp.where(earlier_Bx1x1xLxL, jnp.exp(jnp.where(earlier_Bx1x1xLxL, between, 0.0)), 0.0)
  total_BxGxRxL = coarse + fine
  since_BxGxRxL = jnp.where(enters_Bx1x1xL, jnp.exp(total_BxGxRxL), 0.0)

  scores_BxGx1xLxL = _einsum("bgin,bgjn->bgij", c_BxGxLxN, b_BxGxLxN)[:, :, None]
  out = _einsum("bgrij,bgrjp->bgrip", scores_BxGx1xLxL * decay_BxGxRxLxL, x_BxGxRxLxP)
  out += _einsum("bgin,bgrnp->bgrip", c_BxGxLxN, state_BxGxRxNxP) * since_BxGxRxL[..., None]
  left_BxGxRxL = jnp.where(leaves_Bx1x1xL, decay_BxGxRxLxL[..., -1, :], 0.0)
  kept_BxGxR = jnp.where(stays_Bx1x1, jnp.exp(total_BxGxRxL[..., -1]), 0.0)
  state = jnp.where(stays_Bx1x1[..., None, None], state_BxGxRxNxP * kept_BxGxR[..., None, None], 0.0)
  return state + _einsum("bgjn,bgrjp->bgrnp", b_BxGxLxN, x_BxGxRxLxP * left_BxGxRxL[..., None]), out


def _sums(g_BxGxRxL: jax.Array, earlier_Bx1x1xLxL: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sums of g from the begin of the segment, or of the chunk, to each token, as (coarse, fine), of which the first are
  exact. The difference of two sums then has the digits of what lies between them, however large the sums are: behind a
  token at which nearly all is forgotten, float32 would have few left."""
  coarse = jax.lax.stop_gradient(jnp.round(jnp.maximum(g_BxGxRxL, _ALL_GONE) / _GRID) * _GRID)
  fine = jnp.maximum(g_BxGxRxL, _ALL_GONE) - coarse
  earlier = jnp.broadcast_to(earlier_Bx1x1xLxL[:, 0, 0], (len(g_BxGxRxL), *earlier_Bx1x1xLxL.shape[-2:]))
  of_both = _einsum("bij,kbgrj->kbgri", earlier.astype(coarse.dtype), jnp.stack([coarse, fine]))
  return of_both[0], of_both[1]


def _prepared(c, b, x, g, dt, segment_ids_BxT) -> tuple[jax.Array, ...]:
  """(c, b, x, g, dt, `owners`), float32 or as wide as they are; padding changes no state."""
  kind = jnp.promote_types(x.dtype, jnp.float32)
  c, b, x, g, dt = (part.astype(kind) for part in (c, b, x, g, dt))
  real_BxTx1 = segment_ids_BxT[..., None] > 0
  g, dt = (jnp.where(real_BxTx1, part, 0.0) for part in (g, dt))
  return c, b, x, g, dt, owners(segment_ids_BxT)
