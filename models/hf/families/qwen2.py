"""Qwen 1.5, 2 and 2.5: a Llama with biases on queries, keys and values, and a window in its last layers, if any."""

from models.hf.families import common
from models.hf.family import Family
from models.hf.keys import LayerTypes
from models.hf.rope import Rope
from models.hf.source import Source


def switched_window(source: Source) -> int | None:
  """sliding_window, if use_sliding_window says so."""
  on = source.get("use_sliding_window", bool, False)
  # Where it is switched off, the number may be anything.
  window = source.get("sliding_window", int if on else object, 4096, None)
  return window if on else None


def from_max_window_layers_on(source: Source, layers: int) -> tuple[str, ...]:
  """max_window_layers: how many layers at the bottom see everything."""
  first = source.get("max_window_layers", int, 28, least=0)
  windowed = bool(source.content.get("use_sliding_window")) and source.content.get("sliding_window", 4096) is not None
  return tuple("local" if windowed and i >= first else "global" for i in range(layers))


def write_max_window_layers(types: tuple[str, ...], window: int | None) -> dict:
  """The entries that say where windows begin."""
  first = types.index("local") if "local" in types else len(types)
  return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}


LAYERS = LayerTypes(switched_window, from_max_window_layers_on, write_max_window_layers)

QWEN2 = Family(
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED, Rope(), LAYERS,
        common.kv_heads(32),
    ),
    table=common.LLAMA,
    fixed={"qkv_bias": True},
)
