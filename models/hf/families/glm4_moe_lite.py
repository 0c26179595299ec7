"""GLM 4.7 Flash: DeepSeek V3's layers, latent attention among them, under GLM's names."""

from models.hf.families import common, mtp
from models.hf.families.deepseek_v2 import INERT, LATENT, MIXTURE, DenseLayers, latent_sizes
from models.hf.families.deepseek_v3 import AHEAD, CHOICE_BIAS, SCORES, experts
from models.hf.family import Family
from models.hf.keys import Key, Same


class MlpTypes(DenseLayers):
  """mlp_layer_types, which counts before first_k_dense_replace.

  `only`: without it the default alone, since transformers does not read first_k_dense_replace then.
  """

  def __init__(self, default: int, only: bool = False):
    super().__init__(default)
    self.only = only

  def read(self, source, model):
    if (types := source.get("mlp_layer_types", list, None, None)) is None:
      dense = super().read(source, model)
      if self.only and dense["moe.dense_layers"] != self.default:
        raise source.error("first_k_dense_replace", f"{self.default}, unless mlp_layer_types says which layers are "
                           "dense: transformers reads that alone")
      return dense
    source.get("first_k_dense_replace", object, None, None)
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (model["num_layers"] - dense) or dense == len(types):
      raise source.error("mlp_layer_types", f"{model['num_layers']} times (num_hidden_layers) dense or sparse, the "
                         "dense ones first, and one that is sparse")
    return {"moe.dense_layers": dense}

  def write(self, model):
    dense = model["moe.dense_layers"]
    return {**super().write(model), "mlp_layer_types": ["dense"] * dense + ["sparse"] * (model["num_layers"] - dense)}


ROTATED = Same("head_dim", "latent.rope_dim", "it is qk_rope_head_dim once more")

TABLE = (*common.ENDS, *common.NORMS, *LATENT, *MIXTURE, CHOICE_BIAS)

GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    model_types=("glm4_moe_lite",),
    architectures=("Glm4MoeLiteForCausalLM",),
    keys=(
        *latent_sizes(q_rank=768, nope=192, value=256, norm_eps=1e-5), ROTATED,
        *experts(size=1536, number=64, per_token=4, scale=1.8),
        Key("rope_interleave", "rope_interleaved", bool, default=True),
        MlpTypes(1, only=True), mtp.Modules(*AHEAD),
    ),
    table=TABLE,
    fixed=SCORES,
    inert=INERT,
    ahead=mtp.as_layers(TABLE, *AHEAD),
    classifier=None,
)
