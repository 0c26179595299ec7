"""DeepSeek V2, V2-Lite, V3 and R1, Kimi K2, and dots.llm1."""

import math
from dataclasses import dataclass

from models.hf.families import common, mtp
from models.hf.families.qwen3_moe import EXPERTS
from models.hf.family import Family, Tensor
from models.hf.keys import Key, LayerTypes, Must, Rule, Same, sliding_window
from models.hf.rope import Rope
from models.hf.source import Source

# DeepSeek-V2 and V2-Lite: latent attention, and experts in groups beside shared ones, after dense layers.

@dataclass(frozen=True)
class OrNull(Key):
  """A number of ours that is 0 where theirs is null."""

  def write(self, model):
    return {key: value or None for key, value in super().write(model).items()}


class LatentRope(Rope):
  """With yarn, mscale_all_dim is also in the factor on scores; see transformers' `yarn_apply_mscale`."""

  def read(self, source, model):
    keys = super().read(source, model)
    all_dim = self._parameters(source)[0].get("mscale_all_dim", float, None, None)
    if all_dim and keys["rope_scaling.type"] == "yarn":
      magnitude = _magnitude(keys["rope_scaling.factor"], all_dim)
      keys["attention_scale"] = (model["latent.nope_dim"] + model["latent.rope_dim"]) ** -0.5 * magnitude * magnitude
    return keys

  def write(self, model):
    content, scale, factor = super().write(model), model["attention_scale"], model["rope_scaling.factor"]
    if scale is None or model["rope_scaling.type"] != "yarn" or factor <= 1 or scale <= 0:
      return content
    magnitude, step = math.sqrt(scale * math.sqrt(model["head_dim"])), 0.1 * math.log(factor)
    scaling, on_rotation = content["rope_scaling"], model["rope_scaling.attention_factor"]
    scaling["mscale_all_dim"] = round((magnitude - 1) / step, 9)
    if on_rotation is not None:
      scaling["mscale"] = round((on_rotation * magnitude - 1) / step, 9)
      if _magnitude(factor, scaling["mscale"]) / _magnitude(factor, scaling["mscale_all_dim"]) == on_rotation:
        del scaling["attention_factor"]  # programs that know DeepSeek alone read mscale
    return content


def _magnitude(factor: float, mscale: float) -> float:
  return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class DenseLayers(Rule):
  """first_k_dense_replace, which may be 0."""

  def __init__(self, default: int):
    self.default = default

  def read(self, source, model):
    found, most = source.get("first_k_dense_replace", object, self.default, self.default), model["num_layers"] - 1
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= most:
      raise source.error("first_k_dense_replace", f"0 to {most}, so that a layer has experts")
    return {"moe.dense_layers": found}

  def write(self, model):
    return {"first_k_dense_replace": model["moe.dense_layers"]}


