"""OLMo 2 and 3."""

from models.hf.families import common
from models.hf.families.gemma import sliding_window, write_window
from models.hf.family import Family, Tensor
from models.hf.keys import LayerTypes
from models.hf.rope import Rope
from models.hf.source import Source

# ----------------------------------------------------------------------------------------------
# OLMo 2: a Llama whose norms come after attention and MLP, and over all heads of queries and of keys together.

OLMO2_KEYS = (
    *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.SILU, common.UNTIED, common.ATTENTION_BIAS, common.RMS_EPS_5,
    common.KV_HEADS,
)
OLMO2_TABLE = (
    *common.ENDS, *common.ATTENTION, *common.QK_NORMS, *common.MLP,
    Tensor("layers.{layer}.post_attention_layernorm.weight", "blocks/attn_post_norm/scale"),
    Tensor("layers.{layer}.post_feedforward_layernorm.weight", "blocks/mlp_post_norm/scale"),
)
OLMO2_FIXED = {"norm_position": "post", "qk_norm": True, "qk_norm_over": "all"}

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    architectures=("Olmo2ForCausalLM",),
    keys=(*OLMO2_KEYS, Rope()),
    table=OLMO2_TABLE,
    fixed=OLMO2_FIXED,
)


# ----------------------------------------------------------------------------------------------
# OLMo 3: OLMo 2 with a window in three of four layers, whose rotary positions are not scaled.

def all_but_every_fourth(source: Source, layers: int) -> tuple[str, ...]:
  """Every fourth layer has no window."""
  return tuple("local" if (i + 1) % 4 else "global" for i in range(layers))


OLMO3 = Family(
    name="olmo3",
    model_types=("olmo3",),
    architectures=("Olmo3ForCausalLM",),
    keys=(*OLMO2_KEYS, Rope(theta=5e5, local_theta=5e5, local_entry="rope_theta"),
          LayerTypes(sliding_window, all_but_every_fourth, write_window)),
    table=OLMO2_TABLE,
    fixed=OLMO2_FIXED,
)
