"""One decoder whose config spans Llama, Qwen, Mistral, Gemma and GPT-2, in Flax NNX.

B batch, T length, D hidden size, F width of the MLP, H query heads, G key/value heads, K head size,
L layers, V vocabulary (padded).

Parameters are stacked over layers, `blocks/...` with a leading L, whether the layers then run as a scan
or unrolled: both give the same numbers from the same parameters. `Decoder` and its parts are NNX
modules, which hold arrays and say what is computed; `Transformer` is the `models.api.Model` around them,
which takes and returns plain dicts.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from models import cache as cache_lib
from models import lora, quantize
from models.api import Output, Params, constrain
from models.attention import attend_to_past, attention
from models.cache import Cache, Past, layer_of
from models.layers import Embedding, Linear, Mlp, Norm, Scope, document_lengths, dropout, embedding_noise
from models.moe import Moe, report
from models.remat import remat_policy
from models.rope import apply_rope, rope_table
from models.spec import Spec, make_spec, padded_vocab_size
from trainer import patterns
from trainer.config import ConfigError


class SelfAttention(nnx.Module):
  """Grouped-query self-attention with its projections."""

  def __init__(self, spec: Spec, scope: Scope):
    H, G, K, D = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size
    std, bias = spec.init_std, spec.qkv_bias
    self.q = Linear(scope / "q", D, H * K, std=std, bias=bias)
    self.k = Linear(scope / "k", D, G * K, std=std, bias=bias)
    self.v = Linear(scope / "v", D, G * K, std=std, bias=bias)
    self.o = Linear(scope / "o", H * K, D, std=std, bias=spec.attention_out_bias, gain=_out_gain(spec))
    # Attributes are assigned once: NNX's graph mode lets no static None become a module.
    norm = dict(kind="rmsnorm", eps=spec.norm_eps, plus_one=spec.norm_scale_plus_one)
    self.q_norm = Norm(scope / "q_norm", K, **norm) if spec.qk_norm else None
    self.k_norm = Norm(scope / "k_norm", K, **norm) if spec.qk_norm else None
    self.spec = spec

  def __call__(self, x_BxTxD, segment_ids, rope: Any, window: int | None, key: jax.Array | None = None,
               past: Past | None = None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """(output, (keys, values) [B, T, G, K]).

    `rope`: a `rope_table`, or None for no rotation. `key`: for dropout on the adapters' input; None: no dropout.
    `past`: what the one token of each row attends to beside itself; None: rows begin here.
    """
    s = self.spec
    B, T, _ = x_BxTxD.shape
    q_BxTxHxK = self.q(x_BxTxD, key).reshape(B, T, s.num_heads, s.head_dim)
    k_BxTxGxK = self.k(x_BxTxD, key).reshape(B, T, s.num_kv_heads, s.head_dim)
    v_BxTxGxK = self.v(x_BxTxD, key).reshape(B, T, s.num_kv_heads, s.head_dim)
    q_BxTxHxK = constrain(q_BxTxHxK, "batch", "length", "heads", None)
    k_BxTxGxK = constrain(k_BxTxGxK, "batch", "length", "kv_heads", None)
    v_BxTxGxK = constrain(v_BxTxGxK, "batch", "length", "kv_heads", None)
    if self.q_norm is not None:
      q_BxTxHxK, k_BxTxGxK = self.q_norm(q_BxTxHxK), self.k_norm(k_BxTxGxK)
    if rope is not None:
      q_BxTxHxK, k_BxTxGxK = apply_rope(q_BxTxHxK, rope), apply_rope(k_BxTxGxK, rope)
    options = dict(scale=s.attention_scale, logit_cap=s.attention_logit_cap)
    if past is None:
      options |= dict(segment_ids=segment_ids, window=window, impl=s.attention, block=s.attention_block)
      out_BxTxHxK = attention(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, **options)
    else:
      out_BxTxHxK = attend_to_past(q_BxTxHxK, k_BxTxGxK, v_BxTxGxK, past.keys_BxSxGxK, past.values_BxSxGxK,
                                   seen_BxS=past.seen_BxS, active_B=segment_ids[:, 0] > 0, **options)
    out_BxTxHxK = constrain(out_BxTxHxK, "batch", "length", "heads", None)
    return self.o(out_BxTxHxK.reshape(B, T, -1), key), (k_BxTxGxK, v_BxTxGxK)


class Block(nnx.Module):
  """One layer: attention and MLP (or mixture of experts), each a residual branch normalised before, after, or both."""

  def __init__(self, spec: Spec, scope: Scope):
    D = spec.hidden_size
    pre, post = spec.norm_position in ("pre", "sandwich"), spec.norm_position in ("post", "sandwich")
    self.attn_norm = _norm(spec, scope / "attn_norm") if pre else None
    self.attn = SelfAttention(spec, scope / "attn")
    self.attn_post_norm = _norm(spec, scope / "attn_post_norm") if post else None
    self.mlp_norm = _norm(spec, scope / "mlp_norm") if pre else None
    mlp = dict(activation=spec.activation, std=spec.init_std, bias=spec.mlp_bias, out_gain=_out_gain(spec))
    self.mlp = Mlp(scope / "mlp", D, spec.intermediate_size, **mlp) if spec.moe is None else None
    self.moe = Moe(spec, scope / "moe", out_gain=_out_gain(spec)) if spec.moe is not None else None
    self.mlp_post_norm = _norm(spec, scope / "mlp_post_norm") if post else None
    self.dropout = spec.dropout

  def __call__(self, x_BxTxD, segment_ids, rope, window: int | None, key: jax.Array | None, past: Past | None = None):
    """(x, statistics of the experts or None, keys and values).

    `key`: this layer's key for dropout; None: no dropout. `past`: see `SelfAttention`.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    y = x_BxTxD if self.attn_norm is None else self.attn_norm(x_BxTxD)
    y, new = self.attn(y, segment_ids, rope, window, key, past)
    x_BxTxD = x_BxTxD + self._branch_end(y, self.attn_post_norm, keys[0])
    x_BxTxD = constrain(x_BxTxD, "batch", "length", "embed")
    y = x_BxTxD if self.mlp_norm is None else self.mlp_norm(x_BxTxD)
    y, stats = (self.mlp(y, key), None) if self.moe is None else self.moe(y, segment_ids, key)
    x_BxTxD = x_BxTxD + self._branch_end(y, self.mlp_post_norm, keys[1])
    return constrain(x_BxTxD, "batch", "length", "embed"), stats, new

  def _branch_end(self, y_BxTxD: jax.Array, norm: Norm | None, key: jax.Array | None) -> jax.Array:
    if norm is not None:
      y_BxTxD = norm(y_BxTxD)
    return y_BxTxD if key is None else dropout(y_BxTxD, self.dropout, key)


