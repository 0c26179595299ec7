"""Embeddings, the stacked blocks and the final norm, in Flax NNX: what `Transformer` (models/transformer.py) calls.

B batch, T length, D hidden size, L layers, k tokens ahead.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models import vlm
from models.attention.cache import Cache, Past
from models.attention.context import LayerContext
from models.attention.mask import TokenIds
from models.attention.rope import rope_table, temperature
from models.blocks import Block, room_to_lend, run_blocks, stack_blocks
from models.experts.moe import Routing
from models.layers import Linear, Norm, Scope, document_lengths, dropout, embedding_noise
from models.mtp import Mtp
from models.residual import Streams, make_norm, of_each_layer
from models.sharding.logical_axes import constrain
from models.spec import Spec
from models.tables import Embedding, Unembedding


class Decoder(nnx.Module):
  """Embeddings, the stacked blocks and the final norm: tokens, and images among them, to hidden states."""

  def __init__(self, spec: Spec, scope: Scope, vocab_size: int):
    D = spec.hidden_size
    self.embed = Embedding(scope / "embed", vocab_size, D, std=spec.init_std)
    learned = spec.positions == "learned"
    self.pos_embed = Embedding(scope / "pos_embed", spec.max_positions, D, std=spec.init_std) if learned else None
    P, L = spec.per_layer_size, spec.num_layers
    own_size = spec.per_layer_vocab or vocab_size
    self.per_layer_embed = Embedding(scope / "per_layer_embed", own_size, L * P, std=spec.init_std) if P else None
    self.per_layer_proj = Linear(scope / "per_layer_proj", D, L * P, std=spec.init_std, bias=False,
                                 names=(None, None)) if P else None
    self.per_layer_norm = Norm(scope / "per_layer_norm", P, kind=spec.norm, eps=spec.norm_eps,
                               plus_one=spec.norm_scale_plus_one) if P else None
    of_images = dataclasses.replace(scope, outputs_first=False)
    self.vision = vlm.make_tower(spec, of_images / "vision") if spec.vision is not None else None
    self.projector = vlm.Projector(spec, of_images / "projector") if spec.vision is not None else None
    self.blocks = stack_blocks(spec, scope / "blocks")
    self.streams = Streams(spec, scope / "streams") if spec.altup is not None else None
    # The factor on logits is one on what they are made of, so that whatever makes them needs not know it.
    gain = spec.logit_scale if spec.head.predicts else 1.0
    self.final_norm = make_norm(spec, scope / "final_norm", gain=gain)
    # Starts like an embedding, so that the first loss is close to log(V), or the first score to 0.
    std, untied = 0.02 if spec.init_std is None else spec.init_std, not spec.tie_embeddings and spec.head.predicts
    self.unembed = Unembedding(scope / "unembed", D, vocab_size, std=std) if untied else None
    self.mtp = Mtp(spec, scope / "mtp") if spec.mtp_layers else None
    scored, compared, labels = scope / "score", scope / "similarity", spec.head.num_labels
    self.score = nnx.Dict(kernel=scored.normal("kernel", (D, labels), std)) if labels else None
    learned_of = {name: compared.constant(name, (), 0.0) for name in spec.head.similarity}
    self.similarity = nnx.Dict(learned_of) if learned_of else None
    self.spec = spec

  def __call__(self, batch: dict, remat: Callable, key: jax.Array | None, remember: bool = False,
               cache: Cache | None = None, blocks: Sequence[Block] | None = None
               ) -> tuple[jax.Array, dict, dict | Cache | None]:
    """(hidden states, statistics of all layers' experts, stacked, if there are any, what they leave for later tokens).

    That is by the name of their mixer, stacked: attn, global_attn: keys and values [L, B, T, G, K]; delta and mamba:
    see `GatedDeltaNet` and `Mamba2`.

    `remat` is a `remat_policy`; `key` feeds dropout, None: no dropout. They leave something only with `remember`. Where
    there is a `cache`, each row's tokens follow those that its row of the cache holds. Without `remember` T is then 1,
    and the cache with its keys and values comes in that place. `blocks`: those of each layer, from `unstack`.
    """
    s = self.spec
    positions, segment_ids = batch["positions"], batch["segment_ids"]
    tokens = TokenIds(segment_ids, batch.get("block_ids"), batch.get("prompt_ids"))
    x_BxTxD, deep_LxBxFxD, own_LxBxTxP = self._embed(batch, remat, key)
    # What several tokens follow stays as it is, and is not carried from layer to layer.
    before, cache = (cache, None) if remember else (None, cache)
    lent = room_to_lend(s, x_BxTxD, cached=cache is not None)
    ropes = self._ropes(batch)
    tokens_of = {} if s.attention_chunk is None else {"chunked": tokens.in_chunks(positions, s.attention_chunk)}
    if s.vision is not None and s.vision.attention == "local_image":
      tokens_of, tokens = {"local": tokens}, tokens._replace(blocks=None)
    routing = Routing.of(batch, keep=remember or cache is not None)

    def layer(place: int, carry: tuple[jax.Array, Cache | None, dict], block: Block, its: Any):
      x_BxTxD, cache, lent = carry
      index, own_BxTxP = (its, None) if own_LxBxTxP is None else its
      layer_key = None if key is None else jax.random.fold_in(key, index)
      kind, source = s.layer_type(place), s.kv_source(place)
      found = before if cache is None else cache
      at, number = (place, index) if source is None else (source, jnp.asarray(source))
      past = None if found is None else Past(found, at, number, extends=cache is None, chunked=kind == "chunked")
      routed = None if s.moe is None else routing.of_layer(index, s)
      context = LayerContext(tokens_of.get(kind, tokens), ropes.get(kind), s.window_of(place), layer_key, past,
                             lent.get(kind), lent.get("chosen"))
      x_BxTxD, stats, new, chosen = block(x_BxTxD, context, s.parts_of(place), routed, own_BxTxP, s.sparsity_of(place))
      if "chosen" in lent:
        lent = {**lent, "chosen": chosen}
      if kind in lent and source is None:  # that of the last such layer stays
        lent = {**lent, kind: new[s.mixer_of(place)]}
      if deep_LxBxFxD is not None and place < s.first_layers:
        x_BxTxD = vlm.add(x_BxTxD, deep_LxBxFxD, index, batch["image_index"])
      return (x_BxTxD, None if cache is None else new, lent), (stats, new if remember else None)

    def kind(place: int) -> Any:
      """All that `layer` takes from its place."""
      of_cache = None if before is None and cache is None else place
      # Whose keys it uses follows: of its type, the last that has some.
      return s.layer_type(place), s.parts_of(place), s.sparsity_of(place), place < s.first_layers, of_cache

    x_BxTxD = x_BxTxD if self.streams is None else self.streams.begin(x_BxTxD)
    (x_BxTxD, cache, _), (stats, new) = run_blocks(s, blocks or self.blocks, layer, remat, (x_BxTxD, cache, lent),
                                                   own_LxBxTxP, kind)
    x_BxTxD = x_BxTxD if self.streams is None else self.streams.end(x_BxTxD)
    return self.final_norm(x_BxTxD), stats, new if cache is None else cache

  def ahead(self, hidden_BxTxD: jax.Array, batch: dict, remat: Callable, key: jax.Array | None
            ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What `Mtp` makes of the hidden states that the decoder has given of a batch."""
    own_key = None if key is None else jax.random.fold_in(key, self.spec.num_layers + 3)
    return self.mtp(hidden_BxTxD, batch, lambda tokens_BxT: self._scaled(self.embed(tokens_BxT)), self._ropes(batch),
                    remat, own_key)

  def _ropes(self, batch: dict) -> dict[str, Any]:
    """By the type of layer the `rope_table`, with the factor on queries, if there is one; or, where nothing turns,
    that factor."""
    s, positions = self.spec, batch["positions"]
    ropes: dict[str, Any] = {kind: rope_table(rope, positions, batch["segment_ids"], batch.get("axes"))
                             for kind, rope in s.ropes.items()}
    if s.nope_temperature is not None:
      ropes["nope"] = temperature(s.nope_temperature.scale, s.nope_temperature.floor, positions + 1)
    if s.query_temperature is not None:
      factor_BxTx1x1 = temperature(s.query_temperature.scale, s.query_temperature.floor, positions)
      ropes |= {kind: (*ropes[kind], factor_BxTx1x1) for kind in s.ropes}
    return ropes

  def _scaled(self, x_BxTxD: jax.Array) -> jax.Array:
    s = self.spec
    if s.scale_embeddings:
      x_BxTxD = x_BxTxD * jnp.asarray(math.sqrt(s.hidden_size), x_BxTxD.dtype)
    if s.embedding_scale != 1.0:
      x_BxTxD = x_BxTxD * jnp.asarray(s.embedding_scale, x_BxTxD.dtype)
    return x_BxTxD

  def _embed(self, batch: dict, remat: Callable, key: jax.Array | None
             ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """(What enters the first layer, features that are added to what the first layers give, if there are any,
    `of_each_layer`)."""
    s = self.spec
    positions, deep_LxBxFxD = batch["positions"], None
    x_BxTxD = self.embed(batch["tokens"])
    if key is not None and s.neftune_alpha:
      # Layers fold 0, 1, … into the key; the embeddings' dropout comes after the last, then this, then the tower.
      noise_key = jax.random.fold_in(key, s.num_layers + 1)
      lengths_BxT = document_lengths(positions, batch["segment_ids"])
      x_BxTxD += embedding_noise(lengths_BxT, s.hidden_size, s.neftune_alpha, noise_key).astype(x_BxTxD.dtype)
    x_BxTxD = self._scaled(x_BxTxD)
    own_LxBxTxP = None
    if batch.get("images") is not None:
      tower_key = None if key is None else jax.random.fold_in(key, s.num_layers + 2)
      features_BxFxD, deep_LxBxFxD = vlm.features(self.vision, self.projector, batch["images"], remat, tower_key,
                                                  batch["image_grid"])
      x_BxTxD = vlm.place(x_BxTxD, features_BxFxD, batch["image_index"])
    if self.per_layer_embed is not None:
      own_LxBxTxP = of_each_layer(s, self._read_per_layer(batch), self.per_layer_proj(x_BxTxD), self.per_layer_norm)
    if self.pos_embed is not None:
      x_BxTxD = x_BxTxD + self.pos_embed(positions)
    if key is not None:
      x_BxTxD = dropout(x_BxTxD, s.dropout, jax.random.fold_in(key, s.num_layers))
    return constrain(x_BxTxD, "batch", "stream", "embed"), deep_LxBxFxD, own_LxBxTxP

  def _read_per_layer(self, batch: dict) -> jax.Array:
    """What the table of embeddings of each layer has for tokens [B, T, L * P]; in the places of images the first entry,
    padding's, which is not trained there (Gemma 4)."""
    read_BxT, entries = batch["tokens"], self.spec.per_layer_vocab
    if entries is not None:
      read_BxT = jnp.where(read_BxT < entries, read_BxT, 0)
    if batch.get("images") is None:
      return self.per_layer_embed(read_BxT)
    of_image_BxTx1 = (batch["image_index"] > 0)[..., None]
    found = self.per_layer_embed(jnp.where(of_image_BxTx1[..., 0], 0, read_BxT))
    return jnp.where(of_image_BxTx1, jax.lax.stop_gradient(found), found)
