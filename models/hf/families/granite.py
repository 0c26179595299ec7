"""Granite 3: a Llama with factors on embeddings, attention's scores, residual branches and logits."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key, Rule
from models.hf.rope import Rope


class Multipliers(Rule):
  """attention_multiplier, the factor on scores, and logits_scaling, which logits are divided by."""

  def read(self, source, model):
    divisor = source.get("logits_scaling", float, 1.0)
    if divisor <= 0:
      raise source.error("logits_scaling", "a number above 0")
    return {"attention_scale": source.get("attention_multiplier", float, 1.0), "logit_scale": 1 / divisor}

  def write(self, model):
    scale = model["attention_scale"]
    # 1 / (1 / x) is x up to the last digit, which is none that anyone has typed.
    return {"attention_multiplier": model["head_dim"] ** -0.5 if scale is None else scale,
            "logits_scaling": float(f"{1 / model['logit_scale']:.15g}")}


GRANITE = Family(
    name="granite",
    model_types=("granite",),
    architectures=("GraniteForCausalLM",),
    classifier=None,
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED, Rope(),
        Key("num_key_value_heads", "num_kv_heads", default=common.as_many_as_heads, null=common.as_many_as_heads),
        common.ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", bool, default=False),
        Key("embedding_multiplier", "embedding_scale", float, default=1.0),
        Key("residual_multiplier", "residual_scale", float, default=1.0),
        Multipliers(),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
)
