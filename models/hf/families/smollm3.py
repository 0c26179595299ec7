"""SmolLM 3: a Llama in which some layers, every fourth where nothing is said, have no rotary positions."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import Key, Must, Rule
from models.hf.rope import Rope


class NoRopeLayers(Rule):
  """no_rope_layers: 1 for each layer that rotates, 0 for others; or every no_rope_layer_interval-th is another."""

  def read(self, source, model):
    layers, interval = model["num_layers"], source.get("no_rope_layer_interval", int, 4)
    found = source.get("no_rope_layers", list, None, None)
    rotates = [int((i + 1) % interval != 0) for i in range(layers)] if found is None else found
    if len(rotates) < layers or any(flag not in (0, 1) for flag in rotates):
      raise source.error("no_rope_layers", f"1 or 0 for each of the {layers} layers")
    types = source.get("layer_types", list, None, None)
    if types is not None and types != ["full_attention"] * layers:
      raise source.error("layer_types", f"'full_attention' for each of the {layers} layers, since there is no window")
    source.get("sliding_window", object, None)  # switched off, so that it may be anything
    return {"layer_pattern": tuple("global" if flag else "nope" for flag in rotates[:layers])}

  def write(self, model):
    pattern = model["layer_pattern"]
    return {"no_rope_layers": [int(pattern[i % len(pattern)] != "nope") for i in range(model["num_layers"])]}


SMOLLM3 = Family(
    name="smollm3",
    model_types=("smollm3",),
    architectures=("SmolLM3ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.TIED, Rope(theta=2e6),
        Key("num_key_value_heads", "num_kv_heads", default=4, null=common.as_many_as_heads),
        common.ATTENTION_BIAS,
        Key("mlp_bias", "mlp_bias", bool, default=False),
        Must("use_sliding_window", False, "layers without rotary positions have no window here"),
        NoRopeLayers(),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP),
    inert=frozenset({"max_window_layers"}),
)
