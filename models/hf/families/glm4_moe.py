"""GLM 4.5, 4.6 and 4.7: a Llama's attention of half-rotated heads, and DeepSeek V3's router and experts."""

from models.hf.families import common, mtp
from models.hf.families.deepseek_v2 import MIXTURE, DenseLayers
from models.hf.families.deepseek_v3 import AHEAD, CHOICE_BIAS, SCORES, experts
from models.hf.family import Family
from models.hf.keys import Key
from models.hf.rope import Rope

TABLE = (*common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *MIXTURE, CHOICE_BIAS)

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
        *experts(size=1408, number=128, per_token=8, scale=1.0),
        DenseLayers(1), mtp.Modules(*AHEAD),
    ),
    table=TABLE,
    fixed=SCORES,
    ahead=mtp.as_layers(TABLE, *AHEAD),
    classifier=None,
)
