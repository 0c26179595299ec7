"""Apertus: norms of queries and keys as in Qwen 3, and an MLP without a gate whose activation, xIELU, is learned."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Activation, Key
from models.hf.rope import Rope

XIELU = tuple(Tensor(f"layers.{{layer}}.mlp.act_fn.{name}", f"blocks/mlp/xielu/{name}")
              for name in ("alpha_p", "alpha_n", "beta", "eps"))

APERTUS = Family(
    name="apertus",
    model_types=("apertus",),
    architectures=("ApertusForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.UNTIED, common.ATTENTION_BIAS,
        Rope(theta=1.2e7, told=True),
        Activation("hidden_act", "xielu", {"xielu": ("xielu",)}),
        Key("rms_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
    ),
    table=(
        *common.ENDS, *common.ATTENTION, *common.QK_NORMS, *XIELU,
        *(Tensor(f"layers.{{layer}}.mlp.{p}_proj.weight", f"blocks/mlp/{p}/kernel", transpose=True)
          for p in ("up", "down")),
        Tensor("layers.{layer}.attention_layernorm.weight", "blocks/attn_norm/scale"),
        Tensor("layers.{layer}.feedforward_layernorm.weight", "blocks/mlp_norm/scale"),
    ),
    fixed={"qk_norm": True},
    classifier=None,
)
