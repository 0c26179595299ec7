"""The shape of a vision tower and its projector: `model.vision` checked, its gaps filled, as a frozen dataclass."""

import dataclasses
import math
from typing import Any

from ml_collections import ConfigDict

from models.activations import GATED, UNGATED
from models.spec_checks import at_least_one, one_of
from trainer.errors import ConfigError

# The keys of `model.vision` that say what function is computed.
VISION_KEYS = tuple(f"vision.{key}" for key in (
    "tower", "image_size", "patch_size", "num_layers", "hidden_size", "intermediate_size", "num_heads", "activation",
    "norm_eps", "mean", "std", "feature_layer", "final_norm", "projector", "projector_activation", "projector_bias",
    "tokens_per_image", "feature_scale", "attention", "image_token", "window", "full_layers", "min_pixels",
    "max_pixels", "position_grid", "deepstack_layers", "longest_side", "split",
))
# Towers that see an image in tiles, as many as its size asks for, and the activations and norms of their layers.
NATIVE = {"qwen2_vl": (UNGATED, "layernorm"), "qwen2_5_vl": (GATED, "rmsnorm"),
          "qwen3_vl": (UNGATED, "layernorm")}
# Frames that a patch of theirs has: of a film it would be two of them, of an image it is the same twice.
FRAMES = 2
# The base of their rotary positions.
THETA = 10_000.0
TOWERS = ("none", "siglip", "clip", *NATIVE)
PROJECTORS = ("linear", "mlp", "pool", "merge", "shuffle")
ATTENTIONS = ("causal", "image", "prefix")
# Mean and standard deviation of red, green and blue that the towers were trained with.
PIXELS = {
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
PIXELS |= {**dict.fromkeys(NATIVE, PIXELS["clip"]), "qwen3_vl": PIXELS["siglip"]}


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
  window: int | None
  full_layers: tuple[int, ...]
  min_pixels: int
  max_pixels: int
  position_grid: int
  deepstack_layers: tuple[int, ...]
  longest_side: int
  split: bool

  def most_squares(self, seq_len: int) -> int:
    """Places of a batch's `images` that the largest image takes which a row has room for: 1, its tiles or squares."""
    most = 1
    if self.native:
      most = self.max_pixels // self.image_size**2
    elif self.split:
      most = math.ceil(self.longest_side / self.image_size) ** 2 + 1
    return max(1, min(most, seq_len // self.tokens_per_image))

  @property
  def native(self) -> bool:
    """Whether images keep their sizes, and an "image" of a batch is a tile of one (models/vit_native.py)."""
    return self.tower in NATIVE

  @property
  def merged(self) -> int:
    """How many patches a side of an image, or of a tile, has."""
    return self.image_size // self.patch_size

  @property
  def patches(self) -> int:
    """Patches of an image."""
    return self.merged**2

  @property
  def positions(self) -> int:
    """Patches of an image, with CLIP's class token."""
    return self.patches + (self.tower == "clip")

  @property
  def layers_run(self) -> int:
    """How many layers the features come from."""
    return self.num_layers + 1 + self.feature_layer


def make_vision(c: ConfigDict, num_layers: int, reasons: list[str]) -> Vision | None:
  """Reads and checks `model.vision`; None: a model of text alone.

  Args:
    c: the section.
    num_layers: of the model, without the tower.
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
  _check_native(c, num_layers)
  if c.longest_side and (c.longest_side < 0 or c.projector != "shuffle"):
    raise ConfigError(f"model.vision.longest_side: found {c.longest_side} with the projector {c.projector!r}; allowed: "
                      "0, or, with 'shuffle', pixels.")
  if c.split and not c.longest_side:
    raise ConfigError("model.vision.split: an image is cut into squares after its longer side was brought to "
                      "model.vision.longest_side, which is 0. Set both (with the projector 'shuffle'), or none.")
  plain = UNGATED if c.tower not in NATIVE else NATIVE[c.tower][0]
  activations: dict[str, Any] = {key: one_of(f"vision.{key}", c[key], tuple(allowed)) for key, allowed in (
      ("activation", plain), ("projector_activation", UNGATED))}
  copied = ("tower", "image_size", "patch_size", "num_layers", "hidden_size", "intermediate_size", "num_heads",
            "norm_eps", "feature_layer", "final_norm", "projector_bias", "feature_scale", "image_token",
            "window", "min_pixels", "max_pixels", "position_grid", "longest_side")
  return Vision(
      **{key: c[key] for key in copied}, **activations, mean=mean, std=std,
      projector=one_of("vision.projector", c.projector, PROJECTORS), tokens_per_image=_tokens_per_image(c, reasons),
      attention=one_of("vision.attention", c.attention, ATTENTIONS), full_layers=tuple(c.full_layers),
      deepstack_layers=tuple(c.deepstack_layers), split=bool(c.split))


def _check_native(c: ConfigDict, num_layers: int) -> None:
  """What goes with a tower that sees tiles, and with no other."""
  native, deep = c.tower in NATIVE, tuple(c.deepstack_layers)
  if (c.tower == "qwen3_vl") != (c.position_grid > 0):
    raise ConfigError(f"model.vision.position_grid: found {c.position_grid} with the tower {c.tower!r}; qwen3_vl has a "
                      "table of learned positions, whose side is 1 or more, and others have 0.")
  if deep and c.tower != "qwen3_vl" or sorted({*deep}) != [*deep] or any(not 0 <= i < c.num_layers for i in deep) or (
      len(deep) > num_layers):
    raise ConfigError(f"model.vision.deepstack_layers: found {deep} with the tower {c.tower!r}; allowed: () or, with "
                      f"qwen3_vl, up to {num_layers} of its layers from 0 to {c.num_layers - 1}, in this order.")
  if native != (c.projector == "merge"):
    raise ConfigError(f"model.vision.projector: found {c.projector!r} with the tower {c.tower!r}; 'merge' belongs to "
                      f"the towers {', '.join(NATIVE)}, and these have no other.")
  if not native:
    if c.window is not None or c.full_layers:
      raise ConfigError(f"model.vision: found window={c.window}, full_layers={tuple(c.full_layers)} with the tower "
                        f"{c.tower!r}; only {', '.join(NATIVE)} have windows. Leave both unset.")
    return
  if c.window is not None:
    at_least_one("vision.window", c.window)
  if wrong := [i for i in c.full_layers if not 0 <= i < c.num_layers]:
    raise ConfigError(f"model.vision.full_layers: found {wrong[0]}, allowed: layers from 0 to {c.num_layers - 1}.")
  if c.feature_layer != -1 or c.attention != "causal" or c.hidden_size // c.num_heads % 4:
    raise ConfigError(f"model.vision: found feature_layer={c.feature_layer}, attention={c.attention!r}, heads of "
                      f"{c.hidden_size // c.num_heads}; the tower {c.tower!r} has -1, 'causal', and a multiple of 4.")
  if not 1 <= c.min_pixels <= c.max_pixels or c.max_pixels < c.image_size**2:
    raise ConfigError(f"model.vision: found min_pixels={c.min_pixels}, max_pixels={c.max_pixels}; allowed: min_pixels "
                      f"from 1 to max_pixels, and that at least a tile, {c.image_size**2}.")


def _tokens_per_image(c: ConfigDict, reasons: list[str]) -> int:
  side = c.image_size // c.patch_size
  if c.tower in NATIVE:
    if c.tokens_per_image not in (None, 1):
      raise ConfigError(f"model.vision.tokens_per_image: found {c.tokens_per_image}; the tower {c.tower!r} gives one "
                        "token for each tile. Leave it unset.")
    return 1
  if c.projector not in ("pool", "shuffle"):
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
