"""The sections of `model` for experts, layers with states, latents, adapters: checked and filled, as dataclasses."""

import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict

from models.activations import GATED, UNGATED
from models.spec_checks import TOKENWISE, as_they_are, at_least_one, names, one_of
from trainer.errors import ConfigError

LAYER_TYPES = ("global", "local", "nope", "chunked", "delta", "mamba", *TOKENWISE)  # what `layer_pattern` may have


@dataclasses.dataclass(frozen=True)
class Moe:
  """The mixture of experts; the keys of `model.moe`."""

  num_experts: int
  experts_per_token: int
  expert_size: int
  shared_size: int
  shared_gate: bool
  beside_mlp: bool
  router_norm: bool
  expert_scale: bool
  router_bias: bool
  softmax: str
  scores: str
  normalize_weights: bool
  weight_scale: float
  weights_on_input: bool
  choice_bias: bool
  choice_bias_rate: float
  groups: int
  groups_used: int
  dense_layers: int
  layer_step: int
  balance_loss: float
  z_loss: float

  def in_layer(self, layer: int) -> bool:
    """Whether that layer has experts."""
    return layer >= self.dense_layers and (layer + 1) % self.layer_step == 0


@dataclasses.dataclass(frozen=True)
class Delta:
  """The layers of type delta; the keys of `model.delta`."""

  num_key_heads: int
  num_value_heads: int
  key_head_dim: int
  value_head_dim: int
  conv_width: int
  chunk: int

  @property
  def channels(self) -> int:
    """Of its convolutions."""
    return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

  @property
  def state_shape(self) -> tuple[int, int, int]:
    """Of a text's states."""
    return self.num_value_heads, self.key_head_dim, self.value_head_dim


@dataclasses.dataclass(frozen=True)
class Mamba:
  """The layers of type mamba; the keys of `model.mamba`."""

  num_heads: int
  head_dim: int
  num_groups: int
  state_dim: int
  conv_width: int
  conv_bias: bool
  min_step: float
  chunk: int

  @property
  def channels(self) -> int:
    """Of its convolutions."""
    return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim

  @property
  def state_shape(self) -> tuple[int, int, int]:
    """Of a text's states."""
    return self.num_heads, self.state_dim, self.head_dim


@dataclasses.dataclass(frozen=True)
class GlobalAttention:
  """Layers of type global, where they are of another form; the keys of `model.global_attention`."""

  head_dim: int
  num_kv_heads: int
  values_are_keys: bool
  rope_fraction: float


@dataclasses.dataclass(frozen=True)
class Temperature:
  """A factor on queries that grows with a token's position; the keys of `model.nope_temperature`."""

  scale: float
  floor: int


@dataclasses.dataclass(frozen=True)
class Latent:
  """Multi-head latent attention; the keys of `model.latent`."""

  kv_rank: int
  q_rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  index_topk: int
  index_heads: int
  index_head_dim: int
  index_rope_interleaved: bool
  index_shared_layers: tuple[int, ...]

  @property
  def head_dim(self) -> int:
    """Of queries and keys."""
    return self.nope_dim + self.rope_dim

  @property
  def kept_sizes(self) -> tuple[int, int]:
    """Of what a cache keeps of a token: its rotated key, with that of the indexer, and its latent."""
    return self.rope_dim + (self.index_head_dim if self.index_topk else 0), self.kv_rank


@dataclasses.dataclass(frozen=True)
class Lora:
  """The adapters; the keys of `model.lora`, with the scale that follows from them."""

  rank: int
  scale: float
  targets: tuple[str, ...]
  dropout: float
  modules_to_save: tuple[str, ...] = ()
  dora: bool = False
  trainable_token_indices: tuple[int, ...] = ()


