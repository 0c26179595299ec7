"""Attention to some of the keys that may be seen, those that an indexer chooses (DeepSeek Sparse Attention,
DeepSeek-V3.2-Exp; across layers: arXiv 2603.12201).

The indexer of a layer scores the keys of each query: the sum over its heads of w_h relu(q_h · k). Attention is over the
`index_topk` keys with the highest scores; of equal scores that of the earlier key comes first. Where there are no more
keys than that, all are seen, and nothing of this is computed.

The choice has no gradient, so that indexers are not trained, as in transformers. DeepSeek trains them beforehand by a
loss of their own.

B batch, T queries, S keys, H query heads, K and V sizes of a head's keys and values, N heads of the indexer, I their
size, C keys that are chosen.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from models import cpu
from models.attention import mask
from models.attention.blocked import MASKED
from models.attention.mask import QKV, Rule, Side, TokenIds
from models.attention.pages import Seen
from models.attention.rope import apply_rope
from models.layers import Kernel, Linear, Norm, Scope
from models.sharding import logical_axes
from models.sharding.logical_axes import constrain
from models.spec import Spec

# Added to the variance of the indexer's keys, whatever model.norm_eps: transformers' classes have no key for it.
EPS = 1e-6
# Pairs of a query and a key whose scores exist at a time, of each row and head.
PAIRS = 2**20


class Indexer(nnx.Module):
  """What scores are made of. Its inputs are constants to the gradient."""

  def __init__(self, spec: Spec, scope: Scope):
    s, D, std = spec.latent, spec.hidden_size, spec.init_std
    scope = dataclasses.replace(scope, lora=None)  # no gradient would reach adapters
    whole: dict[str, Any] = dict(std=std, bias=False, names=(None, None))
    self.queries = Linear(scope / "queries", s.q_rank, s.index_heads * s.index_head_dim, **whole)
    self.keys = Linear(scope / "keys", D, s.index_head_dim, **whole)
    self.keys_norm = Norm(scope / "keys_norm", s.index_head_dim, kind="layernorm", eps=EPS, plus_one=False, bias=True)
    self.weights = Kernel(scope / "weights", (D, s.index_heads), D**-0.5 if std is None else std)
    self.spec = s

  def keys_of(self, x_BxTxD: jax.Array, rope: Any) -> jax.Array:
    """[B, T, 1, I], rotated."""
    k_BxTx1xI = self.keys_norm(self.keys(jax.lax.stop_gradient(x_BxTxD)))[:, :, None]
    k_BxTx1xI = constrain(k_BxTx1xI, "batch", "length", None, None)
    return jax.lax.stop_gradient(apply_rope(k_BxTx1xI, rope, self.spec.index_rope_interleaved))

  def queries_of(self, x_BxTxD: jax.Array, latent_BxTxR: jax.Array, rope: Any) -> tuple[jax.Array, jax.Array]:
    """(queries [B, T, N, I], rotated; weights [B, T, N], float32 whatever the others are). `latent_BxTxR`: what
    attention's queries are made of."""
    s, (B, T, _) = self.spec, x_BxTxD.shape
    q_BxTxNxI = self.queries(jax.lax.stop_gradient(latent_BxTxR)).reshape(B, T, s.index_heads, -1)
    q_BxTxNxI = apply_rope(constrain(q_BxTxNxI, "batch", "length", None, None), rope, s.index_rope_interleaved)
    w_BxTxN = jnp.matmul(x_BxTxD.astype(jnp.float32), self.weights.kernel[...].astype(jnp.float32),
                         precision=jax.lax.Precision.HIGHEST) * s.index_heads**-0.5
    return jax.lax.stop_gradient((q_BxTxNxI, constrain(w_BxTxN, "batch", "length", None)))


def choose(asked: tuple[jax.Array, jax.Array], k_BxSxI: jax.Array, tokens: TokenIds, before: Side | None, count: int,
           block: int) -> jax.Array:
  """The places int32 [B, T, C] of the keys with the highest scores of those that each query may see, and, where these
  are fewer than `count`, of some that it does not.

  Args:
    asked: of `Indexer.queries_of`.
    k_BxSxI: keys of a cache, if there are any, and of the tokens.
    tokens, before: the tokens and what stands before them, see `mask.TokenIds.sides`.
    count: how many; S is larger.
    block: queries that are scored at a time, at most.
  """
  def local(asked, k_BxSxI, tokens, before):
    queries, keys = tokens.sides(before)

    def some(of_queries: tuple) -> jax.Array:
      (q_BxTxNxI, w_BxTxN), queries = of_queries
      scores_BxTxS = _scores(q_BxTxNxI, w_BxTxN, k_BxSxI)
      return _highest(scores_BxTxS, _seen(queries, keys), count)

    return _by_queries(some, block, k_BxSxI.shape[1], (asked, queries))

  if (placed := logical_axes.current()) is None:
    return local(asked, k_BxSxI, tokens, before)
  rows = PartitionSpec(placed.spec(("batch", None, None), k_BxSxI.shape)[0])
  return jax.shard_map(local, mesh=placed.mesh, in_specs=rows, out_specs=rows, check_vma=False)(
      asked, k_BxSxI, tokens, before)


