"""Nemotron 3, 4 and Minitron: LayerNorm stored as an offset from one, a squared ReLU, half of each head rotated."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import UNGATED, Activation, Key
from models.hf.rope import Rope

NEMOTRON = Family(
    name="nemotron",
    model_types=("nemotron",),
    architectures=("NemotronForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.UNTIED, Rope(fraction=0.5),
        Activation("hidden_act", "relu2", UNGATED),
        Key("norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
        common.ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", bool, default=False),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
    fixed={"norm": "layernorm", "norm_bias": True, "norm_scale_plus_one": True},
)
