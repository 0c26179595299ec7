"""Llama 4, text (Scout, Maverick): attention in chunks, but for every fourth layer, which has no positions; experts of
which a token uses one, in every layer or every other.

Published folders hold a tower for images beside it, which is passed over.
"""

from models.hf.families import common
from models.hf.family import Tensor
from models.hf.images import TextPart
from models.hf.keys import Key, Rule, kinds_of
from models.hf.rope import Rope
from models.hf.source import LARGEST


class ExpertLayers(Rule):
  """moe_layers: the numbers of the layers with experts; or every interleave_moe_layer_step-th has them."""

  def read(self, source, model):
    layers, step = model["num_layers"], source.get("interleave_moe_layer_step", int, 1, 1)
    given = source.get("moe_layers", list, None, None)
    if given is not None:  # transformers leaves the step aside then
      step = given[0] + 1 if given and isinstance(given[0], int) and 0 <= given[0] < layers else 0
      if not step or given != list(range(step - 1, layers, step)):
        raise source.error("moe_layers", f"the number of every n-th layer of the {layers}, n - 1, 2n - 1, …, of some n")
    if step > layers:
      raise source.error("interleave_moe_layer_step", f"1 to {layers}, so that a layer has experts")
    return {"moe.layer_step": step}

  def write(self, model):
    layers, step = model["num_layers"], model["moe.layer_step"]
    return {"interleave_moe_layer_step": step, "moe_layers": list(range(step - 1, layers, step))}


class Layers(Rule):
  """no_rope_layers: 1 for each layer that rotates, 0 for others; or every no_rope_layer_interval-th is another. Those
  that rotate see chunks of attention_chunk_size, unless that is null or layer_types says otherwise."""

  def read(self, source, model):
    layers, interval = model["num_layers"], source.get("no_rope_layer_interval", int, 4, 4)
    chunk = source.get("attention_chunk_size", int, 8192, None)
    rotates = source.get("no_rope_layers", list, [], []) or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(rotates) < layers or any(flag not in (0, 1) for flag in rotates):
      raise source.error("no_rope_layers", f"1 or 0 for each of the {layers} layers")
    pattern = tuple(("global" if chunk is None else "chunked") if flag else "nope" for flag in rotates[:layers])
    types = source.get("layer_types", list, None, None)
    if types is not None:
      meant = {(True, "chunked_attention"): "chunked", (True, "full_attention"): "global",
               (False, "full_attention"): "nope"}
      found = [meant.get((bool(flag), kind) if isinstance(kind, str) else None) for flag, kind
               in zip(rotates, types, strict=False)]
      if len(types) != layers or None in found or "chunked" in found and chunk is None:
        raise source.error("layer_types", f"for each of the {layers} layers full_attention, or, where no_rope_layers "
                           "has a 1 and attention_chunk_size is set, chunked_attention")
      pattern = tuple(found)
    return {"layer_pattern": pattern, "attention_chunk": chunk}

  def write(self, model):
    types = kinds_of(model)
    return {"no_rope_layers": [int(kind != "nope") for kind in types], "attention_chunk_size": model["attention_chunk"],
            "layer_types": ["chunked_attention" if kind == "chunked" else "full_attention" for kind in types]}


class Temperature(Rule):
  """attn_temperature_tuning, a number in the first files: a factor on queries of layers that do not rotate."""

  def read(self, source, model):
    on = source.get("attn_temperature_tuning", object, True)
    if not isinstance(on, int) or not 0 <= on <= LARGEST:
      raise source.error("attn_temperature_tuning", "true or false")
    scale, floor = source.get("attn_scale", float, 0.1), source.get("floor_scale", int, 8192)
    if on and scale < 0:
      raise source.error("attn_scale", "0 or more")
    return {"nope_temperature.scale": scale if on else 0.0, "nope_temperature.floor": floor}

  def write(self, model):
    scale, floor = model["nope_temperature.scale"], model["nope_temperature.floor"]
    return {"attn_temperature_tuning": scale > 0, **({"attn_scale": scale, "floor_scale": floor} if scale else {})}


IN_LAYER = "layers.{layer}.feed_forward"
FEED_FORWARD = (
    *(Tensor(f"{IN_LAYER}.{place}{p}_proj.weight", f"blocks/{ours}/{p}/kernel", transpose=True)
      for place, ours in (("", "mlp"), ("shared_expert.", "moe/shared")) for p in ("gate", "up", "down")),
    Tensor(f"{IN_LAYER}.router.weight", "blocks/moe/router/kernel", transpose=True),
    *common.fused(f"{IN_LAYER}.experts", transpose=False),
)

class Llama4(TextPart):
  """See the module's docstring."""

  def kept(self, config):
    """See `Family.kept`. transformers 5 loads no number for attn_temperature_tuning."""
    kept = super().kept(config)
    return kept | {key: bool(kept[key]) for key in ("attn_temperature_tuning",) if key in kept}


LLAMA4 = Llama4(
    name="llama4",
    model_types=("llama4_text", "llama4"),
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    classifier=None,
    keys=(
        *common.SIZES, common.UNTIED, common.ATTENTION_BIAS, common.SILU, common.RMS_EPS_5,
        common.head_dim(128), common.kv_heads(8), Rope(theta=500000.0, scalings=("linear", "llama3", "yarn")),
        Key("use_qk_norm", "qk_norm", bool, default=True),
        Key("intermediate_size", ("moe.expert_size", "moe.shared_size"), default=8192),
        Key("intermediate_size_mlp", "intermediate_size", default=16384),
        Key("num_local_experts", "moe.num_experts", default=16),
        Key("num_experts_per_tok", "moe.experts_per_token", default=1),
        ExpertLayers(), Layers(), Temperature(),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *FEED_FORWARD,
           # In folders with a tower.
           Tensor("language_model.lm_head.weight", "unembed/kernel", transpose=True, prefixed=False)),
    fixed={"rope_interleaved": True, "qk_norm_over": "unscaled", "moe.scores": "sigmoid",
           "moe.normalize_weights": False, "moe.weights_on_input": True},
    prefixes=("model.", "language_model.model.", ""),
    ignored=(r"rotary_emb\.", r"^(vision_model|multi_modal_projector)\."),
    # Tokens around and in the places of images; what other programs do with the files.
    inert=frozenset({"boi_token_index", "eoi_token_index", "image_token_index", "for_llm_compressor"}),
)
