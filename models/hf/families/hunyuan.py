"""Hunyuan 0.5B to 7B, dense: a Llama that normalises queries and keys after their rotation."""

from dataclasses import dataclass

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import Must
from models.hf.rope import Rope
from models.hf.source import Source


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
    name="hunyuan_v1_dense",
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
