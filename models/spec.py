"""The Transformer's shape: the config's `model` section checked, its gaps filled, as a frozen dataclass."""

import dataclasses
import difflib

from ml_collections import ConfigDict

from models import attention, layers
from trainer.config import ConfigError

LAYER_TYPES = ("global", "local")
POSITIONS = ("rope", "learned", "none")
NORM_POSITIONS = ("pre", "post", "sandwich")


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
  activation: str
  positions: str
  max_positions: int | None
  # Base frequency per layer type; empty unless positions == "rope".
  rope_thetas: dict[str, float]
  rope_fraction: float
  tie_embeddings: bool
  scale_embeddings: bool
  qkv_bias: bool
  attention_out_bias: bool
  mlp_bias: bool
  qk_norm: bool
  attention_scale: float
  attention_logit_cap: float | None
  final_logit_cap: float | None
  window: int | None
  layer_pattern: tuple[str, ...]
  dropout: float
  init_std: float | None
  scan_layers: bool
  attention: str
  attention_block: int
  vocab_chunk: int
  # Sentences on what was derived from what.
  reasons: tuple[str, ...]

  def window_of(self, layer: int) -> int | None:
    """The window of that layer; None: it sees all before it."""
    return self.window if self.layer_type(layer) == "local" else None

  def layer_type(self, layer: int) -> str:
    """`local` or `global`."""
    return self.layer_pattern[layer % len(self.layer_pattern)]


def make_spec(m: ConfigDict) -> Spec:
  """Reads and checks the config's `model` section; raises ConfigError."""
  reasons = []
  for key in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_chunk"):
    _at_least_one(key, m[key])
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
  head_dim = m.head_dim
  if head_dim is None:
    if m.hidden_size % m.num_heads:
      raise ConfigError(
          f"model.head_dim is not set and hidden_size={m.hidden_size} is not a multiple of "
          f"num_heads={m.num_heads}. Set model.head_dim, or change one of them."
      )
    head_dim = m.hidden_size // m.num_heads
    reasons.append(f"model.head_dim = {head_dim}: hidden_size / num_heads")
  _at_least_one("head_dim", head_dim)
  attention_scale = m.attention_scale
  if attention_scale is None:
    attention_scale = head_dim**-0.5
    reasons.append(f"model.attention_scale = {attention_scale:.4g}: head_dim ** -0.5")
  pattern, window = _layer_pattern(m)
  max_positions = m.max_positions
  if _one_of("positions", m.positions, POSITIONS) == "learned" and max_positions is None:
    raise ConfigError(
        "model.positions is 'learned', which needs model.max_positions: the longest row, e.g. the value of "
        "seq_len."
    )
  if not 0.0 <= m.dropout < 1.0:
    raise ConfigError(f"model.dropout: found {m.dropout}, allowed: 0 <= dropout < 1.")
  impl = _one_of("attention", m.attention, attention.IMPLEMENTATIONS)
  return Spec(
      num_layers=m.num_layers,
      hidden_size=m.hidden_size,
      intermediate_size=m.intermediate_size,
      num_heads=m.num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=head_dim,
      norm=_one_of("norm", m.norm, layers.NORMS),
      norm_eps=m.norm_eps,
      norm_scale_plus_one=m.norm_scale_plus_one,
      norm_bias=m.norm_bias,
      norm_position=_one_of("norm_position", m.norm_position, NORM_POSITIONS),
      activation=_one_of("activation", m.activation, layers.ACTIVATIONS),
      positions=m.positions,
      max_positions=max_positions,
      rope_thetas=_rope_thetas(m, pattern),
      rope_fraction=_rope_fraction(m, head_dim),
      tie_embeddings=m.tie_embeddings,
      scale_embeddings=m.scale_embeddings,
      qkv_bias=m.qkv_bias,
      attention_out_bias=m.attention_out_bias,
      mlp_bias=m.mlp_bias,
      qk_norm=m.qk_norm,
      attention_scale=attention_scale,
      attention_logit_cap=_cap("attention_logit_cap", m.attention_logit_cap),
      final_logit_cap=_cap("final_logit_cap", m.final_logit_cap),
      window=window,
      layer_pattern=pattern,
      dropout=m.dropout,
      init_std=m.init_std,
      scan_layers=m.scan_layers,
      attention=impl,
      attention_block=_at_least_one("attention_block", m.attention_block),
      vocab_chunk=m.vocab_chunk,
      reasons=tuple(reasons),
  )


