"""Helium 1: a Llama with rotated neighbours."""

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key, Rule
from models.hf.rope import Rope


class SquareOutput(Rule):
  """transformers has an output projection of the hidden size, whatever heads give."""

  def read(self, source, model):
    if model["num_heads"] * model["head_dim"] != model["hidden_size"]:
      raise source.error("head_dim", f"{model['hidden_size'] / model['num_heads']:g}, hidden_size / "
                         "num_attention_heads: the output projection is square in this family")
    return {}

  def write(self, model):
    if model["num_heads"] * model["head_dim"] != model["hidden_size"]:
      raise HFError(f"{model['num_heads']} heads of {model['head_dim']} must make the hidden size, "
                    f"{model['hidden_size']}, for transformers to load it")
    return {}


HELIUM = Family(
    name="helium",
    model_types=("helium",),
    architectures=("HeliumForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Rope(theta=1e5),
        Key("head_dim", "head_dim", default=128, null=common.head_size), SquareOutput(),
        Key("rms_norm_eps", "norm_eps", float, default=1e-8),
        Key("num_key_value_heads", "num_kv_heads", default=20, null=common.as_many_as_heads),
        Key("attention_bias", "qkv_bias", bool, default=False), Key("mlp_bias", "mlp_bias", bool, default=False),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
    fixed={"rope_interleaved": True},
)
