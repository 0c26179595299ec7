"""Arcee (AFM): a Llama whose MLP has no gate, but a squared ReLU."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import UNGATED, Activation, Key, WholeHeads
from models.hf.rope import Rope

ARCEE = Family(
    name="arcee",
    model_types=("arcee",),
    architectures=("ArceeForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.UNTIED, WholeHeads(), Rope(),
        Activation("hidden_act", "relu2", UNGATED),
        Key("rms_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
        common.ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", bool, default=False),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
)
