"""Models as {dotted key of config.model: value}: one way to say each, and which parameters a model has."""

import math
from collections.abc import Mapping
from typing import Any

from models.activations import GATED
from models.hf import videos
from models.hf.rope import scaling_keys
from models.spec import MIXERS, RECURRENT, TOKENWISE
from models.spec_mtp import model_layer
from models.spec_video import CLOCKED, INTRODUCED, SAMPLING, kind_of
from models.spec_vision import NATIVE

# Values of the architecture's keys for a decoder with nothing special; a family's rules and constants go on top.
NEUTRAL: Mapping[str, Any] = {
    "norm": "rmsnorm", "norm_scale_plus_one": False, "norm_bias": False, "norm_position": "pre",
    "parallel_blocks": False,
    "positions": "rope", "max_positions": None, "rope_theta": 10000.0, "rope_local_theta": None, "rope_fraction": 1.0,
    "rope_interleaved": False, "rope_sections": (), "rope_sections_interleaved": False,
    "rope_scaling.type": "none", "rope_scaling.factor": 1.0, "rope_scaling.original_positions": None,
    "rope_scaling.low_frequency_factor": 1.0, "rope_scaling.high_frequency_factor": 4.0,
    "rope_scaling.beta_fast": 32.0, "rope_scaling.beta_slow": 1.0, "rope_scaling.truncate": True,
    "rope_scaling.attention_factor": None, "rope_scaling.short_factors": (), "rope_scaling.long_factors": (),
    "head": "lm", "num_labels": 1,
    "scale_embeddings": False, "embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0,
    "layer_scale": False, "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False,
    "qk_norm_over": "head", "value_norm": False, "attention_scale": None, "attention_logit_cap": None,
    "final_logit_cap": None, "attention_gate": False, "attention_sinks": False, "window": None,
    "attention_chunk": None, "nope_temperature.scale": 0.0, "nope_temperature.floor": 8192,
    "query_temperature.scale": 0.0, "query_temperature.floor": 8192,
    "layer_pattern": ("global",), "global_attention.head_dim": None, "global_attention.num_kv_heads": None,
    "kv_shared_layers": 0, "double_wide_mlp": False, "per_layer_size": 0, "per_layer_vocab": None, "mtp_layers": 0,
    "altup.num_inputs": 0, "altup.coef_clip": None, "laurel_rank": 0, "activation_sparsity": (),
    "global_attention.values_are_keys": False, "global_attention.rope_fraction": 1.0,
    "delta.num_key_heads": 2, "delta.num_value_heads": 4, "delta.key_head_dim": 32, "delta.value_head_dim": 32,
    "delta.conv_width": 4,
    "mamba.num_heads": 4, "mamba.head_dim": 32, "mamba.num_groups": 1, "mamba.state_dim": 32, "mamba.conv_width": 4,
    "mamba.conv_bias": True, "mamba.min_step": 0.0,
    "latent.kv_rank": 0, "latent.q_rank": 0, "latent.nope_dim": 32, "latent.rope_dim": 16, "latent.value_dim": 32,
    "latent.index_topk": 0, "latent.index_heads": 4, "latent.index_head_dim": 32,
    "latent.index_rope_interleaved": False, "latent.index_shared_layers": (),
    "moe.num_experts": 0, "moe.experts_per_token": 2, "moe.expert_size": None, "moe.shared_size": 0,
    "moe.shared_gate": False, "moe.beside_mlp": False, "moe.router_norm": False, "moe.expert_scale": False,
    "moe.router_bias": False, "moe.softmax": "before_topk", "moe.scores": "softmax",
    "moe.normalize_weights": True, "moe.weight_scale": 1.0, "moe.weights_on_input": False, "moe.choice_bias": False,
    "moe.groups": 1, "moe.groups_used": 1, "moe.dense_layers": 0, "moe.layer_step": 1,
    "vision.tower": "none", "vision.image_size": 224, "vision.patch_size": 14, "vision.num_layers": 4,
    "vision.hidden_size": 128, "vision.intermediate_size": 512, "vision.num_heads": 4, "vision.activation": "gelu",
    "vision.norm_eps": 1e-6, "vision.mean": (), "vision.std": (), "vision.feature_layer": -1, "vision.final_norm": True,
    "vision.projector": "linear", "vision.projector_activation": "gelu_exact", "vision.projector_bias": True,
    "vision.tokens_per_image": None, "vision.feature_scale": 1.0, "vision.attention": "causal",
    "vision.image_token": None, "vision.window": None, "vision.full_layers": (),
    "vision.min_pixels": 56 * 56, "vision.max_pixels": 28 * 28 * 1280,
    "vision.position_grid": 0, "vision.deepstack_layers": (), "vision.longest_side": 0,
    "vision.split": None, "vision.clipped": False, "vision.standardized": False,
    "vision.video.token": None, "vision.video.tokens_per_second": 0.0, "vision.video.fps": None,
    "vision.video.num_frames": None, "vision.video.min_frames": 4, "vision.video.max_frames": 768,
    "vision.video.min_pixels": 128 * 28 * 28, "vision.video.max_pixels": 28 * 28 * 768,
}
# Keys that preprocessor_config.json has, and what it is of videos, not config.json (models/hf/pixels.py, videos.py).
PIXELS = ("vision.mean", "vision.std", "vision.min_pixels", "vision.max_pixels", "vision.longest_side", "vision.split",
          *(f"vision.video.{key}" for key in SAMPLING))


