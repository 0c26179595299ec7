"""One decoder whose config spans Llama, Qwen, Mistral, Gemma and GPT-2, with or without a vision tower, in Flax NNX.

B batch, T length, D hidden size, G key/value heads, K head size, L layers, V vocabulary (padded).

Parameters are stacked over layers, `blocks/...` with a leading L, whether the layers then run as a scan
or unrolled: both give the same numbers from the same parameters. `Decoder` and its parts are NNX
modules, which hold arrays and say what is computed; `Transformer` is the `models.api.Model` around them,
which takes and returns plain dicts.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from models import cpu, flops, lora, tables, vlm
from models.api import Output, Params
from models.attention import cache as cache_lib
from models.attention.cache import Cache, Past
from models.attention.mask import TokenIds
from models.attention.rope import rope_table, temperature
from models.blocks import Block, room_to_lend, run_blocks, stack_blocks, unstack, without
from models.experts.moe import Routing, disagreement, report
from models.layers import Linear, Norm, Scope, document_lengths, dropout, embedding_noise
from models.quantization import quantize
from models.quantization.matmul import MatmulRules
from models.remat import remat_policy
from models.residual import Streams, make_norm, of_each_layer
from models.sharding import logical_axes
from models.sharding.logical_axes import constrain
from models.spec import PARTS, Spec, make_spec
from models.spec_head import padded_vocab_size
from models.tables import Embedding, Unembedding
from trainer import tree
from trainer.errors import ConfigError


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
    ropes: dict = {kind: rope_table(rope, positions, segment_ids, batch.get("axes")) for kind, rope in s.ropes.items()}
    if s.nope_temperature is not None:
      ropes["nope"] = temperature(s.nope_temperature.scale, s.nope_temperature.floor, positions)
    tokens_of = {} if s.attention_chunk is None else {"chunked": tokens.in_chunks(positions, s.attention_chunk)}
    routing = Routing.of(batch, keep=remember or cache is not None)

    def layer(place: int, carry: tuple[jax.Array, Cache | None, dict], block: Block, its: Any):
      x_BxTxD, cache, lent = carry
      index, own_BxTxP = (its, None) if own_LxBxTxP is None else its
      layer_key = None if key is None else jax.random.fold_in(key, index)
      kind, source = s.layer_type(place), s.kv_source(place)
      found = before if cache is None else cache
      at, number = (place, index) if source is None else (source, jnp.asarray(source))
      past = None if found is None else Past(found, at, number, extends=cache is None, chunked=kind == "chunked")
      routed = None if s.moe is None else routing.of_layer(s.moe.layers_before(index))
      x_BxTxD, stats, new, chosen = block(
          x_BxTxD, tokens_of.get(kind, tokens), ropes.get(kind), s.window_of(place), layer_key, past, s.parts_of(place),
          routed, lent.get(kind), own_BxTxP, s.sparsity_of(place), lent.get("chosen"))
      if "chosen" in lent:
        lent = {**lent, "chosen": chosen}
      if kind in lent and source is None:  # that of the last such layer stays
        lent = {**lent, kind: new[s.mixer_of(place)]}
      if deep_LxBxFxD is not None and place < s.first_layers:
        x_BxTxD = vlm.add(x_BxTxD, deep_LxBxFxD, index, batch["image_index"])
      return (x_BxTxD, None if cache is None else new, lent), (stats, new if remember else None)

    x_BxTxD = x_BxTxD if self.streams is None else self.streams.begin(x_BxTxD)
    (x_BxTxD, cache, _), (stats, new) = run_blocks(s, blocks or self.blocks, layer, remat, (x_BxTxD, cache, lent),
                                                   own_LxBxTxP)
    x_BxTxD = x_BxTxD if self.streams is None else self.streams.end(x_BxTxD)
    return self.final_norm(x_BxTxD), stats, new if cache is None else cache

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
    if s.scale_embeddings:
      x_BxTxD = x_BxTxD * jnp.asarray(math.sqrt(s.hidden_size), x_BxTxD.dtype)
    if s.embedding_scale != 1.0:
      x_BxTxD = x_BxTxD * jnp.asarray(s.embedding_scale, x_BxTxD.dtype)
    own_LxBxTxP, read = None, batch["tokens"]
    if self.per_layer_embed is not None:
      read = read if s.per_layer_vocab is None else jnp.where(read < s.per_layer_vocab, read, 0)
      own_LxBxTxP = of_each_layer(s, self.per_layer_embed(read), self.per_layer_proj(x_BxTxD), self.per_layer_norm)
    if batch.get("images") is not None:
      tower_key = None if key is None else jax.random.fold_in(key, s.num_layers + 2)
      features_BxFxD, deep_LxBxFxD = vlm.features(self.vision, self.projector, batch["images"], remat, tower_key,
                                                  batch["image_grid"])
      x_BxTxD = vlm.place(x_BxTxD, features_BxFxD, batch["image_index"])
    if self.pos_embed is not None:
      x_BxTxD = x_BxTxD + self.pos_embed(positions)
    if key is not None:
      x_BxTxD = dropout(x_BxTxD, s.dropout, jax.random.fold_in(key, s.num_layers))
    return constrain(x_BxTxD, "batch", "stream", "embed"), deep_LxBxFxD, own_LxBxTxP


class Transformer:
  """The `models.api.Model` of a `Decoder`."""

  def __init__(
      self,
      cfg_model: ConfigDict,
      *,
      vocab_size: int,
      params_dtype: Any,
      compute_dtype: Any,
      remat: str = "none",
      frozen: str | None = None,
      freeze: Sequence[str] = (),
      matmul_rules: MatmulRules | None = None,
  ):
    """See `models.api.make_model`."""
    self.spec = make_spec(cfg_model)
    self.reasons = list(self.spec.reasons)
    self.vocab_size = padded_vocab_size(cfg_model, vocab_size, self.reasons)
    # A checkpoint from elsewhere was trained with a softmax over all its entries, those without a token included.
    self.num_real_vocab = vocab_size if cfg_model.hf is None else self.vocab_size
    self.trained_only = lora.trained(self.spec.lora.modules_to_save) if self.spec.lora else None
    self.num_labels, self.num_layers, self.vision = self.spec.head.num_labels, self.spec.num_layers, self.spec.vision
    self.max_length, self.no_prefix_sharing = self.spec.max_length, self.spec.no_prefix_sharing
    self.no_split_length = self.spec.no_split_length
    self.final_logit_cap = self.spec.final_logit_cap
    self.vocab_chunk = self.spec.vocab_chunk
    self._dtypes = (jnp.dtype(params_dtype), jnp.dtype(compute_dtype))
    self._frozen = None if frozen is None else quantize.frozen(frozen, freeze, self.trained_only)
    self._matmul_rules = matmul_rules
    self._remat = remat_policy(remat)
    if self.spec.lora is not None:
      lora.check_patterns(self.spec.lora)
    # The decoder without its arrays; merged with a dict of parameters it becomes callable.
    self._graph, self._state = self._abstract()
    if self.spec.lora is not None:
      lora.check_targets(self.spec.lora, self._logical(), vocab_size)
    if matmul_rules is not None:
      matmul_rules.check(self._logical())

  @staticmethod
  def validate(cfg_model: ConfigDict, seq_len: int) -> None:
    """Raises ConfigError if `cfg_model` cannot be built, or not for rows of `seq_len` tokens."""
    spec = make_spec(cfg_model)
    if spec.max_positions is not None and seq_len > spec.max_positions:
      raise ConfigError(
          f"seq_len is {seq_len}, but model.max_positions is {spec.max_positions}. Lower seq_len or raise "
          "model.max_positions."
      )

  def abstract_params(self) -> Params:
    """See `models.api.Model`."""
    return nnx.to_pure_dict(self._state)

  def init(self, rng: jax.Array) -> Params:
    """See `models.api.Model`."""
    return nnx.to_pure_dict(nnx.split(self._make(rng))[1])

  def apply(self, params: Params, batch: dict, *, rng: jax.Array | None = None, train: bool = False) -> Output:
    """See `models.api.Model`. Without `positions` or `segment_ids`, each row is one document from 0 on."""
    s = self.spec
    noisy = train and bool(s.dropout or s.neftune_alpha or (s.lora and s.lora.dropout))
    if noisy and rng is None:
      raise ValueError("model.dropout, lora.dropout or neftune_alpha is above 0 and train=True, so apply() needs rng")
    batch = vlm.complete(batch, self.spec.vision)
    decoder = nnx.merge(self._graph, params)
    hidden_BxTxD, stats, _ = decoder(batch, self._remat, rng if noisy else None)
    losses, metrics = report(stats, batch["segment_ids"], self.spec.moe)
    if stats and "differs" in stats:
      metrics["rollout/expert_disagreement"] = disagreement(stats["differs"], Routing.of(batch, False).recorded,
                                                            batch["segment_ids"])
    return Output(hidden_BxTxD, losses, metrics)

  def layer_inputs(self, params: Params, batch: dict) -> list[jax.Array]:
    """What enters each layer, [B, T, D] each; the arguments are those of `apply`."""
    decoder, kept = nnx.merge(self._graph, params), []

    def keeping(block: Callable) -> Callable:
      def run(x_BxTxD, *more):
        kept.append(x_BxTxD)
        return block(x_BxTxD, *more)

      return run

    blocks = [keeping(block) for block in unstack(self.spec, decoder.blocks)]
    decoder(vlm.complete(batch, self.spec.vision), remat_policy("none"), None, blocks=blocks)
    return kept

  def empty_cache(self, rows: int, max_length: int, pages: int | None = None) -> Cache:
    """See `models.api.Generative`."""
    return cache_lib.empty(self.spec, rows, max_length, self._dtypes[1], self._one_by_one, pages)

  @property
  def routing(self) -> tuple[int, int] | None:
    """See `models.api.Generative`."""
    return None if self.spec.moe is None else (len(self.spec.layers_with("moe")), self.spec.moe.experts_per_token)

  def extend(self, params: Params, batch: dict, cache: Cache | None = None, record: bool = False) -> tuple:
    """See `models.api.Generative`."""
    before = None if cache is None else cache_lib.stacked(cache, self.spec)
    if cache is not None:
      segment_ids = batch.get("segment_ids", jnp.ones_like(batch["tokens"]))
      firsts_B = cache.lengths if cache.shift is None else cache.lengths + cache.shift
      # Those of padding are within any table of positions.
      positions_BxT = jnp.where(segment_ids > 0, firsts_B[:, None] + jnp.arange(segment_ids.shape[1]), 0)
      batch = {**batch, "segment_ids": segment_ids, "positions": positions_BxT}
    batch = vlm.complete(batch, self.spec.vision)
    hidden_BxTxD, stats, new = nnx.merge(self._graph, params)(batch, self._remat, None, remember=True, cache=before)
    cache = self.empty_cache(*batch["tokens"].shape) if cache is None else cache
    cache = cache_lib.extended(cache, self.spec, new, batch["segment_ids"], batch["axes"])
    return (hidden_BxTxD, cache, jnp.moveaxis(stats["experts"], 0, 2)) if record else (hidden_BxTxD, cache)

  def copied_cache(self, cache: Cache, *which: Any) -> Cache:
    """See `models.api.Generative`."""
    return cache_lib.copied(cache, self.spec, *which)

  def has_beginnings(self, length: int) -> bool:
    """See `models.api.Generative`."""
    return cache_lib.has_beginnings(self.spec, length)

  def beginning_of_cache(self, cache: Cache, length: int) -> Cache:
    """See `models.api.Generative`."""
    return cache_lib.beginning(cache, length)

  def resized_cache(self, cache: Cache, rows_R: jax.Array, max_length: int, pages_Q: jax.Array | None = None) -> Cache:
    """See `models.api.Generative`."""
    return cache_lib.resized(cache, self.spec, rows_R, max_length, pages_Q)

  def decoding_params(self, params: Params) -> Params:
    """See `models.api.Generative`: kernels and tables in the dtype that they are used in, so that no token reads more;
    those of layers that run one by one apart, and where that is faster with their outputs first; what predicts tokens
    with its adapter."""
    paths = {path.removesuffix("_across"): path for path in tree.flatten(self._decoding[1])}

    def as_used(path: str, leaf: jax.Array) -> jax.Array:
      used = path.endswith(("/kernel", "/embedding")) and not path.endswith(quantize.FLOAT32)
      wider = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > self._dtypes[1].itemsize
      return leaf.astype(self._dtypes[1]) if used and wider else leaf

    merged = tables.merged_unembedding(params, self.spec, self._dtypes[1])
    params = {path: as_used(path, leaf) for path, leaf in tree.flatten(params).items()}
    params = merged | tree.unflatten({
        paths[path]: leaf if paths[path] == path else leaf.swapaxes(-1, -2) for path, leaf in params.items()})
    if not self._one_by_one:
      return params
    blocks = unstack(self.spec, params["blocks"])
    return {**params, "blocks": [{part: arrays for part, arrays in block.items() if jax.tree.leaves(arrays)}
                                 for block in blocks]}

  def decode(self, params: Params, tokens_B: jax.Array, active_B: jax.Array, cache: Cache, record: bool = False
             ) -> tuple:
    """See `models.api.Generative`."""
    graph, state = self._decoding
    blocks, params = None, {part: arrays for part, arrays in params.items() if part != tables.MERGED}
    if self._one_by_one:
      blocks = [nnx.merge(without(nnx.merge(graph, state).blocks, PARTS - block.keys()), block)
                for block in params["blocks"]]
      # The decoder runs `blocks`. Something has to be in the place of its stack, which it does not run.
      params = {**params, "blocks": functools.reduce(operator.or_, params["blocks"])}
    positions_B = cache.lengths if cache.shift is None else cache.lengths + cache.shift
    batch = dict(tokens=tokens_B[:, None], positions=positions_B[:, None],
                 segment_ids=active_B[:, None].astype(jnp.int32))
    decoder = nnx.merge(graph, params)
    hidden_Bx1xD, stats, cache = decoder(batch, self._remat, None, cache=cache, blocks=blocks)
    cache = cache._replace(lengths=cache.lengths + active_B)
    return (hidden_Bx1xD[:, 0], cache, jnp.moveaxis(stats["experts"][:, :, 0], 0, 1)) if record else (
        hidden_Bx1xD[:, 0], cache)

  @property
  def _one_by_one(self) -> bool:
    """Whether decoding runs the layers one after another, with parameters and caches of their own. The compilers for
    CPU and GPU copy a layer's part of stacked arrays before they read it; that for TPU does not."""
    return logical_axes.platform() != "tpu" or not self.spec.scan_layers

  @property
  def _decoding(self) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder that decodes, without its arrays, and the shapes of these; on CPU it multiplies by `few_rows`."""
    across = logical_axes.platform() == "cpu" and self._one_by_one
    return self._with_outputs_first if across else (self._graph, self._state)

  @functools.cached_property
  def _with_outputs_first(self) -> tuple[nnx.GraphDef, nnx.State]:
    return self._abstract(True)

  def unembedding(self, params: Params) -> jax.Array:
    """See `models.api.Model`."""
    self.spec.head.need("lm", "predicts no tokens")
    return tables.unembedding(params, self.spec)

  def logits(
      self,
      params: Params,
      tokens_BxT: jax.Array | dict,
      positions: jax.Array | None = None,
      segment_ids: jax.Array | None = None,
      images: Any = None,
      prefix_length: Any = None,
  ) -> jax.Array:
    """See `models.api.Model`; images as in models/vlm.py.

    Where the model's attention is `prefix`, and not a whole batch is given, all tokens are the prefix, or the first
    `prefix_length` of each text.
    """
    batch = dict(images=images, prefix_length=prefix_length)
    batch = {key: value for key, value in batch.items() if value is not None}
    if isinstance(tokens_BxT, dict):
      return self.unembed(params, self.apply(params, {**tokens_BxT, **batch}).hidden)
    tokens_BxT = jnp.asarray(tokens_BxT)
    if self.spec.vision is not None and self.spec.vision.attention == "prefix":
      batch.setdefault("prefix_length", tokens_BxT.shape[1])
    batch |= dict(tokens=tokens_BxT, positions=positions, segment_ids=segment_ids)
    return self.unembed(params, self.apply(params, batch).hidden)

  def score(self, params: Params, hidden_xD: jax.Array) -> jax.Array:
    """See `models.api.Scoring`."""
    self.spec.head.need("score", "scores nothing")
    return jnp.matmul(hidden_xD.astype(jnp.float32), params["score"]["kernel"].astype(jnp.float32),
                      precision=jax.lax.Precision.HIGHEST)

  def unembed(self, params: Params, hidden_BxTxD: jax.Array) -> jax.Array:
    """See `models.api.Model`."""
    kernel_DxV = self.unembedding(params).astype(hidden_BxTxD.dtype)
    if hidden_BxTxD.shape[1] == 1 and logical_axes.platform() == "cpu" and logical_axes.current() is None:
      logits_BxTxV = cpu.few_rows(hidden_BxTxD, kernel_DxV.T, jnp.float32)
    else:
      logits_BxTxV = cpu.einsum("btd,dv->btv", hidden_BxTxD, kernel_DxV)
    if self.final_logit_cap is not None:
      logits_BxTxV = self.final_logit_cap * jnp.tanh(logits_BxTxV / self.final_logit_cap)
    real_V = jnp.arange(self.vocab_size) < self.num_real_vocab
    return constrain(jnp.where(real_V, logits_BxTxV, -jnp.inf), "batch", "length", "vocab")

  def flops_per_token(self, seq_len: int, document_length: float | None = None, images_per_row: float = 0.0,
                      tower_frozen: bool = False) -> float:
    """See `models.api.Model`, and `models.flops.per_token`."""
    return flops.per_token(self.spec, self.vocab_size, self._logical(), self.trained_only, seq_len, document_length,
                           images_per_row, tower_frozen)

  def _make(self, rng: jax.Array | None, outputs_first: bool = False) -> Decoder:
    scope = Scope(rng, *self._dtypes, frozen=self._frozen, lora=self.spec.lora, matmul_rules=self._matmul_rules,
                  outputs_first=outputs_first)
    return Decoder(self.spec, scope, self.vocab_size)

  def _abstract(self, outputs_first: bool = False) -> tuple[nnx.GraphDef, nnx.State]:
    """The decoder without its arrays, and their shapes."""
    return nnx.split(jax.eval_shape(lambda: self._make(None, outputs_first)))

  def _logical(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes by path, of quantised kernels as they were."""
    return quantize.logical(tree.flatten(self.abstract_params()))
