"""One decoder whose config spans Llama, Qwen, Mistral, Gemma and GPT-2, with or without a vision tower, in Flax NNX.

B batch, T length, D hidden size, G key/value heads, K head size, L layers, V vocabulary (padded).

Parameters are stacked over layers, `blocks/...` with a leading L, whether the layers then run as a scan
or unrolled: both give the same numbers from the same parameters. `Decoder` and its parts are NNX
modules (models/decoder.py), which hold arrays and say what is computed; `Transformer` is the `models.api.Model` around
them, which takes and returns plain dicts.
"""

import functools
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
from models.attention.cache import Cache
from models.blocks import unstack, without
from models.decoder import Decoder
from models.experts.moe import Routing, disagreement, report
from models.layers import Scope
from models.quantization import quantize
from models.quantization.matmul import MatmulRules
from models.remat import remat_policy
from models.sharding import logical_axes
from models.sharding.logical_axes import constrain
from models.spec import PARTS, make_spec
from models.spec_head import padded_vocab_size
from trainer import tree
from trainer.errors import ConfigError


class Transformer:
  """The `models.api.Model` of a `Decoder`, and its `Scoring` and `Generative`, where what methods do is said."""

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
    return nnx.to_pure_dict(self._state)

  def init(self, rng: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.split(self._make(rng))[1])

  def apply(self, params: Params, batch: dict, *, rng: jax.Array | None = None, train: bool = False) -> Output:
    """See `models.api.Model`. Without `positions` or `segment_ids`, each row is one document from 0 on."""
    s = self.spec
    noisy = train and bool(s.dropout or s.neftune_alpha or (s.lora and s.lora.dropout))
    if noisy and rng is None:
      raise ValueError("model.dropout, lora.dropout or neftune_alpha is above 0 and train=True, so apply() needs rng")
    batch = vlm.complete(batch, self.spec.vision)
    decoder = nnx.merge(self._graph, params)
    key, further = rng if noisy else None, None
    hidden_BxTxD, stats, _ = decoder(batch, self._remat, key)
    if s.mtp_layers:
      further, more = decoder.ahead(hidden_BxTxD, batch, self._remat, key)
      stats = stats | {name: jnp.concatenate([stats[name], more[name]]) for name in more}
    losses, metrics = report(stats, batch["segment_ids"], self.spec.moe)
    if stats and "differs" in stats:
      metrics["rollout/expert_disagreement"] = disagreement(stats["differs"], Routing.of(batch, False).recorded,
                                                            batch["segment_ids"])
    return Output(hidden_BxTxD, losses, metrics, further)

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
    return cache_lib.empty(self.spec, rows, max_length, self._dtypes[1], self._one_by_one, pages)

  @property
  def routing(self) -> tuple[int, int] | None:
    return None if self.spec.moe is None else (len(self.spec.layers_with("moe")), self.spec.moe.experts_per_token)

  def extend(self, params: Params, batch: dict, cache: Cache | None = None, record: bool = False) -> tuple:
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
    return cache_lib.copied(cache, self.spec, *which)

  def has_beginnings(self, length: int) -> bool:
    return cache_lib.has_beginnings(self.spec, length)

  def beginning_of_cache(self, cache: Cache, length: int) -> Cache:
    return cache_lib.beginning(cache, length)

  def resized_cache(self, cache: Cache, rows_R: jax.Array, max_length: int, pages_Q: jax.Array | None = None) -> Cache:
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
    self.spec.head.need("score", "scores nothing")
    return jnp.matmul(hidden_xD.astype(jnp.float32), params["score"]["kernel"].astype(jnp.float32),
                      precision=jax.lax.Precision.HIGHEST)

  def unembed(self, params: Params, hidden_BxTxD: jax.Array) -> jax.Array:
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
