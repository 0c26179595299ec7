"""The layers of a Transformer, decoder or tower: attention, MLP, and how a stack of them runs.

B batch, T length, D hidden size, H query heads, G key/value heads, K head size, L layers.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import mask
from models.attention.cache import Cache
from models.attention.context import LayerContext
from models.attention.deltanet import GatedDeltaNet
from models.attention.dispatch import attend_to_past, attention
from models.attention.latent import LatentAttention
from models.attention.mamba import Mamba2
from models.attention.mask import QKV, Rule
from models.attention.rope import apply_rope
from models.attention.selected import Indexer
from models.experts.moe import Moe, Routing
from models.layers import Linear, Mlp, Norm, Scope, apply_linears, dropout, rms_normalised
from models.remat import named
from models.residual import AltUp, Laurel, PerLayer, make_norm, out_gain
from models.sharding.logical_axes import constrain
from models.spec import HALVES, MIXERS, Spec
from models.spec_vision import OF_IMAGES


class SelfAttention(nnx.Module):
  """Grouped-query self-attention with its projections."""

  def __init__(self, spec: Spec, scope: Scope, mixer: str = "attn"):
    """`mixer`: which of `models.spec.MIXERS` it is."""
    H, D, (G, K) = spec.num_heads, spec.hidden_size, spec.heads_of(mixer)
    std, bias = spec.init_std, spec.qkv_bias
    # With a gate, each head has its query and then as many numbers for its gate.
    queries = H * K * (2 if spec.attention_gate else 1)
    self.q = Linear(scope / "q", D, queries, std=std, bias=bias, names=(None, "heads"))
    own, of_keys = "query" not in mixer, mixer == "global_attn" and spec.global_attention.values_are_keys
    of_kv: dict[str, Any] = dict(std=std, bias=bias, names=(None, "kv_heads"))
    self.k = Linear(scope / "k", D, G * K, **of_kv) if own else None
    self.v = Linear(scope / "v", D, G * K, **of_kv) if own and not of_keys else None
    self.o = Linear(scope / "o", H * K, D, std=std, bias=spec.attention_out_bias, gain=out_gain(spec),
                    names=("heads", None))
    # Attributes are assigned once: NNX's graph mode lets no static None become a module.
    scaled = spec.qk_norm and spec.qk_norm_over != "unscaled"
    kind = spec.norm if spec.qk_norm_over == "each_head" else "rmsnorm"
    norm: dict[str, Any] = dict(kind=kind, eps=spec.norm_eps, plus_one=spec.norm_scale_plus_one)
    of_heads: dict[str, Any] = {"each_head": lambda n: (n, K), "all": lambda n: n * K}
    q_size, k_size = map(of_heads.get(spec.qk_norm_over, lambda n: K), (H, G))
    self.over_all = spec.qk_norm_over == "all"
    self.q_norm = Norm(scope / "q_norm", q_size, **norm) if scaled else None
    self.k_norm = Norm(scope / "k_norm", k_size, **norm) if scaled and own else None
    self.sinks = scope.constant("sinks", (H,), 0.0) if spec.attention_sinks else None
    self.spec, self.kv_heads, self.head_dim = spec, G, K

  def __call__(self, x_BxTxD: jax.Array, context: LayerContext
               ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | Cache]:
    """(output, (keys, values) [B, T, G, K], or, with a `past` of one token, its cache with those of it)."""
    s, (tokens, rope, window, key, past, lent, _) = self.spec, context
    B, T, _ = x_BxTxD.shape
    linears = tuple(linear for linear in (self.q, self.k, self.v) if linear is not None)
    q, *made = apply_linears(linears, x_BxTxD, key)
    q_BxTxHxK = named(constrain(q.reshape(B, T, s.num_heads, -1), "batch", "length", "heads", None), "qkv")
    q_BxTxHxK, gate_BxTxHxK = q_BxTxHxK[..., :self.head_dim], q_BxTxHxK[..., self.head_dim:]
    q_BxTxHxK, factor = self._turned(self.q_norm, q_BxTxHxK, rope), rope
    if isinstance(rope, tuple):
      factor = rope[2] if len(rope) > 2 else None
    if factor is not None:
      q_BxTxHxK = (q_BxTxHxK.astype(jnp.float32) * factor).astype(q_BxTxHxK.dtype)
    k_BxTxGxK, v_BxTxGxK = self._keys_and_values(made, rope, B, T) if made else lent or (None, None)
    # In Gemma 3 and 4 the window bounds blocks too, in PaliGemma 2 it does not.
    bounded = s.vision is not None and s.vision.attention in OF_IMAGES
    rule = Rule(s.attention_scale, s.attention_logit_cap, window, bounded)
    sinks_H = None if self.sinks is None else self.sinks[...]
    if past is None or past.extends:
      new: Any = k_BxTxGxK, v_BxTxGxK
      k_BxSxGxK, v_BxSxGxK, behind_BxP = (*new, None) if past is None else past.before(*new)
      ids_BxP = None
      if past is not None and tokens.chunks is not None:
        ids_BxP = tokens.chunks_of(past.cache.lengths[:, None] - behind_BxP, window)
      if tokens.chunks is not None:
        tokens = tokens._replace(segments=tokens.chunks, chunks=None)
      before = None if past is None else mask.behind(behind_BxP, ids_BxP)
      out_BxTxHxK = attention(QKV(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, sinks_H), tokens, rule, before=before,
                              impl=s.attention, block=s.attention_block)
    else:
      active_B = tokens.segments[:, 0] > 0
      new, seen = (past.add(k_BxTxGxK[:, 0], v_BxTxGxK[:, 0], active_B, window) if made else
                   (past.cache, past.seen(window)))
      out_BxTxHxK = attend_to_past(rule, q_BxTxHxK, seen, active_B, sinks_H=sinks_H, impl=s.attention)
    if s.attention_gate:
      out_BxTxHxK = out_BxTxHxK * jax.nn.sigmoid(gate_BxTxHxK.astype(jnp.float32)).astype(out_BxTxHxK.dtype)
    out_BxTxHxK = constrain(out_BxTxHxK, "batch", "length", "heads", None)
    return self.o(out_BxTxHxK.reshape(B, T, -1), key), new

  def _keys_and_values(self, made: Sequence[jax.Array], rope: Any, B: int, T: int) -> tuple[jax.Array, jax.Array]:
    """[B, T, G, K] each, of what the projections have `made`: keys, and values unless these are the keys."""
    made = [constrain(part.reshape(B, T, self.kv_heads, self.head_dim), "batch", "length", "kv_heads", None)
            for part in made]
    k_BxTxGxK, *values = (named(part, "qkv") for part in made)
    v_BxTxGxK = values[0] if values else k_BxTxGxK
    if self.spec.value_norm:
      v_BxTxGxK = rms_normalised(v_BxTxGxK, self.spec.norm_eps)
    return self._turned(self.k_norm, k_BxTxGxK, rope), v_BxTxGxK

  def _turned(self, norm: Norm | None, x_BxTxHxK: jax.Array, rope: Any) -> jax.Array:
    """Queries or keys, rotated, if there is a table, and normalised before that or after."""
    rotates, over = isinstance(rope, tuple), self.spec.qk_norm_over
    if norm is not None and over != "rotated":
      x_BxTxHxK = self._normalise(norm, x_BxTxHxK)
    if rotates:
      x_BxTxHxK = apply_rope(x_BxTxHxK, rope[:2], self.spec.rope_interleaved, 2 if self.spec.positions == HALVES else 1)
    if norm is not None and over == "rotated":
      x_BxTxHxK = self._normalise(norm, x_BxTxHxK)
    last = rotates and self.spec.qk_norm and over == "unscaled"
    return rms_normalised(x_BxTxHxK, self.spec.norm_eps) if last else x_BxTxHxK

  def _normalise(self, norm: Norm, x_BxTxHxK: jax.Array) -> jax.Array:
    """Queries or keys, normalised over what `qk_norm_over` says."""
    over = (*x_BxTxHxK.shape[:2], -1) if self.over_all else x_BxTxHxK.shape
    return norm(x_BxTxHxK.reshape(over)).reshape(x_BxTxHxK.shape)


class Block(nnx.Module):
  """One layer: attention or what stands in its place, and MLP (or mixture of experts), each a residual branch
  normalised before, after, or both; or both of the same normalised input; or one of the two."""

  def __init__(self, spec: Spec, scope: Scope):
    """Without the parts that layers may lack (`models.spec.PARTS`), which `stack_blocks` adds."""
    pre, post = spec.norm_position in ("pre", "sandwich"), spec.norm_position in ("post", "sandwich")
    self.attn_norm = make_norm(spec, scope / "attn_norm") if pre else None
    self.attn_post_norm = make_norm(spec, scope / "attn_post_norm") if post else None
    self.parallel = spec.parallel_blocks
    self.one_branch = spec.one_branch
    self.mlp_norm = make_norm(spec, scope / "mlp_norm") if pre and not self.parallel and not self.one_branch else None
    self.mlp_post_norm = make_norm(spec, scope / "mlp_post_norm") if post else None
    beside = spec.moe is not None and spec.moe.beside_mlp
    self.mlp_out_norm = make_norm(spec, scope / "mlp_out_norm") if beside else None
    self.moe_norm = make_norm(spec, scope / "moe_norm") if beside else None
    self.moe_out_norm = make_norm(spec, scope / "moe_out_norm") if beside else None
    self.per_layer = PerLayer(spec, scope / "per_layer") if spec.per_layer_size else None
    self.laurel = Laurel(spec, scope / "laurel") if spec.laurel_rank else None
    self.altup = AltUp(spec, scope / "altup") if spec.altup is not None else None
    self.layer_scale = scope.constant("layer_scale", (1,), 1.0) if spec.layer_scale else None
    self.residual_scale, self.dropout = spec.residual_scale, spec.dropout

  def __call__(self, x_BxTxD, context: LayerContext, parts: Collection[str] = ("attn", "mlp"),
               routing: Routing | None = None, own_BxTxP: jax.Array | None = None, sparsity: float = 0.0):
    """(x, statistics of the experts if it has any, {name of the mixer: keys and values, or a state}, or, with a `past`
    of one token, its cache, which keys were chosen (`LatentAttention`)).

    `x_BxTxD`: with AltUp, all its streams [N, B, T, D], as what is returned. `parts`: of `models.spec.PARTS`.
    `routing`: of this layer's experts. `own_BxTxP`: see `PerLayer`. `sparsity`: of the MLP, see `Mlp`.
    """
    tokens, key, past, chosen_BxTxC = context.tokens, context.key, context.past, None
    keys = (None, None) if key is None else jax.random.split(key)
    x_BxTxD = named(x_BxTxD, "layer_input")
    predicted_NxBxTxD = None if self.altup is None else self.altup.predict(x_BxTxD)
    x_BxTxD = x_BxTxD if predicted_NxBxTxD is None else predicted_NxBxTxD[0]
    normed_BxTxD = x_BxTxD if self.attn_norm is None else self.attn_norm(x_BxTxD)
    apart = past is None or past.extends
    new: Any = {} if apart else past.cache
    if mixer := next((mixer for mixer in MIXERS if mixer in parts), None):
      indexer = (self.indexer,) if "indexer" in parts else ()
      y, left, *more = getattr(self, mixer)(normed_BxTxD, context, *indexer)
      chosen_BxTxC = more[0] if more else None
      if not apart:
        new = left
      elif "query" not in mixer:
        new = {mixer: left}
      x_BxTxD = x_BxTxD + self._branch_end(y, self.attn_post_norm, keys[0])
      if self.laurel is not None:
        x_BxTxD = (x_BxTxD + self.laurel(normed_BxTxD, key)) * jnp.asarray(2**-0.5, x_BxTxD.dtype)
      x_BxTxD = named(constrain(x_BxTxD, "batch", "stream", "embed"), "stream")
      if self.one_branch:
        return x_BxTxD, {}, new, None
    if mixer and not self.parallel:
      normed_BxTxD = x_BxTxD if self.mlp_norm is None else self.mlp_norm(x_BxTxD)
    mlp = self.wide_mlp if "wide_mlp" in parts else self.mlp if "mlp" in parts else None
    if "moe" not in parts:
      y, stats = mlp(normed_BxTxD, key, sparsity), {}
    elif mlp is None:
      y, stats = self.moe(normed_BxTxD, tokens.segments, key, routing)
    else:  # each between norms of its own; the router judges what none has normalised
      of_experts, stats = self.moe(self.moe_norm(x_BxTxD), tokens.segments, key, routing, x_BxTxD)
      y = self.mlp_out_norm(mlp(normed_BxTxD, key)) + self.moe_out_norm(of_experts)
    x_BxTxD = x_BxTxD + self._branch_end(y, self.mlp_post_norm, keys[1])
    if self.altup is not None:
      x_NxBxTxD = self.altup.correct(predicted_NxBxTxD, x_BxTxD)
      if self.per_layer is not None:  # joins the streams that the layer does not compute on
        x_NxBxTxD = x_NxBxTxD.at[1:].add(self._own(self.altup.scaled(x_NxBxTxD[0]), own_BxTxP, key))
      return constrain(x_NxBxTxD, None, "batch", "stream", "embed"), stats, new, None
    if self.per_layer is not None:
      x_BxTxD = x_BxTxD + self._own(x_BxTxD, own_BxTxP, key)
    if self.layer_scale is not None:  # a buffer of theirs, which is not trained
      x_BxTxD = x_BxTxD * jax.lax.stop_gradient(self.layer_scale[...]).astype(x_BxTxD.dtype)
    return constrain(x_BxTxD, "batch", "stream", "embed"), stats, new, chosen_BxTxC

  def _own(self, x_BxTxD: jax.Array, own_BxTxP: jax.Array, key: jax.Array | None) -> jax.Array:
    """What the layer's own embedding gives."""
    more = None if key is None else jax.random.fold_in(key, 2)
    return self._branch_end(self.per_layer(x_BxTxD, own_BxTxP, key), None, more)

  def _branch_end(self, y_BxTxD: jax.Array, norm: Norm | None, key: jax.Array | None) -> jax.Array:
    if norm is not None:
      y_BxTxD = norm(y_BxTxD)
    if self.residual_scale != 1.0:
      y_BxTxD = y_BxTxD * jnp.asarray(self.residual_scale, y_BxTxD.dtype)
    return y_BxTxD if key is None else dropout(y_BxTxD, self.dropout, key)