def attend(rule: Rule, qkv: QKV, chosen_BxTxC: jax.Array, tokens: TokenIds, before: Side | None, block: int
           ) -> jax.Array:
  """Attention [B, T, H, V] to those of the chosen keys that a query may see, with the promises of `dispatch`.

  All scores of some queries at a time are made, and made again for the gradient. There is no window.
  """
  def local(qkv, chosen, tokens, before):
    (q, k_BxSxHxK, v_BxSxHxV, _), (queries, keys) = qkv, tokens.sides(before)
    S = k_BxSxHxK.shape[1]

    @jax.checkpoint
    def some(of_queries: tuple) -> jax.Array:
      q_BxTxHxK, chosen_BxTxC, queries = of_queries
      seen_BxTxS = _seen(queries, keys) & picked(chosen_BxTxC, S)
      scores_BxHxTxS = rule.scale * cpu.einsum("bthk,bshk->bhts", q_BxTxHxK, k_BxSxHxK)
      if rule.logit_cap is not None:
        scores_BxHxTxS = rule.logit_cap * jnp.tanh(scores_BxHxTxS / rule.logit_cap)
      weights_BxHxTxS = jax.nn.softmax(jnp.where(seen_BxTxS[:, None], scores_BxHxTxS, MASKED), axis=-1)
      out_BxTxHxV = cpu.einsum("bhts,bshv->bthv", weights_BxHxTxS.astype(v_BxSxHxV.dtype), v_BxSxHxV)
      return jnp.where(queries.segments[:, :, None, None] > 0, out_BxTxHxV, 0.0).astype(v_BxSxHxV.dtype)

    return _by_queries(some, block, S, (q, chosen, queries))

  if (placed := logical_axes.current()) is None:
    return local(qkv, chosen_BxTxC, tokens, before)
  by_head = placed.spec(("batch", None, "heads", None), qkv.q.shape)
  rows = PartitionSpec(by_head[0])
  return jax.shard_map(local, mesh=placed.mesh, in_specs=(by_head, rows, rows, rows), out_specs=by_head,
                       check_vma=False)(qkv, chosen_BxTxC, tokens, before)


def choose_of_past(asked: tuple[jax.Array, jax.Array], k_BxSxI: jax.Array, seen: Seen, count: int) -> jax.Array:
  """As `choose`, of the newest token of each row: positions int32 [B, 1, C].

  Args:
    k_BxSxI: of what a cache holds; with `seen.table` by page in place of row.
    seen: which of these there are.
  """
  (q, w), table = asked, seen.table
  if table is not None:
    q, w = table.per_page(q), table.per_page(w)
  scores_BxS = jnp.where(seen.seen_BxS, _scores(q, w, k_BxSxI)[:, 0], -jnp.inf)
  if table is not None:
    scores_BxS = table.per_row(scores_BxS, -jnp.inf).reshape(len(table.pages_BxJ), -1)
  return jax.lax.top_k(scores_BxS, count)[1][:, None]


def narrowed(seen: Seen, chosen_Bx1xC: jax.Array) -> Seen:
  """What was chosen of what is seen."""
  picked_BxS, table = picked(chosen_Bx1xC, seen.positions)[:, 0], seen.table
  if table is not None:
    (B, J), Z = table.pages_BxJ.shape, seen.seen_BxS.shape[1]
    picked_BxS = picked_BxS.reshape(B, J, Z).at[table.owners_Q, table.firsts_Q // Z].get(mode="fill", fill_value=False)
  return seen._replace(seen_BxS=seen.seen_BxS & picked_BxS)


def picked(chosen_BxTxC: jax.Array, size: int) -> jax.Array:
  """bool [B, T, size]: True at these places."""
  rows, queries = (jnp.arange(n).reshape(shape) for n, shape in zip(chosen_BxTxC.shape, ((-1, 1, 1), (1, -1, 1)),
                                                                    strict=False))
  return jnp.zeros((*chosen_BxTxC.shape[:2], size), bool).at[rows, queries, chosen_BxTxC].set(True)


def _scores(q_BxTxNxI: jax.Array, w_BxTxN: jax.Array, k_BxSxI: jax.Array) -> jax.Array:
  """Of each query and key [B, T, S], float32."""
  products_BxTxNxS = cpu.einsum("btni,bsi->btns", q_BxTxNxI, k_BxSxI) * q_BxTxNxI.shape[-1] ** -0.5
  return jnp.einsum("btn,btns->bts", w_BxTxN, jax.nn.relu(products_BxTxNxS), precision=jax.lax.Precision.HIGHEST)


def _highest(scores_BxTxS: jax.Array, seen_BxTxS: jax.Array, count: int) -> jax.Array:
  return jax.lax.top_k(jnp.where(seen_BxTxS, scores_BxTxS, -jnp.inf), count)[1]


def _seen(queries: Side, keys: Side) -> jax.Array:
  """bool [B, T, S]"""
  return mask.seen(Rule(1.0), queries, keys, keys_first=False)


def _by_queries(function: Callable, block: int, S: int, of_queries: Any) -> jax.Array:
  """`function` of a tree of arrays [B, T, …] to one, a few queries at a time: `block`, or fewer of many keys."""
  B, T = jax.tree.leaves(of_queries)[0].shape[:2]
  size = max(1, min(block, PAIRS // S))
  if T <= size:
    return function(of_queries)

  def split(x: jax.Array) -> jax.Array:
    x = jnp.pad(x, [(0, -T % size if d == 1 else 0) for d in range(x.ndim)])
    return jnp.moveaxis(x.reshape(B, -1, size, *x.shape[2:]), 1, 0)

  outs = jnp.moveaxis(jax.lax.map(function, jax.tree.map(split, of_queries)), 0, 1)
  return outs.reshape(B, -1, *outs.shape[3:])[:, :T]