def canonical(model: Mapping[str, Any]) -> dict[str, Any]:
  """The same function said in one way: what is derived is filled in, what has no effect gets its NEUTRAL value."""
  m = dict(model)
  m["num_kv_heads"] = m.get("num_kv_heads") or m["num_heads"]
  m["latent.index_shared_layers"] = tuple(sorted(m["latent.index_shared_layers"]))
  if m["latent.kv_rank"]:
    m["head_dim"] = m["latent.nope_dim"] + m["latent.rope_dim"]
    if not m["latent.index_topk"]:
      _reset(m, "latent.index_")
  else:
    _reset(m, "latent.")
  m["head_dim"] = m.get("head_dim") or m["hidden_size"] // m["num_heads"]
  if m["head"] != "score":
    m["num_labels"] = NEUTRAL["num_labels"]
  if m["head"] != "lm":  # of logits of tokens
    m["mtp_layers"] = 0
    m["final_logit_cap"], m["logit_scale"] = NEUTRAL["final_logit_cap"], NEUTRAL["logit_scale"]
  if m["attention_scale"] == m["head_dim"] ** -0.5 and m["global_attention.head_dim"] in (None, m["head_dim"]):
    m["attention_scale"] = None
  if not m["qk_norm"]:
    m["qk_norm_over"] = NEUTRAL["qk_norm_over"]
  _canonical_layers(m)
  _canonical_positions(m)
  if m["moe.num_experts"]:
    m["moe.expert_size"] = m["moe.expert_size"] or m["intermediate_size"]
    if all(layers_with_experts(m)) and not m["moe.beside_mlp"]:
      m["intermediate_size"] = m["moe.expert_size"]
    if m["moe.groups_used"] == m["moe.groups"]:
      m["moe.groups_used"] = m["moe.groups"] = 1
    if m["moe.softmax"] == "after_topk":
      # A softmax over the chosen is the softmax over all, divided by the sum of the chosen.
      m.update({"moe.softmax": "before_topk", "moe.normalize_weights": True})
    m["moe.shared_gate"] = m["moe.shared_gate"] and m["moe.shared_size"] > 0
  else:
    _reset(m, "moe.")
  _canonical_vision(m)
  return m


