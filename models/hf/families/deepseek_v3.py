"""DeepSeek-V3, R1 and Kimi K2: V2's layers, with sigmoid scores and a bias that keeps experts evenly used."""

from models.hf.families import common, mtp
from models.hf.families.deepseek_v2 import (
  INERT,
  LATENT,
  MIXTURE,
  DenseLayers,
  SharedExperts,
  latent_sizes,
)
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Must, Rule

# Entries that say how many modules predict tokens further ahead.
AHEAD = ("num_nextn_predict_layers", "num_mtp_layers")
CHOICE_BIAS = Tensor("layers.{layer}.mlp.gate.e_score_correction_bias", "blocks/moe/router/choice_bias")


def experts(size: int, number: int, per_token: int, scale: float, groups: int = 1, groups_used: int = 1
            ) -> tuple[Rule, ...]:
  """The router and its experts; the arguments are what a family's class assumes where nothing is said."""
  return (
      Key("moe_intermediate_size", "moe.expert_size", default=size),
      Key("n_routed_experts", "moe.num_experts", default=number, alias="num_local_experts"),
      Key("num_experts_per_tok", "moe.experts_per_token", default=per_token),
      SharedExperts("n_shared_experts", "moe.shared_size", default=1),
      Key("routed_scaling_factor", "moe.weight_scale", float, default=scale),
      Key("n_group", "moe.groups", default=groups), Key("topk_group", "moe.groups_used", default=groups_used),
      Key("norm_topk_prob", "moe.normalize_weights", bool, default=True),
      Must("scoring_func", "sigmoid", "softmax scores are DeepSeek-V2's"),
      Must("topk_method", "noaux_tc", "groups are chosen by the sum of their two best scores, with the bias"),
  )


SCORES = {"moe.scores": "sigmoid", "moe.choice_bias": True}
TABLE = (*common.ENDS, *common.NORMS, *LATENT, *MIXTURE, CHOICE_BIAS)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    architectures=("DeepseekV3ForCausalLM",),
    keys=(
        *latent_sizes(q_rank=1536, nope=128, value=128),
        *experts(size=2048, number=256, per_token=8, scale=2.5, groups=8, groups_used=4),
        Key("rope_interleave", "rope_interleaved", bool, default=True),
        DenseLayers(3), mtp.Modules(*AHEAD),
    ),
    table=TABLE,
    fixed=SCORES,
    inert=INERT,
    ahead=mtp.as_layers(TABLE, *AHEAD),
)
