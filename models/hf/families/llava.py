"""LLaVA 1.5 and its kin: CLIP or SigLIP, two linear layers, and a causal text model of almost any family."""

from models.hf.families import common
from models.hf.families.gemma import GEMMA, GEMMA2, GEMMA3
from models.hf.families.llama import ARCEE, LLAMA, NEMOTRON, PHI3, SEED_OSS, STABLELM, STARCODER2
from models.hf.families.mistral import MISTRAL, MIXTRAL
from models.hf.families.qwen2 import QWEN2
from models.hf.families.qwen2_moe import QWEN2_MOE
from models.hf.families.qwen3 import QWEN3
from models.hf.families.qwen3_moe import QWEN3_MOE
from models.hf.families.towers import CLIP, SIGLIP
from models.hf.images import Wrapper
from models.hf.keys import UNGATED, Activation, Key, Rule


class Features(Rule):
  """Which of the tower's outputs are taken: one layer's, without the final norm, and no class token."""

  def read(self, source, model):
    layers, clip = model["vision.num_layers"], model["vision.tower"] == "clip"
    found = source.get("vision_feature_layer", object, -2)
    if isinstance(found, bool) or not isinstance(found, int) or not -layers <= found <= layers or found == 0:
      raise source.error("vision_feature_layer", f"a whole number from {-layers} to -1, or 1 to {layers}; features of "
                         "several layers are not put together here")
    wanted = "default" if clip else "full"
    if source.get("vision_feature_select_strategy", str, "default") != wanted:
      raise source.error("vision_feature_select_strategy", f"{wanted!r} for a {model['vision.tower']} tower: all "
                         f"patches, and {'not the class token' if clip else 'there is no class token to leave out'}")
    return {"vision.feature_layer": found if found < 0 else found - layers - 1, "vision.final_norm": False}

  def write(self, model):
    strategy = "default" if model["vision.tower"] == "clip" else "full"
    return {"vision_feature_layer": model["vision.feature_layer"], "vision_feature_select_strategy": strategy}


class Tokens(Rule):
  """How many tokens an image has, which follows from the tower; it is written for processors."""

  def read(self, source, model):
    source.get("image_seq_length", object, None)
    return {}

  def write(self, model):
    return {"image_seq_length": model["vision.tokens_per_image"]}


PROJECTOR = (*common.pair("linear_1", "projector/up"), *common.pair("linear_2", "projector/down"))
LLAVA = Wrapper(
    model_types=("llava",),
    architectures=("LlavaForConditionalGeneration",),
    texts=(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, QWEN2_MOE, GEMMA, GEMMA2, GEMMA3, STARCODER2, STABLELM,
           PHI3, ARCEE, NEMOTRON, SEED_OSS),
    towers=(CLIP, SIGLIP),
    keys=(
        Key("image_token_index", "vision.image_token", default=32000, alias="image_token_id"),
        Key("multimodal_projector_bias", "vision.projector_bias", bool, default=True),
        Activation("projector_hidden_act", "gelu", UNGATED, ours="vision.projector_activation"),
        Features(), Tokens(),
    ),
    table=PROJECTOR,
    fixed={"vision.projector": "mlp", "vision.attention": "causal"},
    tied=None,
    inert=frozenset({"ignore_index"}),
)
