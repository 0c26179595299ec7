"""StableLM 2 and 3B: a Llama with LayerNorm, of which a part of each head is rotated."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key, Must
from models.hf.rope import Rope

STABLELM = Family(
    name="stablelm",
    model_types=("stablelm",),
    architectures=("StableLmForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Rope(fraction=0.25),
        Must("qk_layernorm", False, "a LayerNorm with one scale for each head is not built"),
        Must("use_parallel_residual", False, "attention and MLP in parallel are not built"),
        Key("layer_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=32),
        Key("use_qkv_bias", "qkv_bias", bool, default=False),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
    fixed={"norm": "layernorm", "norm_bias": True},
)
