"""Seed-OSS: a Llama that says for itself whether the attention's output has a bias."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key
from models.hf.rope import Rope

SEED_OSS = Family(
    name="seed_oss",
    model_types=("seed_oss",),
    architectures=("SeedOssForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.SILU, common.UNTIED, Rope(),
        Key("head_dim", "head_dim", default=128, null=common.head_size),
        Key("num_key_value_heads", "num_kv_heads", default=8, null=common.as_many_as_heads),
        Key("attention_bias", "qkv_bias", bool, default=True),
        Key("attention_out_bias", "attention_out_bias", bool, default=False),
        Key("mlp_bias", "mlp_bias", bool, default=False),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
)
