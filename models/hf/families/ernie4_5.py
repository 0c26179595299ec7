"""ERNIE 4.5, dense: a Llama with rotated neighbours, and biases in all projections or in none."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key
from models.hf.rope import Rope

ERNIE4_5 = Family(
    name="ernie4_5",
    model_types=("ernie4_5",),
    architectures=("Ernie4_5ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.TIED, Rope(theta=5e5),
        Key("head_dim", "head_dim", default=128, null=common.head_size),
        Key("rms_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=2, null=common.as_many_as_heads),
        Key("use_bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), bool, default=False, null=False),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
    fixed={"rope_interleaved": True},
    classifier=None,
)
