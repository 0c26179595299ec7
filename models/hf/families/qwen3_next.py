"""Qwen3-Next: of four layers three with a gated delta rule and one of gated attention, all with mixtures of experts."""

from models.hf.families import common, mtp
from models.hf.families.qwen2_moe import SHARED_EXPERT
from models.hf.families.qwen3_moe import EXPERTS, SPARSE
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Rule, kinds_of, named_kinds
from models.hf.rope import Rope


class DeltaLayers(Rule):
  """layer_types; or every full_attention_interval-th layer is one of attention, the others have the delta rule."""

  ours = {"linear_attention": "delta", "full_attention": "global"}

  def read(self, source, model):
    layers, interval = model["num_layers"], source.get("full_attention_interval", int, 4)
    if source.get("layer_types", list, None, None) is None:
      return {"layer_pattern": tuple("delta" if (i + 1) % interval else "global" for i in range(layers))}
    return {"layer_pattern": named_kinds(source, "layer_types", layers, self.ours)}

  def write(self, model):
    theirs = {ours: theirs for theirs, ours in self.ours.items()}
    return {"layer_types": [theirs.get(kind, kind) for kind in kinds_of(model)]}


DELTA_SIZES = (
    DeltaLayers(),
    Key("linear_num_key_heads", "delta.num_key_heads", default=16),
    Key("linear_num_value_heads", "delta.num_value_heads", default=32),
    Key("linear_key_head_dim", "delta.key_head_dim", default=128),
    Key("linear_value_head_dim", "delta.value_head_dim", default=128),
    Key("linear_conv_kernel_dim", "delta.conv_width", default=4),
)
# What stands beside the projections.
DELTA = (
    Tensor("layers.{layer}.linear_attn.conv1d.weight", tuple(f"blocks/delta/{p}_conv/taps" for p in "qkv"),
           transpose=True, form="taps"),
    Tensor("layers.{layer}.linear_attn.A_log", "blocks/delta/A_log"),
    Tensor("layers.{layer}.linear_attn.dt_bias", "blocks/delta/dt_bias"),
    Tensor("layers.{layer}.linear_attn.norm.weight", "blocks/delta/norm/scale"),
    Tensor("layers.{layer}.linear_attn.out_proj.weight", "blocks/delta/o/kernel", transpose=True),
)
FIXED = {"norm_scale_plus_one": True, "qk_norm": True, "attention_gate": True}
TABLE = (
    *common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *DELTA, *EXPERTS, *SHARED_EXPERT,
    # For each head of keys, its rows of all of them.
    *(Tensor(f"layers.{{layer}}.linear_attn.in_proj_{parts}.weight",
             tuple(f"blocks/delta/{p}/kernel" for p in parts), transpose=True, groups="delta.num_key_heads")
      for parts in ("qkvz", "ba")),
)
# What published folders do not say, though they have one; vLLM asks for it under this name.
COUNT = "num_nextn_predict_layers"

QWEN3_NEXT = Family(
    model_types=("qwen3_next",),
    architectures=("Qwen3NextForCausalLM",),
    keys=(
        *common.SIZES, common.RMS_EPS, common.SILU, common.UNTIED, Rope(fraction=0.25), *DELTA_SIZES, *SPARSE,
        Key("head_dim", "head_dim", default=256), common.kv_heads(2),
        Key("moe_intermediate_size", ("intermediate_size", "moe.expert_size"), default=512),
        Key("norm_topk_prob", "moe.normalize_weights", bool, default=True),
        Key("num_experts", "moe.num_experts", default=512, alias="num_local_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token", default=10),
        Key("shared_expert_intermediate_size", "moe.shared_size", default=512),
        common.ATTENTION_BIAS, mtp.Modules(COUNT, most=1, always=False),
    ),
    table=TABLE,
    fixed=FIXED | {"moe.shared_gate": True},
    ahead=mtp.apart(TABLE, COUNT),
    # The width of layers that are not sparse, of which there are none.
    inert=frozenset({"intermediate_size"}),
)
