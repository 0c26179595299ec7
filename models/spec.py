"""The Transformer's shape: the config's `model` section checked, its gaps filled, as a frozen dataclass."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from models import activations, layers
from models.attention import dispatch as attention
from models.attention.rope import Rope, RopeScaling
from models.spec_checks import TOKENWISE, as_they_are, at_least_one, cap, check_branches, names, one_of
from models.spec_head import Head, make_head
from models.spec_mtp import make_mtp_layers
from models.spec_parts import (
  Delta,
  GlobalAttention,
  Latent,
  Lora,
  Mamba,
  Moe,
  Temperature,
  make_delta,
  make_global_attention,
  make_latent,
  make_layer_pattern,
  make_lora,
  make_mamba,
  make_moe,
  make_query_temperature,
  make_temperature,
)
from models.spec_rope import make_ropes
from models.spec_streams import AltUp, make_activation_sparsity, make_altup, make_kv_shared_layers, make_per_layer_size
from models.spec_vision import VISION_KEYS, Vision, make_vision
from trainer.errors import ConfigError

# Entries of the vocabulary that logits are made of at a time where the config does not say it: on CPU, and elsewhere.
VOCAB_CHUNK, VOCAB_CHUNK_ELSEWHERE = 2048, 8192
# Types of layers that have a state in the place of keys and values: their mixers have the same names.
RECURRENT = ("delta", "mamba")
# Parts of a block that a layer may lack: it has one of MIXERS, and an MLP, or experts, or both; or one of
# these alone. Mixers with queries alone are attention to keys and values of an earlier layer; an indexer chooses keys
# for its layer's and for those of later layers without one.
MIXERS = ("attn", "global_attn", "query_attn", "global_query_attn", *RECURRENT)
PARTS = frozenset({*MIXERS, "indexer", "mlp", "wide_mlp", "moe"})
POSITIONS, HALVES = ("rope", "learned", "none"), "halves"  # the last of a tower: each half of a head turns by itself
NORM_POSITIONS = ("pre", "post", "sandwich")
QK_NORMS = ("head", "each_head", "all", "unscaled", "rotated")


@dataclasses.dataclass(frozen=True)
class Spec:
  """What `Transformer` is built from; the config's keys of the same names say what each means."""

  num_layers: int
  hidden_size: int
  intermediate_size: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  norm: str
  norm_eps: float
  norm_scale_plus_one: bool
  norm_bias: bool
  norm_position: str
  parallel_blocks: bool
  activation: str
  positions: str
  max_positions: int | None
  # The rotation per layer type; empty unless positions == "rope".
  ropes: dict[str, Rope]
  rope_interleaved: bool
  tie_embeddings: bool
  head: Head
  scale_embeddings: bool
  embedding_scale: float
  residual_scale: float
  logit_scale: float
  layer_scale: bool
  qkv_bias: bool
  attention_out_bias: bool
  mlp_bias: bool
  qk_norm: bool
  qk_norm_over: str
  value_norm: bool
  attention_scale: float
  attention_logit_cap: float | None
  attention_gate: bool
  attention_sinks: bool
  final_logit_cap: float | None
  window: int | None
  attention_chunk: int | None
  layer_pattern: tuple[str, ...]
  # None: queries of layers that do not rotate are as others.
  nope_temperature: Temperature | None
  query_temperature: Temperature | None
  # How many of the last layers have no keys and values of their own.
  kv_shared_layers: int
  # Modules that predict tokens further ahead, behind the layers (models/mtp.py).
  mtp_layers: int
  double_wide_mlp: bool
  # Size of each layer's embedding of a token; 0: layers have none.
  per_layer_size: int
  # None: all tokens have one of their own.
  per_layer_vocab: int | None
  # None: there is one stream.
  altup: AltUp | None
  laurel_rank: int
  # Of each layer; empty: none has any.
  activation_sparsity: tuple[float, ...]
  # None: layers of type global are like the others.
  global_attention: GlobalAttention | None
  # None: there are no layers of type delta.
  delta: Delta | None
  # None: there are no layers of type mamba.
  mamba: Mamba | None
  # None: attention has keys and values for each token.
  latent: Latent | None
  moe: Moe | None
  lora: Lora | None
  # None: a model of text alone.
  vision: Vision | None
  neftune_alpha: float
  dropout: float
  init_std: float | None
  scan_layers: bool
  attention: str
  attention_block: int
  vocab_chunk: int
  # Sentences on what was derived from what.
  reasons: tuple[str, ...]

  @property
  def max_length(self) -> int | None:
    """The longest text that can be generated token by token; None: no bound.

    `dynamic` and `longrope` scaling turn every token of a text by an angle that depends on the text's length once it is
    beyond the original one, so that what has been computed for the tokens before would change with a new one.
    """
    bounds = [] if self.max_positions is None or self.positions != "learned" else [self.max_positions]
    scalings = (rope.scaling for rope in self.ropes.values() if rope.scaling is not None)
    bounds += [scaling.original_positions for scaling in scalings if scaling.by_length]
    return min(bounds, default=None)

  @property
  def no_prefix_sharing(self) -> str | None:
    """Why completions of one prompt cannot share one copy of it in a row; None: they can."""
    if kinds := self._recurrent_kinds:
      return f"the state of its {kinds} layers is that of one text"
    if "local" in self.layer_pattern:
      return "the window of its local layers counts places of the row"
    if "chunked" in self.layer_pattern:
      return "the chunks of its layers are parts of one text"
    if self.moe is not None:
      return "the load of its experts counts tokens"
    if self.vision is not None:
      return "it sees images"
    if any(rope.scaling is not None and rope.scaling.by_length for rope in self.ropes.values()):
      return "its RoPE scaling depends on the length of each text"
    return None

  @property
  def no_split_length(self) -> str | None:
    """Why the length of rows cannot be split over devices; None: it can."""
    kinds = self._recurrent_kinds
    if self.latent is not None and self.latent.index_topk:
      return "its indexers choose among all keys of a row"
    return f"its {kinds} layers go through each row from its begin to its end" if kinds else None

  @property
  def _recurrent_kinds(self) -> str:
    return " and ".join(kind for kind in RECURRENT if kind in self.layer_pattern)

  def layers_with(self, part: str) -> list[int]:
    """Numbers of the layers that have that part of a block: one of PARTS; any other: all."""
    return [i for i in range(self.num_layers) if part not in PARTS or part in self.parts_of(i)]

  def parts_of(self, layer: int) -> frozenset[str]:
    """Which of PARTS that layer has."""
    mixer = self.mixer_of(layer)
    if self.one_branch:
      return frozenset({mixer})
    of_experts = {"moe"} if self.moe is not None and self.moe.in_layer(layer) else set()
    mlp = "wide_mlp" if self.double_wide_mlp and self.kv_source(layer) is not None else "mlp"
    chooses = self.latent is not None and self.latent.index_topk and layer not in self.latent.index_shared_layers
    return frozenset({mixer, *of_experts} | ({mlp} if not of_experts or self.moe.beside_mlp else set()) |
                     ({"indexer"} if chooses else set()))

  def mixer_of(self, layer: int) -> str:
    """Which of MIXERS that layer has; mlp or moe: none, it is that."""
    kind = self.layer_type(layer)
    if kind in (*RECURRENT, *TOKENWISE):
      return kind
    own = "global_" if kind == "global" and self.global_attention else ""
    return own + ("attn" if self.kv_source(layer) is None else "query_attn")

  def kv_source(self, layer: int) -> int | None:
    """Whose keys and values that layer uses; None: it has its own."""
    first = self.num_layers - self.kv_shared_layers
    return None if layer < first else max(i for i in range(first) if self.layer_type(i) == self.layer_type(layer))

  def heads_of(self, mixer: str) -> tuple[int, int]:
    """(key/value heads, size of a head) of that kind of attention."""
    own = self.global_attention if mixer.startswith("global_") else None
    return (self.num_kv_heads, self.head_dim) if own is None else (own.num_kv_heads, own.head_dim)

  @property
  def one_branch(self) -> bool:
    """Whether each layer is a mixer or an MLP, or experts, and not one and then the other."""
    return any(kind in TOKENWISE for kind in self.layer_pattern)

  @property
  def first_layers(self) -> int:
    """How many layers, whole periods of the pattern, those are in which some differ from the same in later periods, in
    their parts or in what is added to what they give."""
    dense, period = 0 if self.moe is None else self.moe.dense_layers, len(self.layer_pattern)
    return min(self.num_layers, -(-max(dense, self.deepstack) // period) * period)

  @property
  def runs(self) -> list[tuple[int, int]]:
    """(first layer, the one after the last) of stretches of the depth in which each period has what the first one has,
    unless the last is cut short."""
    changes = {i for i in range(1, self.num_layers) if self.sparsity_of(i) != self.sparsity_of(i - 1)}
    ends = sorted({0, self.first_layers, max(self.first_layers, self.num_layers - self.kv_shared_layers),
                   self.num_layers, *changes})
    return list(zip(ends, ends[1:], strict=False))

  @property
  def deepstack(self) -> int:
    """To how many layers' outputs, from the first on, features of images are added."""
    return 0 if self.vision is None else len(self.vision.deepstack_layers)

  def window_of(self, layer: int) -> int | None:
    """How many tokens one of that layer sees at most; None: all before it."""
    return {"local": self.window, "chunked": self.attention_chunk}.get(self.layer_type(layer))

  def seen_of(self, layer: int) -> int | None:
    """As `window_of`, of what an indexer leaves, too."""
    return (self.latent.index_topk or None) if self.latent is not None else self.window_of(layer)

  def sparsity_of(self, layer: int) -> float:
    """Which share of the gates of that layer's MLP is 0."""
    return self.activation_sparsity[layer] if self.activation_sparsity else 0.0

  def layer_type(self, layer: int) -> str:
    """One of `spec_parts.LAYER_TYPES`."""
    return self.layer_pattern[layer % len(self.layer_pattern)]

  def recurrent(self, layer: int) -> Delta | Mamba | None:
    """The sizes of that layer's state; None: it has keys and values."""
    kind = self.layer_type(layer)
    return self.delta if kind == "delta" else self.mamba if kind == "mamba" else None


# Sections of `model` beside `vision`, and what of all this says how the model is trained, or is computed, alone.
_SECTIONS = {"rope_scaling": RopeScaling, "nope_temperature": Temperature, "query_temperature": Temperature,
             "altup": AltUp, "global_attention": GlobalAttention, "delta": Delta, "mamba": Mamba, "latent": Latent,
             "moe": Moe}
_OF_TRAINING = {"ropes", "lora", "vision", "neftune_alpha", "dropout", "init_std", "scan_layers", "attention",
                "attention_block", "vocab_chunk", "reasons", "delta.chunk", "mamba.chunk", "moe.choice_bias_rate",
                "moe.balance_loss", "moe.z_loss"}
# The keys of the config's `model` section that say what function is computed; a checkpoint's config.json has them.
ARCHITECTURE_KEYS = (
    "vocab_size", "num_labels", "rope_theta", "rope_local_theta", "rope_fraction", "rope_sections",
    "rope_sections_interleaved",
    *(key for key in (*names(Spec), *(f"{section}.{key}" for section, its in _SECTIONS.items() for key in names(its)))
      if key not in _OF_TRAINING and key not in _SECTIONS),
    *VISION_KEYS,
)


def make_spec(m: ConfigDict) -> Spec:
  """Reads and checks the config's `model` section; raises ConfigError."""
  reasons: list[str] = []
  for key in ("num_layers", "hidden_size", "intermediate_size", "num_heads"):
    at_least_one(key, m[key])
  num_kv_heads = m.num_kv_heads
  if num_kv_heads is None:
    num_kv_heads = m.num_heads
    reasons.append(f"model.num_kv_heads = {num_kv_heads}: one per query head (num_heads)")
  if num_kv_heads < 1 or m.num_heads % num_kv_heads:
    fitting = [g for g in range(1, m.num_heads + 1) if m.num_heads % g == 0]
    raise ConfigError(
        f"model.num_kv_heads: found {num_kv_heads}, which does not divide num_heads={m.num_heads}. "
        f"Allowed: {fitting}."
    )
  pattern = make_layer_pattern(m)
  latent, of_global = make_latent(m, pattern), make_global_attention(m, pattern, num_kv_heads)
  head_dim = m.head_dim if latent is None else latent.head_dim
  if head_dim is None:
    if m.hidden_size % m.num_heads:
      raise ConfigError(
          f"model.head_dim is not set and hidden_size={m.hidden_size} is not a multiple of "
          f"num_heads={m.num_heads}. Set model.head_dim, or change one of them."
      )
    head_dim = m.hidden_size // m.num_heads
    reasons.append(f"model.head_dim = {head_dim}: hidden_size / num_heads")
  at_least_one("head_dim", head_dim)
  attention_scale = m.attention_scale
  if attention_scale is None:
    if of_global is not None and of_global.head_dim != head_dim:
      raise ConfigError(f"model.attention_scale is not set, and heads of global layers (global_attention.head_dim="
                        f"{of_global.head_dim}) are of another size than the others ({head_dim}). Set it, for all.")
    attention_scale = head_dim**-0.5
    reasons.append(f"model.attention_scale = {attention_scale:.4g}: head_dim ** -0.5")
  if one_of("positions", m.positions, POSITIONS) == "learned" and m.max_positions is None:
    raise ConfigError(
        "model.positions is 'learned', which needs model.max_positions: the longest row, e.g. the value of "
        "seq_len."
    )
  if m.parallel_blocks and m.norm_position != "pre":
    raise ConfigError(f"model.parallel_blocks: attention and MLP share the norm before them; found norm_position="
                      f"{m.norm_position!r}, allowed: 'pre'.")
  check_branches(m, pattern)
  if m.neftune_alpha < 0:
    raise ConfigError(f"model.neftune_alpha: found {m.neftune_alpha}, allowed: 0 or more.")
  if not 0.0 <= m.dropout < 1.0:
    raise ConfigError(f"model.dropout: found {m.dropout}, allowed: 0 <= dropout < 1.")
  checked: dict[str, Any] = dict(
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
      norm=one_of("norm", m.norm, layers.NORMS),
      norm_position=one_of("norm_position", m.norm_position, NORM_POSITIONS),
      activation=one_of("activation", m.activation, activations.ACTIVATIONS),
      ropes=make_ropes(m, pattern, head_dim if latent is None else latent.rope_dim, of_global),
      head=make_head(m),
      qk_norm_over=one_of("qk_norm_over", m.qk_norm_over, QK_NORMS),
      attention_scale=attention_scale,
      attention_logit_cap=cap("attention_logit_cap", m.attention_logit_cap),
      final_logit_cap=cap("final_logit_cap", m.final_logit_cap),
      window=m.window if "local" in pattern else None,
      attention_chunk=m.attention_chunk if "chunked" in pattern else None,
      layer_pattern=pattern,
      nope_temperature=make_temperature(m, pattern),
      query_temperature=make_query_temperature(m),
      kv_shared_layers=make_kv_shared_layers(m, pattern),
      mtp_layers=make_mtp_layers(m, pattern),
      per_layer_size=make_per_layer_size(m),
      altup=make_altup(m),
      activation_sparsity=make_activation_sparsity(m),
      global_attention=of_global,
      delta=make_delta(m, pattern),
      mamba=make_mamba(m, pattern),
      latent=latent,
      moe=make_moe(m, reasons),
      lora=make_lora(m.lora),
      vision=make_vision(m.vision, m.num_layers, reasons),
      attention=one_of("attention", m.attention, attention.IMPLEMENTATIONS),
      attention_block=at_least_one("attention_block", m.attention_block),
      vocab_chunk=VOCAB_CHUNK if m.vocab_chunk is None else at_least_one("vocab_chunk", m.vocab_chunk),
      reasons=tuple(reasons),
  )
  return Spec(**as_they_are(Spec, m, but=checked), **checked)
