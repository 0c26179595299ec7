"""GLM 4 to 4.7."""

from models.hf.families import common, mtp
from models.hf.families.deepseek import (
  AHEAD,
  CHOICE_BIAS,
  INERT,
  LATENT,
  MIXTURE,
  SCORES,
  DenseLayers,
  experts,
  latent_sizes,
)
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Same
from models.hf.rope import Rope

# GLM 4 9B: Phi 3's fused gate, biases on queries, keys and values, and half of each head rotated, in neighbours.

GLM_KEYS = (
    *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Rope(fraction=0.5), common.head_dim(128),
    Key("rms_norm_eps", "norm_eps", float, default=1.5625e-7),
    common.kv_heads(2),
    Key("attention_bias", "qkv_bias", bool, default=True),
)
GLM_TABLE = (
    *common.ENDS, *common.ATTENTION,
    Tensor("layers.{layer}.mlp.gate_up_proj.weight", ("blocks/mlp/gate/kernel", "blocks/mlp/up/kernel"),
           transpose=True),
    Tensor("layers.{layer}.mlp.down_proj.weight", "blocks/mlp/down/kernel", transpose=True),
)

GLM = Family(
    model_types=("glm",),
    architectures=("GlmForCausalLM",),
    keys=GLM_KEYS,
    table=(*GLM_TABLE, *common.NORMS),
    fixed={"rope_interleaved": True},
)


# GLM 4 0414 (9B, 32B) and GLM Z1: GLM with norms before and after attention and MLP.
GLM4 = Family(
    model_types=("glm4",),
    architectures=("Glm4ForCausalLM",),
    keys=GLM_KEYS,
    table=(
        *GLM_TABLE,
        Tensor("layers.{layer}.input_layernorm.weight", "blocks/attn_norm/scale"),
        Tensor("layers.{layer}.post_self_attn_layernorm.weight", "blocks/attn_post_norm/scale"),
        Tensor("layers.{layer}.post_attention_layernorm.weight", "blocks/mlp_norm/scale"),
        Tensor("layers.{layer}.post_mlp_layernorm.weight", "blocks/mlp_post_norm/scale"),
    ),
    fixed={"rope_interleaved": True, "norm_position": "sandwich"},
)


# GLM 4.5, 4.6 and 4.7: a Llama's attention of half-rotated heads, and DeepSeek V3's router and experts.

MOE_TABLE = (*common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *MIXTURE, CHOICE_BIAS)

GLM4_MOE = Family(
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM",),
    keys=(
        *common.SIZES, common.HEAD_SIZE, common.WIDTH, common.SILU, common.UNTIED, Rope(fraction=0.5), common.RMS_EPS_5,
        common.kv_heads(8),
        Key("attention_bias", "qkv_bias", bool, default=False),
        Key("use_qk_norm", "qk_norm", bool, default=False),
        *experts(size=1408, number=128, per_token=8, scale=1.0),
        DenseLayers(1), mtp.Modules(*AHEAD),
    ),
    table=MOE_TABLE,
    fixed=SCORES,
    ahead=mtp.as_layers(MOE_TABLE, *AHEAD),
    classifier=None,
)


# GLM 4.7 Flash: DeepSeek V3's layers, latent attention among them, under GLM's names.

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

LITE_TABLE = (*common.ENDS, *common.NORMS, *LATENT, *MIXTURE, CHOICE_BIAS)

GLM4_MOE_LITE = Family(
    model_types=("glm4_moe_lite",),
    architectures=("Glm4MoeLiteForCausalLM",),
    keys=(
        *latent_sizes(q_rank=768, nope=192, value=256, norm_eps=1e-5), ROTATED,
        *experts(size=1536, number=64, per_token=4, scale=1.8),
        Key("rope_interleave", "rope_interleaved", bool, default=True),
        MlpTypes(1, only=True), mtp.Modules(*AHEAD),
    ),
    table=LITE_TABLE,
    fixed=SCORES,
    inert=INERT,
    ahead=mtp.as_layers(LITE_TABLE, *AHEAD),
    classifier=None,
)
