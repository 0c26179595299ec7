"""GLM 4 9B: Phi 3's fused gate, biases on queries, keys and values, and half of each head rotated, in neighbours."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key
from models.hf.rope import Rope

GLM_KEYS = (
    *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Rope(fraction=0.5),
    Key("head_dim", "head_dim", default=128, null=common.head_size),
    Key("rms_norm_eps", "norm_eps", float, default=1.5625e-7),
    Key("num_key_value_heads", "num_kv_heads", default=2, null=common.as_many_as_heads),
    Key("attention_bias", "qkv_bias", bool, default=True),
)
GLM_TABLE = (
    *common.ENDS, *common.ATTENTION,
    Tensor("layers.{layer}.mlp.gate_up_proj.weight", ("blocks/mlp/gate/kernel", "blocks/mlp/up/kernel"),
           transpose=True),
    Tensor("layers.{layer}.mlp.down_proj.weight", "blocks/mlp/down/kernel", transpose=True),
)

GLM = Family(
    name="glm",
    model_types=("glm",),
    architectures=("GlmForCausalLM",),
    keys=GLM_KEYS,
    table=(*GLM_TABLE, *common.NORMS),
    fixed={"rope_interleaved": True},
)
