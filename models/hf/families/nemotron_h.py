"""Nemotron-H and Nemotron 3: layers of one branch each, of Mamba 2, of attention, an MLP or experts, in any order."""

import math
from dataclasses import replace

from models.hf.errors import HFError
from models.hf.families import common
from models.hf.families.deepseek import SCORES
from models.hf.families.granite import mamba
from models.hf.family import Family, Tensor
from models.hf.keys import UNGATED, Activation, Key, Must, Rule, Same, kinds_of


class Pattern(Rule):
  """hybrid_override_pattern, a letter for each layer; or layers_block_type, their names in transformers 4 or 5."""

  letters = {"M": "mamba", "*": "global", "-": "mlp", "E": "moe"}
  names = {"mamba": "mamba", "linear_attention": "mamba", "attention": "global", "full_attention": "global",
           "mlp": "mlp", "moe": "moe"}

  def read(self, source, model):
    told = {}
    for key, kind, ours in (("hybrid_override_pattern", str, self.letters), ("layers_block_type", list, self.names),
                            ("layer_types", list, self.names)):
      given = source.get(key, kind, None, None)
      if given is None:
        continue
      if not given or not all(isinstance(one, str) and one in ours for one in given):
        raise source.error(key, f"one of {', '.join(ours)} for each layer")
      told[tuple(ours[one] for one in given)] = key
    if len(told) != 1:
      raise HFError(f"{source.where}: hybrid_override_pattern or layers_block_type must say what each layer is; found "
                    f"{'two that differ' if told else 'neither'}.")
    pattern = next(iter(told))
    if source.get("num_hidden_layers", int, len(pattern)) != len(pattern):
      raise source.error("num_hidden_layers", f"{len(pattern)}, as many as {told[pattern]} has")
    if not {"mlp", "moe"} & {*pattern}:
      raise source.error(told[pattern], "a layer with an MLP or experts among the others")
    return {"layer_pattern": pattern, "num_layers": len(pattern)}

  def write(self, model):
    kinds, letters = kinds_of(model), {ours: letter for letter, ours in self.letters.items()}
    return {"num_hidden_layers": len(kinds),
            "hybrid_override_pattern": "".join(letters.get(kind, "?") for kind in kinds)}


class Experts(Rule):
  """Those of layers of type moe; where there are none, what is said of experts has no effect."""

  rules = (
      Key("n_routed_experts", "moe.num_experts", default=8, alias="num_local_experts"),
      Key("num_experts_per_tok", "moe.experts_per_token", default=2),
      Key("moe_intermediate_size", "moe.expert_size", default=7688),
      Key("moe_shared_expert_intermediate_size", "moe.shared_size", default=7688),
      Key("routed_scaling_factor", "moe.weight_scale", float, default=1.0),
      Key("n_group", "moe.groups", default=1), Key("topk_group", "moe.groups_used", default=1),
      Key("norm_topk_prob", "moe.normalize_weights", bool, default=True),
      Must("moe_latent_size", None, "experts see hidden states as they are"),
  )

  def read(self, source, model):
    if "moe" not in model["layer_pattern"]:
      for rule in self.rules:
        source.get(rule.theirs, object, None, None)
      return {}
    if model["mlp_bias"]:
      raise source.error("mlp_bias", "false where there are experts, which have no biases")
    return {**SCORES, **{key: value for rule in self.rules for key, value in rule.read(source, model).items()}}

  def write(self, model):
    rules = self.rules if "moe" in model["layer_pattern"] else ()
    return {key: value for rule in rules for key, value in rule.write(model).items()}


class LeastStep(Key):
  """time_step_min, below which transformers lets no step of a text fall that it reads as a whole."""

  def write(self, model):
    return {**super().write(model), "time_step_limit": [model[self.ours], math.inf]}

  def notes(self, source):
    least, limit = source.get(self.theirs, float, self.default), source.get("time_step_limit", list, [0.0], [0.0])
    return [] if not least or limit[:1] == [least] else [
        f"{source.where}: time_step_min is {least:g}. As in transformers 5, no step is smaller; in its generation from "
        "a cache, and in the code that NVIDIA published with the model, which reads time_step_limit, there is no such "
        "limit: that is --config.model.mamba.min_step=0."]


