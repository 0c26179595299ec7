"""Llama 2 to 3.1, and families that differ from it by a few rules: Arcee, Apertus, ERNIE 4.5, Helium, Hunyuan,
Nemotron, Phi 3, Seed-OSS, SmolLM 3, StableLM, StarCoder 2."""

from dataclasses import dataclass

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import UNGATED, Activation, Key, Must, Rule, WholeHeads, Window, kinds_of
from models.hf.rope import Rope
from models.hf.source import Source

# Llama 2, 3 and 3.1, and all that say they are a "llama" (Yi, SmolLM 2, DeepSeek 1, …).
LLAMA = Family(
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.UNTIED, WholeHeads(), Rope(),
        common.KV_HEADS, common.ATTENTION_BIAS, common.MLP_BIAS,
    ),
    table=common.LLAMA,
)


# Arcee (AFM): a Llama whose MLP has no gate, but a squared ReLU.
ARCEE = Family(
    model_types=("arcee",),
    architectures=("ArceeForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.UNTIED, WholeHeads(), Rope(), common.RMS_EPS_5,
        Activation("hidden_act", "relu2", UNGATED),
        common.KV_HEADS, common.ATTENTION_BIAS, common.MLP_BIAS,
    ),
    table=common.LLAMA,
)


# Seed-OSS: a Llama that says for itself whether the attention's output has a bias.
SEED_OSS = Family(
    model_types=("seed_oss",),
    architectures=("SeedOssForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.RMS_EPS, common.SILU, common.UNTIED, Rope(), common.MLP_BIAS,
        common.head_dim(128), common.kv_heads(8),
        Key("attention_bias", "qkv_bias", bool, default=True),
        Key("attention_out_bias", "attention_out_bias", bool, default=False),
    ),
    table=common.LLAMA,
)


