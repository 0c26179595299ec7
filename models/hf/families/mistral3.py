"""Mistral Small 3.1 and 3.2 and Ministral 3, with images: Pixtral's tower, of whose patches neighbours are merged,
around a Mistral or a Ministral 3."""

from models.hf.families.llava import PROJECTOR
from models.hf.families.mistral import MINISTRAL3, MISTRAL
from models.hf.families.pixtral import NAMES, TOWER, alone
from models.hf.family import Tensor
from models.hf.images import Wrapper
from models.hf.keys import UNGATED, Activation, Key, Must, Rule


class Merged(Rule):
  """How many patches a side become a token: a tile's side in pixels is ours."""

  def read(self, source, model):
    return {"vision.image_size": model["vision.patch_size"] * source.get("spatial_merge_size", int, 2)}

  def write(self, model):
    return {"spatial_merge_size": model["vision.image_size"] // model["vision.patch_size"]}


MISTRAL3 = Wrapper(
    model_types=("mistral3",),
    architectures=("Mistral3ForConditionalGeneration",),
    texts=(alone(MISTRAL), alone(MINISTRAL3)),
    towers=(TOWER,),
    keys=(
        Key("image_token_index", "vision.image_token", default=10, alias="image_token_id"), Merged(),
        Key("multimodal_projector_bias", "vision.projector_bias", bool, default=False),
        Activation("projector_hidden_act", "gelu", UNGATED, ours="vision.projector_activation"),
        Must("vision_feature_layer", -1, "the features are those of the tower's last layer"),
    ),
    table=(
        Tensor("norm.weight", "projector/norm/scale"),
        Tensor("patch_merger.merging_layer.weight", "projector/merge/kernel", transpose=True), *PROJECTOR),
    fixed={"vision.projector": "merge_mlp", "vision.attention": "causal"},
    tied=None,
    names=NAMES,
)
