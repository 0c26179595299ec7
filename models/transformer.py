"""One decoder whose config spans Llama, Qwen, Mistral, Gemma and GPT-2, in Flax NNX.

B batch, T length, D hidden size, F width of the MLP, H query heads, G key/value heads, K head size,
L layers, V vocabulary (padded).

Parameters are stacked over layers, `blocks/...` with a leading L, whether the layers then run as a scan
or unrolled: both give the same numbers from the same parameters. `Decoder` and its parts are NNX
modules, which hold arrays and say what is computed; `Transformer` is the `models.api.Model` around them,
which takes and returns plain dicts.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from models.api import Params, constrain
from models.attention import attention
from models.layers import Embedding, Linear, Mlp, Norm, Scope, apply_rope, dropout, rope_table
from models.spec import Spec, make_spec, padded_vocab_size
from trainer.config import ConfigError

# Names of config.remat beside those of jax.checkpoint_policies. None: keep nothing, recompute all.
REMAT = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
# The members of jax.checkpoint_policies that are policies; the others make one from arguments.
JAX_POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


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

  def __call__(self, x_BxTxD: jax.Array, segment_ids: jax.Array, rope: Any, window: int | None) -> jax.Array:
    """`rope`: a `rope_table`, or None for no rotation."""
    s = self.spec
    B, T, _ = x_BxTxD.shape
    q_BxTxHxK = self.q(x_BxTxD).reshape(B, T, s.num_heads, s.head_dim)
    k_BxTxGxK = self.k(x_BxTxD).reshape(B, T, s.num_kv_heads, s.head_dim)
    v_BxTxGxK = self.v(x_BxTxD).reshape(B, T, s.num_kv_heads, s.head_dim)
    q_BxTxHxK = constrain(q_BxTxHxK, "batch", "length", "heads", None)
    k_BxTxGxK = constrain(k_BxTxGxK, "batch", "length", "kv_heads", None)
    v_BxTxGxK = constrain(v_BxTxGxK, "batch", "length", "kv_heads", None)
    if self.q_norm is not None:
      q_BxTxHxK, k_BxTxGxK = self.q_norm(q_BxTxHxK), self.k_norm(k_BxTxGxK)
    if rope is not None:
      q_BxTxHxK, k_BxTxGxK = apply_rope(q_BxTxHxK, rope), apply_rope(k_BxTxGxK, rope)
    out_BxTxHxK = attention(
        q_BxTxHxK,
        k_BxTxGxK,
        v_BxTxGxK,
        segment_ids=segment_ids,
        window=window,
        scale=s.attention_scale,
        logit_cap=s.attention_logit_cap,
        impl=s.attention,
        block=s.attention_block,
    )
    out_BxTxHxK = constrain(out_BxTxHxK, "batch", "length", "heads", None)
    return self.o(out_BxTxHxK.reshape(B, T, -1))


class Block(nnx.Module):
  """One layer: attention and MLP, each a residual branch normalised before, after, or both."""

  def __init__(self, spec: Spec, scope: Scope):
    D = spec.hidden_size
    pre, post = spec.norm_position in ("pre", "sandwich"), spec.norm_position in ("post", "sandwich")
    self.attn_norm = _norm(spec, scope / "attn_norm") if pre else None
    self.attn = SelfAttention(spec, scope / "attn")
    self.attn_post_norm = _norm(spec, scope / "attn_post_norm") if post else None
    self.mlp_norm = _norm(spec, scope / "mlp_norm") if pre else None
    self.mlp = Mlp(
        scope / "mlp",
        D,
        spec.intermediate_size,
        activation=spec.activation,
        std=spec.init_std,
        bias=spec.mlp_bias,
        out_gain=_out_gain(spec),
    )
    self.mlp_post_norm = _norm(spec, scope / "mlp_post_norm") if post else None
    self.dropout = spec.dropout

  def __call__(self, x_BxTxD, segment_ids, rope, window: int | None, key: jax.Array | None) -> jax.Array:
    """`key`: this layer's key for dropout; None: no dropout."""
    keys = (None, None) if key is None else jax.random.split(key)
    y = x_BxTxD if self.attn_norm is None else self.attn_norm(x_BxTxD)
    y = self.attn(y, segment_ids, rope, window)
    x_BxTxD = x_BxTxD + self._branch_end(y, self.attn_post_norm, keys[0])
    x_BxTxD = constrain(x_BxTxD, "batch", "length", "embed")
    y = x_BxTxD if self.mlp_norm is None else self.mlp_norm(x_BxTxD)
    x_BxTxD = x_BxTxD + self._branch_end(self.mlp(y), self.mlp_post_norm, keys[1])
    return constrain(x_BxTxD, "batch", "length", "embed")

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
      return Block(spec, Scope(scope.rng, scope.dtype, scope.compute_dtype, "blocks", layer))

    self.blocks = jax.vmap(make_block)(jnp.arange(spec.num_layers))
    self.final_norm = _norm(spec, scope / "final_norm")
    # Starts like an embedding, so that the first loss is close to log(V).
    std, untied = 0.02 if spec.init_std is None else spec.init_std, not spec.tie_embeddings
    self.unembed = Linear(scope / "unembed", D, vocab_size, std=std, bias=False) if untied else None
    self.spec = spec

  def __call__(self, batch: dict, remat: Callable, key: jax.Array | None) -> jax.Array:
    """`remat` is a `remat_policy`; `key` feeds dropout, None: no dropout."""
    s = self.spec
    positions, segment_ids = batch["positions"], batch["segment_ids"]
    x_BxTxD = self.embed(batch["tokens"])
    if s.scale_embeddings:
      x_BxTxD = x_BxTxD * jnp.asarray(math.sqrt(s.hidden_size), x_BxTxD.dtype)
    if self.pos_embed is not None:
      x_BxTxD = x_BxTxD + self.pos_embed(positions)
    if key is not None:
      # Layers fold in 0, 1, …; the embeddings come after the last.
      x_BxTxD = dropout(x_BxTxD, s.dropout, jax.random.fold_in(key, s.num_layers))
    x_BxTxD = constrain(x_BxTxD, "batch", "length", "embed")
    ropes = {
        kind: rope_table(positions, s.head_dim, theta, s.rope_fraction) for kind, theta in s.rope_thetas.items()
    }

    def layer(kind: str, x_BxTxD: jax.Array, block: Block, index: jax.Array) -> jax.Array:
      layer_key = None if key is None else jax.random.fold_in(key, index)
      window = s.window if kind == "local" else None
      return block(x_BxTxD, segment_ids, ropes.get(kind), window, layer_key)

    return self.final_norm(self._run_blocks(layer, remat, x_BxTxD))

  def _run_blocks(self, layer: Callable, remat: Callable, x_BxTxD: jax.Array) -> jax.Array:
    """Applies every layer: a scan over whole periods of the pattern, then the remaining layers one by one."""
    s = self.spec

    def run(i: int, in_scan: bool, *args) -> jax.Array:
      return remat(functools.partial(layer, s.layer_type(i)), in_scan)(*args)

    period = len(s.layer_pattern)
    scanned = s.num_layers // period * period if s.scan_layers else 0
    indices = jnp.arange(s.num_layers)
    if scanned:
      groups = jax.tree.map(lambda p: p[:scanned].reshape(-1, period, *p.shape[1:]), (self.blocks, indices))

      def scan_body(x_BxTxD, group):
        for i, (block, index) in enumerate(_unstack(group, period)):
          x_BxTxD = run(i, True, x_BxTxD, block, index)
        return x_BxTxD, None

      x_BxTxD, _ = jax.lax.scan(scan_body, x_BxTxD, groups)
    rest = jax.tree.map(lambda p: p[scanned:], (self.blocks, indices))
    for i, (block, index) in enumerate(_unstack(rest, s.num_layers - scanned)):
      x_BxTxD = run(scanned + i, False, x_BxTxD, block, index)
    return x_BxTxD


