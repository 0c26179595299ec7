"""Mistral, Ministral 3 and Mixtral, and MiniMax M2."""

from dataclasses import dataclass

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.families.deepseek import SCORES
from models.hf.families.qwen3_moe import FUSED, ROUTER
from models.hf.family import Family, Tensor
from models.hf.images import TextPart
from models.hf.keys import Key, Must, OfAllLayers, Window
from models.hf.rope import Rope

# Mistral: a Llama without biases, with a sliding window in all layers (7B 0.1) or in none.
#
# Folders of Mistral Small 3.1 and of what came of it (mistral3) hold a tower for images beside it, which is passed
# over.

# Of folders with a tower.
WHOLE = "Mistral3ForConditionalGeneration"
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
IGNORED = (r"rotary_emb\.inv_freq$", r"^(model\.)?(vision_tower|multi_modal_projector)\.")
HEAD = Tensor("language_model.lm_head.weight", "unembed/kernel", transpose=True, prefixed=False)
# How images become tokens.
INERT = frozenset({"image_token_index", "image_token_id", "multimodal_projector_bias", "spatial_merge_size",
                   "vision_feature_layer", "projector_hidden_act"})

MISTRAL = TextPart(
    model_types=("mistral",),
    architectures=("MistralForCausalLM", WHOLE),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED,
        Rope(), Window(default=4096), common.kv_heads(8),
    ),
    table=(*common.LLAMA, HEAD),
    prefixes=PREFIXES, ignored=IGNORED, inert=INERT,
)


# Ministral 3: a Mistral whose queries grow with their position, as those of some of Llama 4's layers.
#
# Published folders (mistral3) hold a tower for images beside it, which is passed over.

BETA = "llama_4_scaling_beta"


@dataclass(frozen=True)
class GrowingRope(Rope):
  """With the factor on queries: a step for each length that the model was first trained on."""

  inert: tuple[str, ...] = (BETA, "max_position_embeddings")

  def read(self, source, model):
    keys = super().read(source, model)
    beta = self._parameters(source)[0].get(BETA, float, 0.0)
    if beta and keys.get("rope_scaling.original_positions") is None:
      raise HFError(f"{source.where}: {BETA} is {beta:g}, which needs a type of rotary positions with "
                    "original_max_position_embeddings, yarn say.")
    return keys | ({"query_temperature.scale": beta,
                    "query_temperature.floor": keys["rope_scaling.original_positions"]} if beta else {})

  def write(self, model):
    content, original = super().write(model), model["rope_scaling.original_positions"]
    if original is None or model["query_temperature.floor"] != original and model["query_temperature.scale"]:
      raise HFError("queries of this family grow by the original length of a scaling of rotary positions")
    content["rope_scaling"][BETA] = model["query_temperature.scale"]
    return content


MINISTRAL3 = TextPart(
    model_types=("ministral3",),
    architectures=("Ministral3ForCausalLM", WHOLE),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Window(default=None), common.RMS_EPS_5,
        GrowingRope(theta=1e6, told=True), common.head_dim(128), common.kv_heads(8),
    ),
    table=(*common.LLAMA, HEAD),
    prefixes=PREFIXES, ignored=IGNORED, inert=INERT,
)


# Mixtral: a Mistral whose MLPs are mixtures of experts.
MIXTRAL = Family(
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    keys=(
        *common.SIZES, common.HEAD_SIZE, common.SILU, common.UNTIED, Rope(theta=1e6), Window(default=None),
        common.RMS_EPS_5, common.kv_heads(8),
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
        ROUTER, *FUSED,
    ),
)


# MiniMax M2: Mixtral's experts chosen as DeepSeek V3's are, norms over all heads of queries and of keys, and half of
# each head rotated.

class RotaryDim(Rope):
  """rotary_dim: how many dimensions of a head are rotated, where partial_rotary_factor does not say which share."""

  def read(self, source, model):
    keys, size = super().read(source, model), model["head_dim"]
    dims = source.get("rotary_dim", int, None, None)
    said = [part for part in (source, self._parameters(source)[0]) if "partial_rotary_factor" in part.content]
    if dims is not None and (dims > size or said and dims != int(size * keys["rope_fraction"])):
      raise source.error("rotary_dim", f"at most {size}, the head_dim, and partial_rotary_factor times that")
    return keys if dims is None or said else keys | {"rope_fraction": dims / size}


MINIMAX_M2 = Family(
    model_types=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    keys=(
        *common.SIZES, common.SILU, common.UNTIED, common.RMS_EPS,
        Key("head_dim", "head_dim", default=128), RotaryDim(theta=5e6, fraction=1.0),
        Key("num_key_value_heads", "num_kv_heads", default=8),
        Key("intermediate_size", ("intermediate_size", "moe.expert_size"), default=1536),
        Key("num_local_experts", "moe.num_experts", default=256, alias="num_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token", default=8),
        Must("use_qk_norm", True, "transformers always has the norms"),
        Must("qk_norm_type", "per_layer", "norms are over all heads together"),
        Must("use_routing_bias", True, "transformers always has the biases"),
        Must("scoring_func", "sigmoid", "transformers has no other scores"),
        Must("shared_intermediate_size", 0, "transformers has no shared expert"),
        *(Must(f"layernorm_{part}_beta", 1.0, "transformers multiplies residual branches by nothing")
          for part in ("full_attention", "linear_attention", "mlp")),
        OfAllLayers("attn_type_list", 1),  # not the linear attention of other models of theirs
    ),
    table=(*MIXTRAL.table, *common.QK_NORMS,
           *(Tensor(f"layers.{{layer}}.{moe}.e_score_correction_bias", "blocks/moe/router/choice_bias")
             for moe in ("block_sparse_moe", "mlp"))),
    fixed={**SCORES, "qk_norm": True, "qk_norm_over": "all"},
    # What predicts tokens further ahead, of which folders have nothing, and the width of an MLP that there is not.
    inert=frozenset({"mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"}),
    classifier=None,
)
