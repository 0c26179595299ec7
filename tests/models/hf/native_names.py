"""Tensors by their names in memory, made of ours in another way than by the families' tables: towers that see tiles."""

import numpy as np


def of_pixtral(name: str, ours: dict) -> np.ndarray:
  """Of Pixtral's tower and Mistral 3's projector."""
  *_, owner, leaf = name.removesuffix(".weight").split(".")
  if leaf == "patch_conv":
    kernel = np.asarray(ours["vision/patch_embed/kernel"])
    size = round((kernel.shape[0] / 3)**0.5)
    return np.einsum("hwcd->dchw", kernel.reshape(size, size, 3, -1))
  if "projector" in name:
    path = {"norm": "norm/scale", "merging_layer": "merge/kernel", "linear_1": "up/kernel", "bias": "down/bias"}[leaf]
    return np.asarray(ours[f"projector/{path}"]).T
  if leaf == "ln_pre":
    return np.asarray(ours["vision/pre_norm/scale"])
  layer, part = int(name.split(".")[4]), {"ffn_norm": "mlp_norm/scale"}.get(leaf, leaf.removesuffix("_proj"))
  part = part if "norm" in part else f"{'attn' if owner == 'attention' else 'mlp'}/{part}/kernel"
  return np.asarray(ours[f"vision/blocks/{part}"][layer]).T


def of_gemma4(name: str, ours: dict) -> np.ndarray:
  """Of Gemma 4's tower and what reads embeddings."""
  if "position_embedding_table" in name:
    return np.asarray(ours["vision/axis_embed/embedding"])
  if "embed_tokens_per_layer" in name:
    return np.asarray(ours["per_layer_embed/embedding"])
  kernels = {"input_proj": "vision/patch_embed", "embedding_projection": "projector/linear"}
  if (owner := name.split(".")[-2]) in kernels:
    return np.asarray(ours[f"{kernels[owner]}/kernel"]).T
  layer, part = int(name.split(".")[4]), {"input_layernorm": "attn_norm"}.get(owner, owner)
  if "norm" in part:
    return np.asarray(ours[f"vision/blocks/{'attn/' * part.startswith('q_')}{part}/scale"][layer])
  owner = name.split(".")[-3]
  part = f"attn/{owner[0]}" if "self_attn" in name else f"mlp/{owner.removesuffix('_proj')}"
  return np.asarray(ours[f"vision/blocks/{part}/kernel"][layer]).T
