"""Pixtral 12B: a tower that sees images of any size, each patch of which is a token, and a Mistral, as a LLaVA."""

from dataclasses import replace

from models.hf.families.llava import LLAVA, Tokens
from models.hf.families.mistral import MISTRAL
from models.hf.families.qwen2_vl import Positions
from models.hf.family import Tensor
from models.hf.images import Tower
from models.hf.keys import GATED, Activation, Key, Must, Rule
from models.spec_vision import THETA


class Sizes(Rule):
  """The tower's sizes, of which a head has its share of the hidden size; the eps of its norms is in no file."""

  def read(self, source, model):
    hidden, heads = source.get("hidden_size", int, 1024), source.get("num_attention_heads", int, 16)
    if hidden % heads or source.get("head_dim", int, hidden // heads, hidden // heads) != hidden // heads:
      raise source.error("head_dim", f"{hidden // heads}: hidden_size, {hidden}, by num_attention_heads, {heads}")
    source.get("image_size", object, None)  # of the processor
    Must("rope_theta", THETA, "the tower has this base").read(source, model)
    return {"vision.hidden_size": hidden, "vision.num_heads": heads, "vision.patch_size": source.get("patch_size", int),
            "vision.norm_eps": 1e-5}

  def write(self, model):
    hidden, heads = model["vision.hidden_size"], model["vision.num_heads"]
    return {"hidden_size": hidden, "num_attention_heads": heads, "head_dim": hidden // heads,
            "patch_size": model["vision.patch_size"]}


class Features(Rule):
  """Which of the tower's outputs are taken: the last layer's."""

  def read(self, source, model):
    for key, default, allowed in (("vision_feature_layer", -2, -1),
                                  ("vision_feature_select_strategy", "default", "full")):
      if source.get(key, object, default) != allowed:
        raise source.error(key, f"{allowed!r}: the features of all patches are those of the tower's last layer")
    return {}

  def write(self, model):
    return {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}


class Each(Rule):
  """Each patch is a token, and so a tile."""

  def read(self, source, model):
    return {"vision.image_size": model["vision.patch_size"]}


_LAYER = "transformer.layers.{layer}"
TABLE = (
    Tensor("patch_conv.weight", "vision/patch_embed/kernel", transpose=True, form="patches"),
    Tensor("ln_pre.weight", "vision/pre_norm/scale"),
    Tensor(f"{_LAYER}.attention_norm.weight", "vision/blocks/attn_norm/scale"),
    Tensor(f"{_LAYER}.ffn_norm.weight", "vision/blocks/mlp_norm/scale"),
    *(Tensor(f"{_LAYER}.attention.{p}_proj.weight", f"vision/blocks/attn/{p}/kernel", transpose=True) for p in "qkvo"),
    *(Tensor(f"{_LAYER}.feed_forward.{p}_proj.weight", f"vision/blocks/mlp/{p}/kernel", transpose=True)
      for p in ("gate", "up", "down")),
)
TOWER = Tower("pixtral", ("pixtral",), (
    Sizes(), Positions(),
    Key("intermediate_size", "vision.intermediate_size", default=4096),
    Key("num_hidden_layers", "vision.num_layers", default=24),
    Activation("hidden_act", "gelu", GATED, ours="vision.activation"),
    Must("num_channels", 3, "images are red, green and blue"),
), TABLE)

# What the names of tensors begin with, as published and in memory.
NAMES = ((("language_model.{prefix}", "language_model."), ("model.language_model.", "")),
         ("vision_tower.", "model.vision_tower."), ("multi_modal_projector.", "model.multi_modal_projector."))


def alone(text):
  """That text family, inside of another: the names of towers are its own there."""
  return replace(text, ignored=(r"rotary_emb\.inv_freq$",))


PIXTRAL = replace(
    LLAVA, name="pixtral", texts=(alone(MISTRAL),), towers=(TOWER,), names=NAMES,
    keys=(*LLAVA.keys[:3], Features(), Each(), Tokens()))
