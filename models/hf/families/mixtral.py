"""Mixtral: a Mistral whose MLPs are mixtures of experts."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Window
from models.hf.rope import Rope

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    keys=(
        *common.SIZES, common.HEAD_SIZE, common.SILU, common.UNTIED, Rope(theta=1e6), Window(default=None),
        Key("rms_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=8, null=common.as_many_as_heads),
        Key("intermediate_size", ("intermediate_size", "moe.expert_size")),
        Key("num_local_experts", "moe.num_experts", default=8),
        Key("num_experts_per_tok", "moe.experts_per_token", default=2),
    ),
    table=(
        *common.ENDS, *common.NORMS, *common.ATTENTION,
        Tensor("layers.{layer}.block_sparse_moe.gate.weight", "blocks/moe/router/kernel", transpose=True),
        *(Tensor(f"layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{theirs}.weight",
                 f"blocks/moe/experts/{ours}/kernel", transpose=True)
          for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))),
        # As transformers 5 has them in memory.
        Tensor("layers.{layer}.mlp.gate.weight", "blocks/moe/router/kernel", transpose=True),
        Tensor("layers.{layer}.mlp.experts.gate_up_proj",
               ("blocks/moe/experts/gate/kernel", "blocks/moe/experts/up/kernel"), transpose=True, axis=1),
        Tensor("layers.{layer}.mlp.experts.down_proj", "blocks/moe/experts/down/kernel", transpose=True),
    ),
)
