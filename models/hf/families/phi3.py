"""Phi 3 to 3.5 and Phi 4 mini: a Llama with fused projections, which may rotate a part of each head, by longrope."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Window
from models.hf.rope import Rope

PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.SILU, common.UNTIED,
        Rope(scalings=("longrope",), fraction=1.0), Window(default=None),
        Key("rms_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
    ),
    table=(
        *common.ENDS, *common.NORMS,
        Tensor("layers.{layer}.self_attn.qkv_proj.weight", tuple(f"blocks/attn/{p}/kernel" for p in "qkv"),
               transpose=True),
        Tensor("layers.{layer}.self_attn.o_proj.weight", "blocks/attn/o/kernel", transpose=True),
        Tensor("layers.{layer}.mlp.gate_up_proj.weight", ("blocks/mlp/gate/kernel", "blocks/mlp/up/kernel"),
               transpose=True),
        Tensor("layers.{layer}.mlp.down_proj.weight", "blocks/mlp/down/kernel", transpose=True),
    ),
    # Of Phi 4 mini, and read by no version of transformers.
    inert=frozenset({"full_attn_mod", "interpolate_factor"}),
)
