"""StarCoder 2: LayerNorm and biases as in GPT-2, rotary positions and grouped queries as in Llama."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import UNGATED, Activation, Key, Must, Window
from models.hf.rope import Rope

STARCODER2 = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    architectures=("Starcoder2ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.TIED, Rope(), Window(default=None),
        Activation("hidden_act", "gelu_pytorch_tanh", UNGATED),
        Must("norm_type", "layer_norm", "the norm is a LayerNorm"),
        Key("norm_epsilon", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=2, null=common.as_many_as_heads),
        Key("use_bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), bool, default=True),
    ),
    table=(
        *common.ENDS, *common.NORMS, *common.ATTENTION,
        *(tensor for theirs, ours in (("c_fc", "up"), ("c_proj", "down")) for tensor in (
            Tensor(f"layers.{{layer}}.mlp.{theirs}.weight", f"blocks/mlp/{ours}/kernel", transpose=True),
            Tensor(f"layers.{{layer}}.mlp.{theirs}.bias", f"blocks/mlp/{ours}/bias"))),
    ),
    fixed={"norm": "layernorm", "norm_bias": True},
    inert=frozenset({"mlp_type"}),
)