# ERNIE 4.5, dense: a Llama with rotated neighbours, and biases in all projections or in none.
ERNIE4_5 = Family(
    model_types=("ernie4_5",),
    architectures=("Ernie4_5ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.TIED, Rope(theta=5e5), common.RMS_EPS_5,
        common.head_dim(128), common.kv_heads(2),
        Key("use_bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), bool, default=False, null=False),
    ),
    table=common.LLAMA,
    fixed={"rope_interleaved": True},
    classifier=None,
)


# SmolLM 3: a Llama in which some layers, every fourth where nothing is said, have no rotary positions.

class NoRopeLayers(Rule):
  """no_rope_layers: 1 for each layer that rotates, 0 for others; or every no_rope_layer_interval-th is another."""

  def read(self, source, model):
    layers, interval = model["num_layers"], source.get("no_rope_layer_interval", int, 4)
    found = source.get("no_rope_layers", list, None, None)
    rotates = [int((i + 1) % interval != 0) for i in range(layers)] if found is None else found
    if len(rotates) < layers or any(flag not in (0, 1) for flag in rotates):
      raise source.error("no_rope_layers", f"1 or 0 for each of the {layers} layers")
    types = source.get("layer_types", list, None, None)
    if types is not None and types != ["full_attention"] * layers:
      raise source.error("layer_types", f"'full_attention' for each of the {layers} layers, since there is no window")
    source.get("sliding_window", object, None)  # switched off, so that it may be anything
    return {"layer_pattern": tuple("global" if flag else "nope" for flag in rotates[:layers])}

  def write(self, model):
    return {"no_rope_layers": [int(kind != "nope") for kind in kinds_of(model)]}


SMOLLM3 = Family(
    model_types=("smollm3",),
    architectures=("SmolLM3ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.RMS_EPS, common.SILU, common.TIED, Rope(theta=2e6),
        common.kv_heads(4), common.ATTENTION_BIAS, common.MLP_BIAS,
        Must("use_sliding_window", False, "layers without rotary positions have no window here"),
        NoRopeLayers(),
    ),
    table=common.LLAMA,
    inert=frozenset({"max_window_layers"}),
)


# Nemotron 3, 4 and Minitron: LayerNorm stored as an offset from one, a squared ReLU, half of each head rotated.
NEMOTRON = Family(
    model_types=("nemotron",),
    architectures=("NemotronForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.UNTIED, Rope(fraction=0.5), common.KV_HEADS,
        Activation("hidden_act", "relu2", UNGATED),
        Key("norm_eps", "norm_eps", float, default=1e-5),
        common.ATTENTION_BIAS, common.MLP_BIAS,
    ),
    table=common.LLAMA,
    fixed={"norm": "layernorm", "norm_bias": True, "norm_scale_plus_one": True},
)


# StableLM 2 and 3B: a Llama with LayerNorm, of which a part of each head is rotated.
STABLELM = Family(
    model_types=("stablelm",),
    architectures=("StableLmForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Rope(fraction=0.25),
        Key("qk_layernorm", "qk_norm", bool, default=False),
        Key("use_parallel_residual", "parallel_blocks", bool, default=False),
        Key("layer_norm_eps", "norm_eps", float, default=1e-5),
        Key("num_key_value_heads", "num_kv_heads", default=32),
        Key("use_qkv_bias", "qkv_bias", bool, default=False),
    ),
    table=(
        *common.ENDS, *common.NORMS, *common.ATTENTION, *common.MLP,
        *(Tensor(f"layers.{{layer}}.self_attn.{p}_layernorm.norms.{{head}}.weight", f"blocks/attn/{p}_norm/scale")
          for p in "qk"),
    ),
    fixed={"norm": "layernorm", "norm_bias": True, "qk_norm_over": "each_head"},
)


# StarCoder 2: LayerNorm and biases as in GPT-2, rotary positions and grouped queries as in Llama.
STARCODER2 = Family(
    model_types=("starcoder2",),
    architectures=("Starcoder2ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.TIED, Rope(), Window(default=None),
        Activation("hidden_act", "gelu_pytorch_tanh", UNGATED),
        Must("norm_type", "layer_norm", "the norm is a LayerNorm"),
        Key("norm_epsilon", "norm_eps", float, default=1e-5),
        common.kv_heads(2),
        Key("use_bias", ("qkv_bias", "attention_out_bias", "mlp_bias"), bool, default=True),
    ),
    table=(
        *common.ENDS, *common.NORMS, *common.ATTENTION,
        *common.pair("layers.{layer}.mlp.c_fc", "blocks/mlp/up"),
        *common.pair("layers.{layer}.mlp.c_proj", "blocks/mlp/down"),
    ),
    fixed={"norm": "layernorm", "norm_bias": True},
    inert=frozenset({"mlp_type"}),
)


# Phi 3 to 3.5 and Phi 4 mini: a Llama with fused projections, which may rotate a part of each head, by longrope.
PHI3 = Family(
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.SILU, common.UNTIED, common.RMS_EPS_5, common.KV_HEADS,
        Rope(scalings=("longrope",), fraction=1.0), Window(default=None),
    ),
    table=(
        *common.ENDS, *common.NORMS,
        Tensor("layers.{layer}.self_attn.qkv_proj.weight", tuple(f"blocks/attn/{p}/kernel" for p in "qkv"),
               transpose=True),
        Tensor("layers.{layer}.self_attn.o_proj.weight", "blocks/attn/o/kernel", transpose=True),
        Tensor("layers.{layer}.mlp.gate_up_proj.weight", ("blocks/mlp/gate/kernel", "blocks/mlp/up/kernel"),
               transpose=True),
        Tensor("layers.{layer}.mlp.down_proj.weight", "blocks/mlp/down/kernel", transpose=True),
    ),
    # Of Phi 4 mini, and read by no version of transformers.
    inert=frozenset({"full_attn_mod", "interpolate_factor"}),
)


# Helium 1: a Llama with rotated neighbours.

class SquareOutput(Rule):
  """transformers has an output projection of the hidden size, whatever heads give."""

  def read(self, source, model):
    if model["num_heads"] * model["head_dim"] != model["hidden_size"]:
      raise source.error("head_dim", f"{model['hidden_size'] / model['num_heads']:g}, hidden_size / "
                         "num_attention_heads: the output projection is square in this family")
    return {}

  def write(self, model):
    if model["num_heads"] * model["head_dim"] != model["hidden_size"]:
      raise HFError(f"{model['num_heads']} heads of {model['head_dim']} must make the hidden size, "
                    f"{model['hidden_size']}, for transformers to load it")
    return {}


