"""Gemma 1: scaled embeddings, norms stored as an offset from one, a tanh-GELU gate, tied embeddings."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import GATED, Activation, Key
from models.hf.rope import Rope

GEMMA_FIXED = {"norm_scale_plus_one": True, "scale_embeddings": True}
# "gelu" in a config.json of Gemma 1 means the tanh approximation, by which it was trained.
ACTIVATIONS = {"swiglu": GATED["swiglu"], "geglu": (*GATED["geglu"], "gelu")}

GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    architectures=("GemmaForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.TIED, Rope(),
        Activation("hidden_act", "gelu_pytorch_tanh", ACTIVATIONS, same=("hidden_activation",)),
        Key("head_dim", "head_dim", default=256),
        Key("num_key_value_heads", "num_kv_heads", default=16),
        common.ATTENTION_BIAS,
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
    fixed=GEMMA_FIXED,
)