TABLE = (
    Tensor("embeddings.weight", "embed/embedding"),
    Tensor("norm_f.weight", "final_norm/scale"),
    Tensor("layers.{layer}.norm.weight", "blocks/attn_norm/scale"),
    *mamba("mixer"),
    *(Tensor(f"layers.{{layer}}.mixer.{p}_proj.weight", f"blocks/attn/{p}/kernel", transpose=True) for p in "qkvo"),
    *(tensor for p in ("up", "down") for tensor in (
        *common.pair(f"layers.{{layer}}.mixer.{p}_proj", f"blocks/mlp/{p}"),
        Tensor(f"layers.{{layer}}.mixer.shared_experts.{p}_proj.weight", f"blocks/moe/shared/{p}/kernel",
               transpose=True),
        # As in files, then as transformers 5 has them in memory.
        Tensor(f"layers.{{layer}}.mixer.experts.{{expert}}.{p}_proj.weight", f"blocks/moe/experts/{p}/kernel",
               transpose=True),
        Tensor(f"layers.{{layer}}.mixer.experts.{p}_proj", f"blocks/moe/experts/{p}/kernel", transpose=True))),
    Tensor("layers.{layer}.mixer.gate.weight", "blocks/moe/router/kernel", transpose=True),
    Tensor("layers.{layer}.mixer.gate.e_score_correction_bias", "blocks/moe/router/choice_bias"),
)
NEMOTRON_H = Family(
    model_types=("nemotron_h",),
    architectures=("NemotronHForCausalLM",),
    classifier=None,
    keys=(
        Key("vocab_size", "vocab_size", default=131072),
        Key("hidden_size", "hidden_size", default=4096),
        Pattern(),
        Key("num_attention_heads", "num_heads", default=32),
        common.kv_heads(8),
        Key("head_dim", "head_dim", default=128, alias="attention_head_dim"),
        Key("intermediate_size", "intermediate_size", default=21504),
        Key("layer_norm_epsilon", "norm_eps", float, default=1e-5),
        Same("rms_norm_eps", "norm_eps", "as layer_norm_epsilon says"),
        Activation("mlp_hidden_act", "relu2", UNGATED),
        Key("mlp_bias", "mlp_bias", bool, default=False),
        Experts(),
        Key("mamba_num_heads", "mamba.num_heads", default=128),
        Key("mamba_head_dim", "mamba.head_dim", default=64),
        Key("n_groups", "mamba.num_groups", default=8, alias="mamba_n_groups"),
        Key("ssm_state_size", "mamba.state_dim", default=128),
        Key("conv_kernel", "mamba.conv_width", default=4, alias="mamba_d_conv"),
        Key("use_conv_bias", "mamba.conv_bias", bool, default=True, alias="mamba_conv_bias"),
        LeastStep("time_step_min", "mamba.min_step", float, default=0.001, alias="mamba_dt_min"),
        Must("mamba_hidden_act", "silu", "which all have"),
        Must("use_bias", False, "the projections of mamba layers have no bias here"),
        Must("mamba_proj_bias", False, "the projections of mamba layers have no bias here"),
        Must("attention_bias", False, "attention has no biases in this family"),
        Must("sliding_window", None, "all layers of attention see all before them"),
        Must("tie_word_embeddings", False, "the unembedding is a matrix of its own in this family"),
    ),
    table=(
        Tensor("lm_head.weight", "unembed/kernel", transpose=True),
        # As in files, then as transformers 5 has them in memory.
        *(replace(tensor, theirs=prefix + tensor.theirs) for prefix in ("backbone.", "model.") for tensor in TABLE),
    ),
    fixed={"positions": "none", "tie_embeddings": False},
    prefixes=("",),
    in_memory="model.",
    # Layers that predict tokens further ahead.
    ignored=(r"^mtp\.",),
    # Of speed, fresh values, and those layers; the shared expert is one of moe_shared_expert_intermediate_size.
    inert=frozenset("""
        chunk_size expand mamba_chunk_size mamba_d_expand mamba_expand mamba_ssm_cache_dtype moe_shared_expert_overlap
        mtp_hybrid_override_pattern mtp_layers_block_type n_shared_experts num_logits_to_keep num_nextn_predict_layers
        rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_limit time_step_max time_step_rank
        use_mamba_kernels
    """.split()),
)