class Decoder(nnx.Module):
  """Embeddings, the stacked blocks and the final norm: tokens to hidden states."""

  def __init__(self, spec: Spec, scope: Scope, vocab_size: int):
    D = spec.hidden_size
    self.embed = Embedding(scope / "embed", vocab_size, D, std=spec.init_std)
    learned = spec.positions == "learned"
    self.pos_embed = Embedding(scope / "pos_embed", spec.max_positions, D, std=spec.init_std) if learned else None

    def make_block(layer: jax.Array) -> Block:
      return Block(spec, dataclasses.replace(scope, path="blocks", layer=layer))

    self.blocks = jax.vmap(make_block)(jnp.arange(spec.num_layers))
    self.final_norm = _norm(spec, scope / "final_norm")
    # Starts like an embedding, so that the first loss is close to log(V).
    std, untied = 0.02 if spec.init_std is None else spec.init_std, not spec.tie_embeddings
    self.unembed = Linear(scope / "unembed", D, vocab_size, std=std, bias=False) if untied else None
    self.spec = spec

  def __call__(self, batch: dict, remat: Callable, key: jax.Array | None, remember: bool = False,
               cache: Cache | None = None) -> tuple[jax.Array, dict | None, tuple[jax.Array, jax.Array] | None]:
    """(hidden states, statistics of every layer's experts, stacked, or None, keys and values [L, B, T, G, K]).

    `remat` is a `remat_policy`; `key` feeds dropout, None: no dropout. Keys and values only with `remember`. Where
    there is a `cache`, T is 1, and each row's token follows those that its row of the cache holds.
    """
    s = self.spec
    positions, segment_ids = batch["positions"], batch["segment_ids"]
    x_BxTxD = self.embed(batch["tokens"])
    if key is not None and s.neftune_alpha:
      # Layers fold 0, 1, … into the key; the embeddings' dropout comes after the last, and then this.
      noise_key = jax.random.fold_in(key, s.num_layers + 1)
      lengths_BxT = document_lengths(positions, segment_ids)
      x_BxTxD += embedding_noise(lengths_BxT, s.hidden_size, s.neftune_alpha, noise_key).astype(x_BxTxD.dtype)
    if s.scale_embeddings:
      x_BxTxD = x_BxTxD * jnp.asarray(math.sqrt(s.hidden_size), x_BxTxD.dtype)
    if self.pos_embed is not None:
      x_BxTxD = x_BxTxD + self.pos_embed(positions)
    if key is not None:
      x_BxTxD = dropout(x_BxTxD, s.dropout, jax.random.fold_in(key, s.num_layers))
    x_BxTxD = constrain(x_BxTxD, "batch", "length", "embed")
    ropes = {kind: rope_table(rope, positions, segment_ids) for kind, rope in s.ropes.items()}

    def layer(place: int, x_BxTxD: jax.Array, block: Block, index: jax.Array):
      layer_key = None if key is None else jax.random.fold_in(key, index)
      kind = s.layer_type(place)
      window = s.window if kind == "local" else None
      past = None if cache is None else layer_of(cache, s, index, place)
      x_BxTxD, stats, new = block(x_BxTxD, segment_ids, ropes.get(kind), window, layer_key, past)
      return x_BxTxD, (stats, new if remember else None)

    x_BxTxD, (stats, new) = self._run_blocks(layer, remat, x_BxTxD)
    return self.final_norm(x_BxTxD), stats, new

  def _run_blocks(self, layer: Callable, remat: Callable, x_BxTxD: jax.Array) -> tuple[jax.Array, Any]:
    """Applies every layer: a scan over whole periods of the pattern, then the remaining layers one by one.

    `layer(place in the pattern, x, block, index)` gives (x, a tree of arrays); theirs are returned stacked.
    """
    s = self.spec

    def run(i: int, in_scan: bool, *args) -> tuple[jax.Array, Any]:
      return remat(functools.partial(layer, i % period), in_scan)(*args)

    period = len(s.layer_pattern)
    scanned = s.num_layers // period * period if s.scan_layers else 0
    indices = jnp.arange(s.num_layers)
    stacked = []  # trees of runs of layers, in order
    if scanned:
      groups = jax.tree.map(lambda p: p[:scanned].reshape(-1, period, *p.shape[1:]), (self.blocks, indices))

      def scan_body(x_BxTxD, group):
        trees = [None] * period
        for i, (block, index) in enumerate(_unstack(group, period)):
          x_BxTxD, trees[i] = run(i, True, x_BxTxD, block, index)
        return x_BxTxD, jax.tree.map(lambda *parts: jnp.stack(parts), *trees)

      x_BxTxD, tree = jax.lax.scan(scan_body, x_BxTxD, groups)
      stacked.append(jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), tree))
    rest = jax.tree.map(lambda p: p[scanned:], (self.blocks, indices))
    for i, (block, index) in enumerate(_unstack(rest, s.num_layers - scanned)):
      x_BxTxD, tree = run(scanned + i, False, x_BxTxD, block, index)
      stacked.append(jax.tree.map(lambda part: part[None], tree))
    return x_BxTxD, jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacked)


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
  ):
    """See `models.api.make_model`."""
    self.spec = make_spec(cfg_model)
    self.reasons = list(self.spec.reasons)
    self.vocab_size = padded_vocab_size(cfg_model, vocab_size, self.reasons)
    # A checkpoint from elsewhere was trained with a softmax over all its entries, those without a token included.
    self.num_real_vocab = vocab_size if cfg_model.hf is None else self.vocab_size
    self.trained_only = lora.TRAINED if self.spec.lora else None
    self.num_layers = self.spec.num_layers
    self.max_length = self.spec.max_length
    self.final_logit_cap = self.spec.final_logit_cap
    self.vocab_chunk = self.spec.vocab_chunk
    self._dtypes = (jnp.dtype(params_dtype), jnp.dtype(compute_dtype))
    self._frozen = None if frozen is None else _frozen(frozen, freeze, self.spec.lora is not None)
    self._remat = remat_policy(remat)
    if self.spec.lora is not None:
      lora.check_patterns(self.spec.lora.targets)
    # The decoder without its arrays; merged with a dict of parameters it becomes callable.
    self._graph, self._state = nnx.split(jax.eval_shape(self._make, jax.eval_shape(jax.random.key, 0)))
    if self.spec.lora is not None:
      lora.check_targets(self.spec.lora.targets, self._logical())

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
    decoder = nnx.merge(self._graph, params)
    batch = _complete(batch)
    hidden_BxTxD, stats, _ = decoder(batch, self._remat, rng if noisy else None)
    return Output(hidden_BxTxD, *report(stats, batch["segment_ids"], self.spec.moe))

  def empty_cache(self, rows: int, max_length: int) -> Cache:
    """See `models.api.Generative`."""
    return cache_lib.empty(self.spec, rows, max_length, self._dtypes[1])

  def prefill(self, params: Params, batch: dict, cache: Cache, rows_M: jax.Array,
              sources_M: jax.Array | None = None) -> tuple[jax.Array, Cache]:
    """See `models.api.Generative`."""
    batch = _complete(batch)
    hidden_NxTxD, _, new = nnx.merge(self._graph, params)(batch, self._remat, None, remember=True)
    positions, segment_ids = batch["positions"], batch["segment_ids"]
    if sources_M is not None:
      new = tuple(part[:, sources_M] for part in new)
      positions, segment_ids = positions[sources_M], segment_ids[sources_M]
    return hidden_NxTxD, cache_lib.put(cache, new, positions, segment_ids, rows_M)

  def decode(self, params: Params, tokens_B: jax.Array, active_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """See `models.api.Generative`."""
    batch = dict(tokens=tokens_B[:, None], positions=cache.lengths[:, None],
                 segment_ids=active_B[:, None].astype(jnp.int32))
    decoder = nnx.merge(self._graph, params)
    hidden_Bx1xD, _, new = decoder(batch, self._remat, None, remember=True, cache=cache)
    return hidden_Bx1xD[:, 0], cache_lib.put(cache, new, batch["positions"], batch["segment_ids"])

  def unembedding(self, params: Params) -> jax.Array:
    """See `models.api.Model`."""
    return params["embed"]["embedding"].T if self.spec.tie_embeddings else params["unembed"]["kernel"]

  def logits(
      self,
      params: Params,
      tokens_BxT: jax.Array | dict,
      positions: jax.Array | None = None,
      segment_ids: jax.Array | None = None,
      images: Any = None,
  ) -> jax.Array:
    """See `models.api.Model`."""
    if images is not None:
      raise ValueError("logits: this model reads tokens alone; it takes no images")
    batch = tokens_BxT
    if not isinstance(batch, dict):
      batch = dict(tokens=jnp.asarray(tokens_BxT), positions=positions, segment_ids=segment_ids)
    return self.unembed(params, self.apply(params, batch).hidden)

  def unembed(self, params: Params, hidden_BxTxD: jax.Array) -> jax.Array:
    """See `models.api.Model`."""
    kernel_DxV = self.unembedding(params).astype(hidden_BxTxD.dtype)
    logits_BxTxV = jnp.einsum("btd,dv->btv", hidden_BxTxD, kernel_DxV, preferred_element_type=jnp.float32)
    if self.final_logit_cap is not None:
      logits_BxTxV = self.final_logit_cap * jnp.tanh(logits_BxTxV / self.final_logit_cap)
    real_V = jnp.arange(self.vocab_size) < self.num_real_vocab
    return constrain(jnp.where(real_V, logits_BxTxV, -jnp.inf), "batch", "length", "vocab")

  def flops_per_token(self, seq_len: int, document_length: float | None = None) -> float:
    """Floating-point operations per token, forward and backward, without recomputation.

    6 N + 12 H K * (sum over layers of the mean number of visible keys), where N counts the weights that
    take part in a token's matrix products (the unembedding included, also when tied; the embedding lookup not;
    of experts only as many as a token passes through),
    and a query of a causal row of T tokens sees (T + 1) / 2 keys on average, fewer with a window. With adapters, the
    weights of the base count 4 times and not 6, since they have no gradient.

    Args:
      seq_len: tokens per row.
      document_length: mean tokens per document where several are packed in a row; default: seq_len.
    """
    s = self.spec
    sizes = {path: p.size for path, p in self._logical().items() if path.startswith("blocks/")}
    active = 1.0 if s.moe is None else s.moe.experts_per_token / s.moe.num_experts
    weights = sum(n * (active if "/experts/" in path else 1.0) for path, n in sizes.items() if path.endswith("/kernel"))
    weights += s.hidden_size * self.vocab_size
    adapters = sum(n for path, n in sizes.items() if lora.is_adapter(path))
    length = seq_len if document_length is None else min(document_length, seq_len)
    visible = sum(_mean_visible(length, s.window_of(i)) for i in range(s.num_layers))
    products = 6.0 * weights if s.lora is None else 4.0 * weights + 6.0 * adapters
    return products + 12.0 * s.num_heads * s.head_dim * visible

  def _make(self, rng: jax.Array) -> Decoder:
    scope = Scope(rng, *self._dtypes, frozen=self._frozen, lora=self.spec.lora)
    return Decoder(self.spec, scope, self.vocab_size)

  def _logical(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes by path, of quantised kernels as they were."""
    return quantize.logical(patterns.flatten(self.abstract_params()))


def _frozen(form: str, freeze: Sequence[str], adapters: bool) -> quantize.Frozen:
  """How frozen parameters are kept; see `models.api.make_model`."""
  if form in quantize.KINDS and not adapters:
    raise ConfigError(f"precision.frozen is {form}, but nothing is trained on top of quantised matrices: that needs "
                      "adapters, model.lora.rank of at least 1. Without them use float32 or bfloat16.")

  def is_frozen(path: str) -> bool:
    return adapters and not lora.is_adapter(path) or any(re.search(pattern, path) for pattern in freeze)

  return quantize.Frozen(form, is_frozen)


def _norm(spec: Spec, scope: Scope) -> Norm:
  return Norm(scope, spec.hidden_size, kind=spec.norm, eps=spec.norm_eps, plus_one=spec.norm_scale_plus_one,
              bias=spec.norm_bias)


def _out_gain(spec: Spec) -> float:
  """Keeps the residual stream's variance independent of depth at the start (Radford et al. 2019, 2.3)."""
  return (2 * spec.num_layers) ** -0.5


def _unstack(tree: Any, n: int) -> list[Any]:
  """The `n` trees stacked in `tree`. `unstack`, unlike indexing, has a cheap gradient: one concatenation."""
  leaves, treedef = jax.tree.flatten(tree)
  columns = [jnp.unstack(leaf) for leaf in leaves]
  return [treedef.unflatten([column[i] for column in columns]) for i in range(n)]


def _complete(batch: dict) -> dict:
  """The batch with `segment_ids` and `positions` where it has none."""
  tokens = batch["tokens"]
  segment_ids = batch.get("segment_ids")
  if segment_ids is None:
    segment_ids = jnp.ones_like(tokens)
  positions = batch.get("positions")
  if positions is None:
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    starts = jnp.concatenate([jnp.ones_like(tokens[:, :1]), jnp.diff(segment_ids, axis=1)], axis=1) != 0
    positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
  return dict(tokens=tokens, segment_ids=segment_ids, positions=positions)


def _mean_visible(length: float, window: int | None) -> float:
  """Mean over the queries of a causal row of how many keys each sees, itself included."""
  if window is None or window >= length:
    return (length + 1) / 2
  return window - window * (window - 1) / (2 * length)
