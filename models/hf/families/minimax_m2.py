"""MiniMax M2: Mixtral's experts chosen as DeepSeek V3's are, norms over all heads of queries and of keys, and half of
each head rotated."""

from models.hf.families import common
from models.hf.families.deepseek import SCORES
from models.hf.families.mistral import MIXTRAL
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Must, OfAllLayers
from models.hf.rope import Rope


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
    name="minimax_m2",
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
