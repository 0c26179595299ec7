"""GPT-2: learned positions, LayerNorm, biases everywhere; its kernels are [in, out], as ours."""

from models.hf.families import common
from models.hf.family import Family, Tensor
from models.hf.keys import UNGATED, Activation, Key, Must


def four_times(model: dict) -> int:
  """n_inner where there is none."""
  return 4 * model["hidden_size"]


GPT2 = Family(
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel",),
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("n_layer", "num_layers"),
        Key("n_embd", "hidden_size"),
        Key("n_head", ("num_heads", "num_kv_heads")),
        Key("n_positions", "max_positions", default=1024),
        Key("n_inner", "intermediate_size", default=four_times, null=four_times),
        Key("layer_norm_epsilon", "norm_eps", float, default=1e-5),
        Key("tie_word_embeddings", "tie_embeddings", bool, default=True),
        Activation("activation_function", "gelu_new", UNGATED),
        Must("scale_attn_weights", True, "attention logits are always divided by the root of the head's size"),
        Must("scale_attn_by_inverse_layer_idx", False, "attention logits are scaled alike in all layers"),
    ),
    table=(
        Tensor("wte.weight", "embed/embedding"),
        Tensor("wpe.weight", "pos_embed/embedding"),
        *common.pair("h.{layer}.ln_1", "blocks/attn_norm", "scale"),
        *common.pair("h.{layer}.ln_2", "blocks/mlp_norm", "scale"),
        Tensor("h.{layer}.attn.c_attn.weight", tuple(f"blocks/attn/{p}/kernel" for p in "qkv"), axis=1),
        Tensor("h.{layer}.attn.c_attn.bias", tuple(f"blocks/attn/{p}/bias" for p in "qkv")),
        *(tensor for theirs, ours in (("attn.c_proj", "attn/o"), ("mlp.c_fc", "mlp/up"), ("mlp.c_proj", "mlp/down"))
          for tensor in (Tensor(f"h.{{layer}}.{theirs}.weight", f"blocks/{ours}/kernel"),
                         Tensor(f"h.{{layer}}.{theirs}.bias", f"blocks/{ours}/bias"))),
        *common.pair("ln_f", "final_norm", "scale"),
        Tensor("lm_head.weight", "unembed/kernel", transpose=True, prefixed=False),
    ),
    fixed={"norm": "layernorm", "norm_bias": True, "positions": "learned", "qkv_bias": True,
           "attention_out_bias": True, "mlp_bias": True},
    prefixes=("transformer.", ""),
    # Causal masks that old files carry.
    ignored=(r"\.attn\.(masked_)?bias$",),
    inert=frozenset({"n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_activation",
                     "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"}),
)
