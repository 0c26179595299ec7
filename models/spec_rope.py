"""Rotary positions in the config's `model` section: checked, and what is left out filled in."""

import math

from ml_collections import ConfigDict

from models.attention import rope
from models.attention.rope import Rope, RopeScaling
from models.spec_checks import TOKENWISE, at_least_one, one_of
from models.spec_parts import GlobalAttention
from models.spec_vision import NATIVE
from trainer.errors import ConfigError


def make_ropes(m: ConfigDict, pattern: tuple[str, ...], head_dim: int, of_global: GlobalAttention | None = None
               ) -> dict[str, Rope]:
  """How the layers of each type of the pattern rotate; those that do not are left out. `head_dim`: of what is rotated;
  `of_global`: of global layers, where they are of another form."""
  if m.positions != "rope":
    return {}
  thetas = dict.fromkeys((kind for kind in pattern if kind not in ("nope", "delta", "mamba", *TOKENWISE)), m.rope_theta)
  own_local = m.rope_local_theta is not None and "local" in pattern
  if own_local:
    thetas["local"] = m.rope_local_theta
  for kind, theta in thetas.items():
    if theta <= 0:
      raise ConfigError(f"model.rope_theta (of {kind} layers): found {theta}, allowed: any number above 0.")
  dims = _rotated_dims(m, head_dim)
  scaling, axes = _rope_scaling(m.rope_scaling, dims), _axes(m, dims)
  ropes = {kind: Rope(theta, dims, None if kind == "local" and own_local else scaling, axes)
           for kind, theta in thetas.items()}
  if of_global is not None:
    ropes["global"] = Rope(m.rope_theta, of_global.head_dim, turning=_turning_pairs(of_global))
  return ropes


def _turning_pairs(c: GlobalAttention) -> int:
  turning = int(c.rope_fraction * c.head_dim // 2)
  if c.head_dim % 2 or not 1 <= turning <= c.head_dim // 2:
    raise ConfigError(f"model.global_attention: found head_dim={c.head_dim}, of whose pairs the share rope_fraction="
                      f"{c.rope_fraction} turns: {turning}. Allowed: an even head_dim, and 1 to {c.head_dim // 2} "
                      "pairs.")
  return turning


def _axes(m: ConfigDict, dims: int) -> tuple[int, ...]:
  """`Rope.axes`."""
  sections = tuple(m.rope_sections)
  if not sections:
    if m.rope_sections_interleaved:
      raise ConfigError("model.rope_sections_interleaved is True, but model.rope_sections is (). Set both or neither.")
    return ()
  if len(sections) != 3 or min(sections) < 0 or sum(sections) != dims // 2:
    raise ConfigError(f"model.rope_sections: found {sections}, allowed: three numbers, of which the sum is the "
                      f"{dims // 2} pairs that are rotated.")
  if m.vision.tower not in NATIVE:
    raise ConfigError(f"model.rope_sections: found {sections}, but only a tower of {', '.join(NATIVE)} gives tokens a "
                      f"row and a column; model.vision.tower is {m.vision.tower!r}. Leave it ().")
  if m.rope_scaling.type in ("dynamic", "longrope"):
    raise ConfigError(f"model.rope_scaling.type: found {m.rope_scaling.type!r}, which depends on a text's length; that "
                      "is not defined with model.rope_sections. Use none, linear, llama3 or yarn.")
  if not m.rope_sections_interleaved:
    return tuple(axis for axis in range(3) for _ in range(sections[axis]))
  # Of rows and columns with more turns than there are, the last ones are left out, as in transformers.
  return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(dims // 2))


def _rope_scaling(c: ConfigDict, dims: int) -> RopeScaling | None:
  if one_of("rope_scaling.type", c.type, rope.SCALINGS) == "none":
    return None
  if c.factor < 1:
    raise ConfigError(f"model.rope_scaling.factor: found {c.factor}, allowed: 1 or more.")
  scaling = dict(type=c.type, factor=c.factor)
  if c.type != "linear":
    scaling["original_positions"] = at_least_one("rope_scaling.original_positions", c.original_positions)
  if c.type == "llama3":
    scaling.update(low_frequency_factor=c.low_frequency_factor, high_frequency_factor=c.high_frequency_factor)
    if not 0 < c.low_frequency_factor <= c.high_frequency_factor:
      raise ConfigError(
          f"model.rope_scaling: found low_frequency_factor={c.low_frequency_factor} and high_frequency_factor="
          f"{c.high_frequency_factor}; allowed: 0 < low_frequency_factor <= high_frequency_factor."
      )
  if c.type == "yarn":
    scaling.update(beta_fast=c.beta_fast, beta_slow=c.beta_slow, truncate=c.truncate)
    factor = 0.1 * math.log(c.factor) + 1.0 if c.attention_factor is None else c.attention_factor
    if factor <= 0 or c.beta_fast <= c.beta_slow:
      raise ConfigError(
          f"model.rope_scaling: found attention_factor={factor}, beta_fast={c.beta_fast}, beta_slow={c.beta_slow}; "
          "allowed: attention_factor above 0, beta_fast above beta_slow."
      )
    scaling["attention_factor"] = factor
  if c.type == "longrope":
    scaling.update(_longrope(c, dims))
  return RopeScaling(**scaling)


def _longrope(c: ConfigDict, dims: int) -> dict[str, object]:
  for key in ("short_factors", "long_factors"):
    if len(c[key]) != dims // 2 or not all(0 < factor < math.inf for factor in c[key]):
      raise ConfigError(f"model.rope_scaling.{key}: found {tuple(c[key])}, allowed: numbers above 0, one for each of "
                        f"the {dims // 2} pairs that are rotated.")
  factor = c.attention_factor
  if factor is None:
    if c.factor > 1 and c.original_positions < 2:
      raise ConfigError(f"model.rope_scaling.original_positions: found {c.original_positions}, allowed: 2 or more, for "
                        "attention_factor follows from its logarithm.")
    factor = math.sqrt(1 + math.log(c.factor) / math.log(c.original_positions)) if c.factor > 1 else 1.0
  if factor <= 0:
    raise ConfigError(f"model.rope_scaling.attention_factor: found {factor}, allowed: above 0.")
  return dict(attention_factor=factor, short_factors=tuple(c.short_factors), long_factors=tuple(c.long_factors))


def _rotated_dims(m: ConfigDict, head_dim: int) -> int:
  if not 0.0 < m.rope_fraction <= 1.0:
    raise ConfigError(
        f"model.rope_fraction: found {m.rope_fraction}, allowed: above 0, up to 1. For no RoPE set "
        'model.positions to "none".'
    )
  rotated = int(head_dim * m.rope_fraction)
  if rotated % 2 or rotated == 0:
    raise ConfigError(
        f"RoPE rotates pairs, but head_dim={head_dim} * rope_fraction={m.rope_fraction} rotates {rotated} "
        "dimensions. Set model.head_dim or model.rope_fraction so that this number is even and not 0."
    )
  return rotated
