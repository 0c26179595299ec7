"""Cohere (Command R, Aya 23): attention and MLP in parallel after one LayerNorm, and a factor on logits."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key, Must
from models.hf.rope import Rope

COHERE_KEYS = (
    *common.SIZES, common.WIDTH, common.SILU, common.TIED, common.ATTENTION_BIAS,
    Key("layer_norm_eps", "norm_eps", float, default=1e-5),
    Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
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
    name="cohere",
    model_types=("cohere",),
    architectures=("CohereForCausalLM",),
    classifier=None,
    keys=(*COHERE_KEYS, common.HEAD_SIZE, Rope(theta=5e5), Key("use_qk_norm", "qk_norm", bool, False, False)),
    table=COHERE_TABLE,
    fixed=COHERE_FIXED | {"qk_norm_over": "each_head"},
    inert=COHERE_INERT,
)
