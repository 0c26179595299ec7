"""Gemma 3n, text: Gemma 3 in four streams (AltUp), with low-rank residual connections (LAuReL), embeddings of each
layer, sparse MLPs in the first layers, and keys and values that the last layers share.

Published folders hold towers for images and sound beside it, which are passed over.
"""

from typing import Any

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.families.gemma import SANDWICH, TANH_GELU
from models.hf.families.gemma4 import ATTENTION, PER_LAYER, SharedLayers, SharesKeys
from models.hf.family import Tensor
from models.hf.keys import Key, LayerTypes, Must, Rule, all_but_every_nth, sliding_window
from models.hf.rope import Rope


class Widths(Rule):
  """intermediate_size, for all layers or for each, which must then be one."""

  def read(self, source, model):
    found = source.get("intermediate_size", object, 16384)
    widths = found if isinstance(found, list) else [found] * model["num_layers"]
    one = len(widths) == model["num_layers"] and all(width == widths[0] for width in widths)
    if not one or isinstance(widths[0], bool) or not isinstance(widths[0], int) or widths[0] < 1:
      raise source.error("intermediate_size", f"a number above 0, or it {model['num_layers']} times (num_hidden_layers)"
                         ": layers whose MLPs differ in width are not computed here")
    return {"intermediate_size": widths[0]}

  def write(self, model):
    return {"intermediate_size": [model["intermediate_size"]] * model["num_layers"]}


class Sparsity(Rule):
  """activation_sparsity_pattern: for each layer, which share of its gates is 0."""

  def read(self, source, model):
    L = model["num_layers"]
    usual = [0.95 if i < 10 < L else 0.0 for i in range(L)]
    shares = source.get("activation_sparsity_pattern", list, usual, usual)
    if len(shares) != L or not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
      raise source.error("activation_sparsity_pattern", f"{L} times (num_hidden_layers) a number from 0 to below 1")
    return {"activation_sparsity": tuple(map(float, shares))}

  def write(self, model):
    return {"activation_sparsity_pattern": list(model["activation_sparsity"]) or [0.0] * model["num_layers"]}


class Streams(Rule):
  """altup_num_inputs and altup_coef_clip, which bounds what coefficients are made with."""

  def read(self, source, model):
    count, clip = source.get("altup_num_inputs", int, 4), source.get("altup_coef_clip", float, 120.0)
    if count < 2 or clip <= 0:
      raise source.error(*(("altup_num_inputs", "2 or more") if count < 2 else ("altup_coef_clip", "a number above 0")))
    return {"altup.num_inputs": count, "altup.coef_clip": clip}

  def write(self, model):
    return {"altup_num_inputs": model["altup.num_inputs"], "altup_coef_clip": model["altup.coef_clip"]}


class OwnEmbeddings(Rule):
  """hidden_size_per_layer_input, and how many tokens have such embeddings of their own; those beyond read the first."""

  def read(self, source, model):
    entries, all_ = source.get("vocab_size_per_layer_input", int, 262144), model["vocab_size"]
    if entries > all_:
      raise source.error("vocab_size_per_layer_input", f"at most the vocab_size, {all_}")
    return {"per_layer_size": source.get("hidden_size_per_layer_input", int, 256), "per_layer_vocab": entries}

  def write(self, model):
    if not model["per_layer_size"]:
      raise HFError("all have embeddings of each layer: model.per_layer_size is 0")
    return {"hidden_size_per_layer_input": model["per_layer_size"],
            "vocab_size_per_layer_input": model["per_layer_vocab"] or model["vocab_size"]}


ALTUP = (
    *(Tensor(f"layers.{{layer}}.altup.{theirs}.weight", f"blocks/altup/{ours}", transpose="norm" not in theirs)
      for theirs, ours in (("modality_router", "router/kernel"), ("router_norm", "norm/scale"),
                           ("prediction_coefs", "prediction"), ("correction_coefs", "correction"))),
    Tensor("layers.{layer}.altup.correct_output_scale", "blocks/altup/scale"),
    # {expert} stands for the number of the stream.
    Tensor("altup_projections.{expert}.weight", "streams/split/kernel", transpose=True),
    Tensor("altup_unembed_projections.{expert}.weight", "streams/join/kernel", transpose=True),
)
LAUREL = (
    *(Tensor(f"layers.{{layer}}.laurel.linear_{side}.weight", f"blocks/laurel/{side}/kernel", transpose=True)
      for side in ("left", "right")),
    Tensor("layers.{layer}.laurel.post_laurel_norm.weight", "blocks/laurel/norm/scale"),
)
# What published files say and transformers does not read: of the optimizer; queries are not scaled.
UNUSED: frozenset[str] = frozenset({"altup_lr_multiplier", "query_pre_attn_scalar"})
FIXED: dict[str, Any] = {"scale_embeddings": True, "norm_position": "sandwich", "qk_norm": True, "value_norm": True,
                         "attention_scale": 1.0}

GEMMA3N = SharesKeys(
    name="gemma3n",
    model_types=("gemma3n_text", "gemma3n"),
    architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    body="Gemma3nTextModel",
    classifier=None,
    keys=(
        *common.SIZES, Widths(), common.RMS_EPS, common.TIED, TANH_GELU, common.ATTENTION_BIAS,
        Key("head_dim", "head_dim", default=256),
        Key("num_key_value_heads", "num_kv_heads", default=2),
        Key("final_logit_softcapping", "final_logit_cap", float, default=30.0),
        Rope(theta=1e6, local_theta=1e4),
        LayerTypes(sliding_window(512), all_but_every_nth(5)),
        SharedLayers("num_kv_shared_layers", "kv_shared_layers", default=15, null=0, least=0),
        OwnEmbeddings(), Sparsity(), Streams(), Key("laurel_rank", "laurel_rank", default=64),
        Must("altup_active_idx", 0, "layers compute on the first stream"),
        Must("altup_correct_scale", True, "the first stream is scaled where the layer's own embedding is gated by it"),
    ),
    table=(*common.ENDS, *SANDWICH, *ATTENTION, *common.MLP, *PER_LAYER, *ALTUP, *LAUREL),
    fixed=FIXED,
    prefixes=("model.", "model.language_model.", ""),
    ignored=(r"rotary_emb\.", r"^model\.(vision_tower|embed_vision|audio_tower|embed_audio)\."),
    # Tokens around and in the places of images and sound, and how many each takes.
    inert=UNUSED | {"boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "audio_token_id", "audio_config",
                    "audio_soft_tokens_per_image", "vision_soft_tokens_per_image"},
)
