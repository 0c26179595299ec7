"""How many floating-point operations a model's matrix products take, by formula: what MFU is made of.

Forward and backward, without recomputation.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from models import lora, vit, vit_native
from models.spec import Spec
from models.spec_mtp import model_layer


def per_token(spec: Spec, vocab_size: int, params: Mapping[str, Any], trained_only: str | None, seq_len: int,
              document_length: float | None = None, images_per_row: float = 0.0, tower_frozen: bool = False) -> float:
  """Operations per token of a row.

  6 N + 6 H (sum over layers of K + V times the mean number of visible keys), where N counts the weights that
  take part in a token's matrix products (the unembedding included, also when tied; the embedding lookup not;
  of experts only as many as a token passes through),
  and a query of a causal row of T tokens sees (T + 1) / 2 keys on average, fewer with a window or chunks. With
  adapters, the weights of the base that are not trained count 4 times and not 6, since they have no gradient. Where an
  indexer chooses keys, only those count, and its own products twice: they have no gradient at all. What
  tokens of an image or a prefix see beyond that is not counted. A delta layer sees no keys: for each of its H states
  [K, V], a token reads it with its key, adds a product to it and reads it with its query, 18 H K V (however many tokens
  are taken together), and 6 W for each channel of its convolutions. A mamba layer does not read before it writes: 12.
  A module that predicts tokens further ahead counts as a layer, with its projection and the unembedding once more.

  Tower and projector work by the image and not by the token: those of a row's images, unused ones included, are
  shared out among its tokens.

  Args:
    vocab_size: entries of its unembedding.
    params: {path: shape} of its parameters, of quantised kernels as they were.
    trained_only: a regex of the parameters that alone are trained (adapters); None: all are.
    seq_len: tokens per row.
    document_length: mean tokens per document where several are packed in a row; default: seq_len.
    images_per_row: images that the tower sees for each row, or tiles (counted as those of one image, as far as one, or
      a frame of a video, may have them); how many that is, the data decide.
    tower_frozen: nothing in tower and projector is trained, so that they run forward only.
  """
  sizes = {path: p.size for path, p in params.items()}
  active = 1.0 if spec.moe is None else spec.moe.experts_per_token / spec.moe.num_experts
  weights = {path: n * (active if "/experts/" in path else 1.0) for path, n in sizes.items()
             if re.match("(mtp/)?blocks/|mtp/eh_proj/", path) and (path.endswith("/kernel") or lora.is_adapter(path))
             and "/indexer/" not in path}
  if spec.per_layer_size:
    weights["per_layer_proj/kernel"] = sizes["per_layer_proj/kernel"]
  weights |= {path: n for path, n in sizes.items() if path.startswith("streams/")}
  if spec.head.predicts:
    head = "embed/embedding" if spec.tie_embeddings else "unembed/kernel"
    weights[head] = spec.hidden_size * vocab_size * (1 + spec.mtp_layers)
  weights |= _of_tables(spec, sizes)
  length = seq_len if document_length is None else min(document_length, seq_len)
  layers = (*range(spec.num_layers), *(model_layer(spec.layer_pattern, spec.num_layers),) * spec.mtp_layers)
  visible = sum(_sizes(spec, spec.mixer_of(i)) * _mean_visible(length, spec.seen_of(i), spec.layer_type(i))
                for i in layers if spec.mixer_of(i).endswith("attn"))
  matmuls = sum(n * (6.0 if re.search(trained_only or "", path) else 4.0) for path, n in weights.items())
  images = images_per_row * _per_image(spec, sizes, tower_frozen, images_per_row) / seq_len if images_per_row else 0.0
  others = _of_states(spec) + _of_streams(spec) + _of_indexers(spec, sizes, seq_len, length)
  return matmuls + 6.0 * spec.num_heads * visible + others + images


def _of_tables(spec: Spec, sizes: Mapping[str, int]) -> dict[str, float]:
  """The weights of adapters of tables, as often as a token passes them: what is read is a row times `lora_b`."""
  found = {path: float(n) for path, n in sizes.items() if re.search(r"^(per_layer_)?embed/lora_b$", path)}
  if not spec.head.predicts:
    return found
  head = "embed" if spec.tie_embeddings else "unembed"
  for path in (f"{head}/lora_a", f"{head}/lora_b"):
    if path in sizes:
      found[path] = found.get(path, 0.0) + sizes[path]
  return found


def _sizes(spec: Spec, mixer: str) -> int:
  """Of a head's key and of its value, together."""
  _, size = spec.heads_of(mixer)
  return size + (size if spec.latent is None else spec.latent.value_dim)


def _of_states(spec: Spec) -> float:
  """Operations of a token in the states of delta and mamba layers and in the convolutions before them."""
  total = 0.0
  for sizes, of_state, layers in ((spec.delta, 18.0, spec.layers_with("delta")),
                                  (spec.mamba, 12.0, spec.layers_with("mamba"))):
    if sizes is not None:
      total += len(layers) * (of_state * math.prod(sizes.state_shape) + 6.0 * sizes.conv_width * sizes.channels)
  return total


def _of_indexers(spec: Spec, sizes: Mapping[str, int], seq_len: int, length: float) -> float:
  """Operations of a token in indexers, which run forward alone, and only in rows longer than what they choose."""
  if spec.latent is None or not 0 < spec.latent.index_topk < seq_len:
    return 0.0
  kernels = sum(n for path, n in sizes.items() if "/indexer/" in path and path.endswith("/kernel"))
  scores = spec.latent.index_heads * spec.latent.index_head_dim * (length + 1) / 2
  return 2.0 * (kernels + (len(spec.layers_with("indexer")) + spec.mtp_layers) * scores)


def _of_streams(spec: Spec) -> float:
  """Operations of a token that mix AltUp's streams, beyond the router, which is passed twice, and their projections."""
  if spec.altup is None:
    return 0.0
  N, D = spec.altup.num_inputs, spec.hidden_size
  return 6.0 * spec.num_layers * (N * N * D + N * D + N**3 + N**2)


def _per_image(spec: Spec, sizes: Mapping[str, int], frozen: bool, per_row: float) -> float:
  """Operations in tower and projector for one image, or one of a row's tiles."""
  v = spec.vision
  kernels = sum(n for path, n in sizes.items() if path.startswith("projector/") and path.endswith("/kernel"))
  tower = vit_native.flops_per_tile(v, min(per_row, v.most_together)) if v.native else vit.flops_per_image(v)
  forward = tower + 2.0 * v.tokens_per_image * kernels
  if spec.lora is None:
    return forward * (1 if frozen else 3)
  adapted = [path for path in sizes if path.startswith(("vision/", "projector/")) and lora.is_adapter(path)]
  # The base has no gradient of its own, but the adapters in it need what flows back through it.
  return forward * (2 if adapted and not frozen else 1)


def _mean_visible(length: float, window: int | None, layer_type: str) -> float:
  """Mean over the queries of a causal row of how many keys each sees, itself included."""
  if window is None or window >= length:
    return (length + 1) / 2
  if layer_type == "chunked":
    chunks, rest = divmod(length, window)
    return (chunks * window * (window + 1) + rest * (rest + 1)) / (2 * length)
  return window - window * (window - 1) / (2 * length)