def mixers(model: Mapping[str, Any]) -> list[str]:
  """Of each layer, which of `models.spec.MIXERS` it has; mlp or moe: none, it is that."""
  of_type = {"global": "attn" if model["global_attention.head_dim"] is None else "global_attn",
             **{kind: kind for kind in (*RECURRENT, *TOKENWISE)}}
  pattern, own = model["layer_pattern"], model["num_layers"] - model["kv_shared_layers"]
  found = [of_type.get(pattern[i % len(pattern)], "attn") for i in range(model["num_layers"])]
  return [*found[:own], *(mixer.replace("attn", "query_attn") for mixer in found[own:])]


def layers_with_experts(model: Mapping[str, Any]) -> list[bool]:
  """Of each layer, whether it has experts, in a model that has some."""
  if "moe" in model["layer_pattern"]:
    return [kind == "moe" for kind in mixers(model)]
  return [i >= model["moe.dense_layers"] and (i + 1) % model["moe.layer_step"] == 0 for i in range(model["num_layers"])]


def has_parameter(model: Mapping[str, Any], path: str) -> bool:
  """Whether a model has the parameter of that path; `model` is canonical."""
  *parents, owner, leaf = path.split("/")
  if path.startswith("mtp/"):
    if model["mtp_layers"] and path.startswith("mtp/blocks/"):
      return has_parameter(_of_modules(model), path.removeprefix("mtp/"))
    return model["mtp_layers"] > 0 and (leaf != "bias" or model["norm_bias"])
  if path.startswith(("vision/", "projector/")):
    return _has_vision_parameter(model, path)
  latent = model["latent.kv_rank"] > 0
  if leaf == "choice_bias" and not model["moe.choice_bias"] or latent and path == "blocks/attn/q/bias":
    return False
  if "query_" in path and owner in ("k", "v", "k_norm"):
    return False
  if path == "blocks/moe/router/scale":
    return model["moe.router_norm"]
  if path == "blocks/altup/scale" and not model["per_layer_size"]:
    return False
  if leaf == "bias" and owner != "keys_norm":
    biases = {"q": "qkv_bias", "k": "qkv_bias", "v": "qkv_bias", "o": "attention_out_bias",
              "q_down": "qkv_bias", "kv_down": "qkv_bias",
              "gate": "mlp_bias", "up": "mlp_bias", "down": "mlp_bias", "router": "moe.router_bias",
              **dict.fromkeys(("x_conv", "b_conv", "c_conv"), "mamba.conv_bias")}
    if not model[biases.get(owner, "norm_bias")]:
      return False
  has_mixer, of_keys = mixers(model), model["global_attention.values_are_keys"] and "global_attn" in parents
  gated, moe, position = model["activation"] in GATED, model["moe.num_experts"] > 0, model["norm_position"]
  one_branch = any(kind in TOKENWISE for kind in has_mixer)
  conditions = {
      "pos_embed": model["positions"] == "learned",
      "unembed": not model["tie_embeddings"] and model["head"] == "lm", "score": model["head"] == "score",
      **{mixer: mixer in has_mixer for mixer in MIXERS}, "indexer": model["latent.index_topk"] > 0,
      "wide_mlp": model["double_wide_mlp"],
      **dict.fromkeys(("per_layer", "per_layer_embed", "per_layer_proj", "per_layer_norm"),
                      model["per_layer_size"] > 0),
      "layer_scale": model["layer_scale"], "laurel": model["laurel_rank"] > 0,
      **dict.fromkeys(("altup", "streams"), model["altup.num_inputs"] > 0),
      "sinks": model["attention_sinks"], "xielu": model["activation"] == "xielu",
      **dict.fromkeys(("q_norm", "k_norm"), model["qk_norm"] and model["qk_norm_over"] != "unscaled"),
      "attn_norm": position != "post",
      "mlp_norm": position != "post" and not model["parallel_blocks"] and not one_branch,
      "attn_post_norm": position != "pre", "mlp_post_norm": position != "pre",
      "gate": gated, "moe": moe,
      "mlp": ("mlp" in has_mixer if one_branch else
              not moe or not all(layers_with_experts(model)) or model["moe.beside_mlp"]),
      **dict.fromkeys(("mlp_out_norm", "moe_norm", "moe_out_norm"), model["moe.beside_mlp"]),
      "expert_scale": model["moe.expert_scale"],
      "q": not latent or not model["latent.q_rank"], "k": not latent, "v": not latent and not of_keys,
      **dict.fromkeys(("q_down", "q_down_norm", "q_up"), latent and model["latent.q_rank"] > 0),
      **dict.fromkeys(("kv_down", "kv_down_norm", "kv_up"), latent),
      "shared": model["moe.shared_size"] > 0, "shared_gate": model["moe.shared_gate"],
  }
  return all(conditions.get(part, True) for part in (*parents, owner, leaf))


