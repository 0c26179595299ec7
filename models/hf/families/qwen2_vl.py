"""Qwen2-VL: images in their own sizes, a Qwen 2 whose rotary positions tell rows and columns, and what 2.5 shares."""

from dataclasses import dataclass, replace
from typing import Any

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.families.common import pair
from models.hf.families.qwen2 import LAYERS, QWEN2
from models.hf.family import Family, Tensor
from models.hf.images import Tower, Wrapper
from models.hf.keys import UNGATED, Activation, Key, Must, Rule
from models.hf.rope import Rope
from models.hf.source import Source
from models.spec_vision import FRAMES, THETA

# Entries of the outer object where those of the text model stand beside them, as in published folders.
BESIDE = frozenset({"architectures", "image_token_id", "model_type", "text_config", "transformers_version",
                    "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id",
                    "vision_token_id"})
# What names of tensors begin with, as published and in memory.
NAMES = (("model.", ""), ("model.language_model.", "")), ("visual.", "model.visual."), (
    "visual.merger.", "model.visual.merger.")


@dataclass(frozen=True)
class SectionedRope(Rope):
  """RoPE whose pairs turn by time, row and column (M-RoPE); "mrope" is its name for no scaling."""

  theta: float = 1_000_000.0
  scalings: tuple[str, ...] = ("yarn",)
  inert: tuple[str, ...] = ("mrope_section",)
  sections: tuple[int, ...] = (16, 24, 24)

  def read(self, source, model):
    parameters, _ = self._parameters(source)
    sections = parameters.get("mrope_section", list, list(self.sections))
    if len(sections) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sections):
      raise parameters.error("mrope_section", "three numbers of pairs: time, row, column")
    return super().read(source, model) | {"rope_sections": tuple(sections)}

  def write(self, model):
    content = super().write(model)
    given = content.get("rope_scaling", {"type": "mrope"})
    return content | {"rope_scaling": given | {"mrope_section": list(model["rope_sections"])}}

  def _parameters(self, source):
    parameters, local = super()._parameters(source)
    plain = {key: "default" if key in ("rope_type", "type") and value == "mrope" else value
             for key, value in parameters.content.items()}
    return Source(plain, parameters.where, parameters.ignored, parameters.path), local


def text_family(name: str) -> Family:
  """The text model of one of these families."""
  return replace(
      QWEN2, name=f"{name}_text", model_types=(f"{name}_text",), architectures=(f"{name} has no model of text alone",),
      keys=(*common.SIZES, common.WIDTH, common.HEAD_SIZE, common.SILU, common.UNTIED, SectionedRope(), LAYERS,
            common.RMS_EPS_5, common.kv_heads(8)),
      classifier=None)


@dataclass(frozen=True)
class Width(Rule):
  """What the merger gives, which is what the text model takes."""

  theirs: str

  def read(self, source, model):
    found, wanted = source.get(self.theirs, int, 3584), model["hidden_size"]
    if wanted not in (None, found):
      raise source.error(self.theirs, f"the hidden_size of the text model, {wanted}")
    return {}

  def write(self, model):
    return {self.theirs: model["hidden_size"]}


