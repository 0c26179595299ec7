"""What the families share: rules for the entries of config.json that most have, and the names of Llama's tensors."""

from typing import Any

from models.hf.family import Tensor
from models.hf.keys import GATED, Activation, Key


def as_many_as_heads(model: dict) -> int:
  """num_key_value_heads where there is none: multi-head attention."""
  return model["num_heads"]


def head_size(model: dict) -> int:
  """head_dim where there is none."""
  return model["hidden_size"] // model["num_heads"]


def head_dim(default: Any) -> Key:
  """The size of a head: `default`, a number or a function of the model, where nothing is said."""
  return Key("head_dim", "head_dim", default=default, null=head_size)


def kv_heads(default: Any) -> Key:
  """Heads of keys and values; see `head_dim`."""
  return Key("num_key_value_heads", "num_kv_heads", default=default, null=as_many_as_heads)


SIZES = (
    Key("vocab_size", "vocab_size"),
    Key("num_hidden_layers", "num_layers"),
    Key("hidden_size", "hidden_size"),
    Key("num_attention_heads", "num_heads"),
)
HEAD_SIZE = head_dim(head_size)
WIDTH = Key("intermediate_size", "intermediate_size")
RMS_EPS = Key("rms_norm_eps", "norm_eps", float, default=1e-6)
RMS_EPS_5 = Key("rms_norm_eps", "norm_eps", float, default=1e-5)
KV_HEADS = kv_heads(as_many_as_heads)
SILU = Activation("hidden_act", "silu", GATED)
UNTIED = Key("tie_word_embeddings", "tie_embeddings", bool, default=False)
TIED = Key("tie_word_embeddings", "tie_embeddings", bool, default=True)
MLP_BIAS = Key("mlp_bias", "mlp_bias", bool, default=False)
ATTENTION_BIAS = Key("attention_bias", ("qkv_bias", "attention_out_bias"), bool, default=False)

def pair(theirs: str, ours: str, weight: str = "kernel") -> tuple[Tensor, Tensor]:
  """The weight and the bias of a module; `weight`: what the former is called here, a kernel being [in, out]."""
  return (Tensor(f"{theirs}.weight", f"{ours}/{weight}", transpose=weight == "kernel"),
          Tensor(f"{theirs}.bias", f"{ours}/bias"))


def fused(place: str, transpose: bool = True) -> tuple[Tensor, Tensor]:
  """All experts of a layer in two tensors, [E, out, in], or without `transpose` [E, in, out]."""
  gate_up = ("blocks/moe/experts/gate/kernel", "blocks/moe/experts/up/kernel")
  return (Tensor(f"{place}.gate_up_proj", gate_up, transpose=transpose, axis=1 if transpose else 2),
          Tensor(f"{place}.down_proj", "blocks/moe/experts/down/kernel", transpose=transpose))


ENDS = (
    Tensor("embed_tokens.weight", "embed/embedding"),
    *pair("norm", "final_norm", "scale"),
    Tensor("lm_head.weight", "unembed/kernel", transpose=True, prefixed=False),
)
ATTENTION = tuple(
    tensor for p in "qkvo" for tensor in pair(f"layers.{{layer}}.self_attn.{p}_proj", f"blocks/attn/{p}")
)
QK_NORMS = tuple(
    Tensor(f"layers.{{layer}}.self_attn.{p}.weight", f"blocks/attn/{p}/scale") for p in ("q_norm", "k_norm")
)
MLP = tuple(
    tensor for p in ("gate", "up", "down") for tensor in pair(f"layers.{{layer}}.mlp.{p}_proj", f"blocks/mlp/{p}")
)
NORMS = (
    *pair("layers.{layer}.input_layernorm", "blocks/attn_norm", "scale"),
    *pair("layers.{layer}.post_attention_layernorm", "blocks/mlp_norm", "scale"),
)
# All of a Llama's.
LLAMA = (*ENDS, *NORMS, *ATTENTION, *MLP)