def _of_modules(model: Mapping[str, Any]) -> dict[str, Any]:
  """The model of which the layers are those of modules that predict tokens further ahead."""
  pattern = model["layer_pattern"]
  last = model_layer(pattern, model["num_layers"]) or 0
  experts = model["moe.num_experts"] if layers_with_experts(model)[last] else 0
  return {**model, "num_layers": model["mtp_layers"], "mtp_layers": 0, "layer_pattern": (pattern[last % len(pattern)],),
          "moe.num_experts": experts, "moe.dense_layers": 0, "moe.layer_step": 1, "latent.index_shared_layers": ()}


def _has_vision_parameter(model: Mapping[str, Any], path: str) -> bool:
  tower, projector = model["vision.tower"], model["vision.projector"]
  if tower == "none":
    return False
  part, owner, *rest = path.split("/")
  if owner == "deepstack":
    return bool(model["vision.deepstack_layers"])
  if owner == "standard":
    return model["vision.standardized"]
  if "/clip/" in path:
    return model["vision.clipped"]
  native = NATIVE.get(tower)
  layernorm = native is None or native.norm == "layernorm"
  if owner == "norm" and projector == "merge":
    return layernorm or rest != ["bias"]
  if native is not None and part == "vision":
    return _has_native_parameter(model, path, layernorm)
  if part == "projector":
    owners = {"linear": ("linear",), "mlp": ("up", "down"), "pool": ("norm", "linear"), "mean": ("linear",),
              "merge": ("norm", "up", "down"), "shuffle": ("linear",),
              "merge_mlp": ("norm", "merge", "up", "down")}[projector]
    bias = model["vision.projector_bias"] and projector not in ("pool", "shuffle", "mean") and owner != "norm"
    return owner in owners and (bias or rest != ["bias"])
  if path == "vision/patch_embed/bias":
    return tower != "clip"
  return tower == "clip" or owner not in ("cls_embed", "pre_norm")


def _has_native_parameter(model: Mapping[str, Any], path: str, layernorm: bool) -> bool:
  """Of the towers that see tiles."""
  tower, parts = model["vision.tower"], path.split("/")
  positions = {"qwen3_vl": "pos_embed", "gemma4": "axis_embed", "pixtral": "pre_norm"}.get(tower, "blocks")
  if parts[1] not in ("patch_embed", "blocks", positions):
    return False
  if path == "vision/patch_embed/bias":
    return tower == "qwen3_vl"
  if parts[-1] == "bias" and (NATIVE[tower].frames == 1 or parts[-2].endswith("norm") and not layernorm):
    return False
  if parts[-2] in ("q_norm", "k_norm", "attn_post_norm", "mlp_post_norm"):
    return tower == "gemma4"
  return "gate" not in parts or model["vision.activation"] in GATED