def padded_vocab_size(m: ConfigDict, num_real_vocab: int, reasons: list[str]) -> int:
  """The vocabulary with padding, for a tokenizer of `num_real_vocab` entries; appends to `reasons`."""
  if m.vocab_size is None:
    multiple = _at_least_one("vocab_multiple", m.vocab_multiple)
    size = -(-num_real_vocab // multiple) * multiple
    reasons.append(f"model.vocab_size = {size}: the tokenizer's {num_real_vocab}, up to a multiple of {multiple}")
    return size
  if m.vocab_size < num_real_vocab:
    raise ConfigError(
        f"model.vocab_size: found {m.vocab_size}, but the tokenizer has {num_real_vocab} entries. Allowed: "
        f"{num_real_vocab} or more, or leave it unset to have it derived."
    )
  return m.vocab_size


def _layer_pattern(m: ConfigDict) -> tuple[tuple[str, ...], int | None]:
  """The pattern, shortened to one entry where all layers are alike, and the window if there is one."""
  pattern = tuple(m.layer_pattern)
  if not pattern:
    raise ConfigError('model.layer_pattern is empty; e.g. ("global",) or ("local", "global").')
  for kind in pattern:
    _one_of("layer_pattern", kind, LAYER_TYPES)
  if "local" not in pattern:
    return ("global",), None
  if m.window is None:
    raise ConfigError(
        f"model.layer_pattern is {pattern}, and local layers need model.window: how many tokens they see."
    )
  _at_least_one("window", m.window)
  return (("local",) if "global" not in pattern else pattern), m.window


def _rope_thetas(m: ConfigDict, pattern: tuple[str, ...]) -> dict[str, float]:
  if m.positions != "rope":
    return {}
  thetas = {"global": m.rope_theta} if "global" in pattern else {}
  if "local" in pattern:
    thetas["local"] = m.rope_theta if m.rope_local_theta is None else m.rope_local_theta
  for kind, theta in thetas.items():
    if theta <= 0:
      raise ConfigError(f"model.rope_theta (of {kind} layers): found {theta}, allowed: any number above 0.")
  return thetas


def _rope_fraction(m: ConfigDict, head_dim: int) -> float:
  if m.positions != "rope":
    return 0.0
  if not 0.0 < m.rope_fraction <= 1.0:
    raise ConfigError(
        f"model.rope_fraction: found {m.rope_fraction}, allowed: above 0, up to 1. For no RoPE set "
        'model.positions to "none".'
    )
  rotated = layers.rotated_dims(head_dim, m.rope_fraction)
  if rotated % 2 or rotated == 0:
    raise ConfigError(
        f"RoPE rotates pairs, but head_dim={head_dim} * rope_fraction={m.rope_fraction} rotates {rotated} "
        "dimensions. Set model.head_dim or model.rope_fraction so that this number is even and not 0."
    )
  return m.rope_fraction


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> str:
  if value not in allowed:
    near = difflib.get_close_matches(str(value), allowed, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"model.{key}: found {value!r}, allowed: {', '.join(allowed)}.{hint}")
  return value


def _at_least_one(key: str, value: int) -> int:
  if value is None or value < 1:
    raise ConfigError(f"model.{key}: found {value}, allowed: 1 or more.")
  return value


def _cap(key: str, value: float | None) -> float | None:
  if value is not None and value <= 0:
    raise ConfigError(f"model.{key}: found {value}, allowed: a number above 0, or unset for no cap.")
  return value
