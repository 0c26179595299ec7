"""Qwen3-VL, dense and with experts: Qwen2-VL around a Qwen 3, whose rotary positions take turns, and whose first layers
are given features of some of the tower's layers, too (DeepStack)."""

import math
from dataclasses import dataclass, replace

from models.hf.families import common
from models.hf.families.common import pair
from models.hf.families.qwen2_vl import SectionedRope, Width, tower_keys, tower_table, wrapper
from models.hf.families.qwen3 import QWEN3
from models.hf.families.qwen3_moe import FUSED, QWEN3_MOE, ROUTER, SPARSE
from models.hf.family import Tensor
from models.hf.images import Tower
from models.hf.keys import UNGATED, Activation, Key, Must, Rule


@dataclass(frozen=True)
class TurningRope(SectionedRope):
  """RoPE whose pairs turn by time, row and column in turns."""

  theta: float = 500_000.0
  inert: tuple[str, ...] = ("mrope_section", "mrope_interleaved")
  sections: tuple[int, ...] = (24, 20, 20)

  def read(self, source, model):
    Must("mrope_interleaved", True, "time, row and column take turns in all models").read(
        self._parameters(source)[0], model)
    return super().read(source, model) | {"rope_sections_interleaved": True}

  def write(self, model):
    given = super().write(model)
    scaling = {key: value for key, value in given["rope_scaling"].items() if key != "type"}
    return given | {"rope_scaling": {"rope_type": "default", **scaling, "mrope_interleaved": True}}


class Grid(Rule):
  """The table of learned positions, which is square; ours is its side."""

  def read(self, source, model):
    found = source.get("num_position_embeddings", int, 2304)
    if found < 1 or math.isqrt(found) ** 2 != found:
      raise source.error("num_position_embeddings", "a square number, 1 or more")
    return {"vision.position_grid": math.isqrt(found)}

  def write(self, model):
    return {"num_position_embeddings": model["vision.position_grid"] ** 2}


class Deepstack(Rule):
  """The tower's layers whose features the first layers of the text model are given."""

  def read(self, source, model):
    found = source.get("deepstack_visual_indexes", list, [8, 16, 24])
    layers = range(model["vision.num_layers"])
    if not all(isinstance(i, int) and not isinstance(i, bool) and i in layers for i in found) or (
        found != sorted(set(found))):
      raise source.error("deepstack_visual_indexes", f"numbers of layers from 0 to {len(layers) - 1}, each above the "
                         "one before it")
    text = model.get("num_layers")
    if text is not None and len(found) > text:
      raise source.error("deepstack_visual_indexes", f"at most as many as the text model has layers, {text}")
    return {"vision.deepstack_layers": tuple(found)}

  def write(self, model):
    return {"deepstack_visual_indexes": list(model["vision.deepstack_layers"])}


class Oblong(Rule):
  """Experts lie either way round in files of one name; which way, their shape says alone."""

  def read(self, source, model):
    hidden, size = model["hidden_size"], model["moe.expert_size"]
    if hidden in (size, 2 * size):
      raise source.error("moe_intermediate_size", f"neither hidden_size, {hidden}, nor half of it: programs would take "
                         "experts for their transposes")
    return {}


TEXT = replace(
    QWEN3, name="qwen3_vl_text", model_types=("qwen3_vl_text",),
    architectures=("qwen3_vl has no model of text alone",), classifier=None,
    keys=(*common.SIZES, common.WIDTH, common.RMS_EPS, common.SILU, common.UNTIED, TurningRope(),
          Key("head_dim", "head_dim", default=128), common.kv_heads(32), common.ATTENTION_BIAS))

TEXT_MOE = replace(
    QWEN3_MOE, name="qwen3_vl_moe_text", model_types=("qwen3_vl_moe_text",),
    architectures=("qwen3_vl_moe has no model of text alone",), classifier=None,
    keys=(*common.SIZES, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.TIED, TurningRope(), *SPARSE,
          Key("moe_intermediate_size", ("intermediate_size", "moe.expert_size"), default=1408), Oblong(),
          Must("sliding_window", None, "all layers see all tokens before them"),
          Must("norm_topk_prob", True, "the chosen weights are divided by their sum in all models"),
          Key("num_experts", "moe.num_experts", default=60, alias="num_local_experts"),
          Key("num_experts_per_tok", "moe.experts_per_token", default=4),
          common.kv_heads(16), common.ATTENTION_BIAS),
    # Experts with their inputs first; or, as transformers 5 saves them, last.
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, ROUTER,
           *common.fused("layers.{layer}.mlp.experts", transpose=False), *FUSED))

MERGER = (
    *pair("merger.norm", "projector/norm", "scale"), *pair("merger.linear_fc1", "projector/up"),
    *pair("merger.linear_fc2", "projector/down"),
)
MERGERS = (
    *MERGER,
    *pair("deepstack_merger_list.{layer}.norm", "projector/deepstack/norm", "scale"),
    *pair("deepstack_merger_list.{layer}.linear_fc1", "projector/deepstack/up"),
    *pair("deepstack_merger_list.{layer}.linear_fc2", "projector/deepstack/down"),
)
TABLE = (
    Tensor("patch_embed.proj.bias", "vision/patch_embed/bias"),
    Tensor("pos_embed.weight", "vision/pos_embed/embedding"),
    *tower_table({"linear_fc1": "up", "linear_fc2": "down"}),
)
TOWER_KEYS = (
    *tower_keys(Key("hidden_size", "vision.hidden_size", default=1152), Width("out_hidden_size"),
                Key("intermediate_size", "vision.intermediate_size", default=4304),
                Activation("hidden_act", "gelu_pytorch_tanh", UNGATED, ours="vision.activation"), depth=27, patch=16),
    Grid(),
)


def _family(name: str, architecture: str, text):
  tower = Tower("qwen3_vl", (f"{name}_vision", name), (*TOWER_KEYS, Deepstack()), TABLE)
  made = wrapper(name, architecture, tower)
  return replace(made, texts=(text,), table=MERGERS, beside=None,
                 names=((("model.language_model.", ""),), ("model.visual.",), ("model.visual.",)))


QWEN3_VL = _family("qwen3_vl", "Qwen3VLForConditionalGeneration", TEXT)
QWEN3_VL_MOE = _family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", TEXT_MOE)