def _canonical_vision(m: dict[str, Any]) -> None:
  if m["vision.tower"] == "none":
    _reset(m, "vision.")
    return
  m["vision.full_layers"] = tuple(sorted(m["vision.full_layers"]))
  if m["vision.tokens_per_image"] is None:
    m["vision.tokens_per_image"] = (
        1 if m["vision.tower"] in NATIVE else (m["vision.image_size"] // m["vision.patch_size"]) ** 2)
  if m["vision.window"] is None or len(m["vision.full_layers"]) == m["vision.num_layers"]:  # no layer has windows
    m["vision.window"], m["vision.full_layers"] = None, ()
  if m["vision.projector"] in ("pool", "shuffle", "mean", "merge"):
    m["vision.projector_bias"] = NEUTRAL["vision.projector_bias"]
  if m["vision.projector"] not in ("mlp", "merge_mlp"):
    m["vision.projector_activation"] = NEUTRAL["vision.projector_activation"]
  if m["vision.feature_layer"] != -1:
    m["vision.final_norm"] = True
  if m["vision.video.token"] is None:
    _reset(m, "vision.video.")
  if m["vision.attention"] == "local_image" and m["window"] is None:  # no layer is local
    m["vision.attention"] = "causal"
  m.update({key: NEUTRAL[key] for key in PIXELS})
  if m["vision.video.token"] is not None and kind_of(m["vision.tower"], m["vision.projector"]) in (CLOCKED, INTRODUCED):
    found = videos.assumed(m)
    m.update({f"vision.video.{key}": found[key] for key in SAMPLING})
  if m["vision.tower"] == "gemma4":  # what its image processor assumes
    m["vision.max_pixels"] = 280 * m["vision.image_size"] ** 2
  if m["vision.tower"] == "pixtral":  # as published
    m["vision.longest_side"] = 1540


def _canonical_layers(m: dict[str, Any]) -> None:
  """The shortest pattern that, repeated, gives the layers' types."""
  pattern, layers_ = tuple(m["layer_pattern"]), m["num_layers"]
  if m["positions"] != "rope":
    pattern = tuple("global" if kind == "nope" else kind for kind in pattern)
  types = [pattern[i % len(pattern)] for i in range(layers_)] or list(pattern)
  period = next(p for p in range(1, len(types) + 1) if all(kind == types[i % p] for i, kind in enumerate(types)))
  m["layer_pattern"] = tuple(types[:period])
  if "chunked" not in types:
    m["attention_chunk"] = None
  if "nope" not in types or not m["nope_temperature.scale"]:
    _reset(m, "nope_temperature.")
  if not m["query_temperature.scale"]:
    _reset(m, "query_temperature.")
  if "local" not in types:
    m["window"] = m["rope_local_theta"] = None
  for kind in RECURRENT:
    if kind not in types:
      _reset(m, f"{kind}.")
  m["double_wide_mlp"] = m["double_wide_mlp"] and m["kv_shared_layers"] > 0
  m["activation_sparsity"] = tuple(map(float, m["activation_sparsity"])) if any(m["activation_sparsity"]) else ()
  if not m["altup.num_inputs"]:
    _reset(m, "altup.")
  if not m["per_layer_size"] or m["per_layer_vocab"] == m["vocab_size"]:
    m["per_layer_vocab"] = None
  if "global" not in types or m["global_attention.head_dim"] is None:
    _reset(m, "global_attention.")
  else:
    m["global_attention.num_kv_heads"] = m["global_attention.num_kv_heads"] or m["num_kv_heads"]


def _canonical_positions(m: dict[str, Any]) -> None:
  if m["positions"] != "rope":
    _reset(m, "rope_")
    if m["positions"] == "none":
      m["max_positions"] = None
    return
  m["max_positions"] = None
  kind = m["rope_scaling.type"]
  used = {f"rope_scaling.{key}" for key in scaling_keys(kind)} | {"rope_scaling.type"}
  m.update({key: value for key, value in NEUTRAL.items() if key.startswith("rope_scaling.") and key not in used})
  if kind == "yarn" and m["rope_scaling.attention_factor"] == 0.1 * math.log(m["rope_scaling.factor"]) + 1.0:
    m["rope_scaling.attention_factor"] = None
  if m["rope_local_theta"] == m["rope_theta"] and kind == "none":
    m["rope_local_theta"] = None


def _reset(m: dict[str, Any], prefix: str) -> None:
  m.update({key: value for key, value in NEUTRAL.items() if key.startswith(prefix)})
