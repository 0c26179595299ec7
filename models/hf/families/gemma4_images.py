"""Gemma 4 with images: a tower with layers like the text model's, pooled patches, and a Gemma 4 in which the tokens of
an image see one another in layers with a window (26B-A4B, 31B), or do not (E2B, E4B).

Published folders of E2B and E4B hold a tower for sound, too, which is passed over.
"""

from dataclasses import replace

from models.hf.families.gemma4 import GEMMA4
from models.hf.families.qwen2_vl import Positions, Videos
from models.hf.family import Tensor
from models.hf.images import Tower, Wrapper
from models.hf.keys import GATED, Activation, Key, Must, Rule
from models.spec_vision import BOUNDS

# Tensors of the tower for sound.
SOUND = r"^model\.(audio_tower|embed_audio)\."


class Heads(Rule):
  """Heads, which have keys and values of their own, and share the hidden size among them."""

  def read(self, source, model):
    heads = source.get("num_attention_heads", int, 12)
    size = model["vision.hidden_size"] // heads
    for key, default, allowed in (("num_key_value_heads", 12, heads), ("head_dim", 64, size)):
      if source.get(key, int, default) != allowed or model["vision.hidden_size"] % heads:
        raise source.error(key, f"{allowed}: num_attention_heads, {heads}, is that of keys and values, and a divisor "
                           f"of hidden_size, {model['vision.hidden_size']}")
    for key in ("default_output_length", "global_head_dim"):  # of the processor; of nothing
      source.get(key, object, None)
    return {"vision.num_heads": heads}

  def write(self, model):
    heads = model["vision.num_heads"]
    return {"num_attention_heads": heads, "num_key_value_heads": heads,
            "head_dim": model["vision.hidden_size"] // heads}


class Squares(Rule):
  """Patches, and of how many of them, squared, the mean becomes a token: a tile's side in pixels is ours."""

  def read(self, source, model):
    patch, pooled = source.get("patch_size", int, 16), source.get("pooling_kernel_size", int, 3)
    return {"vision.patch_size": patch, "vision.image_size": patch * pooled}

  def write(self, model):
    patch = model["vision.patch_size"]
    return {"patch_size": patch, "pooling_kernel_size": model["vision.image_size"] // patch}


class ReadPadding(Rule):
  """In the places of images, embeddings of each layer are read at the padding's entry, ours at the first."""

  def read(self, source, model):
    text = source.inside("text_config", source.get("text_config", dict))
    found = text.get("pad_token_id", object, 0)
    if model["per_layer_size"] and (found != 0 or isinstance(found, bool)):
      raise text.error("pad_token_id", "0, whose embeddings of each layer stand in the places of images")
    return {}


class Sound(Rule):
  """The tower for sound, which is not read."""

  def read(self, source, model):
    if not isinstance(source.get("audio_config", object, None), dict | None):
      raise source.error("audio_config", "an object, or null")
    return {}

  def notes(self, source):
    return [f"{source.where} is that of a model of images, sound and text. Of it the models of images and of text are "
            "read, trained and exported; its tensors for sound are passed over."] if source.content.get(
                "audio_config") else []


_LAYER = "encoder.layers.{layer}"
_LINEARS = {**{f"self_attn.{p}_proj": f"attn/{p}" for p in "qkvo"},
            **{f"mlp.{p}_proj": f"mlp/{p}" for p in ("gate", "up", "down")}}
TABLE = (
    Tensor("patch_embedder.input_proj.weight", "vision/patch_embed/kernel", transpose=True),
    Tensor("patch_embedder.position_embedding_table", "vision/axis_embed/embedding"),
    *(Tensor(f"{_LAYER}.{theirs}.weight", f"vision/blocks/{ours}/scale") for theirs, ours in (
        ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "attn_post_norm"),
        ("pre_feedforward_layernorm", "mlp_norm"), ("post_feedforward_layernorm", "mlp_post_norm"),
        ("self_attn.q_norm", "attn/q_norm"), ("self_attn.k_norm", "attn/k_norm"))),
    *(Tensor(f"{_LAYER}.{theirs}.linear.weight", f"vision/blocks/{ours}/kernel", transpose=True)
      for theirs, ours in _LINEARS.items()),
    *(Tensor(f"{_LAYER}.{theirs}.{bound}", f"vision/blocks/{ours}/clip/{bound}", form="bound")
      for theirs, ours in _LINEARS.items() for bound in BOUNDS),
    *(Tensor(f"std_{part}", f"projector/standard/{part}") for part in ("bias", "scale")),
)
TOWER = Tower("gemma4", ("gemma4_vision",), (
    Key("hidden_size", "vision.hidden_size", default=768),
    Key("intermediate_size", "vision.intermediate_size", default=3072),
    Key("num_hidden_layers", "vision.num_layers", default=16),
    Heads(), Squares(), Positions(100.0, ("axial", "default")),
    Key("rms_norm_eps", "vision.norm_eps", float, default=1e-6),
    Activation("hidden_activation", "gelu_pytorch_tanh", GATED, ours="vision.activation"),
    Must("attention_bias", False, "the tower has no biases"),
    Must("num_channels", 3, "images are red, green and blue"),
    Key("position_embedding_size", "vision.position_grid", default=10240),
    Key("use_clipped_linears", "vision.clipped", bool, default=False),
    Key("standardize", "vision.standardized", bool, default=False),
), TABLE)

GEMMA4_IMAGES = Wrapper(
    name="gemma4 with images",
    model_types=("gemma4",),
    architectures=("Gemma4ForConditionalGeneration",),
    texts=(replace(GEMMA4, model_types=("gemma4_text",), architectures=("gemma4 has images",), classifier=None,
                   prefixes=("model.language_model.",), ignored=(r"rotary_emb\.", SOUND)),),
    towers=(TOWER,),
    keys=(Key("image_token_id", "vision.image_token", default=258880), Videos(258884), ReadPadding(), Sound()),
    table=(Tensor("embedding_projection.weight", "projector/linear/kernel", transpose=True),),
    fixed={"vision.projector": "mean"},
    both_ways={None: "causal", "vision": "local_image"},
    # Tokens around images and in the places of sound; how many tokens the processor makes of an image.
    inert=GEMMA4.inert - {"audio_config"} | {"vision_soft_tokens_per_image", "eoa_token_id"},
    names=((("model.language_model.", ""),), ("model.vision_tower.",), ("model.embed_vision.",)),
)