@dataclass(frozen=True)
class Squares(Rule):
  """Patches, and how many of them, squared, become a token: a tile's side in pixels is ours."""

  patch: int

  def read(self, source, model):
    patch, merged = (source.get(key, int, default)
                     for key, default in (("patch_size", self.patch), ("spatial_merge_size", 2)))
    source.get("spatial_patch_size", object, None)  # of no effect, in published folders
    return {"vision.patch_size": patch, "vision.image_size": patch * merged}

  def write(self, model):
    patch = model["vision.patch_size"]
    return {"patch_size": patch, "spatial_merge_size": model["vision.image_size"] // patch}


@dataclass(frozen=True)
class Videos(Rule):
  """The token that holds the place of a video's feature, which the class assumes to be `default`; of a folder without
  one, None, the model sees none."""

  default: int | None = None

  def read(self, source, model):
    return {"vision.video.token": source.get("video_token_id", int, self.default, None)}

  def write(self, model):
    token = model["vision.video.token"]
    return {} if token is None else {"video_token_id": token}


class Ratio(Rule):
  """The MLP's size by its ratio to the hidden size."""

  def read(self, source, model):
    return {"vision.intermediate_size": model["vision.hidden_size"] * source.get("mlp_ratio", int, 4)}

  def write(self, model):
    ratio, rest = divmod(model["vision.intermediate_size"], model["vision.hidden_size"])
    if rest:
      raise HFError(f"vision.intermediate_size {model['vision.intermediate_size']} is no multiple of "
                    f"vision.hidden_size {model['vision.hidden_size']}, as mlp_ratio says it")
    return {"mlp_ratio": ratio}


@dataclass(frozen=True)
class Positions(Rule):
  """Rotary positions of rows and columns, whose base is the same in all models; `names` of theirs for that."""

  theta: float = THETA
  names: tuple[str, ...] = ("axial",)

  def read(self, source, model):
    found = source.inside("rope_parameters", source.get("rope_parameters", dict, {}, {}))
    Must("rope_theta", self.theta, "the tower has this base").read(found, model)
    if found.get("rope_type", str, self.names[0], self.names[0]) not in self.names:
      raise found.error("rope_type", f"{' or '.join(map(repr, self.names))}; rows and columns")
    found.check_all_read((), "the tower")
    return {}


def tower_keys(*own: Rule, depth: int = 32, patch: int = 14) -> tuple[Rule, ...]:
  """The rules of vision_config that all these towers have, behind `own`; their classes' depth and size of patches."""
  return (
      *own, Key("depth", "vision.num_layers", default=depth), Key("num_heads", "vision.num_heads", default=16),
      Squares(patch), Positions(), Must("in_channels", 3, "images are red, green and blue"),
      Must("in_chans", 3, "images are red, green and blue"),
      Must("temporal_patch_size", FRAMES, "a patch has two frames"),
  )


def tower_table(mlp: dict[str, str]) -> tuple[Tensor, ...]:
  """The tensors of a tower with an MLP of these names: theirs, and ours."""
  attention = tuple(
      Tensor(f"blocks.{{layer}}.attn.qkv.{theirs}", tuple(f"vision/blocks/attn/{p}/{ours}" for p in "qkv"),
             transpose=ours == "kernel") for theirs, ours in (("weight", "kernel"), ("bias", "bias")))
  return (
      Tensor("patch_embed.proj.weight", "vision/patch_embed/kernel", transpose=True, form="videos"),
      *pair("blocks.{layer}.norm1", "vision/blocks/attn_norm", "scale"),
      *pair("blocks.{layer}.norm2", "vision/blocks/mlp_norm", "scale"),
      *attention, *pair("blocks.{layer}.attn.proj", "vision/blocks/attn/o"),
      *(tensor for theirs, ours in mlp.items()
        for tensor in pair(f"blocks.{{layer}}.mlp.{theirs}", f"vision/blocks/mlp/{ours}")),
  )


MERGER = (*pair("ln_q", "projector/norm", "scale"), *pair("mlp.0", "projector/up"), *pair("mlp.2", "projector/down"))


def wrapper(name: str, architecture: str, tower: Tower) -> Wrapper:
  """The family of that name."""
  fixed: dict[str, Any] = {"vision.projector": "merge", "vision.attention": "causal"}
  return Wrapper(
      model_types=(name,), architectures=(architecture,), texts=(text_family(name),), towers=(tower,), table=MERGER,
      keys=(Key("image_token_id", "vision.image_token", default=151655), Videos()), fixed=fixed, tied=None,
      # Tokens around images, which a chat template writes.
      inert=frozenset({"vision_start_token_id", "vision_end_token_id", "vision_token_id"}), beside=BESIDE, names=NAMES)


QWEN2_VL = wrapper("qwen2_vl", "Qwen2VLForConditionalGeneration", Tower(
    "qwen2_vl", ("qwen2_vl_vision", "qwen2_vl"),
    tower_keys(Key("embed_dim", "vision.hidden_size", default=1280), Width("hidden_size"), Ratio(),
               Activation("hidden_act", "quick_gelu", UNGATED, ours="vision.activation")),
    tower_table({"fc1": "up", "fc2": "down"})))
