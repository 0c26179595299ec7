"""Cohere 2 (Command R7B, Command A): Cohere with a window in three of four layers; the fourth has no positions."""

from models.hf.families.cohere import COHERE_FIXED, COHERE_INERT, COHERE_KEYS, COHERE_TABLE
from models.hf.families.common import head_size
from models.hf.families.gemma2 import sliding_window, write_window
from models.hf.family import Family
from models.hf.keys import LayerTypes, Must, Rule
from models.hf.rope import Rope
from models.hf.source import Source


class DividedHeads(Rule):
  """A head's size is the hidden size divided by the heads, whatever head_dim says to other families."""

  def read(self, source, model):
    size = head_size(model)
    if source.get("head_dim", object, size, size) != size:
      raise source.error("head_dim", f"{size}, the hidden size divided by the heads")
    return {"head_dim": size}

  def write(self, model):
    return {}


class WindowOrNoPositions(LayerTypes):
  """Layers without a window are those without rotary positions."""

  def read(self, source, model):
    found = super().read(source, model)
    return found | {"layer_pattern": tuple("nope" if kind == "global" else kind for kind in found["layer_pattern"])}


def all_but_every_nth(source: Source, layers: int) -> tuple[str, ...]:
  """sliding_window_pattern: every so manieth layer, the fourth where nothing is said, has no window."""
  period = source.get("sliding_window_pattern", int, source.get("_sliding_window_pattern", int, 4))
  return tuple("local" if (i + 1) % period else "global" for i in range(layers))


COHERE2 = Family(
    name="cohere2",
    model_types=("cohere2",),
    architectures=("Cohere2ForCausalLM",),
    classifier=None,
    keys=(*COHERE_KEYS, DividedHeads(), Rope(), Must("use_qk_norm", False, "queries and keys have no norms"),
          WindowOrNoPositions(sliding_window, all_but_every_nth, write_window)),
    table=COHERE_TABLE,
    fixed=COHERE_FIXED,
    inert=COHERE_INERT,
)
