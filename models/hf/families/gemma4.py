"""Gemma 4, text: Gemma 3 with larger heads in layers without a window, of which a part of the pairs turns, with norms
on values and a factor on each layer.

Published folders hold towers for images and sound beside it, which are passed over.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.families.gemma import SANDWICH, TANH_GELU
from models.hf.family import Tensor
from models.hf.images import TextPart
from models.hf.keys import Key, LayerTypes, Rule, sliding_window
from models.hf.source import Source

# What a rope_parameters of this family says where it says nothing.
ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


class Ropes(Rule):
  """rope_parameters of layers with and without a window; no other layout is known to this family."""

  def read(self, source, model):
    given = source.inside("rope_parameters", source.get("rope_parameters", dict, ROPES, ROPES))
    full, local = (given.inside(kind, given.get(kind, dict)) for kind in ROPES)
    given.check_all_read((), "this family")
    keys = {"rope_theta": full.get("rope_theta", float), "rope_local_theta": local.get("rope_theta", float)}
    fraction, kind = full.get("partial_rotary_factor", float, 1.0, 1.0), full.get("rope_type", str, "default")
    if kind not in ("default", "proportional"):
      raise full.error("rope_type", "default, proportional")
    if local.get("rope_type", str, "default") != "default":
      raise local.error("rope_type", "default")
    if kind == "default" and fraction != 1.0:
      raise full.error("partial_rotary_factor", "1.0 with rope_type default, by which whole heads turn")
    full.need("factor", float, 1.0, "1.0")
    for part in (full, local):
      part.check_all_read((), "this family")
    return keys | {"global_attention.rope_fraction": fraction}

  def write(self, model):
    local = model["rope_theta"] if model["rope_local_theta"] is None else model["rope_local_theta"]
    full = dict(ROPES["full_attention"], rope_theta=model["rope_theta"],
                partial_rotary_factor=model["global_attention.rope_fraction"])
    limit = {} if model["max_positions"] is None else {"max_position_embeddings": model["max_positions"]}
    return limit | {"rope_parameters": {"full_attention": full, "sliding_attention": {
        "rope_type": "default", "rope_theta": local}}}


class GlobalLayers(Rule):
  """What layers without a window have of their own: by global_head_dim and num_global_key_value_heads, as published, or
  by per_layer_config, as transformers writes it; attention_k_eq_v: their values are their keys."""

  def read(self, source, model):
    of_keys = source.get("attention_k_eq_v", bool, False)
    size, heads = source.get("global_head_dim", int, 512), source.get("num_global_key_value_heads", int, None, None)
    if not of_keys or heads is None:
      heads = model["num_kv_heads"]
    given = source.get("per_layer_config", dict, None, None)
    if given is not None:
      size, heads = self._of_layers(source.inside("per_layer_config", given), model)
    return {"global_attention.head_dim": size, "global_attention.num_kv_heads": heads,
            "global_attention.values_are_keys": of_keys}

  def _of_layers(self, given: Source, model: Mapping[str, Any]) -> tuple[int, int]:
    """(size of heads, key/value heads) of layers without a window, which must be the same in all of these."""
    found: dict[str, set] = {"local": {(model["head_dim"], model["num_kv_heads"])}, "global": set()}
    for layer, kind in enumerate(model["layer_pattern"]):
      own = given.inside(str(layer), given.get(str(layer), dict, {}, {}))
      found[kind].add((own.get("head_dim", int, model["head_dim"]),
                       own.get("num_key_value_heads", int, model["num_kv_heads"])))
      own.check_all_read((), "this family")
    given.check_all_read((), "this family")
    if any(len(sizes) > 1 for sizes in found.values()):
      raise HFError(f"{given.where}: (head_dim, num_key_value_heads) of sliding_attention layers are "
                    f"{sorted(found['local'])}, of full_attention {sorted(found['global'])}; allowed: one for each, "
                    "of sliding_attention that beside per_layer_config.")
    return found["global"].pop()

  def write(self, model):
    of_keys = model["global_attention.values_are_keys"]
    return {"global_head_dim": model["global_attention.head_dim"] or model["head_dim"], "attention_k_eq_v": of_keys,
            "num_global_key_value_heads": model["global_attention.num_kv_heads"] if of_keys else None}


class ExpertsBeside(Rule):
  """enable_moe_block: in every layer, experts beside the MLP. Without it their sizes say nothing."""

  sizes = {"num_experts": "moe.num_experts", "top_k_experts": "moe.experts_per_token",
           "moe_intermediate_size": "moe.expert_size"}

  def read(self, source, model):
    if not source.get("enable_moe_block", bool, False):
      return {"moe.num_experts": 0}
    return {ours: source.get(theirs, int) for theirs, ours in self.sizes.items()} | {
        "moe.beside_mlp": True, "moe.router_norm": True, "moe.expert_scale": True}

  def write(self, model):
    if not model["moe.num_experts"]:
      return {"enable_moe_block": False}
    return {"enable_moe_block": True, **{theirs: model[ours] for theirs, ours in self.sizes.items()}}


class SharedLayers(Key):
  """num_kv_shared_layers, of which each type must be among the layers before."""

  def read(self, source, model):
    found, types = super().read(source, model), model["layer_pattern"]
    own = len(types) - found[self.ours]
    if own < 1 or not set(types[own:]) <= set(types[:own]):
      raise source.error(self.theirs, f"a number below {len(types)}, so that before the layers that share keys and "
                         "values there is one of each of their types, which has these")
    return found


class PerLayerEmbeddings(Key):
  """hidden_size_per_layer_input, with a table of as many entries as there are tokens."""

  def read(self, source, model):
    found = super().read(source, model)
    entries = source.get("vocab_size_per_layer_input", int, 262144, 262144)
    if found[self.ours] and entries != model["vocab_size"]:
      raise source.error("vocab_size_per_layer_input", f"{model['vocab_size']}, the vocab_size")
    return found

  def write(self, model):
    return super().write(model) | {"vocab_size_per_layer_input": model["vocab_size"]}


class LastIsGlobal(LayerTypes):
  """The last layer has no window; transformers makes it so, whatever layer_types says."""

  def read(self, source, model):
    found = super().read(source, model)
    if found["layer_pattern"][-1] != "global":
      raise source.error("layer_types", "full_attention for the last layer")
    return found


def every_sixth(source: Source, layers: int) -> tuple[str, ...]:
  """Every sixth layer has no window, nor has the last."""
  return tuple("local" if (i + 1) % 6 and i + 1 < layers else "global" for i in range(layers))


ATTENTION = tuple(
    tensor for mixer in ("attn", "global_attn", "query_attn", "global_query_attn") for tensor in (
        *(Tensor(f"layers.{{layer}}.self_attn.{p}_proj.{end}", f"blocks/{mixer}/{p}/{ours}", transpose=ours == "kernel")
          for p in "qkvo" for end, ours in (("weight", "kernel"), ("bias", "bias"))),
        *(Tensor(f"layers.{{layer}}.self_attn.{p}_norm.weight", f"blocks/{mixer}/{p}_norm/scale") for p in "qk"),
    )
)
EXPERTS = (
    *(Tensor(f"layers.{{layer}}.{theirs}.weight", f"blocks/{ours}/scale") for theirs, ours in (
        ("post_feedforward_layernorm_1", "mlp_out_norm"), ("pre_feedforward_layernorm_2", "moe_norm"),
        ("post_feedforward_layernorm_2", "moe_out_norm"))),
    Tensor("layers.{layer}.router.proj.weight", "blocks/moe/router/kernel", transpose=True),
    Tensor("layers.{layer}.router.scale", "blocks/moe/router/scale"),
    Tensor("layers.{layer}.router.per_expert_scale", "blocks/moe/router/expert_scale"),
    *common.fused("layers.{layer}.experts"),
)
WIDE_MLP = tuple(replace(tensor, ours=str(tensor.ours).replace("/mlp/", "/wide_mlp/")) for tensor in common.MLP)
PER_LAYER = (
    Tensor("embed_tokens_per_layer.weight", "per_layer_embed/embedding"),
    Tensor("per_layer_model_projection.weight", "per_layer_proj/kernel", transpose=True),
    Tensor("per_layer_projection_norm.weight", "per_layer_norm/scale"),
    Tensor("layers.{layer}.per_layer_input_gate.weight", "blocks/per_layer/gate/kernel", transpose=True),
    Tensor("layers.{layer}.per_layer_projection.weight", "blocks/per_layer/out/kernel", transpose=True),
    Tensor("layers.{layer}.post_per_layer_input_norm.weight", "blocks/per_layer/norm/scale"),
)


class SharesKeys(TextPart):
  """A family whose last layers may use keys and values of others."""

  def passed_over(self, model):
    """Of layers without keys and values of their own, published folders have the projections all the same."""
    layers = range(model["num_layers"] - model["kv_shared_layers"], model["num_layers"])
    return (*self.ignored, *([rf"layers\.({'|'.join(map(str, layers))})\.self_attn\.[kv]_(proj|norm)\."]
                             if layers else []))


GEMMA4 = SharesKeys(
    name="gemma4",
    model_types=("gemma4_text", "gemma4"),
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    body="Gemma4TextModel",
    classifier=None,
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.TIED, TANH_GELU, common.ATTENTION_BIAS,
        Key("head_dim", "head_dim", default=256),
        Key("num_key_value_heads", "num_kv_heads", default=4),
        Key("final_logit_softcapping", "final_logit_cap", float, default=None, null=None),
        LastIsGlobal(sliding_window(512), every_sixth),
        GlobalLayers(), Ropes(),
        ExpertsBeside(),
        SharedLayers("num_kv_shared_layers", "kv_shared_layers", default=0, null=0, least=0),
        Key("use_double_wide_mlp", "double_wide_mlp", bool, default=False),
        PerLayerEmbeddings("hidden_size_per_layer_input", "per_layer_size", default=256, null=0, least=0),
    ),
    table=(*common.ENDS, *SANDWICH, *ATTENTION, *common.MLP, *WIDE_MLP, *EXPERTS, *PER_LAYER,
           Tensor("layers.{layer}.layer_scalar", "blocks/layer_scale")),
    fixed={"scale_embeddings": True, "norm_position": "sandwich", "qk_norm": True, "value_norm": True,
           "layer_scale": True, "attention_scale": 1.0},
    prefixes=("model.", "model.language_model.", ""),
    ignored=(r"rotary_emb\.", r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\."),
    # Tokens around and in the places of images and sound; sizes of what is switched off.
    inert=frozenset({"boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
                     "audio_token_id", "audio_config", "num_experts", "top_k_experts", "moe_intermediate_size"}),
)
