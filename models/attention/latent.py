"""Multi-head latent attention: all heads' keys and values are made of one short latent (DeepSeek-V2, arXiv 2405.04434).

B batch, T length, D hidden size, H heads, R size of the latent, N and P dimensions of a head's queries and keys that
are not rotated and that are, V size of its values; S slots of a cache, I size of an indexer's keys, C keys that it
chooses.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import cpu
from models.attention import mask, selected
from models.attention.cache import Cache
from models.attention.context import LayerContext
from models.attention.dispatch import attend_to_past, attention
from models.attention.mask import QKV, Rule
from models.attention.pages import Seen
from models.attention.rope import apply_rope
from models.layers import Linear, Norm, Scope, apply_linears
from models.remat import named
from models.sharding.logical_axes import constrain
from models.spec import Spec

# Added to the variance of latents, whatever model.norm_eps: transformers' DeepSeek has no key for it.
EPS = 1e-6


class LatentAttention(nnx.Module):
  """Latents, and the queries, keys and values that are made of them.

  A step of training makes the keys and values, as many as there are heads. A token that is generated does not: a
  query times a key that is k_up @ latent is the query times k_up, then times the latent, and so with values, so that
  all heads read the latents as they are kept.
  """

  def __init__(self, spec: Spec, scope: Scope, out_gain: float):
    """`out_gain`: factor on the initial standard deviation of the last projection."""
    s, D, H, std = spec.latent, spec.hidden_size, spec.num_heads, spec.init_std
    # Latents are those of the tokens that a device has in the residual stream; what is made of them is split by head.
    down: dict[str, Any] = dict(std=std, bias=spec.qkv_bias, names=(None, None))
    up: dict[str, Any] = dict(std=std, bias=False, names=(None, "heads"))
    norm: dict[str, Any] = dict(kind="rmsnorm", eps=EPS, plus_one=False)
    self.q = None if s.q_rank else Linear(scope / "q", D, H * s.head_dim, **up)
    self.q_down = Linear(scope / "q_down", D, s.q_rank, **down) if s.q_rank else None
    self.q_down_norm = Norm(scope / "q_down_norm", s.q_rank, **norm) if s.q_rank else None
    self.q_up = Linear(scope / "q_up", s.q_rank, H * s.head_dim, **up) if s.q_rank else None
    # The latent, then the key that is rotated.
    self.kv_down = Linear(scope / "kv_down", D, s.kv_rank + s.rope_dim, **down)
    self.kv_down_norm = Norm(scope / "kv_down_norm", s.kv_rank, **norm)
    # Of each head its key, then its value.
    self.kv_up = Linear(scope / "kv_up", s.kv_rank, H * (s.nope_dim + s.value_dim), **up)
    self.o = Linear(scope / "o", H * s.value_dim, D, std=std, bias=spec.attention_out_bias, gain=out_gain,
                    names=("heads", None))
    self.spec = spec

  @property
  def _rule(self) -> Rule:
    return Rule(self.spec.attention_scale, self.spec.attention_logit_cap)

  def __call__(self, x_BxTxD: jax.Array, context: LayerContext, indexer: selected.Indexer | None = None
               ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | Cache, jax.Array | None]:
    """(output, (rotated keys [B, T, 1, P], latents [B, T, 1, R]), or, with a `past` of one token, its cache with this,
    which keys were chosen).

    There is no window. `indexer`: that of the layer, which chooses keys; None: they are the `context`'s, as the layer
    before had them. Its keys are kept behind the rotated ones, [B, T, 1, P + I].
    """
    s, sizes, (B, T, _) = self.spec, self.spec.latent, x_BxTxD.shape
    tokens, rope, key, past = context.tokens, context.rope, context.key, context.past
    q, asking_BxTxR, latent_BxTxR, k_rope_BxTx1xP = self._projected(x_BxTxD, key)
    q_BxTxHxK = constrain(q.reshape(B, T, s.num_heads, -1), "batch", "length", "heads", None)
    q_nope_BxTxHxN, q_rope_BxTxHxP = jnp.split(q_BxTxHxK, [sizes.nope_dim], axis=-1)
    q_rope_BxTxHxP, k_rope_BxTx1xP = (apply_rope(part, rope, s.rope_interleaved)
                                      for part in (q_rope_BxTxHxP, k_rope_BxTx1xP))
    asked, kept_BxTx1xC = None, k_rope_BxTx1xP
    if indexer is not None:
      asked = indexer.queries_of(x_BxTxD, asking_BxTxR, rope)
      kept_BxTx1xC = jnp.concatenate([k_rope_BxTx1xP, indexer.keys_of(x_BxTxD, rope)], axis=-1)
    elif sizes.index_topk:  # what layers keep has one shape
      kept_BxTx1xC = jnp.pad(k_rope_BxTx1xP, [(0, 0)] * 3 + [(0, sizes.index_head_dim)])
    queries = q_nope_BxTxHxN, q_rope_BxTxHxP
    if past is None or past.extends:
      new: Any = kept_BxTx1xC, latent_BxTxR[:, :, None]
      kept, latents, behind_BxP = (*new, None) if past is None else past.before(*new)
      before = None if past is None else mask.behind(behind_BxP)
      out_BxTxHxV, chosen_BxTxC = self._attend(queries, kept, latents, before, context, asked)
    else:
      active_B = tokens.segments[:, 0] > 0
      new, seen = past.add(kept_BxTx1xC[:, 0], latent_BxTxR, active_B, None)
      out_BxTxHxV, chosen_BxTxC = self._attend_to_past(queries, seen, active_B, asked, context.chosen_BxTxC)
    out_BxTxHxV = constrain(out_BxTxHxV, "batch", "length", "heads", None)
    return self.o(out_BxTxHxV.reshape(B, T, -1), key), new, chosen_BxTxC

  def _attend(self, queries: tuple[jax.Array, jax.Array], kept_BxSx1xC: jax.Array, latent_BxSx1xR: jax.Array,
              before: mask.Side | None, context: LayerContext, asked: Any) -> tuple[jax.Array, jax.Array | None]:
    """(attention [B, T, H, V] to the keys and values of these latents, which keys were chosen). `asked`: of
    `Indexer.queries_of`."""
    s, sizes, tokens, chosen_BxTxC = self.spec, self.spec.latent, context.tokens, context.chosen_BxTxC
    B, S = latent_BxSx1xR.shape[:2]
    k_rope_BxSx1xP, k_index_BxSx1xI = jnp.split(kept_BxSx1xC, [sizes.rope_dim], axis=-1)
    kv = self.kv_up(latent_BxSx1xR[:, :, 0], context.key).reshape(B, S, s.num_heads, sizes.nope_dim + sizes.value_dim)
    k_nope_BxSxHxN, v_BxSxHxV = jnp.split(constrain(kv, "batch", "length", "heads", None), [sizes.nope_dim], axis=-1)
    k_rope_BxSxHxP = jnp.broadcast_to(k_rope_BxSx1xP, (*k_nope_BxSxHxN.shape[:3], sizes.rope_dim))
    qkv = QKV(jnp.concatenate(queries, axis=-1), jnp.concatenate([k_nope_BxSxHxN, k_rope_BxSxHxP], axis=-1), v_BxSxHxV)
    if 0 < sizes.index_topk < S:
      if asked is not None:
        chosen_BxTxC = selected.choose(asked, k_index_BxSx1xI[:, :, 0], tokens, before, sizes.index_topk,
                                       s.attention_block)
      return selected.attend(self._rule, qkv, chosen_BxTxC, tokens, before, s.attention_block), chosen_BxTxC
    # All implementations of attention have heads of one size. Zeros add nothing to a product, and make values of zeros,
    # which are cut off: what is computed is the same.
    size = max(sizes.head_dim, sizes.value_dim)
    padded = jax.tree.map(lambda part: jnp.pad(part, [(0, 0)] * 3 + [(0, size - part.shape[-1])]), qkv)
    out = attention(padded, tokens, self._rule, before=before, impl=s.attention, block=s.attention_block)
    return out[..., :sizes.value_dim], chosen_BxTxC

  def _attend_to_past(self, queries: tuple[jax.Array, jax.Array], seen: Seen, active_B: jax.Array, asked: Any,
                      chosen_Bx1xC: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """As `_attend`, of one token to what a cache holds."""
    s, sizes, (q_nope_BxTxHxN, q_rope_BxTxHxP) = self.spec, self.spec.latent, queries
    k_rope_Bx1xSxP, k_index_Bx1xSxI = jnp.split(seen.keys_BxGxSxK, [sizes.rope_dim], axis=-1)
    if 0 < sizes.index_topk < seen.positions:
      if asked is not None:
        chosen_Bx1xC = selected.choose_of_past(asked, k_index_Bx1xSxI[:, 0], seen, sizes.index_topk)
      seen = selected.narrowed(seen, chosen_Bx1xC)
    up_RxHxC = self.kv_up.matrix().reshape(sizes.kv_rank, s.num_heads, -1)
    k_up_RxHxN, v_up_RxHxV = jnp.split(up_RxHxC, [sizes.nope_dim], axis=-1)
    dtype = q_nope_BxTxHxN.dtype
    q_BxTxHxR = cpu.einsum("bthn,rhn->bthr", q_nope_BxTxHxN, k_up_RxHxN).astype(dtype)
    out_BxTxHxR = attend_to_past(self._rule, q_BxTxHxR, seen._replace(keys_BxGxSxK=seen.values_BxGxSxK), active_B,
                                 more=(q_rope_BxTxHxP, k_rope_Bx1xSxP))
    return cpu.einsum("bthr,rhv->bthv", out_BxTxHxR, v_up_RxHxV).astype(dtype), chosen_Bx1xC

  def _projected(self, x_BxTxD: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array | None, jax.Array,
                                                                           jax.Array]:
    """(queries [B, T, H * (N + P)], what they are made of, unless it is the hidden state, the latents [B, T, R], both
    normalised, the keys [B, T, 1, P], not yet rotated)."""
    asking_BxTxR = None
    if self.q is not None:
      (q,), (kv,) = (apply_linears((linear,), x_BxTxD, key) for linear in (self.q, self.kv_down))
      q, kv = named(q, "qkv"), named(kv, "qkv")
    else:
      q, kv = (named(part, "qkv") for part in apply_linears((self.q_down, self.kv_down), x_BxTxD, key))
      asking_BxTxR = self.q_down_norm(q)
      q = self.q_up(asking_BxTxR, key)
    latent_BxTxR, k_BxTxP = jnp.split(kv, [self.spec.latent.kv_rank], axis=-1)
    return (q, asking_BxTxR, self.kv_down_norm(latent_BxTxR),
            constrain(k_BxTxP[:, :, None], "batch", "length", None, None))
