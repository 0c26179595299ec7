"""Qwen3.5 with images, dense and with experts: the tower of Qwen3-VL without DeepStack, around Qwen3.5's text model, of
whose heads a part turns by time, row and column."""

from dataclasses import replace

from models.hf.families.qwen2_vl import Films, wrapper
from models.hf.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from models.hf.families.qwen3_vl import MERGER, TABLE, TOWER_KEYS, TurningRope
from models.hf.images import TextPart, Tower
from models.hf.keys import Key
from models.hf.rope import Rope

# The tower's tensors, which the text model alone passes over.
TOWER = r"^model\.visual\."


def _family(text: TextPart):
  name, architecture = text.model_types[1], text.architectures[1]
  rope = TurningRope(theta=Rope.theta, fraction=0.25, sections=(11, 11, 10))
  inside = replace(text, model_types=text.model_types[:1], architectures=(f"{name} has images",), classifier=None,
                   prefixes=text.prefixes[:1], keys=tuple(rope if isinstance(key, Rope) else key for key in text.keys),
                   ignored=tuple(pattern for pattern in text.ignored if pattern != TOWER))
  made = wrapper(name, architecture, Tower("qwen3_vl", (f"{name}_vision", name), TOWER_KEYS, TABLE))
  return replace(made, texts=(inside,), keys=(Key("image_token_id", "vision.image_token", default=248056), Films()),
                 table=MERGER, beside=None, names=((("model.language_model.", ""),), ("model.visual.",),
                                                   ("model.visual.",)))


QWEN3_5_IMAGES = _family(QWEN3_5)
QWEN3_5_MOE_IMAGES = _family(QWEN3_5_MOE)
