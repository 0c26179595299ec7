"""Gemma 2: Gemma with norms before and after each branch, capped logits, and a window in every other layer."""

from models.hf.families import common
from models.hf.families.gemma import GEMMA_FIXED
from models.hf.family import Family, Tensor
from models.hf.keys import GATED, Activation, Key, LayerTypes, QueryScale, WholeHeads
from models.hf.rope import Rope
from models.hf.source import Source


def sliding_window(source: Source) -> int | None:
  """sliding_window, which is 4096 where it is not said."""
  return source.get("sliding_window", int, 4096, None)


def every_other(source: Source, layers: int) -> tuple[str, ...]:
  """The first layer has a window, the second none, and so on."""
  return tuple("global" if i % 2 else "local" for i in range(layers))


def write_window(types: tuple[str, ...], window: int | None) -> dict:
  """The window alone."""
  return {"sliding_window": window}


SANDWICH = (
    Tensor("layers.{layer}.input_layernorm.weight", "blocks/attn_norm/scale"),
    Tensor("layers.{layer}.post_attention_layernorm.weight", "blocks/attn_post_norm/scale"),
    Tensor("layers.{layer}.pre_feedforward_layernorm.weight", "blocks/mlp_norm/scale"),
    Tensor("layers.{layer}.post_feedforward_layernorm.weight", "blocks/mlp_post_norm/scale"),
)
# hidden_act stands in many files of this family, but is not what is used.
TANH_GELU = Activation("hidden_activation", "gelu_pytorch_tanh", GATED, same=("hidden_act",))

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    architectures=("Gemma2ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.TIED,
        WholeHeads(), Rope(), TANH_GELU, QueryScale(), common.ATTENTION_BIAS,
        LayerTypes(sliding_window, every_other, write_window),
        Key("head_dim", "head_dim", default=256),
        Key("num_key_value_heads", "num_kv_heads", default=4),
        Key("final_logit_softcapping", "final_logit_cap", float, default=30.0, null=None),
        Key("attn_logit_softcapping", "attention_logit_cap", float, default=50.0, null=None),
    ),
    table=(*common.ENDS, *SANDWICH, *common.ATTENTION, *common.MLP),
    fixed=GEMMA_FIXED | {"norm_position": "sandwich"},
)
