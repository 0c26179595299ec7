"""Mixture of experts: every token passes through the k experts that a router chooses for it, and no token is dropped.

The output of a token is a function of that token alone: there is no capacity that others could use up, and padding
(segment 0) reaches no expert and no statistic.

B batch, T length, D hidden size, E experts, k experts per token, F width of an expert; N = B T tokens, A = k N
assignments of a token to an expert, the first choice of all tokens, then the second, …, M rows of the assignments
sorted by expert (models/experts/grouped.py).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from models import spec as spec_lib
from models.activations import activate
from models.experts.all_to_all import Split, at_home, exchange
from models.experts.grouped import add_biases, gather_rows, grouped_matmul, grouped_matmul_as, sort_by_expert
from models.experts.kernels import NO_ADAPTERS, Biased, Experts, LowRank
from models.layers import Linear, Mlp, Scope, rms_normalised
from models.quantization.matmul import QuantizedMatmul
from models.remat import named
from models.sharding import logical_axes
from trainer.metrics import Mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Load:
  """How many assignments each expert of each layer received: int32 [L, E]; adds up over micro-batches exactly."""

  counts: Any

  def __add__(self, other: "Load") -> "Load":
    return Load(self.counts + other.counts)

  def to_floats(self, name: str) -> dict[str, float]:
    """The share of experts without any token, over all layers; the fullest expert's load as a multiple of the mean
    load, averaged over layers (1: perfectly even). Nothing for a step without tokens."""
    counts_LxE = np.asarray(self.counts, np.float64)
    if not counts_LxE.any():
      return {}
    relative_L = counts_LxE.max(axis=1) / counts_LxE.mean(axis=1)
    return {f"{name}/dead_experts": float((counts_LxE == 0).mean()), f"{name}/max_load": float(relative_L.mean())}


class Routing(NamedTuple):
  """What is known of the choice of experts elsewhere, and whether this one is to be known.

  Attributes:
    recorded: int [B, T, L, k], of layers with experts, or of one of them [B, T, k]: the experts that each token went
      through when it was sampled; -1: not recorded. None: nothing is.
    replay: tokens go through these, with weights by this program's scores (routing replay, R3: arXiv 2510.11370).
      False: they are only compared.
    keep: the `statistics` have the experts that tokens went through.
  """

  recorded: jax.Array | None = None
  replay: bool = False
  keep: bool = False

  @staticmethod
  def of(batch: dict, keep: bool) -> "Routing":
    """That of a batch, which may hold `sampled_experts` to compare with or `replayed_experts`."""
    replayed = batch.get("replayed_experts")
    return Routing(batch.get("sampled_experts") if replayed is None else replayed, replayed is not None, keep)

  def of_layer(self, layer: int | jax.Array, spec: spec_lib.Spec) -> "Routing":
    """That of the layer of that number; what is recorded is of the layers with experts alone."""
    if self.recorded is None:
      return self
    nth = (np.asarray(spec.layers_with("moe")) < layer).sum()
    return self._replace(
        recorded=jax.lax.dynamic_index_in_dim(self.recorded, nth, axis=2, keepdims=False).astype(jnp.int32))


class Router(Biased):
  """The kernel that gives each expert's score, its bias, what is added to scores for the choice alone, and factors on
  what it sees and on experts' weights."""

  def __init__(self, scope: Scope, features: int, moe: spec_lib.Moe, std: float):
    super().__init__(scope, (features, moe.num_experts), std, moe.router_bias)
    # In float32 whatever the others are: between scores that nearly tie, it decides.
    self.choice_bias = nnx.Param(jnp.zeros(moe.num_experts, jnp.float32)) if moe.choice_bias else None
    self.scale = scope.constant("scale", (features,), 1.0) if moe.router_norm else None
    self.expert_scale = scope.constant("expert_scale", (moe.num_experts,), 1.0) if moe.expert_scale else None


