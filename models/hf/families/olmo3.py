"""OLMo 3: OLMo 2 with a window in three of four layers, whose rotary positions are not scaled."""

from models.hf.families.gemma2 import sliding_window, write_window
from models.hf.families.olmo2 import OLMO2_FIXED, OLMO2_KEYS, OLMO2_TABLE
from models.hf.family import Family
from models.hf.keys import LayerTypes
from models.hf.rope import Rope
from models.hf.source import Source


def all_but_every_fourth(source: Source, layers: int) -> tuple[str, ...]:
  """Every fourth layer has no window."""
  return tuple("local" if (i + 1) % 4 else "global" for i in range(layers))


OLMO3 = Family(
    name="olmo3",
    model_types=("olmo3",),
    architectures=("Olmo3ForCausalLM",),
    keys=(*OLMO2_KEYS, Rope(theta=5e5, local_theta=5e5, local_entry="rope_theta"),
          LayerTypes(sliding_window, all_but_every_fourth, write_window)),
    table=OLMO2_TABLE,
    fixed=OLMO2_FIXED,
)
