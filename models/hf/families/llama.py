"""Llama 2, 3 and 3.1, and all that say they are a "llama" (Yi, SmolLM 2, DeepSeek 1, …)."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key, WholeHeads
from models.hf.rope import Rope

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED, WholeHeads(), Rope(),
        Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
        common.ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", bool, default=False),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
)