class Moe(nnx.Module):
  """Router, experts, and the shared expert that every token passes through."""

  def __init__(self, spec: spec_lib.Spec, scope: Scope, out_gain: float):
    """`out_gain`: factor on the initial standard deviation of the last projections."""
    moe, D, std = spec.moe, spec.hidden_size, spec.init_std
    self.router = Router(scope / "router", D, moe, D**-0.5 if std is None else std)
    self.experts = Experts(scope / "experts", spec, moe, out_gain)
    shared: dict[str, Any] = dict(activation=spec.activation, std=std, bias=spec.mlp_bias, out_gain=out_gain)
    self.shared = Mlp(scope / "shared", D, moe.shared_size, **shared) if moe.shared_size else None
    self.shared_gate = Linear(scope / "shared_gate", D, 1, std=std, bias=False) if moe.shared_gate else None
    self.spec, self.activation, self.norm_eps = moe, spec.activation, spec.norm_eps

  def __call__(self, x_BxTxD: jax.Array, segment_ids: jax.Array, key: jax.Array | None = None,
               routing: Routing | None = None, judged_BxTxD: jax.Array | None = None
               ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The layer's output [B, T, D] (of the experts: 0 at padding) and its `statistics`.

    `key`: the layer's key for dropout on the adapters' input; None: no dropout. `routing`: of this layer.
    `judged_BxTxD`: what the router sees in place of x.
    """
    routing = Routing() if routing is None else routing
    moe, kernel_DxE = self.spec, self.router.kernel[...].astype(jnp.float32)
    # In float32 throughout: two logits that nearly tie must not be swapped by rounding.
    judged_NxD = logical_axes.as_rows(x_BxTxD if judged_BxTxD is None else judged_BxTxD).astype(jnp.float32)
    if self.router.scale is not None:
      scale_D = self.router.scale[...].astype(jnp.float32) * judged_NxD.shape[-1] ** -0.5
      judged_NxD = rms_normalised(judged_NxD, self.norm_eps) * scale_D
    logits_NxE = jnp.matmul(judged_NxD, kernel_DxE, precision=jax.lax.Precision.HIGHEST)
    if self.router.bias is not None:
      logits_NxE = logits_NxE + self.router.bias[...].astype(jnp.float32)
    logits_BxTxE = logits_NxE.reshape(*x_BxTxD.shape[:-1], -1)
    bias, factors = self.router.choice_bias, self.router.expert_scale
    biased = () if bias is None else (jnp.broadcast_to(jax.lax.stop_gradient(bias[...]), logits_BxTxE.shape),)
    scaled = () if factors is None else (jnp.broadcast_to(factors[...].astype(jnp.float32), logits_BxTxE.shape),)
    replayed = (routing.recorded,) if routing.replay else ()
    experts_BxTxk, weights_BxTxk = _on_rows(functools.partial(route, moe=moe, replay=routing.replay),
                                            (logits_BxTxE, *biased, *scaled, *replayed))
    used_BxTxk = jnp.where(segment_ids[..., None] > 0, experts_BxTxk, moe.num_experts)
    run = functools.partial(apply_experts, moe=moe, activation=self.activation, matmuls=self.experts.matmuls,
                            low_rank=self.experts.low_rank)
    y_BxTxD = self.experts.with_kernels(lambda kernels, *rows: _on_rows(run, rows, kernels, self.experts.dimensions),
                                        x_BxTxD, used_BxTxk, weights_BxTxk)
    if self.experts.down.bias is not None:
      y_BxTxD = y_BxTxD + self.experts.mean_bias(used_BxTxk, weights_BxTxk)
    if self.shared is not None:
      shared_BxTxD = self.shared(x_BxTxD, key).astype(jnp.float32)
      if self.shared_gate is not None:
        shared_BxTxD = shared_BxTxD * jax.nn.sigmoid(self.shared_gate(x_BxTxD, key).astype(jnp.float32))
      y_BxTxD = y_BxTxD + shared_BxTxD
    found = statistics(logits_BxTxE, experts_BxTxk, segment_ids, moe)
    if routing.keep:
      found["experts"] = experts_BxTxk.astype(jnp.int16)
    if routing.recorded is not None:  # in whatever order
      found["differs"] = jnp.any(jnp.sort(experts_BxTxk) != jnp.sort(routing.recorded), axis=-1)
    return y_BxTxD.astype(x_BxTxD.dtype), found


def route(rows: tuple[jax.Array, ...], kernels: tuple = (), *, moe: spec_lib.Moe, replay: bool = False
          ) -> tuple[jax.Array, jax.Array]:
  """The chosen experts int32 [B, T, k], best first (of equal ones the first), and their weights, float32.

  Args:
    rows: the router's logits [B, T, E], float32; with `choice_bias`, also what is added to the scores; with
      `expert_scale`, what the weights of experts are multiplied by in the end.
    kernels: none.
    replay: the last of `rows` says which experts are taken, int32 [B, T, k]; where it is below 0, the router does.
  """
  logits_BxTxE, *biased = rows
  recorded_BxTxk = biased.pop() if replay else None
  factors_BxTxE = biased.pop() if moe.expert_scale else None
  sigmoid, after = moe.scores == "sigmoid", moe.softmax == "after_topk"
  scores_BxTxE = jax.nn.sigmoid(logits_BxTxE) if sigmoid else logits_BxTxE if after else jax.nn.softmax(logits_BxTxE)
  by_BxTxE = jax.lax.stop_gradient(scores_BxTxE + sum(biased))
  if moe.groups_used < moe.groups:
    by_BxTxE = _of_best_groups(by_BxTxE, moe)
  experts_BxTxk = jax.lax.top_k(by_BxTxE, moe.experts_per_token)[1]
  if recorded_BxTxk is not None:
    experts_BxTxk = jnp.where(recorded_BxTxk < 0, experts_BxTxk, recorded_BxTxk)
  weights_BxTxk = _taken(scores_BxTxE, experts_BxTxk)
  if after:
    weights_BxTxk = jax.nn.softmax(weights_BxTxk)
  if moe.normalize_weights:
    total_BxTx1 = jnp.sum(weights_BxTxk, axis=-1, keepdims=True)
    weights_BxTxk = weights_BxTxk / (total_BxTx1 + 1e-20 if sigmoid else total_BxTx1)  # sigmoids may all be 0
  if factors_BxTxE is not None:
    weights_BxTxk = weights_BxTxk * _taken(factors_BxTxE, experts_BxTxk)
  return experts_BxTxk, weights_BxTxk if moe.weight_scale == 1.0 else weights_BxTxk * moe.weight_scale


def _of_best_groups(scores_BxTxE: jax.Array, moe: spec_lib.Moe) -> jax.Array:
  """The scores, -inf outside the groups that a token may use."""
  by_group_BxTxGxM = scores_BxTxE.reshape(*scores_BxTxE.shape[:-1], moe.groups, -1)
  best = jax.lax.top_k(by_group_BxTxGxM, 2 if moe.scores == "sigmoid" else 1)[0].sum(-1)
  used_BxTxg = jax.lax.top_k(best, moe.groups_used)[1]
  is_used_BxTxG = jnp.any(used_BxTxg[..., None] == jnp.arange(moe.groups), axis=-2)
  return jnp.where(is_used_BxTxG[..., None], by_group_BxTxGxM, -jnp.inf).reshape(scores_BxTxE.shape)


def _taken(values_BxTxE: jax.Array, index_BxTxk: jax.Array) -> jax.Array:
  """Those entries of the values. On GPU the gradient is a sum of products with zeros and ones, and not scattered, of
  which XLA would not know that no two go to the same place (trainer/compiler/repeatable.py)."""
  if logical_axes.platform() != "gpu":
    return jnp.take_along_axis(values_BxTxE, index_BxTxk, axis=-1)
  is_it_BxTxkxE = index_BxTxk[..., None] == jnp.arange(values_BxTxE.shape[-1])
  return jnp.sum(jnp.where(is_it_BxTxkxE, values_BxTxE[:, :, None], 0.0), axis=-1)


def apply_experts(rows: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...], *, moe: spec_lib.Moe, activation: str,
                  matmuls: tuple[QuantizedMatmul | None, ...], low_rank: LowRank = NO_ADAPTERS,
                  split: Split | None = None) -> jax.Array:
  """Σ_j weight_j × expert_j(x) for each token, with `weights_on_input` Σ_j expert_j(weight_j × x): float32 [B, T, D].

  Args:
    rows: x [B, T, D], experts int32 [B, T, k] (`moe.num_experts`: none), weights float32 [B, T, k].
    kernels: gate, if experts have one, and up [E, D, F], down [E, F, D], with biases those of gate and up [E, F], with
      adapters their pairs, or this device's parts of them.
    activation: one of `activations.GATED` or `UNGATED`.
    matmuls: the 8-bit matmuls with each of these kernels; None: plain ones.
    low_rank: which have adapters.
    split: how they are split; None: not at all.
  """
  x_BxTxD, experts_BxTxk, weights_BxTxk = rows
  x_NxD, k = x_BxTxD.reshape(-1, x_BxTxD.shape[-1]), experts_BxTxk.shape[-1]
  experts_A, weights_Nxk = experts_BxTxk.reshape(-1, k).T.reshape(-1), weights_BxTxk.reshape(-1, k)
  if moe.weights_on_input:  # what each assignment sees is another, so that it has a row of its own
    x_NxD = (weights_Nxk.T[..., None] * x_NxD).astype(x_NxD.dtype).reshape(-1, x_NxD.shape[-1])
  run = functools.partial(expert_outputs, activation=activation, matmuls=matmuls, low_rank=low_rank)
  if split is None:
    y_AxD = run(x_NxD, experts_A, tuple(kernel.astype(x_NxD.dtype) for kernel in kernels))
  elif split.axis is None:
    y_AxD = at_home(run, split, x_NxD, experts_A, kernels)
  else:
    y_AxD = exchange(functools.partial(run, zeros=False), split, x_NxD, experts_A, kernels, moe.num_experts)
  y_AxD = named(y_AxD, "mlp")  # the gradient of the weights needs it
  # A sum in the order of the router's choice, whichever rows of the batch are computed together.
  y_NxD = jnp.zeros((len(weights_Nxk), x_NxD.shape[-1]), jnp.float32)
  for j, part_NxD in enumerate(jnp.split(y_AxD, k)):
    weight_Nx1 = 1.0 if moe.weights_on_input else weights_Nxk[:, j, None]
    y_NxD += weight_Nx1 * part_NxD.astype(jnp.float32)
  return y_NxD.reshape(x_BxTxD.shape)


def expert_outputs(x_NxD: jax.Array, experts_A: jax.Array, kernels: tuple[jax.Array, ...], activation: str,
                   matmuls: tuple[QuantizedMatmul | None, ...], zeros: bool = True, low_rank: LowRank = NO_ADAPTERS
                   ) -> jax.Array:
  """expert_a(x) for each assignment a, of token a % N: [A, D]; where the expert is E, none, it is 0, or anything unless
  `zeros`."""
  names = ("gate", "up", "down")[-len(matmuls):]
  kernel_of, more = dict(zip(names, kernels, strict=False)), kernels[len(names):]
  biases, pairs = more[:len(more) - 2 * len(low_rank.of)], more[len(more) - 2 * len(low_rank.of):]
  adapters = dict(zip(low_rank.of, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
  N, k = x_NxD.shape[0], experts_A.shape[0] // x_NxD.shape[0]
  places_A, assignments_M, sizes_E, block = sort_by_expert(experts_A, kernel_of["up"].shape[0])
  times = {name: functools.partial(grouped_matmul_as, matmul, sizes_E=sizes_E, block=block)
           for name, matmul in zip(names, matmuls, strict=True)}
  # Rows without an assignment get the first token, unless the size of its numbers would matter; nothing comes of it.
  quantised = any(matmul is not None for matmul in matmuls)
  tokens_M = jnp.where(assignments_M < k * N, assignments_M % N, N) if quantised else assignments_M % N
  x_MxD = gather_rows(x_NxD, tokens_M, places_A.reshape(k, N).T, zeros=quantised)

  def project(name, x_MxK, **more):
    y_MxN = times[name](x_MxK, kernel_of[name], **more)
    if name not in adapters:
      return y_MxN
    (a, b), last = adapters[name], name == "down"
    low = grouped_matmul(grouped_matmul(x_MxK, a, sizes_E, block, last), b, sizes_E, block, last)
    return y_MxN + low * low_rank.scale

  wide = tuple(project(name, x_MxD) for name in names[:-1])
  if biases:
    wide = tuple(add_biases(y_MxF, bias_ExF, sizes_E, block) for y_MxF, bias_ExF in zip(wide, biases, strict=True))
  *gate_MxF, up_MxF = (named(y_MxF, "mlp") for y_MxF in wide)
  hidden_MxF = activate(activation, up_MxF, *gate_MxF)
  y_MxD = project("down", hidden_MxF, last=True)
  return gather_rows(y_MxD, places_A, assignments_M[:, None], zeros)


def _on_rows(run: Callable, rows: tuple[jax.Array, ...], kernels: tuple = (),
             names: tuple[tuple[str | None, ...], ...] = ()) -> Any:
  """`run(rows, kernels)` where each device works on the tokens that it holds, with its part of the experts' kernels.

  By hand, since the partitioner would gather the whole batch to sort its tokens by expert.

  Args:
    run: treats every token alone. It is told by `split` how the kernels are split; what it computes with a part of the
      experts' width adds up to the whole.
    rows: arrays [B, T, …], as are the results.
    kernels: none, or those of experts.
    names: of each the logical names of its dimensions.
  """
  placed = logical_axes.current()
  if placed is None:
    return run(rows, kernels)
  by_token = PartitionSpec(*placed.spec(("batch", "length"), rows[0].shape[:2]))
  specs = tuple(placed.spec(dims, kernel.shape) for dims, kernel in zip(names, kernels, strict=True))
  width: tuple[str, ...] = ()
  if specs:
    width = logical_axes.names_of(specs[0][2])
    shards = tuple((logical_axes.names_of(spec[dims.index("shard")]), dims.index("shard"))
                   if "shard" in dims else ((), 0) for spec, dims in zip(specs, names, strict=True))
    run = functools.partial(run, split=Split(specs[0][0], shards, placed.mesh.axis_names))

  def local(rows, kernels):
    partial = run(rows, kernels)
    return jax.lax.psum(partial, width) if width else partial

  # check_vma would want every loop inside to say over which axes its values differ.
  return jax.shard_map(local, mesh=placed.mesh, in_specs=(by_token, specs), out_specs=by_token, check_vma=False)(
      rows, kernels)


def evened(params: Any, counts_LxE: jax.Array, rate: float, taken: jax.Array) -> Any:
  """The parameters after a step that has seen so many assignments: `choice_bias` + rate × sign(mean - count) for each
  layer and expert (Wang et al. 2024, arXiv 2408.15664, algorithm 1); as they are unless the step was `taken`.

  Layers of modules behind the blocks (`mtp/blocks`), if they have experts, come last.
  """
  counts_LxE = counts_LxE.astype(jnp.float32)
  step_LxE = jnp.where(taken, rate * jnp.sign(counts_LxE.mean(axis=1, keepdims=True) - counts_LxE), 0.0)

  def moved(blocks: Any, layers: slice) -> Any:
    router = blocks["moe"]["router"]
    return {**blocks, "moe": {**blocks["moe"], "router": {
        **router, "choice_bias": router["choice_bias"] + step_LxE[layers]}}}

  behind, own = params.get("mtp", {}), params.get("blocks", {})
  if "moe" in own:
    params = {**params, "blocks": moved(own, slice(len(own["moe"]["router"]["choice_bias"])))}
  if "moe" in behind.get("blocks", {}):
    last = slice(-len(behind["blocks"]["moe"]["router"]["choice_bias"]), None)
    params = {**params, "mtp": {**behind, "blocks": moved(behind["blocks"], last)}}
  return params


# ---------------------------------------------------------------------------------------------- losses and metrics


def statistics(logits_BxTxE: jax.Array, experts_BxTxk: jax.Array, segment_ids: jax.Array,
               moe: spec_lib.Moe) -> dict[str, jax.Array]:
  """One layer's sums over each row's tokens: `entropy`, `balance`, `z` float32 [B], `counts` int32 [B, E]."""
  real_BxT = segment_ids > 0
  # Of sigmoid scores, their share of the sum (DeepSeek-V3, eq. 19).
  log_p_BxTxE = jax.nn.log_softmax(jax.nn.log_sigmoid(logits_BxTxE) if moe.scores == "sigmoid" else logits_BxTxE)
  p_BxTxE = jnp.exp(log_p_BxTxE)
  # 1 where the token uses the expert; the experts of a token differ, so no entry is 2.
  uses_BxTxE = jnp.any(experts_BxTxk[..., None] == jnp.arange(moe.num_experts), axis=2)
  uses_BxTxE = (uses_BxTxE & real_BxT[..., None]).astype(jnp.int32)

  def over_tokens(values_BxT):
    return jnp.sum(jnp.where(real_BxT, values_BxT, 0.0), axis=1)

  sums = dict(entropy=over_tokens(-jnp.sum(p_BxTxE * log_p_BxTxE, axis=-1)), counts=jnp.sum(uses_BxTxE, axis=1))
  if moe.balance_loss:
    load_BxTxE = _load_of_document(uses_BxTxE, segment_ids) * (moe.num_experts / moe.experts_per_token)
    sums["balance"] = over_tokens(jnp.sum(load_BxTxE * p_BxTxE, axis=-1))
  if moe.z_loss:
    sums["z"] = over_tokens(jnp.square(jax.nn.logsumexp(logits_BxTxE, axis=-1)))
  return sums


def disagreement(differs_LxBxT: jax.Array, recorded_BxTxLxk: jax.Array, segment_ids: jax.Array) -> Mean:
  """The share of recorded tokens that in any layer did not go through the experts that they were sampled with."""
  known_BxT = (segment_ids > 0) & (recorded_BxTxLxk[..., 0, 0] >= 0)
  differ_BxT = known_BxT & jnp.any(differs_LxBxT, axis=0)
  return Mean(*(jnp.sum(part, axis=1).astype(jnp.float32) for part in (differ_BxT, known_BxT)))


def report(stats: dict[str, jax.Array] | None, segment_ids: jax.Array, moe: spec_lib.Moe | None):
  """(losses, metrics) for `models.api.Output` from every layer's `statistics`, stacked: [L, …].

  Both terms are means over tokens and layers, as is `moe/entropy`; weights depend on the batch alone.
  """
  if moe is None:
    return {}, {}
  weight_B = stats["entropy"].shape[0] * jnp.sum(segment_ids > 0, axis=1).astype(jnp.float32)
  coefficients = dict(balance=moe.balance_loss, z=moe.z_loss)
  losses = {f"moe/{name}_loss": Mean(coefficient * jnp.sum(stats[name], axis=0), weight_B)
            for name, coefficient in coefficients.items() if coefficient}
  entropy = Mean(jnp.sum(stats["entropy"], axis=0), weight_B)
  return losses, {"moe/entropy": entropy, "moe": Load(jnp.sum(stats["counts"], axis=1))}


def _load_of_document(uses_BxTxE: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """For each token, the share of its document's tokens that use each expert: float32 [B, T, E].

  A document's tokens are contiguous, so that its sum is a difference of two running sums: of whole numbers, exact.
  """
  T = segment_ids.shape[1]
  index_T = jnp.arange(T)
  changes = segment_ids[:, 1:] != segment_ids[:, :-1]
  first_BxT = jax.lax.cummax(jnp.where(jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True), index_T, 0), axis=1)
  last_BxT = jax.lax.cummin(jnp.where(jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True), index_T, T - 1), axis=1,
                            reverse=True)
  running = jnp.pad(jnp.cumsum(uses_BxTxE, axis=1), ((0, 0), (1, 0), (0, 0)))
  upto, before = (jnp.take_along_axis(running, at[..., None], axis=1) for at in (last_BxT + 1, first_BxT))
  return (upto - before) / (last_BxT - first_BxT + 1)[..., None]