def stack_blocks(spec: Spec, scope: Scope) -> Block:
  """All of `spec`'s layers in one `Block`, whose arrays have a leading L; `scope` is the path that they share.

  Of PARTS, which may differ from layer to layer, the arrays have an entry for each layer that has them.
  """
  gain, std = out_gain(spec), spec.init_std
  parts: dict[str, Callable] = {
      "attn": (functools.partial(SelfAttention, spec) if spec.latent is None else
               functools.partial(LatentAttention, spec, out_gain=gain)),
      **{mixer: functools.partial(SelfAttention, spec, mixer=mixer)
         for mixer in ("global_attn", "query_attn", "global_query_attn")},
      "indexer": functools.partial(Indexer, spec),
      "delta": functools.partial(GatedDeltaNet, spec, out_gain=gain),
      "mamba": functools.partial(Mamba2, spec, out_gain=gain),
      **{name: functools.partial(Mlp, features=spec.hidden_size, hidden=times * spec.intermediate_size, std=std,
                                 activation=spec.activation, bias=spec.mlp_bias, out_gain=gain)
         for name, times in (("mlp", 1), ("wide_mlp", 2))},
      "moe": functools.partial(Moe, spec, out_gain=gain),
  }

  def of_layer(make: Callable, name: str, layer: jax.Array):
    own = dataclasses.replace(scope, layer=layer)
    return make(own / name if name else own)

  blocks = jax.vmap(functools.partial(of_layer, functools.partial(Block, spec), ""))(jnp.arange(spec.num_layers))
  for name, make in parts.items():
    if layers := spec.layers_with(name):
      setattr(blocks, name, jax.vmap(functools.partial(of_layer, make, name))(jnp.array(layers)))
  return blocks


