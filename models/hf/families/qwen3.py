"""Qwen 3: a Llama with RMSNorms on the heads of queries and keys; see qwen2 for its windows."""

from models.hf.families import common
from models.hf.families.qwen2 import LAYERS
from models.hf.family import Family
from models.hf.keys import Key
from models.hf.rope import Rope

QWEN3 = Family(
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.SILU, common.UNTIED, Rope(), LAYERS, common.ATTENTION_BIAS,
        Key("head_dim", "head_dim", default=128), common.kv_heads(32),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *common.MLP),
    fixed={"qk_norm": True},
)
