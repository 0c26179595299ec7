"""GLM 4 0414 (9B, 32B) and GLM Z1: GLM with norms before and after attention and MLP."""

from models.hf.families.glm import GLM_KEYS, GLM_TABLE
from models.hf.family import Family, Tensor

GLM4 = Family(
    name="glm4",
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
