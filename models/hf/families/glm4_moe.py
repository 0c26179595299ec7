"""GLM 4.5, 4.6 and 4.7: a Llama's attention of half-rotated heads, and DeepSeek V3's router and experts."""

from models.hf.families import common
from models.hf.families.deepseek_v2 import MIXTURE, DenseLayers, SharedExperts
from models.hf.families.deepseek_v3 import AHEAD, CHOICE_BIAS, LayersAhead
from models.hf.family import Family
from models.hf.keys import Key
from models.hf.rope import Rope

GLM4_MOE = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM",),
    keys=(
        *common.SIZES, common.HEAD_SIZE, common.WIDTH, common.SILU, common.UNTIED, Rope(fraction=0.5),
        Key("rms_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=8, null=common.as_many_as_heads),
        Key("attention_bias", "qkv_bias", bool, default=False),
        Key("use_qk_norm", "qk_norm", bool, default=False),
        Key("moe_intermediate_size", "moe.expert_size", default=1408),
        Key("n_routed_experts", "moe.num_experts", default=128, alias="num_local_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token", default=8),
        SharedExperts("n_shared_experts", "moe.shared_size", default=1),
        Key("routed_scaling_factor", "moe.weight_scale", float, default=1.0),
        Key("n_group", "moe.groups", default=1), Key("topk_group", "moe.groups_used", default=1),
        Key("norm_topk_prob", "moe.normalize_weights", bool, default=True),
        DenseLayers(1), LayersAhead(),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *MIXTURE, CHOICE_BIAS),
    fixed={"moe.scores": "sigmoid", "moe.choice_bias": True},
    ahead="eh_proj.weight",
    dropped=AHEAD,
    classifier=None,
)
