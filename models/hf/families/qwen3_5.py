"""Qwen3.5, dense and with mixtures of experts, text: Qwen3-Next with a matrix for each part of the delta layers.

Published folders hold a vision tower beside it, which is passed over.
"""

from models.hf.families import common, mtp
from models.hf.families.qwen2_moe import SHARED_EXPERT
from models.hf.families.qwen3_moe import EXPERTS
from models.hf.families.qwen3_next import DELTA, DELTA_SIZES, FIXED
from models.hf.family import Tensor
from models.hf.images import TextPart
from models.hf.keys import Key, Must
from models.hf.rope import Rope

# How the positions of images are put together, which are those of the text where there is none.
OF_IMAGES = ("mrope_section", "mrope_interleaved")
# Says how many modules predict tokens further ahead.
COUNT = "mtp_num_hidden_layers"
KEYS = (
    *common.SIZES, common.RMS_EPS, common.SILU, common.UNTIED, Rope(fraction=0.25, inert=OF_IMAGES), *DELTA_SIZES,
    Key("head_dim", "head_dim", default=256),
    Must("attn_output_gate", True, "attention has a gate in all models of this family"),
    common.ATTENTION_BIAS, mtp.Modules(COUNT, most=1, always=False),
)
TABLE = (
    *common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *DELTA,
    *(Tensor(f"layers.{{layer}}.linear_attn.in_proj_{parts}.weight",
             tuple(f"blocks/delta/{p}/kernel" for p in parts), transpose=True) for parts in ("qkv", "z", "b", "a")),
)
PREFIXES = ("model.", "model.language_model.", "")
IGNORED = (r"rotary_emb\.inv_freq$", r"^model\.visual\.")
DENSE, SPARSE = (*TABLE, *common.MLP), (*TABLE, *EXPERTS, *SHARED_EXPERT)

QWEN3_5 = TextPart(
    name="qwen3_5",
    model_types=("qwen3_5_text", "qwen3_5"),
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    body="Qwen3_5TextModel",
    classifier="Qwen3_5TextForSequenceClassification",
    keys=(*KEYS, common.WIDTH, common.kv_heads(4)),
    table=DENSE, fixed=FIXED, prefixes=PREFIXES, ignored=IGNORED, ahead=mtp.apart(DENSE, COUNT),
)
QWEN3_5_MOE = TextPart(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    body="Qwen3_5MoeTextModel",
    classifier=None,
    keys=(
        *KEYS, common.kv_heads(2),
        Key("moe_intermediate_size", ("intermediate_size", "moe.expert_size"), default=512),
        Key("num_experts", "moe.num_experts", default=256, alias="num_local_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token", default=8),
        Key("shared_expert_intermediate_size", "moe.shared_size", default=512),
        Must("norm_topk_prob", True, "the weights of the chosen experts sum to one in this family"),
    ),
    table=SPARSE, fixed=FIXED | {"moe.shared_gate": True}, prefixes=PREFIXES,
    # The width of layers that are not sparse, of which there are none.
    ignored=IGNORED, inert=frozenset({"intermediate_size"}), ahead=mtp.apart(SPARSE, COUNT),
)
