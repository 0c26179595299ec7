"""Granite 3, dense and with experts: a Llama with factors on embeddings, attention's scores, residual branches and
logits."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Rule
from models.hf.rope import Rope


class Multipliers(Rule):
  """attention_multiplier, the factor on scores, and logits_scaling, which logits are divided by."""

  def read(self, source, model):
    divisor = source.get("logits_scaling", float, 1.0)
    if divisor <= 0:
      raise source.error("logits_scaling", "a number above 0")
    return {"attention_scale": source.get("attention_multiplier", float, 1.0), "logit_scale": 1 / divisor}

  def write(self, model):
    scale = model["attention_scale"]
    # 1 / (1 / x) is x up to the last digit, which is none that anyone has typed.
    return {"attention_multiplier": model["head_dim"] ** -0.5 if scale is None else scale,
            "logits_scaling": float(f"{1 / model['logit_scale']:.15g}")}


KEYS = (
    *common.SIZES, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED, common.ATTENTION_BIAS,
    Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
    Key("embedding_multiplier", "embedding_scale", float, default=1.0),
    Key("residual_multiplier", "residual_scale", float, default=1.0),
    Multipliers(),
)
# As in files, then as transformers 5 has them in memory.
EXPERTS = tuple(
    tensor for gate_up, down, router in (
        ("input_linear.weight", "output_linear.weight", "router.layer.weight"),
        ("experts.gate_up_proj", "experts.down_proj", "router.weight")) for tensor in (
        Tensor(f"layers.{{layer}}.block_sparse_moe.{gate_up}",
               ("blocks/moe/experts/gate/kernel", "blocks/moe/experts/up/kernel"), transpose=True, axis=1),
        Tensor(f"layers.{{layer}}.block_sparse_moe.{down}", "blocks/moe/experts/down/kernel", transpose=True),
        Tensor(f"layers.{{layer}}.block_sparse_moe.{router}", "blocks/moe/router/kernel", transpose=True)))

GRANITE = Family(
    name="granite",
    model_types=("granite",),
    architectures=("GraniteForCausalLM",),
    classifier=None,
    keys=(*KEYS, common.WIDTH, Rope(), Key("mlp_bias", "mlp_bias", bool, default=False)),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
)
GRANITEMOE = Family(
    name="granitemoe",
    model_types=("granitemoe",),
    architectures=("GraniteMoeForCausalLM",),
    classifier=None,
    keys=(
        *KEYS, Rope(),
        Key("intermediate_size", ("intermediate_size", "moe.expert_size"), default=11008),
        Key("num_local_experts", "moe.num_experts", default=8),
        Key("num_experts_per_tok", "moe.experts_per_token", default=2),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *EXPERTS),
    fixed={"moe.softmax": "after_topk"},
)
