"""Gemma 3 with images: SigLIP, pooled patches, and a Gemma 3 in which the tokens of an image see one another."""

from models.hf.errors import HFError
from models.hf.families.gemma import GEMMA3
from models.hf.families.towers import SIGLIP
from models.hf.family import Tensor
from models.hf.images import Wrapper
from models.hf.keys import Key, Rule


class ImagesWithinWindow(Rule):
  """In the original a window ends what tokens of an image see, too; here it does not, so images must fit into it."""

  def read(self, source, model):
    window, tokens = model["window"], model["vision.tokens_per_image"]
    if window is not None and tokens > window:
      raise HFError(f"{source.where}: mm_tokens_per_image is {tokens}; allowed: up to sliding_window of text_config, "
                    f"{window}.")
    return {}


GEMMA3_IMAGES = Wrapper(
    name="gemma3 with images",
    model_types=("gemma3",),
    architectures=("Gemma3ForConditionalGeneration",),
    texts=(GEMMA3,),
    towers=(SIGLIP,),
    keys=(
        Key("image_token_index", "vision.image_token", default=262144, alias="image_token_id"),
        Key("mm_tokens_per_image", "vision.tokens_per_image", default=256),
        ImagesWithinWindow(),
    ),
    table=(
        Tensor("mm_input_projection_weight", "projector/linear/kernel"),
        Tensor("mm_soft_emb_norm.weight", "projector/norm/scale"),
    ),
    fixed={"vision.projector": "pool", "vision.attention": "image"},
    # Tokens around an image, which a processor puts there.
    inert=frozenset({"boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index"}),
)
