"""The gated delta rule as kernels for GPUs, in Pallas's Triton dialect: models/attention/delta_rule.py on the chip.

B batch, T length, N chunks of C tokens, G heads of queries and keys, H heads of values, K and V their sizes.

In XLA's hands most of its time goes by writing and reading what a chunk's tokens have to do with each other, C numbers
of each token and head. Here these never leave the chip. Forward, a kernel solves every chunk's system (`_solve`), and
one goes over the chunks with the state in registers, a part of the values each (`_read`). Backward, both run again and
keep the state before every chunk, one goes back over the chunks with the state's gradient (`_read_back`), and the last
makes the gradients of every chunk (`_gradients`). The formulas are those of delta_rule.py, whose names they have:

    new, reads = inverse (beta v), inverse (beta since k);  change = new - reads S
    out = since (q S) + weights change;  S <- kept S + (left k)ᵀ change

Products are of bfloat16 numbers, which tensor cores take, and sums float32. A float32 operand is two of them, the
number rounded and what was left, so that a product is off by 2^-16 of its size and not by 2^-8 (of outputs and
gradients 1e-5 to 1e-4 where single products gave 0.5% to 5%, most where keys are alike). Queries, keys and values are
bfloat16 as they come; their lengths divide what is made of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models.attention import delta_chunk as on_chip
from models.attention import delta_rule
from models.attention.delta_chunk import ALL, CHUNK, Tokens
from models.attention.delta_rule import Inputs

# Values of a head that one program of `_read` and `_read_back` has the state of.
_VALUES = 32
# Values that `_gradients` takes at a time.
_FEW = 32
# Of a kernel, where not 4.
_WARPS = {"delta_gradients": 8}


def chunked(inputs: Inputs, segment_ids_BxT: jax.Array, state_BxHxKxV: jax.Array | None = None, *,
            interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """`delta_rule.chunked` of queries and keys of any length, whose heads G divide those of values.

  Args:
    inputs: q, k [B, T, G, K], v [B, T, H, V], of one dtype, bfloat16 on a GPU; g, beta [B, T, H]. K and V are powers
      of two, 16 at least.
    segment_ids_BxT, state_BxHxKxV: as there.
    interpret: run without a GPU.

  Returns:
    (what the tokens read [B, T, H, V] in the dtype of v; the state [B, H, K, V], float32).
  """
  (B, T, _, K), (_, _, H, V) = inputs.q_BxTxHxK.shape, inputs.v_BxTxHxV.shape
  given = *inputs, segment_ids_BxT
  q, k, v, g, beta, segments = (jnp.pad(x, [(0, -T % CHUNK if d == 1 else 0) for d in range(x.ndim)]) for x in given)
  real_BxTx1 = segments[..., None] > 0
  g_BxHxT, beta_BxHxT = (jnp.where(real_BxTx1, x.astype(jnp.float32), 0.0).swapaxes(1, 2) for x in (g, beta))
  before = 0 if state_BxHxKxV is None else 1
  owner_BxT = jnp.maximum(delta_rule.owners(segments), before)
  total, since, left, kept_BxHxN = _decays(g_BxHxT, owner_BxT, before)
  begin = jnp.zeros((B, H, K, V), jnp.float32) if state_BxHxKxV is None else state_BxHxKxV.astype(jnp.float32)
  # The kernels' gradients are those of scaled queries and keys. XLA makes the rest, of numbers made float32 once, so
  # that what comes by the lengths is added in float32.
  scaled = [_scaled(q.astype(jnp.float32), K**-0.5), _scaled(k.astype(jnp.float32), 1.0)]
  units, scales = zip(*scaled, strict=True)
  constants = jax.tree.map(jax.lax.stop_gradient, (q, k, *scales, owner_BxT))
  out, state = _rule(interpret, constants, (*units, v, beta_BxHxT, total, since, left, kept_BxHxN, begin))
  return jnp.where(real_BxTx1[..., None], out, jnp.zeros((), out.dtype))[:, :T], state


def _scaled(x_BxTxGxK: jax.Array, length: float) -> tuple[jax.Array, jax.Array]:
  """(them with that length, what makes them so [B, G, T])."""
  scale_BxTxG = length * jax.lax.rsqrt(jnp.sum(jnp.square(x_BxTxGxK), -1) + delta_rule.EPS)
  return x_BxTxGxK * scale_BxTxG[..., None], scale_BxTxG.swapaxes(1, 2)


def _decays(g_BxHxT: jax.Array, owner_BxT: jax.Array, before: int) -> tuple[jax.Array, ...]:
  """(total, since, left [B, H, T], kept [B, H, N]) of delta_rule.py."""
  B, H, T = g_BxHxT.shape
  earlier_BxNxCxC, enters_BxNxC, leaves_BxNxC, stays_BxN = delta_rule.edges(owner_BxT, CHUNK, before)
  enters_Bx1xNxC, leaves_Bx1xNxC = enters_BxNxC[:, None], leaves_BxNxC[:, None]
  total = jnp.einsum("bnij,bhnj->bhni", earlier_BxNxCxC.astype(jnp.float32), g_BxHxT.reshape(B, H, -1, CHUNK),
                     precision="highest")
  since = jnp.where(enters_Bx1xNxC, jnp.exp(total), 0.0)
  to_last = jnp.where(leaves_Bx1xNxC, total[..., -1:] - total, 0.0)
  left = jnp.where(leaves_Bx1xNxC, jnp.exp(to_last), 0.0)
  kept_BxHxN = jnp.where(stays_BxN[:, None], jnp.exp(total[..., -1]), 0.0)
  return *(x.reshape(B, H, T) for x in (total, since, left)), kept_BxHxN


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(interpret: bool, constants: tuple, given: tuple) -> tuple[jax.Array, ...]:
  """(out [B, T, H, V], the state after the rows).

  Args:
    constants: q, k [B, T, G, K] as they come, their scales [B, G, T], owner.
    given: what has gradients: q and k scaled, v, beta, total, since, left, kept, the state before the rows.
  """
  rows, begin = _Rows.of(interpret, constants, given), given[-1]
  return _read(rows, _solve(rows), begin)


def _rule_fwd(interpret: bool, constants: tuple, given: tuple):
  # Scaled queries and keys are made of what comes, and not kept.
  return _rule(interpret, constants, given), (constants, (None, None, *given[2:]))


def _rule_bwd(interpret: bool, saved: tuple, of_out: tuple):
  constants, given = saved
  rows, (dout, dend) = _Rows.of(interpret, constants, given), of_out
  solved = _solve(rows, keep=True)
  states, change = _read(rows, solved, given[-1], keep=True)
  dstates, dchange, dbegin = _read_back(rows, solved[1], dout, dend)
  dq, dk, *others = _gradients(rows, *solved, states, change, dstates, dchange, dout)

  def by_group(x_BxTxHxK: jax.Array) -> jax.Array:
    return x_BxTxHxK.reshape(*rows.q.shape[:3], -1, rows.K).sum(3)

  nothing = [jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else None for x in constants]
  return tuple(nothing), (by_group(dq), by_group(dk), *others, dbegin)


_rule.defvjp(_rule_fwd, _rule_bwd)


def _solve(rows: "_Rows", keep: bool = False) -> tuple[jax.Array, ...]:
  """(new [B, H, T, V], float32, reads [B, H, 2, T, K]; with `keep` the systems' inverses [B, H, 2, T, C])."""

  def kernel(k_ref, v_ref, tokens_ref, new_ref, reads_ref, *inverse_ref):
    k, v, t = k_ref[...], v_ref[...], on_chip.at(tokens_ref)
    inverse = on_chip.inverse(on_chip.system(k, t))
    new_ref[...] = on_chip.dot(inverse * t.beta[None, :], v)
    on_chip.store(reads_ref, on_chip.dot(inverse * (t.beta * t.since * t.k_scale)[None, :], k), ALL, ALL)
    for ref in inverse_ref:
      on_chip.store(ref, inverse, ALL, ALL)

  outs = [rows.made(rows.V), rows.pairs(rows.K), *([rows.pairs(CHUNK)] if keep else [])]
  return rows.call(kernel, "delta_solve", (rows.N, rows.H, rows.B),
                   [rows.chunk(rows.k), rows.chunk(rows.v), rows.of_tokens()], outs, rows.k, rows.v, rows.tokens)


def _read(rows: "_Rows", solved: tuple[jax.Array, ...], begin: jax.Array, keep: bool = False
          ) -> tuple[jax.Array, ...]:
  """(out [B, T, H, V], the last state [B, H, K, V]); with `keep` in their place (the states before each chunk
  [B, H, 2, N, K, V], change [B, H, 2, T, V])."""

  def kernel(q_ref, k_ref, new_ref, reads_ref, tokens_ref, kept_ref, begin_ref, first_ref, second_ref):

    def step(n, state):
      here = on_chip.tile(n)
      q, k, t, parts = q_ref[here, :], k_ref[here, :], on_chip.at(tokens_ref, here), on_chip.parts(state)
      change = new_ref[here, :] - on_chip.dot(on_chip.load(reads_ref, here, ALL), parts)
      if keep:
        on_chip.store(first_ref, parts, n, ALL, ALL)
        on_chip.store(second_ref, change, here, ALL)
      else:
        out = on_chip.dot(q, parts) * (t.since * t.q_scale)[:, None] + on_chip.dot(on_chip.weights(q, k, t), change)
        first_ref[here, :] = out.astype(first_ref.dtype)
      return state * kept_ref[n] + on_chip.dot(k.T, change * (t.left * t.k_scale)[:, None])

    state = jax.lax.fori_loop(0, rows.N, step, begin_ref[...])
    if not keep:
      second_ref[...] = state

  outs = [rows.states, rows.pairs(rows.V, some=True)] if keep else [rows.out, rows.state]
  new_place = rows.spec((None, None, rows.T, rows.some), lambda i, h, b: (b, h, 0, i))
  return rows.call(kernel, "delta_read", (rows.V // rows.some, rows.H, rows.B),
                   [rows.whole(rows.q), rows.whole(rows.k), new_place, rows.whole_pairs, rows.of_tokens(whole=True),
                    rows.of_chunks, rows.state[0]], outs,
                   rows.q, rows.k, *solved[:2], rows.tokens, rows.kept, begin)


def _read_back(rows: "_Rows", reads: jax.Array, dout: jax.Array, dend: jax.Array) -> tuple[jax.Array, ...]:
  """The gradients of the states after each chunk [B, H, 2, N, K, V], of change [B, H, 2, T, V], of the first state."""

  def kernel(q_ref, k_ref, reads_ref, tokens_ref, kept_ref, dout_ref, dend_ref, dstates_ref, dchange_ref, dbegin_ref):

    def step(i, dstate):
      n = rows.N - 1 - i
      here = on_chip.tile(n)
      q, k, t, dout = q_ref[here, :], k_ref[here, :], on_chip.at(tokens_ref, here), dout_ref[here, :]
      dchange = on_chip.dot(on_chip.transposed(on_chip.weights(q, k, t)), dout)
      dchange += on_chip.dot(k, dstate) * (t.left * t.k_scale)[:, None]
      on_chip.store(dstates_ref, dstate, n, ALL, ALL)
      on_chip.store(dchange_ref, dchange, here, ALL)
      dread = dout.astype(jnp.float32) * (t.since * t.q_scale)[:, None]
      reads = on_chip.transposed(on_chip.load(reads_ref, here, ALL))
      return dstate * kept_ref[n] + on_chip.dot(q.T, dread) - on_chip.dot(reads, dchange)

    dbegin_ref[...] = jax.lax.fori_loop(0, rows.N, step, dend_ref[...])

  return rows.call(kernel, "delta_read_back", (rows.V // rows.some, rows.H, rows.B),
                   [rows.whole(rows.q), rows.whole(rows.k), rows.whole_pairs, rows.of_tokens(whole=True),
                    rows.of_chunks, rows.out[0], rows.state[0]],
                   [rows.states, rows.pairs(rows.V, some=True), rows.state],
                   rows.q, rows.k, reads, rows.tokens, rows.kept, dout, dend)


def _gradients(rows: "_Rows", *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Of scaled queries and keys [B, T, H, K], float32, of v, and of beta, total, since, left [B, H, T], kept [B, H, N].

  Args:
    arrays: new, reads, inverse, states, change, the gradients of the states and of change, and of the output.
  """

  def kernel(q_ref, k_ref, v_ref, tokens_ref, new_ref, reads_ref, inverse_ref, states_ref, change_ref, dstates_ref,
             dchange_ref, dout_ref, dq_ref, dk_ref, dv_ref, dbeta_ref, dtotal_ref, dsince_ref, dleft_ref, dkept_ref):
    q, k, t = q_ref[...], k_ref[...], on_chip.at(tokens_ref)
    inverse = on_chip.transposed(on_chip.load(inverse_ref, ALL, ALL))

    def over_values(step, *carry):
      """A few values at a time, and one thing after another: registers hold little more than one sum."""
      return jax.lax.fori_loop(0, rows.V // rows.few, lambda i, carry: step(on_chip.tile(i, rows.few), *carry), carry)

    def of_chunk(here, dweights, dsystem, dbeta, dkept):
      solved = on_chip.dot(inverse, on_chip.load(dchange_ref, ALL, here))
      dv_ref[:, here] = (solved * t.beta[:, None]).astype(dv_ref.dtype)
      state, dstate = (sum(x.astype(jnp.float32) for x in on_chip.load(ref, ALL, here))
                       for ref in (states_ref, dstates_ref))
      return (dweights + on_chip.dot(dout_ref[:, here], on_chip.load(change_ref, ALL, here), across=True),
              dsystem - on_chip.dot(solved, new_ref[:, here], across=True), dbeta + (solved * v_ref[:, here]).sum(1),
              dkept + (state * dstate).sum(1))

    square, per_token = jnp.zeros((CHUNK, CHUNK), jnp.float32), jnp.zeros(CHUNK, jnp.float32)
    dweights, dsystem, dbeta, dkept = over_values(of_chunk, square, square, per_token, jnp.zeros(rows.K, jnp.float32))
    dkept_ref[0] = dkept.sum(0)

    def summed(load, states_ref):
      """a sᵀ [C, K], over the values of a and of states s."""
      def add(here, total):
        return (total + on_chip.dot(load(here), on_chip.load(states_ref, ALL, here), across=True),)
      return over_values(add, jnp.zeros((CHUNK, rows.K), jnp.float32))[0]

    # Where the chunk's tokens write what the next one reads.
    keys = k.astype(jnp.float32) * t.k_scale[:, None]
    of_left = summed(lambda here: on_chip.load(change_ref, ALL, here), dstates_ref)
    dleft_ref[...] = (keys * of_left).sum(1)
    dk = of_left * t.left[:, None]
    # Where they are corrected by what came into the chunk.
    solved = -on_chip.dot(inverse, summed(lambda here: on_chip.load(dchange_ref, ALL, here), states_ref))
    of_reads = (keys * solved).sum(1)
    dk += solved * (t.beta * t.since)[:, None]
    dsystem -= on_chip.dot(solved, on_chip.load(reads_ref, ALL, ALL), across=True)
    # And by each other.
    decay = on_chip.decay(t)
    dsystem = jnp.where(on_chip.diagonal(), 0.0, dsystem * decay)
    of_system = dsystem * on_chip.dot(k, k, across=True) * (t.k_scale[:, None] * t.k_scale[None, :])
    dsystem *= t.beta[:, None]
    dk += on_chip.dot((dsystem + dsystem.T) * t.k_scale[None, :], k)
    # Where they read each other.
    dweights *= decay
    of_decay = of_system * t.beta[:, None]
    of_decay += dweights * on_chip.dot(q, k, across=True) * (t.q_scale[:, None] * t.k_scale[None, :])
    dk_ref[...] = dk + on_chip.dot(dweights.T * t.q_scale[None, :], q)
    dtotal_ref[...] = of_decay.sum(1) - of_decay.sum(0)
    dbeta_ref[...] = dbeta + t.since * of_reads + of_system.sum(1)
    # Where they read what came into the chunk.
    dread = summed(lambda here: dout_ref[:, here], states_ref)
    dsince_ref[...] = t.beta * of_reads + (q.astype(jnp.float32) * t.q_scale[:, None] * dread).sum(1)
    dq_ref[...] = dread * t.since[:, None] + on_chip.dot(dweights * t.k_scale[None, :], k)

  shape, f32 = jax.ShapeDtypeStruct, jnp.float32
  by_token = rows.per_token, shape((rows.B, rows.H, rows.T), f32)
  own = (rows.spec((None, CHUNK, None, rows.K), lambda i, h, b: (b, i, h, 0)),
         shape((rows.B, rows.T, rows.H, rows.K), f32))
  states = rows.spec((None, None, 2, None, rows.K, rows.V), lambda i, h, b: (b, h, 0, i, 0, 0))
  of_values = rows.pairs(rows.V)[0]
  return rows.call(kernel, "delta_gradients", (rows.N, rows.H, rows.B),
                   [rows.chunk(rows.q), rows.chunk(rows.k), rows.chunk(rows.v), rows.of_tokens(), rows.made(rows.V)[0],
                    rows.pairs(rows.K)[0], rows.pairs(CHUNK)[0], states, of_values, states, of_values,
                    rows.chunk(rows.v)],
                   [own, own, (rows.chunk(rows.v), shape(rows.v.shape, rows.v.dtype)), *[by_token] * 4,
                    (rows.spec((None, None, 1), lambda i, h, b: (b, h, i)), shape((rows.B, rows.H, rows.N), f32))],
                   rows.q, rows.k, rows.v, rows.tokens, *arrays)


class _Rows:
  """What comes, and where a program finds it: of chunks, rows or values i, the h-th head and the b-th row.

  With a place stands what is made there.
  """

  def __init__(self, arrays: tuple[jax.Array, ...], tokens: Tokens, kept: jax.Array, interpret: bool):
    self.q, self.k, self.v = arrays
    (self.B, self.T, _, self.K), (_, _, self.H, self.V) = self.q.shape, self.v.shape
    self.tokens, self.kept, self._interpret = tokens, kept, interpret
    self.N, self.some, self.few = self.T // CHUNK, min(self.V, _VALUES), min(self.V, _FEW)
    self.of_chunks = self.spec((None, None, self.N), lambda i, h, b: (b, h, 0))
    self.per_token = self.spec((None, None, CHUNK), lambda i, h, b: (b, h, i))
    self.state = (self.spec((None, None, self.K, self.some), lambda i, h, b: (b, h, 0, i)),
                  jax.ShapeDtypeStruct((self.B, self.H, self.K, self.V), jnp.float32))
    self.states = (self.spec((None, None, 2, self.N, self.K, self.some), lambda i, h, b: (b, h, 0, 0, 0, i)),
                   jax.ShapeDtypeStruct((self.B, self.H, 2, self.N, self.K, self.V), jnp.bfloat16))
    self.out = (self.spec((None, self.T, None, self.some), lambda i, h, b: (b, 0, h, i)),
                jax.ShapeDtypeStruct(self.v.shape, self.v.dtype))
    self.whole_pairs = self.spec((None, None, 2, self.T, self.K), lambda i, h, b: (b, h, 0, 0, 0))

  @classmethod
  def of(cls, interpret: bool, constants: tuple, given: tuple) -> "_Rows":
    """See `_rule`."""
    q, k, q_scale, k_scale, owner = constants
    _, _, v, beta, total, since, left, kept, _ = given
    return cls((q, k, v), Tokens(q_scale, k_scale, beta, total, since, left, owner), kept, interpret)

  def spec(self, shape: tuple[int | None, ...], place: Callable) -> Any:
    from jax.experimental import pallas as pl
    return pl.BlockSpec(shape, place)

  def chunk(self, x: jax.Array) -> Any:
    """A chunk of [B, T, G or H, size]."""
    each = self.H // x.shape[2]
    return self.spec((None, CHUNK, None, x.shape[3]), lambda i, h, b: (b, i, h // each, 0))

  def whole(self, x: jax.Array) -> Any:
    """The row of [B, T, G, size]."""
    each = self.H // x.shape[2]
    return self.spec((None, self.T, None, x.shape[3]), lambda i, h, b: (b, 0, h // each, 0))

  def of_tokens(self, whole: bool = False) -> Tokens:
    """A chunk's, or the whole row's."""
    size = self.T if whole else CHUNK

    def of(x: jax.Array) -> Any:
      if x.ndim == 2:
        return self.spec((None, size), lambda i, h, b: (b, 0 if whole else i))
      each = self.H // x.shape[1]
      return self.spec((None, None, size), lambda i, h, b: (b, h // each, 0 if whole else i))

    return jax.tree.map(of, self.tokens)

  def made(self, size: int) -> tuple[Any, Any]:
    """A chunk's of [B, H, T, size], float32."""
    return (self.spec((None, None, CHUNK, size), lambda i, h, b: (b, h, i, 0)),
            jax.ShapeDtypeStruct((self.B, self.H, self.T, size), jnp.float32))

  def pairs(self, size: int, some: bool = False) -> tuple[Any, Any]:
    """The same in `on_chip.parts`, or the row's of some values."""
    spec = (self.spec((None, None, 2, self.T, self.some), lambda i, h, b: (b, h, 0, 0, i)) if some else
            self.spec((None, None, 2, CHUNK, size), lambda i, h, b: (b, h, 0, i, 0)))
    return spec, jax.ShapeDtypeStruct((self.B, self.H, 2, self.T, size), jnp.bfloat16)

  def call(self, kernel: Callable, name: str, grid: tuple[int, ...], ins: list[Any], outs: list[tuple[Any, Any]],
           *arrays: Any) -> tuple[jax.Array, ...]:
    """`kernel` of `arrays`, whose places are `ins`; `outs`: (place, what it is) of each output."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton
    return tuple(pl.pallas_call(
        kernel, name=name, grid=grid, in_specs=ins, out_specs=[place for place, _ in outs], interpret=self._interpret,
        out_shape=[what for _, what in outs],
        compiler_params=triton.CompilerParams(num_warps=_WARPS.get(name, 4), num_stages=1))(*arrays))
