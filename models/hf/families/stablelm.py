"""StableLM 2 and 3B: a Llama with LayerNorm, of which a part of each head is rotated."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key
from models.hf.rope import Rope

STABLELM = Family(
    name="stablelm",
    model_types=("stablelm",),
    architectures=("StableLmForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Rope(fraction=0.25),
        Key("qk_layernorm", "qk_norm", bool, default=False),
        Key("use_parallel_residual", "parallel_blocks", bool, default=False),
        Key("layer_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=32),
        Key("use_qkv_bias", "qkv_bias", bool, default=False),
    ),
    table=(
        *common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP,
        *(Tensor(f"layers.{{layer}}.self_attn.{p}_layernorm.norms.{{head}}.weight", f"blocks/attn/{p}_norm/scale")
          for p in "qk"),
    ),
    fixed={"norm": "layernorm", "norm_bias": True, "qk_norm_over": "each_head"},
)
