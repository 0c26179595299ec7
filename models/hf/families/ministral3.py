"""Ministral 3: a Mistral whose queries grow with their position, as those of some of Llama 4's layers.

Published folders (mistral3) hold a tower for images beside it, which is passed over.
"""

from dataclasses import dataclass

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.families.mistral import HEAD, IGNORED, INERT, PREFIXES, WHOLE
from models.hf.images import TextPart
from models.hf.keys import Key, Window
from models.hf.rope import Rope

BETA = "llama_4_scaling_beta"


@dataclass(frozen=True)
class GrowingRope(Rope):
  """With the factor on queries: a step for each length that the model was first trained on."""

  inert: tuple[str, ...] = (BETA, "max_position_embeddings")

  def read(self, source, model):
    keys = super().read(source, model)
    beta = self._parameters(source)[0].get(BETA, float, 0.0)
    if beta and keys.get("rope_scaling.original_positions") is None:
      raise HFError(f"{source.where}: {BETA} is {beta:g}, which needs a type of rotary positions with "
                    "original_max_position_embeddings, yarn say.")
    return keys | ({"query_temperature.scale": beta,
                    "query_temperature.floor": keys["rope_scaling.original_positions"]} if beta else {})

  def write(self, model):
    content, original = super().write(model), model["rope_scaling.original_positions"]
    if original is None or model["query_temperature.floor"] != original and model["query_temperature.scale"]:
      raise HFError("queries of this family grow by the original length of a scaling of rotary positions")
    content["rope_scaling"][BETA] = model["query_temperature.scale"]
    return content


MINISTRAL3 = TextPart(
    name="ministral3",
    model_types=("ministral3",),
    architectures=("Ministral3ForCausalLM", WHOLE),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Window(default=None),
        GrowingRope(theta=1e6, told=True),
        Key("head_dim", "head_dim", default=128, null=common.head_size),
        Key("rms_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=8, null=common.as_many_as_heads),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP, HEAD),
    prefixes=PREFIXES, ignored=IGNORED, inert=INERT,
)
