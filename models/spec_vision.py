"""The shape of a vision tower and its projector: `model.vision` checked, its gaps filled, as a frozen dataclass."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from models.activations import GATED, UNGATED
from models.spec_checks import as_they_are, at_least_one, names, one_of
from models.spec_video import KEYS as VIDEO_KEYS
from models.spec_video import MOST_TOKENS, SAMPLING, Video, make_video
from trainer.errors import ConfigError

# The base of rotary positions in Qwen's towers.
THETA = 10_000.0
# Frames that a patch of theirs has: of a video it is two of them, of an image it is the same twice.
FRAMES = 2


class Native(NamedTuple):
  """What a tower has that sees an image in tiles, as many as its size asks for.

  activations, norm: of its layers; learned: tables of positions; theta: the base of its rotary positions; frames: of a
  patch; attentions: who sees whom in the text.
  """

  activations: Collection[str]
  norm: str
  learned: bool = False
  projectors: tuple[str, ...] = ("merge",)
  theta: float = THETA
  frames: int = FRAMES
  attentions: tuple[str, ...] = ("causal",)


NATIVE = {"qwen2_vl": Native(UNGATED, "layernorm"), "qwen2_5_vl": Native(GATED, "rmsnorm"),
          "qwen3_vl": Native(UNGATED, "layernorm", learned=True),
          "gemma4": Native(GATED, "rmsnorm", True, ("mean",), 100.0, 1, ("causal", "local_image")),
          "pixtral": Native(GATED, "rmsnorm", False, ("merge_mlp", "mlp"), frames=1)}
TOWERS = ("none", "siglip", "clip", *NATIVE)
# Those that towers have which see tiles, one feature for each, and no others.
OF_TILES = tuple(dict.fromkeys(native.projectors[0] for native in NATIVE.values()))
PROJECTORS = ("linear", "mlp", "pool", "shuffle", *OF_TILES)
# The defaults of model.vision.min_pixels and max_pixels.
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
ATTENTIONS = ("causal", "image", "local_image", "prefix")
# Those in which tokens of an image see one another.
OF_IMAGES = ("image", "local_image")
# Where linear layers clip: the numbers of each, and how far these are from 0 where there is no bound. In a parameter,
# which is always finite, that stands for infinity: in bfloat16, too, and so that squares are finite.
BOUNDS, UNBOUNDED = ("input_min", "input_max", "output_min", "output_max"), 2.0**60
# Mean and standard deviation of red, green and blue that the towers were trained with.
PIXELS = {
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
PIXELS |= {**dict.fromkeys(NATIVE, PIXELS["clip"]), **dict.fromkeys(("qwen3_vl", "gemma4"), PIXELS["siglip"])}


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
  clipped: bool
  standardized: bool
  video: Video | None

  def most_squares(self, seq_len: int) -> int:
    """Places of a batch's `images` that the largest image takes which a row has room for: 1, its tiles or squares."""
    most = self.most_tiles if self.native else 1
    if self.split:
      most = math.ceil(self.longest_side / self.image_size) ** 2 + 1
    return max(1, min(most, seq_len // self.tokens_per_image))

  @property
  def most_tiles(self) -> int:
    """Tiles of the largest image, of a tower that sees tiles."""
    if self.tower == "pixtral":
      return math.ceil(self.longest_side / self.image_size) ** 2
    return self.max_pixels // self.image_size**2

  @property
  def most_together(self) -> int:
    """Tiles whose patches see one another: of the largest image, or of the largest frames of a video."""
    if self.video is None:
      return self.most_tiles
    return max(self.most_tiles, self.video.largest_frame // self.image_size**2)

  @property
  def native(self) -> bool:
    """Whether images keep their sizes, and an "image" of a batch is a tile of one (models/vit_native.py)."""
    return self.tower in NATIVE

  @property
  def frames(self) -> int:
    """Frames of a patch."""
    return NATIVE[self.tower].frames if self.native else 1

  @property
  def merged(self) -> int:
    """How many patches a side of an image, or of a tile, has. Pixels at the end that make no whole patch are seen by
    none, as in a convolution (SigLIP's 384 pixels in patches of 14)."""
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


# The keys of `model.vision` that say what function is computed.
VISION_KEYS = (*(f"vision.{key}" for key in names(Vision) if key != "video"),
               *(f"vision.video.{key}" for key in (*VIDEO_KEYS, *SAMPLING)))


def make_vision(c: ConfigDict, num_layers: int, reasons: list[str]) -> Vision | None:
  """Reads and checks `model.vision`; None: a model of text alone.

  Args:
    num_layers: of the model, without the tower.
    reasons: sentences on what was derived are added to it.
  """
  if one_of("vision.tower", c.tower, TOWERS) == "none":
    return None
  for key in ("image_size", "patch_size", "num_layers", "hidden_size", "intermediate_size", "num_heads"):
    at_least_one(f"vision.{key}", c[key])
  if c.patch_size > c.image_size or c.tower in NATIVE and c.image_size % c.patch_size:
    raise ConfigError(f"model.vision.patch_size: found {c.patch_size}; allowed: at most image_size={c.image_size}, and "
                      "where that is a tile's, a divisor of it.")
  if left := c.image_size % c.patch_size:
    reasons.append(f"model.vision: the last {left} of {c.image_size} pixels of a row and of a column are in no patch "
                   f"of {c.patch_size}, and not seen")
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
  if c.longest_side < 0 or c.longest_side and c.projector != "shuffle" and c.tower != "pixtral":
    raise ConfigError(f"model.vision.longest_side: found {c.longest_side} with the projector {c.projector!r}; allowed: "
                      "0, or, with 'shuffle' and the tower pixtral, pixels.")
  if c.split and (not c.longest_side or c.tower in NATIVE):
    raise ConfigError("model.vision.split: an image is cut into squares after its longer side was brought to "
                      "model.vision.longest_side, which is 0. Set both (with the projector 'shuffle'), or none.")
  plain = UNGATED if c.tower not in NATIVE else NATIVE[c.tower].activations
  activations: dict[str, Any] = {key: one_of(f"vision.{key}", c[key], tuple(allowed)) for key, allowed in (
      ("activation", plain), ("projector_activation", UNGATED))}
  checked: dict[str, Any] = dict(
      **activations, mean=mean, std=std, projector=one_of("vision.projector", c.projector, PROJECTORS),
      tokens_per_image=_tokens_per_image(c, reasons), attention=one_of("vision.attention", c.attention, ATTENTIONS),
      full_layers=tuple(c.full_layers), deepstack_layers=tuple(c.deepstack_layers), split=bool(c.split),
      video=make_video(c))
  return Vision(**as_they_are(Vision, c, but=checked), **checked)


def _check_native(c: ConfigDict, num_layers: int) -> None:
  """What goes with a tower that sees tiles, and with no other."""
  native, deep = NATIVE.get(c.tower), tuple(c.deepstack_layers)
  if (native is not None and native.learned) != (c.position_grid > 0):
    learned = ", ".join(tower for tower, its in NATIVE.items() if its.learned)
    raise ConfigError(f"model.vision.position_grid: found {c.position_grid} with the tower {c.tower!r}; {learned} have "
                      "learned positions, as many on a side, 1 or more, and others have 0.")
  if deep and c.tower != "qwen3_vl" or sorted({*deep}) != [*deep] or any(not 0 <= i < c.num_layers for i in deep) or (
      len(deep) > num_layers):
    raise ConfigError(f"model.vision.deepstack_layers: found {deep} with the tower {c.tower!r}; allowed: () or, with "
                      f"qwen3_vl, up to {num_layers} of its layers from 0 to {c.num_layers - 1}, in this order.")
  if (c.projector in OF_TILES if native is None else c.projector not in native.projectors):
    its = [f"{tower} has {' or '.join(map(repr, its.projectors))}" for tower, its in NATIVE.items()]
    raise ConfigError(f"model.vision.projector: found {c.projector!r} with the tower {c.tower!r}; {', '.join(its)}, "
                      f"and no other tower has {', '.join(map(repr, OF_TILES))}.")
  if c.tower == "pixtral" and c.projector == "mlp" and c.image_size != c.patch_size:
    raise ConfigError(f"model.vision.image_size: found {c.image_size}; with the projector 'mlp' each patch is a token: "
                      f"{c.patch_size}, as patch_size. Or use the projector 'merge_mlp'.")
  if c.tower != "gemma4" and (c.clipped or c.standardized):
    raise ConfigError(f"model.vision: found clipped={c.clipped}, standardized={c.standardized} with the tower "
                      f"{c.tower!r}; only gemma4 has either. Leave both False.")
  if native is None or native.frames == 1:
    if c.window is not None or c.full_layers:
      raise ConfigError(f"model.vision: found window={c.window}, full_layers={tuple(c.full_layers)} with the tower "
                        f"{c.tower!r}; only those of Qwen have windows. Leave both unset.")
  if native is None:
    return
  if c.window is not None:
    at_least_one("vision.window", c.window)
  if wrong := [i for i in c.full_layers if not 0 <= i < c.num_layers]:
    raise ConfigError(f"model.vision.full_layers: found {wrong[0]}, allowed: layers from 0 to {c.num_layers - 1}.")
  if c.feature_layer != -1 or c.attention not in native.attentions or c.hidden_size // c.num_heads % 4:
    raise ConfigError(f"model.vision: found feature_layer={c.feature_layer}, attention={c.attention!r}, heads of "
                      f"{c.hidden_size // c.num_heads}; the tower {c.tower!r} has -1, "
                      f"{' or '.join(map(repr, native.attentions))}, and a multiple of 4.")
  if c.tower == "gemma4":
    _check_gemma4(c)
  elif c.tower == "pixtral":
    if c.longest_side < 1 or (c.min_pixels, c.max_pixels) != (MIN_PIXELS, MAX_PIXELS):
      raise ConfigError(f"model.vision: found longest_side={c.longest_side}, min_pixels={c.min_pixels}, max_pixels="
                        f"{c.max_pixels}; with the tower pixtral the first says how large images are, 1540 say, and "
                        f"the others stay {MIN_PIXELS} and {MAX_PIXELS}.")
  elif not 1 <= c.min_pixels <= c.max_pixels or c.max_pixels < c.image_size**2:
    raise ConfigError(f"model.vision: found min_pixels={c.min_pixels}, max_pixels={c.max_pixels}; allowed: min_pixels "
                      f"from 1 to max_pixels, and that at least a tile, {c.image_size**2}.")


def _check_gemma4(c: ConfigDict) -> None:
  """What its image processor and its tables of positions allow: images are made as large as max_pixels lets them."""
  tile, own = c.image_size**2, PIXELS[c.tower]
  most = [n * tile for n in MOST_TOKENS]
  if c.min_pixels != MIN_PIXELS or c.max_pixels not in most:
    raise ConfigError(f"model.vision: found min_pixels={c.min_pixels}, max_pixels={c.max_pixels}; with the tower "
                      f"gemma4 the first stays {MIN_PIXELS}, for images are made as large as they may be, and the "
                      f"other is one of {', '.join(map(str, most))}: {', '.join(map(str, MOST_TOKENS))} tiles.")
  largest = c.max_pixels if c.video.token is None else max(c.max_pixels, c.video.max_pixels)
  if (longest := largest // tile * (c.image_size // c.patch_size)) > c.position_grid:
    raise ConfigError(f"model.vision.position_grid: found {c.position_grid}, but an image may have {longest} patches "
                      "in a row or column (max_pixels, of frames video.max_pixels). Set it to that, or more.")
  if (tuple(c.mean) or own[0], tuple(c.std) or own[1]) != own:
    raise ConfigError(f"model.vision: found mean={tuple(c.mean)}, std={tuple(c.std)}; the tower gemma4 has 0.5 for "
                      "each, which its image processors cannot say otherwise. Leave both ().")


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