class Transformer:
  """The `models.api.Model` of a `Decoder`."""

  def __init__(
      self, cfg_model: ConfigDict, *, vocab_size: int, params_dtype: Any, compute_dtype: Any, remat: str = "none"
  ):
    """See `models.api.make_model`."""
    self.spec = make_spec(cfg_model)
    self.reasons = list(self.spec.reasons)
    self.num_real_vocab = vocab_size
    self.vocab_size = padded_vocab_size(cfg_model, vocab_size, self.reasons)
    self.num_layers = self.spec.num_layers
    self.final_logit_cap = self.spec.final_logit_cap
    self.vocab_chunk = self.spec.vocab_chunk
    self._dtypes = (jnp.dtype(params_dtype), jnp.dtype(compute_dtype))
    self._remat = remat_policy(remat)
    # The decoder without its arrays; merged with a dict of parameters it becomes callable.
    self._graph, self._state = nnx.split(jax.eval_shape(self._make, jax.eval_shape(jax.random.key, 0)))

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

  def apply(
      self, params: Params, batch: dict, *, rng: jax.Array | None = None, train: bool = False
  ) -> jax.Array:
    """See `models.api.Model`. Without `positions` or `segment_ids`, each row is one document from 0 on."""
    dropping = train and self.spec.dropout > 0
    if dropping and rng is None:
      raise ValueError(f"model.dropout is {self.spec.dropout} and train=True, so apply() needs rng")
    decoder = nnx.merge(self._graph, params)
    return decoder(_complete(batch), self._remat, rng if dropping else None)

  def unembedding(self, params: Params) -> jax.Array:
    """See `models.api.Model`."""
    return params["embed"]["embedding"].T if self.spec.tie_embeddings else params["unembed"]["kernel"]

  def logits(self, params: Params, batch: dict | jax.Array) -> jax.Array:
    """See `models.api.Model`. `batch` may also be just the tokens [B, T]."""
    return self.unembed(params, self.apply(params, batch if isinstance(batch, dict) else dict(tokens=batch)))

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
    take part in matrix products (the unembedding included, also when tied; the embedding lookup not),
    and a query of a causal row of T tokens sees (T + 1) / 2 keys on average, fewer with a window.

    Args:
      seq_len: tokens per row.
      document_length: mean tokens per document where several are packed in a row; default: seq_len.
    """
    s = self.spec
    matrices = jax.tree_util.tree_leaves_with_path(self.abstract_params())
    weights = sum(p.size for path, p in matrices if path[-1].key == "kernel" and path[0].key == "blocks")
    weights += s.hidden_size * self.vocab_size
    length = seq_len if document_length is None else min(document_length, seq_len)
    visible = sum(_mean_visible(length, s.window_of(i)) for i in range(s.num_layers))
    return 6.0 * weights + 12.0 * s.num_heads * s.head_dim * visible

  def _make(self, rng: jax.Array) -> Decoder:
    return Decoder(self.spec, Scope(rng, *self._dtypes), self.vocab_size)


def remat_policy(name: str) -> Callable:
  """`wrap(f, in_scan)`, the transformation of one layer's function that `config.remat` names.

  Names: none, those of REMAT, those of JAX_POLICIES; raises ConfigError for others.
  """
  if name == "none":
    return lambda f, in_scan: f
  if name not in REMAT and name not in JAX_POLICIES:
    raise ConfigError(f"remat: found {name!r}, allowed: none, {', '.join(REMAT)}, {', '.join(JAX_POLICIES)}.")
  policy = REMAT[name] if name in REMAT else getattr(jax.checkpoint_policies, name)
  # Inside a scan nothing can merge the recomputation with the forward pass, so no barrier is needed.
  return lambda f, in_scan: jax.checkpoint(f, policy=policy, prevent_cse=not in_scan)


def _norm(spec: Spec, scope: Scope) -> Norm:
  return Norm(
      scope,
      spec.hidden_size,
      kind=spec.norm,
      eps=spec.norm_eps,
      plus_one=spec.norm_scale_plus_one,
      bias=spec.norm_bias,
  )


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
