"""DeepSeek-V3, R1 and Kimi K2: V2's layers, with sigmoid scores and a bias that keeps experts evenly used."""

from models.hf.families import common
from models.hf.families.deepseek_v2 import INERT, LATENT, LATENT_SIZES, MIXTURE, DenseLayers, SharedExperts
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Must, Rule

# How many layers predict tokens further ahead, under its two names.
AHEAD = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
CHOICE_BIAS = Tensor("layers.{layer}.mlp.gate.e_score_correction_bias", "blocks/moe/router/choice_bias")


class LayersAhead(Rule):
  """Layers after the last one that predict tokens further ahead, which transformers' logits do not use either."""

  def read(self, source, model):
    for key in AHEAD:
      source.get(key, object, 0, 0)
    return {}

  def write(self, model):
    return {"num_nextn_predict_layers": 0}

  def notes(self, source):
    found = {key: source.content[key] for key in AHEAD if source.content.get(key)}
    return [f"{source.where}: {key} is {count}; layers that predict tokens further ahead are passed over, and are not "
            "exported." for key, count in [*found.items()][:1]]


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2"),
    architectures=("DeepseekV3ForCausalLM",),
    keys=(
        *LATENT_SIZES,
        Key("moe_intermediate_size", "moe.expert_size", default=2048),
        Key("n_routed_experts", "moe.num_experts", default=256, alias="num_local_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token", default=8),
        SharedExperts("n_shared_experts", "moe.shared_size", default=1),
        Key("routed_scaling_factor", "moe.weight_scale", float, default=2.5),
        Key("n_group", "moe.groups", default=8), Key("topk_group", "moe.groups_used", default=4),
        Key("norm_topk_prob", "moe.normalize_weights", bool, default=True),
        Key("rope_interleave", "rope_interleaved", bool, default=True),
        DenseLayers(3), LayersAhead(),
        Must("scoring_func", "sigmoid", "softmax scores are DeepSeek-V2's"),
        Must("topk_method", "noaux_tc", "groups are chosen by the sum of their two best scores, with the bias"),
    ),
    table=(*common.ENDS, *common.NORMS, *LATENT, *MIXTURE, CHOICE_BIAS),
    fixed={"moe.scores": "sigmoid", "moe.choice_bias": True},
    inert=INERT,
    ahead="eh_proj.weight",
    dropped=AHEAD,
)
