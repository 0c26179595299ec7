"""The vision towers of the families of images and text: SigLIP and CLIP, whose tensors have the same names."""

from models.hf.families.common import pair
from models.hf.family import Tensor
from models.hf.images import Tower
from models.hf.keys import UNGATED, Activation, Key, Must, Rule


class NoHead(Rule):
  """A head that pools the patches, of which no family makes use: it is neither read nor written."""

  def read(self, source, model):
    source.get("vision_use_head", bool, True)
    return {}

  def write(self, model):
    return {"vision_use_head": False}


def sizes(hidden: int, intermediate: int, layers: int, heads: int, patch: int, eps: float, activation: str) -> tuple:
  """The rules of vision_config, with the values that the original's class assumes."""
  return (
      Key("hidden_size", "vision.hidden_size", default=hidden),
      Key("intermediate_size", "vision.intermediate_size", default=intermediate),
      Key("num_hidden_layers", "vision.num_layers", default=layers),
      Key("num_attention_heads", "vision.num_heads", default=heads),
      Key("image_size", "vision.image_size", default=224),
      Key("patch_size", "vision.patch_size", default=patch),
      Key("layer_norm_eps", "vision.norm_eps", float, default=eps),
      Activation("hidden_act", activation, UNGATED, ours="vision.activation"),
      Must("num_channels", 3, "images are red, green and blue"),
  )


TABLE = (
    Tensor("embeddings.class_embedding", "vision/cls_embed/embedding", form="row"),
    Tensor("embeddings.patch_embedding.weight", "vision/patch_embed/kernel", transpose=True, form="patches"),
    Tensor("embeddings.patch_embedding.bias", "vision/patch_embed/bias"),
    Tensor("embeddings.position_embedding.weight", "vision/pos_embed/embedding"),
    *pair("pre_layrnorm", "vision/pre_norm", "scale"),  # so spelt in CLIP
    *(tensor for theirs, ours in (("layer_norm1", "attn_norm"), ("layer_norm2", "mlp_norm"))
      for tensor in pair(f"encoder.layers.{{layer}}.{theirs}", f"vision/blocks/{ours}", "scale")),
    *(tensor for theirs, ours in (("self_attn.q_proj", "attn/q"), ("self_attn.k_proj", "attn/k"),
                                  ("self_attn.v_proj", "attn/v"), ("self_attn.out_proj", "attn/o"),
                                  ("mlp.fc1", "mlp/up"), ("mlp.fc2", "mlp/down"))
      for tensor in pair(f"encoder.layers.{{layer}}.{theirs}", f"vision/blocks/{ours}")),
    *pair("post_layernorm", "vision/final_norm", "scale"),
)

SIGLIP = Tower("siglip", ("siglip_vision_model",),
               (*sizes(768, 3072, 12, 12, 16, 1e-6, "gelu_pytorch_tanh"), NoHead()), TABLE)
CLIP = Tower("clip", ("clip_vision_model",), sizes(768, 3072, 12, 12, 32, 1e-5, "quick_gelu"), TABLE)
