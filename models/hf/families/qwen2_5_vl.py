"""Qwen2.5-VL: Qwen2-VL with RMSNorm and a gated MLP in its tower, in most of whose layers patches see windows."""

from models.hf.families.qwen2_vl import Width, tower_keys, tower_table, wrapper
from models.hf.images import Tower
from models.hf.keys import GATED, Activation, Key, Rule


class Seconds(Rule):
  """How many positions a second of a film is."""

  def read(self, source, model):
    found = source.get("tokens_per_second", float, 4.0)
    if found <= 0:
      raise source.error("tokens_per_second", "a number above 0")
    return {"vision.video.tokens_per_second": found}

  def write(self, model):
    found = model["vision.video.tokens_per_second"]
    return {"tokens_per_second": int(found) if found == int(found) else found} if found else {}


class Windows(Rule):
  """The side of a window in pixels, and the layers without; ours counts tiles."""

  def read(self, source, model):
    full, layers = source.get("fullatt_block_indexes", list, [7, 15, 23, 31]), model["vision.num_layers"]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in full):
      raise source.error("fullatt_block_indexes", "numbers of layers, from 0 on")
    size, tile = source.get("window_size", int, 112), model["vision.image_size"]
    if size < tile:
      raise source.error("window_size", f"{tile} or more, the pixels of a token's side")
    return {"vision.window": size // tile, "vision.full_layers": tuple(sorted({i for i in full if i < layers}))}

  def write(self, model):
    if model["vision.window"] is None:
      return {"window_size": model["vision.image_size"],
              "fullatt_block_indexes": list(range(model["vision.num_layers"]))}
    return {"window_size": model["vision.window"] * model["vision.image_size"],
            "fullatt_block_indexes": list(model["vision.full_layers"])}


QWEN2_5_VL = wrapper("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", Tower(
    "qwen2_5_vl", ("qwen2_5_vl_vision", "qwen2_5_vl"),
    (*tower_keys(Key("hidden_size", "vision.hidden_size", default=3584), Width("out_hidden_size"),
                 Key("intermediate_size", "vision.intermediate_size", default=3420),
                 Activation("hidden_act", "silu", GATED, ours="vision.activation")), Windows(), Seconds()),
    tower_table({"gate_proj": "gate", "up_proj": "up", "down_proj": "down"})))
