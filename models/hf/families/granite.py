"""Granite 3 and 4."""

import math

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Must, Rule, kinds_of, named_kinds
from models.hf.rope import Rope

# Granite 3, dense and with experts: a Llama with factors on embeddings, attention's scores, residual branches and
# logits.

class Multipliers(Rule):
  """attention_multiplier, the factor on scores, and logits_scaling, which logits are divided by."""

  def read(self, source, model):
    divisor = source.get("logits_scaling", float, 1.0)
    if divisor <= 0:
      raise source.error("logits_scaling", "a number above 0")
    return {"attention_scale": source.get("attention_multiplier", float, 1.0), "logit_scale": 1 / divisor}

  def write(self, model):
    scale = model["attention_scale"]
    # 1 / (1 / x) is x up to the last digit, which is none that anyone has typed.
    return {"attention_multiplier": model["head_dim"] ** -0.5 if scale is None else scale,
            "logits_scaling": float(f"{1 / model['logit_scale']:.15g}")}


KEYS = (
    *common.SIZES, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED, common.ATTENTION_BIAS, common.KV_HEADS,
    Key("embedding_multiplier", "embedding_scale", float, default=1.0),
    Key("residual_multiplier", "residual_scale", float, default=1.0),
    Multipliers(),
)
# As in files, then as transformers 5 has them in memory.
EXPERTS = tuple(
    tensor for gate_up, down, router in (
        ("input_linear.weight", "output_linear.weight", "router.layer.weight"),
        ("experts.gate_up_proj", "experts.down_proj", "router.weight")) for tensor in (
        Tensor(f"layers.{{layer}}.block_sparse_moe.{gate_up}",
               ("blocks/moe/experts/gate/kernel", "blocks/moe/experts/up/kernel"), transpose=True, axis=1),
        Tensor(f"layers.{{layer}}.block_sparse_moe.{down}", "blocks/moe/experts/down/kernel", transpose=True),
        Tensor(f"layers.{{layer}}.block_sparse_moe.{router}", "blocks/moe/router/kernel", transpose=True)))

GRANITE = Family(
    model_types=("granite",),
    architectures=("GraniteForCausalLM",),
    classifier=None,
    keys=(*KEYS, common.WIDTH, Rope(), common.MLP_BIAS),
    table=common.LLAMA,
)
GRANITEMOE = Family(
    model_types=("granitemoe",),
    architectures=("GraniteMoeForCausalLM",),
    classifier=None,
    keys=(
        *KEYS, Rope(),
        Key("intermediate_size", ("intermediate_size", "moe.expert_size"), default=11008),
        Key("num_local_experts", "moe.num_experts", default=8),
        Key("num_experts_per_tok", "moe.experts_per_token", default=2),
    ),
    table=(*common.ENDS, *common.NORMS, *common.ATTENTION, *EXPERTS),
    fixed={"moe.softmax": "after_topk"},
)


# Granite 4: Granite 3's factors on layers of Mamba 2, with a few of attention among them; dense, or with experts.

class MambaLayers(Rule):
  """layer_types, or layers_block_type: the kind of each layer, by the names of transformers 4 or 5."""

  ours = {"mamba": "mamba", "attention": "global", "linear_attention": "mamba", "full_attention": "global"}
  entries = ("layer_types", "layers_block_type")

  def read(self, source, model):
    kinds = {named_kinds(source, key, model["num_layers"], self.ours) for key in self.entries if key in source.content}
    if len(kinds) > 1:
      raise source.error(self.entries[1], f"the same as {self.entries[0]}")
    return {"layer_pattern": next(iter(kinds), ("mamba",))}

  def write(self, model):
    theirs = {"global": "attention", "nope": "attention"}
    return {"layer_types": [theirs.get(kind, kind) for kind in kinds_of(model)]}


