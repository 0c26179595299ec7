"""Gemma 3, text only: Gemma 2 with RMSNorms on queries and keys, five layers with a window for each without, and two
bases of rotary positions."""

from models.hf.families import common
from models.hf.families.gemma import GEMMA_FIXED
from models.hf.families.gemma2 import SANDWICH, TANH_GELU, sliding_window
from models.hf.family import Family
from models.hf.keys import Key, LayerTypes, QueryScale, WholeHeads
from models.hf.rope import Rope
from models.hf.source import Source


def all_but_every_nth(source: Source, layers: int) -> tuple[str, ...]:
  """sliding_window_pattern: every so manieth layer has no window."""
  period = source.get("sliding_window_pattern", int, source.get("_sliding_window_pattern", int, 6))
  return tuple("local" if (i + 1) % period else "global" for i in range(layers))


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
        LayerTypes(sliding_window, all_but_every_nth, write_pattern),
        Key("head_dim", "head_dim", default=256),
        Key("num_key_value_heads", "num_kv_heads", default=4),
        Key("final_logit_softcapping", "final_logit_cap", float, default=None, null=None),
        Key("attn_logit_softcapping", "attention_logit_cap", float, default=None, null=None),
    ),
    table=(*common.ENDS, *SANDWICH, *common.ATTENTION, *common.QK_NORMS, *common.MLP),
    fixed=GEMMA_FIXED | {"norm_position": "sandwich", "qk_norm": True},
)
