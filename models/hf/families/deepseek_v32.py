"""DeepSeek-V3.2 and GLM-5: DeepSeek V3's layers, with indexers that choose the keys of latent attention."""

import functools

from models.hf.families import common, mtp
from models.hf.families.deepseek import AHEAD, CHOICE_BIAS, INERT, LATENT, MIXTURE, SCORES, experts, latent_sizes
from models.hf.families.glm import MlpTypes
from models.hf.family import Family, Tensor
from models.hf.keys import Key, Must, OfAllLayers, Rule

KINDS = {"F": "full", "S": "shared"}


class Indexers(Rule):
  """Which layers have an indexer: indexer_types; or index_topk_pattern, letters of KINDS or the same list; or every
  index_topk_freq-th layer after the first index_skip_topk_offset - 1."""

  def read(self, source, model):
    layers = model["num_layers"]
    pattern = source.get("index_topk_pattern", object, None, None)
    step, first = (source.get(key, int, default, default) for key, default in (
        ("index_topk_freq", 1), ("index_skip_topk_offset", 2)))
    types = ["full" if max(i - first + 1, 0) % step == 0 else "shared" for i in range(layers)]
    if pattern is not None:
      types = [KINDS.get(letter) for letter in pattern] if isinstance(pattern, str) else pattern
    named = "indexer_types" if source.content.get("indexer_types") or pattern is None else "index_topk_pattern"
    types = source.get("indexer_types", list, types, types)
    if not isinstance(types, list) or len(types) != layers or set(types) - set(KINDS.values()) or types[0] != "full":
      raise source.error(named, f"full or shared for each of the {layers} layers, full for the first")
    return {"latent.index_shared_layers": tuple(i for i, kind in enumerate(types) if kind == "shared")}

  def write(self, model):
    shared = model["latent.index_shared_layers"]
    return {"indexer_types": ["shared" if i in shared else "full" for i in range(model["num_layers"])]}


def keys(heads: int, interleaved: bool) -> tuple[Rule, ...]:
  """What both have. `heads`: of an indexer where nothing is said; `interleaved`: how they are rotated."""
  return (
      Key("index_topk", "latent.index_topk", default=2048),
      Key("index_n_heads", "latent.index_heads", default=heads),
      Key("index_head_dim", "latent.index_head_dim", default=128),
      Must("indexer_rope_interleave", interleaved, "transformers rotates them so in this family"),
      Must("rope_interleave", True, "transformers rotates queries and keys so in this family"),
      Must("mlp_bias", False, "experts have no biases"),
      MlpTypes(3), OfAllLayers("layer_types", "indexed_attention"), mtp.Modules(*AHEAD),
  )


INDEXER = tuple(
    Tensor(f"layers.{{layer}}.self_attn.indexer.{theirs}", f"blocks/indexer/{ours}", transpose=ours.endswith("kernel"))
    for theirs, ours in (("wq_b.weight", "queries/kernel"), ("wk.weight", "keys/kernel"),
                         ("k_norm.weight", "keys_norm/scale"), ("k_norm.bias", "keys_norm/bias"),
                         ("weights_proj.weight", "weights/kernel")))
TABLE = (*common.ENDS, *common.NORMS, *LATENT, *INDEXER, *MIXTURE, CHOICE_BIAS)

with_indexers = functools.partial(
    Family, table=TABLE, inert=INERT, ahead=mtp.as_layers(TABLE, *AHEAD), classifier=None)

DEEPSEEK_V32 = with_indexers(
    model_types=("deepseek_v32",),
    architectures=("DeepseekV32ForCausalLM",),
    keys=(
        *latent_sizes(q_rank=1536, nope=128, value=128),
        *experts(size=2048, number=256, per_token=8, scale=2.5, groups=8, groups_used=4),
        *keys(heads=64, interleaved=False),
    ),
    fixed={**SCORES, "rope_interleaved": True, "latent.index_rope_interleaved": False},
)

GLM_MOE_DSA = with_indexers(
    model_types=("glm_moe_dsa",),
    architectures=("GlmMoeDsaForCausalLM",),
    keys=(
        *latent_sizes(q_rank=2048, nope=192, value=256, norm_eps=1e-5),
        *experts(size=2048, number=256, per_token=8, scale=2.5),
        *keys(heads=32, interleaved=True), Indexers(),
    ),
    fixed={**SCORES, "rope_interleaved": True, "latent.index_rope_interleaved": True},
)