class MambaSizes(Rule):
  """The heads of mamba layers, which together are mamba_expand times as wide as the model; and the least step."""

  def read(self, source, model):
    heads = source.get("mamba_n_heads", int, 128)
    wide = source.get("mamba_expand", int, 2) * model["hidden_size"]
    size = source.get("mamba_d_head", object, "auto", "auto")
    if size == "auto":
      size = wide // heads
    if isinstance(size, bool) or not isinstance(size, int) or size * heads != wide:
      raise source.error("mamba_d_head", f"{wide / heads:g}, so that the {heads} heads (mamba_n_heads) are "
                         f"mamba_expand * hidden_size = {wide} wide")
    limit = source.get("time_step_limit", list, None, None)
    least, most = limit if limit and len(limit) == 2 else (0.0 if limit is None else None, math.inf)
    if isinstance(least, bool) or not isinstance(least, int | float) or least < 0 or _number(most) != math.inf:
      raise source.error("time_step_limit", "[0.0 or more, Infinity]; steps may be as long as they like here")
    return {"mamba.num_heads": heads, "mamba.head_dim": size, "mamba.min_step": float(least)}

  def write(self, model):
    heads, size = model["mamba.num_heads"], model["mamba.head_dim"]
    if heads * size % model["hidden_size"] and "mamba" in model["layer_pattern"]:
      raise HFError(f"mamba.num_heads * mamba.head_dim = {heads * size} must be a multiple of hidden_size "
                    f"{model['hidden_size']}")
    if "mamba" not in model["layer_pattern"]:
      return {"mamba_n_heads": 1, "mamba_d_head": model["hidden_size"], "mamba_expand": 1}
    limit = {"time_step_limit": [model["mamba.min_step"], math.inf]} if model["mamba.min_step"] else {}
    return {"mamba_n_heads": heads, "mamba_d_head": size, "mamba_expand": heads * size // model["hidden_size"], **limit}


def _number(value) -> float | None:
  """That of an entry; transformers 5 writes what JSON has no name for as {"__float__": its name}."""
  value = value.get("__float__") if isinstance(value, dict) else value
  return math.inf if value == "Infinity" else value


class Positions(Rule):
  """position_embedding_type: rope, or nothing tells tokens their positions but the layers that have states."""

  rope = Rope()

  def read(self, source, model):
    kind = source.get("position_embedding_type", str, None, None)
    if kind == "rope":
      return {"positions": "rope", **self.rope.read(source, model)}
    if kind not in (None, "nope"):
      raise source.error("position_embedding_type", "rope, nope or null")
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):  # of no effect then
      source.get(key, object, None, None)
    return {"positions": "none"}

  def write(self, model):
    if model["positions"] == "rope":
      return {"position_embedding_type": "rope", **self.rope.write(model)}
    return {"position_embedding_type": "nope" if model["positions"] == "none" else model["positions"]}

  def notes(self, source):
    return self.rope.notes(source) if source.content.get("position_embedding_type") == "rope" else []


class Experts(Rule):
  """num_local_experts, 0 of which make a dense model: its MLP is what is the shared expert of others."""

  def read(self, source, model):
    experts = source.get("num_local_experts", int, 8, least=0)
    of_experts, shared = source.get("intermediate_size", int, 11008), source.get("shared_intermediate_size", int, 1024)
    used = source.get("num_experts_per_tok", int if experts else object, 2, 2)
    if not experts:
      return {"intermediate_size": shared}
    return {"intermediate_size": of_experts, "moe.num_experts": experts, "moe.experts_per_token": used,
            "moe.expert_size": of_experts, "moe.shared_size": shared, "moe.softmax": "after_topk"}

  def write(self, model):
    if not model["moe.num_experts"]:
      return {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": model["intermediate_size"],
              "shared_intermediate_size": model["intermediate_size"]}
    if not model["moe.shared_size"]:
      raise HFError("every token must pass through a shared expert (moe.shared_size)")
    return {"num_local_experts": model["moe.num_experts"], "num_experts_per_tok": model["moe.experts_per_token"],
            "intermediate_size": model["moe.expert_size"], "shared_intermediate_size": model["moe.shared_size"]}


def mamba(module: str) -> tuple[Tensor, ...]:
  """The tensors of a mamba layer's module of that name."""
  def tensor(name: str, ours: str | tuple[str, ...], transpose: bool = False, form: str | None = None) -> Tensor:
    return Tensor(f"layers.{{layer}}.{module}.{name}", ours, transpose, form=form)

  return (
      tensor("in_proj.weight", tuple(f"blocks/mamba/{p}/kernel" for p in ("z", "x", "b", "c", "dt")), True),
      tensor("conv1d.weight", tuple(f"blocks/mamba/{p}_conv/taps" for p in "xbc"), True, "taps"),
      tensor("conv1d.bias", tuple(f"blocks/mamba/{p}_conv/bias" for p in "xbc")),
      *(tensor(name, f"blocks/mamba/{name}") for name in ("A_log", "D", "dt_bias")),
      tensor("norm.weight", "blocks/mamba/norm/scale"),
      tensor("out_proj.weight", "blocks/mamba/o/kernel", True),
  )


GRANITE4 = Family(
    name="granite4",
    model_types=("granitemoehybrid",),
    architectures=("GraniteMoeHybridForCausalLM",),
    classifier=None,
    keys=(
        *KEYS, MambaLayers(), MambaSizes(), Positions(), Experts(),
        Key("mamba_n_groups", "mamba.num_groups", default=1),
        Key("mamba_d_state", "mamba.state_dim", default=256),
        Key("mamba_d_conv", "mamba.conv_width", default=4),
        Key("mamba_conv_bias", "mamba.conv_bias", bool, default=True),
        Must("mamba_proj_bias", False, "the projections of mamba layers have no bias here"),
        Must("normalization_function", "rmsnorm", "all norms are RMSNorm in this family"),
    ),
    table=(
        *common.ENDS, *common.NORMS, *common.ATTENTION, *mamba("mamba"),
        *(tensor for ours in ("mlp", "moe/shared") for tensor in (
            Tensor("layers.{layer}.shared_mlp.input_linear.weight",
                   (f"blocks/{ours}/gate/kernel", f"blocks/{ours}/up/kernel"), transpose=True),
            Tensor("layers.{layer}.shared_mlp.output_linear.weight", f"blocks/{ours}/down/kernel", transpose=True))),
        *EXPERTS,
    ),
    # Of no effect but on speed.
    inert=frozenset({"mamba_chunk_size"}),
)
