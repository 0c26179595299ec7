"""Mistral 7B: a Llama without biases, with a sliding window in all layers (0.1) or in none."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key, Window
from models.hf.rope import Rope

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED,
        Rope(), Window(default=4096),
        Key("num_key_value_heads", "num_kv_heads", default=8, null=common.as_many_as_heads),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
)