def run_blocks(spec: Spec, blocks: Block | Sequence[Block], layer: Callable, remat: Callable, x: Any,
               each: Any = None, kind: Callable[[int], Any] = lambda place: place) -> tuple[Any, Any]:
  """Applies every layer: a scan over whole periods of the pattern, then the remaining layers one by one. Where the
  first layers, or the last, differ from others, they are such a run of their own (`Spec.runs`).

  Args:
    spec: says how many layers there are, their pattern, and whether they are scanned.
    blocks: from `stack_blocks`; or of each layer (`unstack`), which are then not scanned.
    layer: `layer(place, x, block, index)` gives (x, a tree of arrays); `place` is `index` as a number, or of layers in
      the scan the number of the first layer like this one. With `each`, `layer(place, x, block, (index, its))`.
    remat: a `remat_policy`.
    x: what enters the first layer, a tree of arrays.
    each: a tree of arrays with a leading L, of which each layer gets its entry.
    kind: all that a layer takes from its place, hashable. Of layers that stand one after another in the program, those
      of a kind are traced once: a trace of 52 layers of three kinds takes seconds in place of a quarter of a minute.

  Returns:
    (what leaves the last layer, the trees of all layers, stacked).
  """
  L, period = spec.num_layers, len(spec.layer_pattern)
  indices = jnp.arange(L) if each is None else (jnp.arange(L), each)
  stacked = []  # trees of runs of layers, in order
  kinds, traced_once = [kind(place) for place in range(L)], dict[Any, Callable]()

  def at(place: int, start: int, stop: int) -> Callable:
    """`layer` at that place, of those from `start` on, up to `stop`, that stand beside it."""
    of_place = functools.partial(layer, place)
    if kinds[start:stop].count(kinds[place]) == 1:
      return of_place
    return traced_once.setdefault(kinds[place], jax.jit(of_place))

  def in_group(start: int, i: int, x: Any, group: Any) -> tuple[Any, Any]:
    """The i-th layer of a period. It is taken out here, within what `remat` wraps: what goes in is then the scan's own
    input, which is there anyway, and not a copy of each layer's parameters, kept for the backward pass."""
    blocks, indices = group

    def take(path: tuple[Any, ...], p: jax.Array) -> jax.Array | None:
      layers = [i for i in spec.layers_with(_part(path)) if i >= start]
      return jax.lax.index_in_dim(p, layers.index(start + i), keepdims=False) if start + i in layers else None

    of_place = at(start + i, start, start + period)
    return of_place(x, jax.tree_util.tree_map_with_path(take, blocks), jax.tree.map(lambda part: part[i], indices))

  def scanned(x: Any, start: int, periods: int) -> Any:
    def in_periods(path: tuple[Any, ...], p: jax.Array) -> jax.Array:
      layers = spec.layers_with(_part(path))
      skipped, each = sum(i < start for i in layers), sum(start <= i < start + period for i in layers)
      return p[skipped:skipped + periods * each].reshape(periods, each, *p.shape[1:])

    groups = (jax.tree_util.tree_map_with_path(in_periods, blocks),
              jax.tree.map(lambda part: part[start:start + periods * period].reshape(periods, period, *part.shape[1:]),
                           indices))

    def scan_body(x, group):
      trees = [None] * period
      for i in range(period):
        x, trees[i] = remat(functools.partial(in_group, start, i), True)(x, group)
      return x, _joined(jnp.stack, trees)

    x, tree = jax.lax.scan(scan_body, x, groups)
    stacked.append(jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), tree))
    return x

  def one_by_one(x: Any, blocks: Any, start: int) -> Any:
    leaves, treedef = jax.tree.flatten(indices)
    columns = [jnp.unstack(leaf) for leaf in leaves]
    for i, block in enumerate(blocks, start):
      its = treedef.unflatten([column[i] for column in columns])
      # What keeps a layer's input (`Transformer.layer_inputs`) is called as a block is, but is no tree of arrays.
      of_place = at(i, start, start + len(blocks)) if isinstance(block, Block) else functools.partial(layer, i)
      x, tree = remat(of_place, False)(x, block, its)
      stacked.append(jax.tree.map(lambda part: part[None], tree))
    return x

  if not isinstance(blocks, Block):
    x = one_by_one(x, blocks, 0)
    return x, _joined(jnp.concatenate, stacked)
  for start, stop in spec.runs:
    alike = all(spec.parts_of(i) == spec.parts_of(start + (i - start) % period) for i in range(start, stop))
    periods = (stop - start) // period if spec.scan_layers and alike else 0
    if periods:
      x = scanned(x, start, periods)
    x = one_by_one(x, unstack(spec, blocks, start + periods * period, stop), start + periods * period)
  return x, _joined(jnp.concatenate, stacked)


