"""OLMo 2 and 3, and EXAONE 4."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key, LayerTypes, all_but_every_nth, sliding_window
from models.hf.rope import Rope
from models.hf.source import Source

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
    model_types=("olmo2",),
    architectures=("Olmo2ForCausalLM",),
    keys=(*OLMO2_KEYS, Rope()),
    table=OLMO2_TABLE,
    fixed=OLMO2_FIXED,
)


# OLMo 3: OLMo 2 with a window in three of four layers, whose rotary positions are not scaled.
OLMO3 = Family(
    model_types=("olmo3",),
    architectures=("Olmo3ForCausalLM",),
    keys=(*OLMO2_KEYS, Rope(theta=5e5, local_theta=5e5, local_entry="rope_theta"),
          LayerTypes(sliding_window(4096), all_but_every_nth(4))),
    table=OLMO2_TABLE,
    fixed=OLMO2_FIXED,
)


# EXAONE 4: norms after attention and MLP as in OLMo 2, but of each head; in the larger one a window in three of four
# layers, and no rotary positions in the fourth.

class WindowOrNoPositions(LayerTypes):
  """Of models with a window, layers without one do not rotate."""

  def read(self, source, model):
    found = super().read(source, model)
    if found["window"] is None:
      return found
    return found | {"layer_pattern": tuple("nope" if kind == "global" else kind for kind in found["layer_pattern"])}


def exaone4_kinds(source: Source, layers: int) -> tuple[str, ...] | None:
  """sliding_window_pattern: every so manieth layer has no window; of letters, versions differ on the last layer."""
  period = source.get("sliding_window_pattern", object, 4, 0)
  if source.get("sliding_window", int, 4096, None) is None:
    return ("global",) * layers
  if isinstance(period, bool) or not isinstance(period, int) or period < 1:
    return None
  return tuple("local" if (i + 1) % period else "global" for i in range(layers))


EXAONE4 = Family(
    model_types=("exaone4",),
    architectures=("Exaone4ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.SILU, common.UNTIED, Rope(), common.RMS_EPS_5,
        Key("num_key_value_heads", "num_kv_heads", default=32),
        WindowOrNoPositions(sliding_window(4096), exaone4_kinds),
    ),
    table=OLMO2_TABLE,
    fixed={"norm_position": "post", "qk_norm": True},
)