class SharedExperts(Key):
  """n_shared_experts of the size of the others, which are one of as many times that size."""

  def read(self, source, model):
    return {"moe.shared_size": super().read(source, model)[self.ours] * model["moe.expert_size"]}

  def write(self, model):
    return {self.theirs: max(1, model["moe.shared_size"] // (model["moe.expert_size"] or 1))}


class Groups(Rule):
  """topk_method: `greedy`, or with groups `group_limited_greedy`."""

  def read(self, source, model):
    method = source.get("topk_method", str, "greedy", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
      raise source.error("topk_method", "greedy, group_limited_greedy")
    groups = {ours: source.get(theirs, int, 1, 1) for theirs, ours in (
        ("n_group", "moe.groups"), ("topk_group", "moe.groups_used"))}
    return groups if method == "group_limited_greedy" else {}

  def write(self, model):
    method = "group_limited_greedy" if model["moe.groups"] > 1 else "greedy"
    return {"topk_method": method, "n_group": model["moe.groups"], "topk_group": model["moe.groups_used"]}


HEADS = "latent attention has keys and values for each head"


def latent_sizes(q_rank: int, nope: int, value: int, norm_eps: float = 1e-6) -> tuple[Rule, ...]:
  """Sizes, and those of latent attention; the arguments are what a family's class assumes where nothing is said."""
  return (
      *common.SIZES, common.SILU, common.UNTIED, common.WIDTH, common.ATTENTION_BIAS,
      Key("rms_norm_eps", "norm_eps", float, default=norm_eps),
      Same("num_key_value_heads", "num_heads", HEADS),
      Key("kv_lora_rank", "latent.kv_rank", default=512),
      OrNull("q_lora_rank", "latent.q_rank", default=q_rank, null=0),
      Key("qk_nope_head_dim", "latent.nope_dim", default=nope),
      Key("qk_rope_head_dim", "latent.rope_dim", default=64),
      Key("v_head_dim", "latent.value_dim", default=value),
      LatentRope(),
      Must("moe_layer_freq", 1, "all layers after the first ones have experts"),
  )


LATENT = (
    Tensor("layers.{layer}.self_attn.q_proj.weight", "blocks/attn/q/kernel", transpose=True),
    *(tensor for theirs, ours in (("q_a_proj", "q_down"), ("kv_a_proj_with_mqa", "kv_down"), ("o_proj", "o"))
      for tensor in common.pair(f"layers.{{layer}}.self_attn.{theirs}", f"blocks/attn/{ours}")),
    *(tensor for p in ("q", "kv") for tensor in (
        Tensor(f"layers.{{layer}}.self_attn.{p}_a_layernorm.weight", f"blocks/attn/{p}_down_norm/scale"),
        Tensor(f"layers.{{layer}}.self_attn.{p}_b_proj.weight", f"blocks/attn/{p}_up/kernel", transpose=True))),
)
MIXTURE = (
    *common.MLP, *EXPERTS,
    *(Tensor(f"layers.{{layer}}.mlp.shared_experts.{p}_proj.weight", f"blocks/moe/shared/{p}/kernel", transpose=True)
      for p in ("gate", "up", "down")),
)
# Losses and layouts of training; the size of rotated keys, said twice; that of queries and keys.
INERT = frozenset({"aux_loss_alpha", "seq_aux", "ep_size", "head_dim", "qk_head_dim"})

DEEPSEEK_V2 = Family(
    model_types=("deepseek_v2",),
    architectures=("DeepseekV2ForCausalLM",),
    keys=(
        *latent_sizes(q_rank=1536, nope=128, value=128),
        Key("moe_intermediate_size", "moe.expert_size", default=1407),
        Key("n_routed_experts", "moe.num_experts", default=64, alias="num_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token"),
        SharedExperts("n_shared_experts", "moe.shared_size", default=2),
        Key("routed_scaling_factor", "moe.weight_scale", float, default=1.0),
        DenseLayers(0), Groups(),
        Must("scoring_func", "softmax", "sigmoid scores are DeepSeek-V3's"),
        Must("norm_topk_prob", False, "transformers does not divide weights by their sum in this family"),
        Must("mlp_bias", False, "experts have no biases"),
    ),
    table=(*common.ENDS, *common.NORMS, *LATENT, *MIXTURE),
    fixed={"rope_interleaved": True, "moe.normalize_weights": False},
    inert=INERT,
)


# DeepSeek-V3, R1 and Kimi K2: V2's layers, with sigmoid scores and a bias that keeps experts evenly used.

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


# dots.llm1: Qwen 3's attention, and DeepSeek V3's router and experts.

def from_max_window_layers_on(source: Source, layers: int) -> tuple[str, ...]:
  first, window = source.get("max_window_layers", int, 62, 0), source.get("sliding_window", int, 4096, None)
  return tuple("local" if i >= first and window else "global" for i in range(layers))


DOTS1 = Family(
    model_types=("dots1",),
    architectures=("Dots1ForCausalLM",),
    keys=(
        *common.SIZES, common.HEAD_SIZE, common.WIDTH, common.RMS_EPS, common.SILU, common.UNTIED, Rope(),
        common.ATTENTION_BIAS, common.kv_heads(32),
        LayerTypes(sliding_window(4096), from_max_window_layers_on),
        Key("moe_intermediate_size", "moe.expert_size", default=1408),
        Key("n_routed_experts", "moe.num_experts", alias="num_local_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token"),
        SharedExperts("n_shared_experts", "moe.shared_size"),
        Key("routed_scaling_factor", "moe.weight_scale", float, default=1.0),
        Key("n_group", "moe.groups", default=1, null=1), Key("topk_group", "moe.groups_used", default=1, null=1),
        Key("norm_topk_prob", "moe.normalize_weights", bool, default=False, null=False),
        Must("moe_layer_freq", 1, "all layers after the first ones have experts"),
        DenseLayers(0),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *MIXTURE, CHOICE_BIAS),
    fixed=SCORES | {"qk_norm": True},
    # Published folders have here what transformers does not read: how experts are chosen, which is as in DeepSeek V3.
    inert=frozenset({"scoring_func", "topk_method"}),
    classifier=None,
)