def make_moe(m: ConfigDict, reasons: list[str]) -> Moe | None:
  """Reads `model.moe`; appends to `reasons`; None: there are no experts."""
  c = m.moe
  if c.num_experts == 0:
    return None
  at_least_one("moe.num_experts", c.num_experts)
  if not 1 <= c.experts_per_token <= c.num_experts:
    raise ConfigError(
        f"model.moe.experts_per_token: found {c.experts_per_token}, allowed: 1 to num_experts={c.num_experts}."
    )
  if m.activation not in (*GATED, *UNGATED):
    raise ConfigError(f"model.moe: found activation={m.activation!r}, which experts cannot have. Allowed: "
                      f"{', '.join((*GATED, *UNGATED))}.")
  for key in ("balance_loss", "z_loss", "shared_size"):
    if c[key] < 0:
      raise ConfigError(f"model.moe.{key}: found {c[key]}, allowed: 0 or more.")
  if c.shared_gate and not c.shared_size:
    raise ConfigError("model.moe.shared_gate is set, but there is no shared expert: set model.moe.shared_size.")
  expert_size = c.expert_size
  if expert_size is None:
    expert_size = m.intermediate_size
    reasons.append(f"model.moe.expert_size = {expert_size}: intermediate_size")
  if c.beside_mlp and (m.norm_position != "sandwich" or c.dense_layers or c.layer_step > 1):
    raise ConfigError("model.moe.beside_mlp: MLP and experts have norms before and after them, in all layers; found "
                      f"norm_position={m.norm_position!r}, moe.dense_layers={c.dense_layers}, moe.layer_step="
                      f"{c.layer_step}. Allowed: 'sandwich', 0, 1.")
  _check_choice(c, m.num_layers, m.lora.rank > 0)
  checked: dict[str, Any] = dict(
      expert_size=at_least_one("moe.expert_size", expert_size),
      softmax=one_of("moe.softmax", c.softmax, ("before_topk", "after_topk")),
      scores=one_of("moe.scores", c.scores, ("softmax", "sigmoid")),
  )
  return Moe(**as_they_are(Moe, c, but=checked), **checked)