HELIUM = Family(
    model_types=("helium",),
    architectures=("HeliumForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.SILU, common.UNTIED, Rope(theta=1e5), common.head_dim(128), SquareOutput(),
        Key("rms_norm_eps", "norm_eps", float, default=1e-8), common.kv_heads(20),
        Key("attention_bias", "qkv_bias", bool, default=False), common.MLP_BIAS,
    ),
    table=common.LLAMA,
    fixed={"rope_interleaved": True},
)


# Apertus: norms of queries and keys as in Qwen 3, and an MLP without a gate whose activation, xIELU, is learned.

XIELU = tuple(Tensor(f"layers.{{layer}}.mlp.act_fn.{name}", f"blocks/mlp/xielu/{name}")
              for name in ("alpha_p", "alpha_n", "beta", "eps"))

APERTUS = Family(
    model_types=("apertus",),
    architectures=("ApertusForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.UNTIED, common.ATTENTION_BIAS, common.RMS_EPS_5,
        Rope(theta=1.2e7, told=True), common.KV_HEADS,
        Activation("hidden_act", "xielu", {"xielu": ("xielu",)}),
    ),
    table=(
        *common.ENDS, *common.ATTENTION, *common.QK_NORMS, *XIELU,
        *(Tensor(f"layers.{{layer}}.mlp.{p}_proj.weight", f"blocks/mlp/{p}/kernel", transpose=True)
          for p in ("up", "down")),
        Tensor("layers.{layer}.attention_layernorm.weight", "blocks/attn_norm/scale"),
        Tensor("layers.{layer}.feedforward_layernorm.weight", "blocks/mlp_norm/scale"),
    ),
    fixed={"qk_norm": True},
    classifier=None,
)


# Hunyuan 0.5B to 7B, dense: a Llama that normalises queries and keys after their rotation.

@dataclass(frozen=True)
class AlphaRope(Rope):
  """A scaling called dynamic, whose `alpha` gives the base another value once and for all (NTK-aware scaling)."""

  inert: tuple[str, ...] = ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")

  def read(self, source, model):
    parameters, _ = self._parameters(source)
    alpha = parameters.get("alpha", float, 0.0, 0.0)
    if not alpha or "dynamic" not in (parameters.content.get("rope_type"), parameters.content.get("type")):
      return super().read(source, model)
    fixed = {key: value for key, value in parameters.content.items() if key not in ("rope_type", "type")}
    for key in ("rope_theta", "max_position_embeddings"):
      source.get(key, object, None)
    content = {key: value for key, value in source.content.items() if key != "rope_scaling"}
    keys = super().read(Source(content | {"rope_parameters": fixed}, source.where), model)
    size = model["head_dim"]
    return keys | {"rope_theta": keys["rope_theta"] * alpha ** (size / (size - 2))}

HUNYUAN_V1_DENSE = Family(
    model_types=("hunyuan_v1_dense",),
    architectures=("HunYuanDenseV1ForCausalLM",),
    keys=(
        *common.SIZES, common.WIDTH, common.HEAD_SIZE, common.SILU, common.UNTIED, common.ATTENTION_BIAS, AlphaRope(),
        common.RMS_EPS_5, common.KV_HEADS,
        Must("use_qk_norm", True, "queries and keys are normalised in all models of this family"),
        Must("use_cla", False, "every layer has its own keys and values in transformers"),
        Must("mlp_bias", False, "MLPs have no biases in this family"),
    ),
    table=(*common.LLAMA,
           *(Tensor(f"layers.{{layer}}.self_attn.{theirs}_layernorm.weight", f"blocks/attn/{ours}_norm/scale")
             for theirs, ours in (("query", "q"), ("key", "k")))),
    fixed={"qk_norm": True, "qk_norm_over": "rotated"},
    # Tokens; heads of other tasks; the size of heads once more.
    inert=frozenset("""
        attention_head_dim cla_share_factor class_num eod_token_id im_end_id im_newline_id im_start_id image_token_id
        mask_init_id org_vocab_size text_end_id text_start_id
    """.split()),
)
