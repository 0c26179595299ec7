"""Gemma 1 to 3, text."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import GATED, Activation, Key, LayerTypes, QueryScale, WholeHeads, all_but_every_nth, sliding_window
from models.hf.rope import Rope

# Gemma 1: scaled embeddings, norms stored as an offset from one, a tanh-GELU gate, tied embeddings.

GEMMA_FIXED = {"norm_scale_plus_one": True, "scale_embeddings": True}
# "gelu" in a config.json of Gemma 1 means the tanh approximation, by which it was trained.
ACTIVATIONS = {"swiglu": GATED["swiglu"], "geglu": (*GATED["geglu"], "gelu")}

GEMMA = Family(
    model_types=("gemma",),
    architectures=("GemmaForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.TIED, Rope(), common.ATTENTION_BIAS,
        Activation("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS, same=("hidden_activation",)),
        Key("head_dim", "head_dim", default=256),
        Key("num_key_value_heads", "num_kv_heads", default=16),
    ),
    table=common.LLAMA,
    fixed=GEMMA_FIXED,
)


# Gemma 2: Gemma with norms before and after each branch, capped logits, and a window in every other layer.

SANDWICH = (
    Tensor("layers.{layer}.input_layernorm.weight", "blocks/attn_norm/scale"),
    Tensor("layers.{layer}.post_attention_layernorm.weight", "blocks/attn_post_norm/scale"),
    Tensor("layers.{layer}.pre_feedforward_layernorm.weight", "blocks/mlp_norm/scale"),
    Tensor("layers.{layer}.post_feedforward_layernorm.weight", "blocks/mlp_post_norm/scale"),
)
# hidden_act stands in many files of this family, but is not what is used.
TANH_GELU = Activation("hidden_activation", "gelu_pytorch_tanh", GATED, same=("hidden_act",))

GEMMA2 = Family(
    model_types=("gemma2",),
    architectures=("Gemma2ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.TIED,
        WholeHeads(), Rope(), TANH_GELU, QueryScale(), common.ATTENTION_BIAS,
        LayerTypes(sliding_window(4096), all_but_every_nth(2)),
        Key("head_dim", "head_dim", default=256),
        Key("num_key_value_heads", "num_kv_heads", default=4),
        Key("final_logit_softcapping", "final_logit_cap", float, default=30.0, null=None),
        Key("attn_logit_softcapping", "attention_logit_cap", float, default=50.0, null=None),
    ),
    table=(*common.ENDS, *SANDWICH, *common.ATTENTION, *common.MLP),
    fixed=GEMMA_FIXED | {"norm_position": "sandwich"},
)


# Gemma 3, text only: Gemma 2 with RMSNorms on queries and keys, five layers with a window for each without, and two
# bases of rotary positions.

def write_pattern(types: tuple[str, ...], window: int | None) -> dict:
  """The window, and the pattern where it is of the old form."""
  period = types.index("global") + 1 if "global" in types else len(types) + 1
  regular = all((kind == "local") == bool((i + 1) % period) for i, kind in enumerate(types))
  return {"sliding_window": window, **({"sliding_window_pattern": period} if regular else {})}


GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    architectures=("Gemma3ForCausalLM",),
    body="Gemma3TextModel",
    classifier="Gemma3TextForSequenceClassification",
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.TIED,
        WholeHeads(), Rope(theta=1e6, local_theta=1e4), TANH_GELU, QueryScale(), common.ATTENTION_BIAS,
        LayerTypes(sliding_window(4096), all_but_every_nth(6, told=True), write_pattern),
        Key("head_dim", "head_dim", default=256),
        Key("num_key_value_heads", "num_kv_heads", default=4),
        Key("final_logit_softcapping", "final_logit_cap", float, default=None, null=None),
        Key("attn_logit_softcapping", "attention_logit_cap", float, default=None, null=None),
    ),
    table=(*common.ENDS, *SANDWICH, *common.ATTENTION, *common.QK_NORMS, *common.MLP),
    fixed=GEMMA_FIXED | {"norm_position": "sandwich", "qk_norm": True},
)
