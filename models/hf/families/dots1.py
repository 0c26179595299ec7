"""dots.llm1: Qwen 3's attention, and DeepSeek V3's router and experts."""

from models.hf.families import common
from models.hf.families.deepseek import CHOICE_BIAS, MIXTURE, SCORES, DenseLayers, SharedExperts
from models.hf.families.gemma import write_window
from models.hf.family import Family
from models.hf.keys import Key, LayerTypes, Must
from models.hf.rope import Rope
from models.hf.source import Source


def sliding_window(source: Source) -> int | None:
  return source.get("sliding_window", int, 4096, None)


def from_max_window_layers_on(source: Source, layers: int) -> tuple[str, ...]:
  first = source.get("max_window_layers", int, 62, 0)
  return tuple("local" if i >= first and sliding_window(source) else "global" for i in range(layers))


DOTS1 = Family(
    name="dots1",
    model_types=("dots1",),
    architectures=("Dots1ForCausalLM",),
    keys=(
        *common.SIZES, common.HEAD_SIZE, common.WIDTH, common.RMS_EPS, common.SILU, common.UNTIED, Rope(),
        common.ATTENTION_BIAS,
        Key("num_key_value_heads", "num_kv_heads", default=32, null=common.as_many_as_heads),
        LayerTypes(sliding_window, from_max_window_layers_on, write_window),
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
