"""Embeddings of the texts of a batch, and the losses that compare each query with all texts of it.

B rows, S segments a row: P texts that belong together (a query, its positive, N hard negatives), one such group after
another. Q = B * S / P queries, so many positives, C = Q * (1 + N) candidates: all positives, then all negatives.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from input_pipeline.examples.roles import ABSENT
from trainer.strategies import sequences

POOLINGS = {"last": sequences.last_hidden, "mean": sequences.mean_hidden}
# Of a vector that is divided by its norm.
_TINY = 1e-12


class Scalars(NamedTuple):
  """What similarities are multiplied by (1 / temperature) and what is added then; 0-dimensional."""

  scale: Any
  bias: Any


class Labels(NamedTuple):
  """Which queries and candidates there are, bool [Q], [C], and which candidate is no negative of which query although
  it is not its own positive: the same text, or an answer to the same query, bool [Q, C]."""

  queries: jax.Array
  candidates: jax.Array
  duplicates: jax.Array


def embeddings(hidden_BxTxD: jax.Array, batch: Mapping[str, jax.Array], pooling: str) -> jax.Array:
  """Of each segment, of length 1, [B, S, D] float32. `pooling`: one of POOLINGS."""
  return unit(sequences.at_least_float32(POOLINGS[pooling](hidden_BxTxD, batch)))


def unit(vectors: jax.Array) -> jax.Array:
  """Vectors [..., D] divided by their lengths, with a gradient of 0 where that is 0."""
  squares = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
  return vectors * jax.lax.rsqrt(jnp.maximum(squares, _TINY**2))


def grouped(of_segments: jax.Array, negatives: int) -> tuple[jax.Array, jax.Array]:
  """(of queries [Q, …], of candidates [C, …]) from what belongs to segments, [B, S, …]."""
  each, (_, segments, *rest) = 2 + negatives, of_segments.shape
  groups = of_segments[:, :segments // each * each].reshape(-1, each, *rest)
  return groups[:, 0], jnp.concatenate([groups[:, 1 + n] for n in range(1 + negatives)])


def text_hashes(batch: Mapping[str, jax.Array]) -> jax.Array:
  """64 bits of each segment's tokens and images, uint32 [B, S, 2]: equal where the texts are. Sums, so in any order."""
  tokens_BxT, positions_BxT = (batch[key].astype(jnp.uint32) for key in ("tokens", "positions"))
  hashes = []
  for nth, salt in enumerate((0x9E3779B9, 0x85EBCA6B)):
    names_BxT = batch["image_names"][:, :, nth] if "image_names" in batch else jnp.uint32(0)
    mixed_BxT = _mixed(_mixed(tokens_BxT + jnp.uint32(salt)) + positions_BxT * jnp.uint32(0xC2B2AE35) + names_BxT)
    hashes.append(jnp.sum(jnp.where(sequences.in_segment(batch), mixed_BxT[:, :, None], 0), axis=1, dtype=jnp.uint32))
  return jnp.stack(hashes, axis=-1)


def _mixed(x: jax.Array) -> jax.Array:
  """MurmurHash3's last step, in which each bit changes each with a probability of about a half."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def labels(batch: Mapping[str, jax.Array], negatives: int) -> Labels:
  """What there is to compare in a batch."""
  queries_Q, candidates_C = grouped(batch["segment_roles"] != ABSENT, negatives)
  query_hashes, text_hashes_C = grouped(text_hashes(batch), negatives)
  count = len(queries_Q)
  same = jnp.all(text_hashes_C[:count, None] == text_hashes_C[None], axis=-1)
  asked = jnp.all(query_hashes[:, None] == query_hashes[None], axis=-1)
  same |= jnp.pad(asked, ((0, 0), (0, len(candidates_C) - count)))
  same &= candidates_C & queries_Q[:, None] & ~jnp.eye(count, len(candidates_C), dtype=bool)
  return Labels(queries_Q, candidates_C, same)


def compare(embeddings_BxSxD: jax.Array, scalars: Scalars, of: Labels, cfg: Any) -> tuple[jax.Array, dict]:
  """(the losses of the queries [Q], {metric: of the queries [Q]}), 0 where there is no query.

  infonce: -log of the share that the query's own positive has in Σ exp(s · cosine) over the candidates (van den Oord et
  al. 2018, arXiv 1807.03748, eq. 4); symmetric: the mean of that and of the same over queries, for each positive
  (CLIP, arXiv 2103.00020). siglip: Σ over candidates of -log σ(± (s · cosine + b)), + for its own (Zhai et al. 2023,
  arXiv 2303.15343, eq. 1); means are over queries.
  """
  queries_QxD, candidates_CxD = grouped(embeddings_BxSxD, cfg.negatives)
  count = len(queries_QxD)
  cosines_QxC = jnp.einsum("qd,cd->qc", queries_QxD, candidates_CxD, precision="highest")
  own = jnp.eye(count, len(candidates_CxD), dtype=bool)
  others = of.candidates & of.queries[:, None] & ~own
  others &= ~of.duplicates if cfg.mask_duplicates else True
  own_Q = jnp.diagonal(cosines_QxC)
  logits_QxC = scalars.scale * cosines_QxC + scalars.bias
  if cfg.loss == "siglip":
    each_QxC = jnp.where(own, jax.nn.softplus(-logits_QxC), jnp.where(others, jax.nn.softplus(logits_QxC), 0.0))
    losses_Q = jnp.sum(each_QxC, axis=1)
  else:
    masked_QxC = jnp.where(own | others, logits_QxC, -jnp.inf)
    losses_Q = jax.nn.logsumexp(masked_QxC, axis=1) - scalars.scale * own_Q - scalars.bias
    if cfg.symmetric:
      back_Q = jax.nn.logsumexp(masked_QxC[:, :count], axis=0) - scalars.scale * own_Q - scalars.bias
      losses_Q = (losses_Q + back_Q) / 2
  there_Q = of.queries.astype(losses_Q.dtype)
  num_others_Q = jnp.sum(others, axis=1)
  metrics = {
      "accuracy": own_Q > jnp.max(jnp.where(others, cosines_QxC, -jnp.inf), axis=1),
      "positive_similarity": own_Q,
      "negative_similarity": jnp.sum(jnp.where(others, cosines_QxC, 0.0), axis=1) / jnp.maximum(num_others_Q, 1),
      "duplicates": jnp.sum(of.duplicates, axis=1)}
  return jnp.where(of.queries, losses_Q, 0.0), {
      name: jax.lax.stop_gradient(there_Q * values_Q) for name, values_Q in metrics.items()}
