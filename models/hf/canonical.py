"""Models as {dotted key of config.model: value}: one way to say each, and which parameters a model has."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from models import api
from models.config import model as defaults
from models.hf import videos
from models.hf.rope import scaling_keys
from models.spec import ARCHITECTURE_KEYS, RECURRENT, Spec
from models.spec_video import CLOCKED, INTRODUCED, SAMPLING, kind_of
from models.spec_vision import NATIVE
from trainer import tree

# Keys of the architecture that every family says.
_TOLD = {"vocab_size", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
         "norm_eps", "activation", "tie_embeddings"}
# Keys that preprocessor_config.json has, and what it is of videos, not config.json (models/hf/pixels.py, videos.py).
PIXELS = ("vision.mean", "vision.std", "vision.min_pixels", "vision.max_pixels", "vision.longest_side", "vision.split",
          *(f"vision.video.{key}" for key in SAMPLING))


def keys_of(section: Mapping, vocab_size: int | None) -> dict[str, Any]:
  """{dotted key: value} of a config's `model` section for ARCHITECTURE_KEYS; `vocab_size`: as it is to be written."""
  def value(key: str) -> Any:
    node = section
    for part in key.split("."):
      node = node[part]
    return tuple(node) if isinstance(node, list) else node

  return {**{key: value(key) for key in ARCHITECTURE_KEYS}, "vocab_size": vocab_size}


# Values of the others for a decoder with nothing special; a family's rules and constants go on top.
NEUTRAL: Mapping[str, Any] = {key: value for key, value in keys_of(defaults(), None).items() if key not in _TOLD}


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
    kinds = {*m["layer_pattern"]}
    everywhere = kinds == {"moe"} if "moe" in kinds else (m["moe.dense_layers"], m["moe.layer_step"]) == (0, 1)
    if everywhere and not m["moe.beside_mlp"]:
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


def set_keys(section: ConfigDict, keys: Mapping[str, Any]) -> None:
  """Puts {dotted key: value} into the `model` section of a config."""
  for key, value in keys.items():
    *parents, last = key.split(".")
    node = section
    for parent in parents:
      node = node[parent]
    node[last] = value

def abstract_params(keys: Mapping[str, Any]) -> Mapping[str, Any]:
  """The parameters, as nested ShapeDtypeStructs, of the model that {dotted key of config.model: value} describes."""
  return _made(keys).abstract_params()


def _made(keys: Mapping[str, Any]) -> Any:
  section = defaults()
  set_keys(section, keys)
  return api.make_model(section, vocab_size=keys["vocab_size"], params_dtype="float32", compute_dtype="float32")


@functools.lru_cache(maxsize=16)
def made_of(items: tuple[tuple[str, Any], ...]) -> tuple[Spec, frozenset[str]]:
  """(its shape, the paths of its parameters) of the model whose keys and values these are."""
  model = _made(dict(items))
  return model.spec, frozenset(tree.flatten(model.abstract_params()))


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
