"""The shape of a vision tower and its projector: `model.vision` checked, its gaps filled, as a frozen dataclass."""

import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict

from models import layers
from models.spec_checks import at_least_one, one_of
from trainer.errors import ConfigError

# The keys of `model.vision` that say what function is computed.
VISION_KEYS = tuple(f"vision.{key}" for key in (
    "tower", "image_size", "patch_size", "num_layers", "hidden_size", "intermediate_size", "num_heads", "activation",
    "norm_eps", "mean", "std", "feature_layer", "final_norm", "projector", "projector_activation", "projector_bias",
    "tokens_per_image", "feature_scale", "attention", "image_token",
))
TOWERS = ("none", "siglip", "clip")
PROJECTORS = ("linear", "mlp", "pool")
ATTENTIONS = ("causal", "image", "prefix")
# Mean and standard deviation of red, green and blue that the towers were trained with.
PIXELS = {
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


@dataclasses.dataclass(frozen=True)
class Vision:
  """What a tower and its projector are built from; the keys of `model.vision`."""

  tower: str
  image_size: int
  patch_size: int
  num_layers: int
  hidden_size: int
  intermediate_size: int
  num_heads: int
  activation: str
  norm_eps: float
  mean: tuple[float, ...]
  std: tuple[float, ...]
  feature_layer: int
  final_norm: bool
  projector: str
  projector_activation: str
  projector_bias: bool
  tokens_per_image: int
  feature_scale: float
  attention: str
  image_token: int | None

  @property
  def patches(self) -> int:
    """Patches of an image."""
    return (self.image_size // self.patch_size) ** 2

  @property
  def positions(self) -> int:
    """Patches of an image, with CLIP's class token."""
    return self.patches + (self.tower == "clip")

  @property
  def layers_run(self) -> int:
    """How many layers the features come from."""
    return self.num_layers + 1 + self.feature_layer


def make_vision(c: ConfigDict, reasons: list[str]) -> Vision | None:
  """Reads and checks `model.vision`; None: a model of text alone.

  Args:
    c: the section.
    reasons: sentences on what was derived are added to it.

  Raises:
    ConfigError: what was found and what is allowed.
  """
  if one_of("vision.tower", c.tower, TOWERS) == "none":
    return None
  for key in ("image_size", "patch_size", "num_layers", "hidden_size", "intermediate_size", "num_heads"):
    at_least_one(f"vision.{key}", c[key])
  if c.image_size % c.patch_size:
    raise ConfigError(f"model.vision.patch_size: found {c.patch_size}, which does not divide image_size="
                      f"{c.image_size}.")
  if c.hidden_size % c.num_heads:
    raise ConfigError(f"model.vision.num_heads: found {c.num_heads}, which does not divide hidden_size="
                      f"{c.hidden_size}.")
  if not -c.num_layers <= c.feature_layer <= -1:
    raise ConfigError(f"model.vision.feature_layer: found {c.feature_layer}, allowed: -1 (after the final norm) to "
                      f"{-c.num_layers} (what the first layer gives).")
  if c.image_token is not None and c.image_token < 0:
    raise ConfigError(f"model.vision.image_token: found {c.image_token}, allowed: the id of a token.")
  mean, std = (tuple(c[key]) or default for key, default in zip(("mean", "std"), PIXELS[c.tower], strict=True))
  if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
    raise ConfigError(f"model.vision: found mean={mean}, std={std}; allowed: three numbers each (red, green, blue), "
                      "those of std above 0, or () for the tower's own.")
  activations: dict[str, Any] = {key: one_of(f"vision.{key}", c[key], tuple(layers.UNGATED))
                 for key in ("activation", "projector_activation")}
  copied = ("tower", "image_size", "patch_size", "num_layers", "hidden_size", "intermediate_size", "num_heads",
            "norm_eps", "feature_layer", "final_norm", "projector_bias", "feature_scale", "image_token")
  return Vision(
      **{key: c[key] for key in copied}, **activations, mean=mean, std=std,
      projector=one_of("vision.projector", c.projector, PROJECTORS), tokens_per_image=_tokens_per_image(c, reasons),
      attention=one_of("vision.attention", c.attention, ATTENTIONS))


def _tokens_per_image(c: ConfigDict, reasons: list[str]) -> int:
  side = c.image_size // c.patch_size
  if c.projector != "pool":
    if c.tokens_per_image not in (None, side * side):
      raise ConfigError(f"model.vision.tokens_per_image: found {c.tokens_per_image}, but the projector "
                        f"{c.projector!r} gives one token for each of the {side * side} patches. Leave it unset, or "
                        "set model.vision.projector='pool'.")
    if c.tokens_per_image is None:
      reasons.append(f"model.vision.tokens_per_image = {side * side}: (image_size / patch_size) ** 2")
    return side * side
  tokens = at_least_one("vision.tokens_per_image", c.tokens_per_image)
  if math.isqrt(tokens) ** 2 != tokens or side % math.isqrt(tokens):
    raise ConfigError(f"model.vision.tokens_per_image: found {tokens}; allowed for {side} × {side} patches: the "
                      f"squares of {', '.join(str(n) for n in range(1, side + 1) if side % n == 0)}.")
  return tokens
