"""Cohere's Command R, R+ and R7B, and Aya."""

from models.hf.families import common
from models.hf.families.common import head_size
from models.hf.family import Family
from models.hf.keys import Key, LayerTypes, Must, Rule, all_but_every_nth, sliding_window
from models.hf.rope import Rope

# Cohere (Command R, Aya 23): attention and MLP in parallel after one LayerNorm, and a factor on logits.

COHERE_KEYS = (
    *common.SIZES, common.WIDTH, common.SILU, common.TIED, common.ATTENTION_BIAS, common.KV_HEADS,
    Key("layer_norm_eps", "norm_eps", float, default=1e-5),
    Key("logit_scale", "logit_scale", float, default=0.0625),
    Must("use_parallel_block", True, "attention and MLP are parallel"),
    Must("use_gated_activation", True, "the MLP is gated"),
    Must("rotary_pct", 1.0, "whole heads are rotated"),
)
COHERE_TABLE = (*common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *common.MLP)
COHERE_FIXED = {"norm": "layernorm", "parallel_blocks": True, "rope_interleaved": True}
# What files have, and no version of transformers reads.
COHERE_INERT = frozenset({"layer_switch", "use_embedding_sharing", "use_parallel_embedding"})

COHERE = Family(
    model_types=("cohere",),
    architectures=("CohereForCausalLM",),
    classifier=None,
    keys=(*COHERE_KEYS, common.HEAD_SIZE, Rope(theta=5e5), Key("use_qk_norm", "qk_norm", bool, False, False)),
    table=COHERE_TABLE,
    fixed=COHERE_FIXED | {"qk_norm_over": "each_head"},
    inert=COHERE_INERT,
)


# Cohere 2 (Command R7B, Command A): Cohere with a window in three of four layers; the fourth has no positions.

class DividedHeads(Rule):
  """A head's size is the hidden size divided by the heads, whatever head_dim says to other families."""

  def read(self, source, model):
    size = head_size(model)
    source.need("head_dim", object, size, f"{size}, the hidden size divided by the heads")
    return {"head_dim": size}


class WindowOrNoPositions(LayerTypes):
  """Layers without a window are those without rotary positions."""

  def read(self, source, model):
    found = super().read(source, model)
    return found | {"layer_pattern": tuple("nope" if kind == "global" else kind for kind in found["layer_pattern"])}


COHERE2 = Family(
    model_types=("cohere2",),
    architectures=("Cohere2ForCausalLM",),
    classifier=None,
    keys=(*COHERE_KEYS, DividedHeads(), Rope(), Must("use_qk_norm", False, "queries and keys have no norms"),
          WindowOrNoPositions(sliding_window(4096), all_but_every_nth(4, told=True))),
    table=COHERE_TABLE,
    fixed=COHERE_FIXED,
    inert=COHERE_INERT,
)
