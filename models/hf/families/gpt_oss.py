"""gpt-oss: attention sinks, a window in every other layer, and experts with biases, published in MXFP4."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key, LayerTypes, Must, all_but_every_nth, sliding_window
from models.hf.rope import Rope

EXPERTS = "blocks/moe/experts"
GPT_OSS = Family(
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    keys=(
        *common.SIZES, common.UNTIED, Rope(theta=150000.0, scalings=("yarn",), told=True), common.RMS_EPS_5,
        common.head_dim(64), common.kv_heads(8),
        LayerTypes(sliding_window(128), all_but_every_nth(2)),
        Key("attention_bias", ("qkv_bias", "attention_out_bias"), bool, default=True),
        Key("intermediate_size", ("intermediate_size", "moe.expert_size"), default=2880),
        Key("num_local_experts", "moe.num_experts", default=128, alias="num_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token", default=4, alias="experts_per_token"),
        Must("hidden_act", "silu", "experts have one activation in this family"),
        Must("swiglu_alpha", 1.702, "experts have one activation in this family"),
        Must("swiglu_limit", 7.0, "experts have one activation in this family"),
    ),
    table=(
        *common.ENDS, *common.NORMS, *common.ATTENTION,
        Tensor("layers.{layer}.self_attn.sinks", "blocks/attn/sinks"),
        *common.pair("layers.{layer}.mlp.router", "blocks/moe/router"),
        # Of an expert's outputs, that of the gate and that of the other take turns.
        Tensor("layers.{layer}.mlp.experts.gate_up_proj", (f"{EXPERTS}/gate/kernel", f"{EXPERTS}/up/kernel"), axis=2,
               form="alternating"),
        Tensor("layers.{layer}.mlp.experts.gate_up_proj_bias", (f"{EXPERTS}/gate/bias", f"{EXPERTS}/up/bias"), axis=1,
               form="alternating"),
        Tensor("layers.{layer}.mlp.experts.down_proj", f"{EXPERTS}/down/kernel"),
        Tensor("layers.{layer}.mlp.experts.down_proj_bias", f"{EXPERTS}/down/bias"),
    ),
    fixed={"attention_sinks": True, "activation": "clamped_swiglu", "mlp_bias": True, "moe.router_bias": True},
    # The length before YaRN, as other programs want it.
    inert=frozenset({"initial_context_length"}),
)
