"""Qwen 3 with mixtures of experts in all layers; the names of experts are also those of other families."""

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Must, Window
from models.hf.rope import Rope


class QwenMoeWindow(Window):
  """A window in all layers; transformers before 4.52 left it out in the first `max_window_layers`."""

  def read(self, source, model):
    keys = super().read(source, model)
    first = source.get("max_window_layers", object, 0, 0)
    if keys["window"] is not None and first != 0:
      raise HFError(f"{source.where}: use_sliding_window is true and max_window_layers is {first!r}; versions of "
                    "transformers differ on what that means here. Set max_window_layers to 0 for a window in all "
                    "layers, or use_sliding_window to false.")
    return keys

  def write(self, model):
    return {**super().write(model), "max_window_layers": 0}


SPARSE = (
    Must("decoder_sparse_step", 1, "mixtures of experts are in all layers or in none"),
    Must("mlp_only_layers", [], "mixtures of experts are in all layers or in none"),
)
EXPERT_SIZES = (
    Key("moe_intermediate_size", ("intermediate_size", "moe.expert_size")),
    Key("norm_topk_prob", "moe.normalize_weights", bool, default=False),
)
ROUTER = Tensor("layers.{layer}.mlp.gate.weight", "blocks/moe/router/kernel", transpose=True)
# As transformers 5 has them in memory.
FUSED = common.fused("layers.{layer}.mlp.experts")
EXPERTS = (
    ROUTER,
    *(Tensor(f"layers.{{layer}}.mlp.experts.{{expert}}.{p}_proj.weight", f"blocks/moe/experts/{p}/kernel",
             transpose=True) for p in ("gate", "up", "down")),
    *FUSED,
)

QWEN3_MOE = Family(
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    keys=(
        *common.SIZES, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED, common.ATTENTION_BIAS,
        Rope(), QwenMoeWindow(default=4096, switch="use_sliding_window"),
        *SPARSE, *EXPERT_SIZES,
        Key("num_experts", "moe.num_experts", default=128, alias="num_local_experts"),
        Key("num_experts_per_tok", "moe.experts_per_token", default=8),
        common.kv_heads(4),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *common.QK_NORMS, *EXPERTS),
    fixed={"qk_norm": True},
    # The width of layers that are not sparse, of which there are none.
    inert=frozenset({"intermediate_size"}),
)