def room_to_lend(spec: Spec, x_BxTxD: jax.Array, cached: bool) -> dict[str, Any]:
  """Room for the keys and values [B, T, G, K] that layers without their own use, by the type of layer, unless these are
  `cached`; and for `chosen`, the keys that layers without an indexer use [B, T, C]."""
  found: dict[str, Any] = {}
  if spec.latent is not None and spec.latent.index_shared_layers:
    found["chosen"] = jnp.zeros((*x_BxTxD.shape[:2], spec.latent.index_topk), jnp.int32)
  for layer in range(spec.num_layers - (0 if cached else spec.kv_shared_layers), spec.num_layers):
    zeros = jnp.zeros((*x_BxTxD.shape[:2], *spec.heads_of(spec.mixer_of(layer))), x_BxTxD.dtype)
    found[spec.layer_type(layer)] = (constrain(zeros, "batch", "length", "kv_heads", None),) * 2
  return found


def unstack(spec: Spec, blocks: Any, first: int = 0, stop: int | None = None) -> list[Any]:
  """The trees of the layers from `first` on, up to `stop` (None: all), of stacked ones; without the arrays of parts
  that a layer does not have.

  `jnp.unstack`, unlike indexing, has a cheap gradient: one concatenation.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(blocks)
  stop = spec.num_layers if stop is None else stop
  if first >= stop:
    return []
  columns = []
  for path, leaf in leaves:
    layers = spec.layers_with(_part(path))
    wanted = [i for i in layers if first <= i < stop]
    skipped = sum(i < first for i in layers)
    part = leaf if len(wanted) == len(layers) else leaf[skipped:skipped + len(wanted)]
    columns.append(dict(zip(wanted, jnp.unstack(part), strict=True)))
  return [treedef.unflatten([column.get(i) for column in columns]) for i in range(first, stop)]


def without(block: Block, parts: Collection[str]) -> nnx.GraphDef:
  """The structure of a block that lacks some of its parts."""
  for part in parts:
    if hasattr(block, part):
      delattr(block, part)
  return nnx.split(block)[0]


def _part(path: tuple[Any, ...]) -> str:
  """The part of a block that an array belongs to, by its path in a `Block` or in a dict of its arrays."""
  return path[0].name if isinstance(path[0], jax.tree_util.GetAttrKey) else path[0].key


def _joined(join: Callable, trees: Sequence[Any]) -> Any:
  """What several layers give, array by array; under a name that not all of them have, that of those that have it."""
  if isinstance(trees[0], dict):
    names = dict.fromkeys(name for tree in trees for name in tree)
    return {name: _joined(join, [tree[name] for tree in trees if name in tree]) for name in names}
  if isinstance(trees[0], tuple):
    return tuple(_joined(join, parts) for parts in zip(*trees, strict=True))
  return None if trees[0] is None else join(trees)
