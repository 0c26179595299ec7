"""OLMo 2: a Llama whose norms come after attention and MLP, and over all heads of queries and of keys together."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key
from models.hf.rope import Rope

OLMO2_KEYS = (
    *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.SILU, common.UNTIED, common.ATTENTION_BIAS,
    Key("rms_norm_eps", "norm_eps", float, default=1e-5),
    Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
)
OLMO2_TABLE = (
    *common.ENDS, *common.ATTENTION, *common.QK_NORMS, *common.MLP,
    Tensor("layers.{layer}.post_attention_layernorm.weight", "blocks/attn_post_norm/scale"),
    Tensor("layers.{layer}.post_feedforward_layernorm.weight", "blocks/mlp_post_norm/scale"),
)
OLMO2_FIXED = {"norm_position": "post", "qk_norm": True, "qk_norm_over": "all"}

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    architectures=("Olmo2ForCausalLM",),
    keys=(*OLMO2_KEYS, Rope()),
    table=OLMO2_TABLE,
    fixed=OLMO2_FIXED,
)