def _check_choice(c: ConfigDict, num_layers: int, adapters: bool) -> None:
  """Refuses ways to choose experts that cannot be."""
  if not 0 <= c.dense_layers < num_layers:
    raise ConfigError(f"model.moe.dense_layers: found {c.dense_layers}, allowed: 0 to {num_layers - 1}, so that a "
                      f"layer of the {num_layers} has experts.")
  if num_layers // at_least_one("moe.layer_step", c.layer_step) == c.dense_layers // c.layer_step:
    raise ConfigError(f"model.moe.layer_step: found {c.layer_step}, by which no layer of the {num_layers} after the "
                      f"first {c.dense_layers} (dense_layers) has experts.")
  if at_least_one("moe.groups", c.groups) > 1 and (c.num_experts % c.groups or c.num_experts == c.groups):
    raise ConfigError(f"model.moe.groups: found {c.groups}, of {c.num_experts} experts; allowed: groups of the same "
                      "size, of 2 or more.")
  if not 1 <= c.groups_used <= c.groups or c.groups_used * (c.num_experts // c.groups) < c.experts_per_token:
    raise ConfigError(f"model.moe.groups_used: found {c.groups_used} of {c.groups} groups; allowed: at most as many as "
                      f"there are, with at least experts_per_token={c.experts_per_token} experts.")
  if c.scores == "sigmoid" and c.softmax != "before_topk":
    raise ConfigError(f"model.moe.softmax: found {c.softmax!r} with scores='sigmoid', which have no softmax; allowed: "
                      "'before_topk', which is of no effect then.")
  if c.choice_bias_rate < 0 or c.choice_bias_rate and (adapters or not c.choice_bias):
    raise ConfigError(f"model.moe.choice_bias_rate: found {c.choice_bias_rate}, allowed: 0, or above it with "
                      "choice_bias=True and without adapters, under which nothing else changes.")


def make_latent(m: ConfigDict, pattern: tuple[str, ...]) -> Latent | None:
  """Reads `model.latent`; None: attention is the usual one."""
  c = m.latent
  if c.kv_rank == 0:
    return None
  if c.q_rank < 0:
    raise ConfigError(f"model.latent.q_rank: found {c.q_rank}, allowed: 0 (queries are made of the hidden state), or "
                      "more.")
  _check_indexer(m)
  for key in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
    at_least_one(f"latent.{key}", c[key])
  made = Latent(**as_they_are(Latent, c) | {"index_shared_layers": tuple(c.index_shared_layers)})
  without = dict(num_kv_heads=(None, m.num_heads), head_dim=(None, made.head_dim), positions=("rope",),
                 rope_fraction=(1.0,), qk_norm=(False,), attention_gate=(False,), attention_sinks=(False,))
  for key, allowed in without.items():
    if m[key] not in allowed:
      raise ConfigError(f"model.{key}: found {m[key]!r} with latent attention (model.latent.kv_rank={c.kv_rank}); "
                        f"allowed: {allowed[-1]!r}.")
  if set(pattern) != {"global"}:
    raise ConfigError(f"model.layer_pattern: found {pattern} with latent attention (model.latent.kv_rank="
                      f"{c.kv_rank}); allowed: ('global',).")
  return made


def _check_indexer(m: ConfigDict) -> None:
  """Refuses indexers of latent attention that cannot be."""
  c = m.latent
  if c.index_topk == 0:
    return
  for key in ("index_topk", "index_heads", "index_head_dim"):
    at_least_one(f"latent.{key}", c[key])
  if not c.q_rank:
    raise ConfigError("model.latent.q_rank: found 0 with model.latent.index_topk="
                      f"{c.index_topk}, whose indexers' queries are made of the latent; allowed: 1 or more.")
  if c.index_head_dim < c.rope_dim:
    raise ConfigError(f"model.latent.index_head_dim: found {c.index_head_dim}, of which rope_dim={c.rope_dim} "
                      "dimensions are rotated; allowed: at least as many.")
  shared = tuple(c.index_shared_layers)
  if len(set(shared)) < len(shared) or not all(isinstance(i, int) and 1 <= i < m.num_layers for i in shared):
    raise ConfigError(f"model.latent.index_shared_layers: found {shared}; allowed: numbers of layers, each once, from "
                      f"1 to {m.num_layers - 1}: the first layer has an indexer of its own.")


def make_global_attention(m: ConfigDict, pattern: tuple[str, ...], num_kv_heads: int) -> GlobalAttention | None:
  """Reads `model.global_attention`; None: layers of type global are like the others."""
  c = m.global_attention
  if c.head_dim is None or "global" not in pattern:
    return None
  at_least_one("global_attention.head_dim", c.head_dim)
  heads = num_kv_heads if c.num_kv_heads is None else c.num_kv_heads
  if heads < 1 or m.num_heads % heads:
    raise ConfigError(f"model.global_attention.num_kv_heads: found {heads}, which does not divide num_heads="
                      f"{m.num_heads}.")
  if m.latent.kv_rank or m.positions == "rope" and (m.rope_interleaved or m.rope_scaling.type != "none" or
                                                    m.rope_sections):
    raise ConfigError("model.global_attention.head_dim is set; allowed with it: latent.kv_rank=0, rope_interleaved="
                      f"False, rope_scaling.type='none', rope_sections=(). Found {m.latent.kv_rank}, "
                      f"{m.rope_interleaved}, {m.rope_scaling.type!r}, {tuple(m.rope_sections)}.")
  return GlobalAttention(c.head_dim, heads, c.values_are_keys, c.rope_fraction)


def make_layer_pattern(m: ConfigDict) -> tuple[str, ...]:
  """Reads `model.layer_pattern`: shortened to one entry where all layers are alike, and as often as it takes for layers
  with experts to come at the same places each time."""
  pattern = tuple(m.layer_pattern)
  if not pattern:
    raise ConfigError('model.layer_pattern is empty; e.g. ("global",) or ("local", "global").')
  for kind in pattern:
    one_of("layer_pattern", kind, LAYER_TYPES)
  if m.positions != "rope":  # nothing is rotated anyway
    pattern = tuple("global" if kind == "nope" else kind for kind in pattern)
  pattern = pattern[:1] if len(set(pattern)) == 1 else pattern
  for kind, key in (("local", "window"), ("chunked", "attention_chunk")):
    if kind in pattern:
      if m[key] is None:
        raise ConfigError(f"model.layer_pattern is {pattern}, and {kind} layers need model.{key}: how many tokens "
                          f"{'they see' if kind == 'local' else 'a chunk has'}.")
      at_least_one(key, m[key])
  step = at_least_one("moe.layer_step", m.moe.layer_step) if m.moe.num_experts else 1
  return pattern * (math.lcm(len(pattern), step) // len(pattern))


def make_temperature(m: ConfigDict, pattern: tuple[str, ...]) -> Temperature | None:
  """Reads `model.nope_temperature`; None: there is none."""
  c = m.nope_temperature
  if c.scale == 0:
    return None
  if c.scale < 0 or "nope" not in pattern:
    raise ConfigError(f"model.nope_temperature.scale: found {c.scale} with layer_pattern={pattern}; "
                      "allowed: 0, or above it where layers are of type nope, whose queries it scales.")
  return Temperature(c.scale, at_least_one("nope_temperature.floor", c.floor))


def make_query_temperature(m: ConfigDict) -> Temperature | None:
  """Reads `model.query_temperature`; None: there is none."""
  c = m.query_temperature
  if c.scale == 0:
    return None
  if c.scale < 0 or m.positions != "rope" or m.latent.kv_rank:
    raise ConfigError(f"model.query_temperature.scale: found {c.scale} with positions={m.positions!r} and "
                      f"latent.kv_rank={m.latent.kv_rank}; allowed: 0, or above it with 'rope' and 0.")
  return Temperature(c.scale, at_least_one("query_temperature.floor", c.floor))


def make_delta(m: ConfigDict, pattern: tuple[str, ...]) -> Delta | None:
  """Reads `model.delta`; None: the pattern has no such layers."""
  if "delta" not in pattern:
    return None
  delta = Delta(**{key: at_least_one(f"delta.{key}", m.delta[key]) for key in names(Delta)})
  if delta.num_value_heads % delta.num_key_heads:
    raise ConfigError(f"model.delta.num_key_heads: found {delta.num_key_heads}, which does not divide "
                      f"num_value_heads={delta.num_value_heads}.")
  _check_causal(m, "delta")
  return delta


def make_mamba(m: ConfigDict, pattern: tuple[str, ...]) -> Mamba | None:
  """Reads `model.mamba`; None: the pattern has no such layers."""
  if "mamba" not in pattern:
    return None
  mamba = Mamba(**as_they_are(Mamba, m.mamba))
  for key in ("num_heads", "head_dim", "num_groups", "state_dim", "conv_width", "chunk"):
    at_least_one(f"mamba.{key}", m.mamba[key])
  if mamba.min_step < 0:
    raise ConfigError(f"model.mamba.min_step: found {mamba.min_step}, allowed: 0 (there is no least step), or more.")
  if mamba.num_heads % mamba.num_groups:
    raise ConfigError(f"model.mamba.num_groups: found {mamba.num_groups}, which does not divide "
                      f"num_heads={mamba.num_heads}.")
  _check_causal(m, "mamba")
  return mamba


def _check_causal(m: ConfigDict, kind: str) -> None:
  if m.vision.tower != "none" and m.vision.attention != "causal":
    raise ConfigError(f"model.vision.attention: found {m.vision.attention!r}, but {kind} layers see nothing that comes "
                      "later. Allowed with them: 'causal'.")


def make_lora(c: ConfigDict) -> Lora | None:
  """Reads `model.lora`; None: there are no adapters."""
  if c.rank == 0:
    if c.trainable_token_indices:
      raise ConfigError("model.lora.trainable_token_indices is set, but model.lora.rank is 0, so that all parameters "
                        "are trained. Set model.lora.rank=1, and model.lora.targets=() to train these rows alone, or "
                        "leave the indices out.")
    return None
  at_least_one("lora.rank", c.rank)
  if not 0.0 <= c.dropout < 1.0 or c.alpha <= 0:
    raise ConfigError(
        f"model.lora: found dropout={c.dropout}, alpha={c.alpha}; allowed: 0 <= dropout < 1, alpha above 0."
    )
  scale = c.alpha / (math.sqrt(c.rank) if c.rslora else c.rank)
  tuples: dict[str, Any] = {key: tuple(c[key]) for key in ("targets", "modules_to_save", "trainable_token_indices")}
  return Lora(scale=scale, **as_they_are(Lora, c, but=("scale", *tuples)), **tuples)
