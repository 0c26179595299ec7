"""Qwen 1.5 and 2 with mixtures of experts: beside the chosen ones, an expert that sees every token, behind a gate."""

from models.hf.families import common
from models.hf.families.qwen2 import from_max_window_layers_on, switched_window, write_max_window_layers
from models.hf.families.qwen3_moe import EXPERT_SIZES, EXPERTS, SPARSE
from models.hf.family import Family, Tensor
from models.hf.keys import Key, LayerTypes
from models.hf.rope import Rope
from models.hf.source import Source


def windows_are_ambiguous(source: Source, layers: int) -> tuple[str, ...] | None:
  """With a window, transformers 4 and 5 differ on the layers that have one."""
  types = from_max_window_layers_on(source, layers)
  return None if source.content.get("use_sliding_window") else types


SHARED_EXPERT = (
    *(Tensor(f"layers.{{layer}}.mlp.shared_expert.{p}_proj.weight", f"blocks/moe/shared/{p}/kernel", transpose=True)
      for p in ("gate", "up", "down")),
    Tensor("layers.{layer}.mlp.shared_expert_gate.weight", "blocks/moe/shared_gate/kernel", transpose=True),
)

QWEN2_MOE = Family(
    model_types=("qwen2_moe",),
    architectures=("Qwen2MoeForCausalLM",),
    keys=(
        *common.SIZES, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED, Rope(),
        LayerTypes(switched_window, windows_are_ambiguous, write_max_window_layers),
        *SPARSE, *EXPERT_SIZES,
        Key("num_experts", "moe.num_experts", default=60, alias="num_local_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token", default=4),
        Key("shared_expert_intermediate_size", "moe.shared_size", default=5632),
        common.kv_heads(16),
        Key("qkv_bias", "qkv_bias", bool, default=True),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *EXPERTS, *SHARED_EXPERT),
    fixed={"moe.shared_gate": True},
    # The width of layers that are not sparse, of which there are none.
    inert=frozenset({"intermediate_size"}),
)
