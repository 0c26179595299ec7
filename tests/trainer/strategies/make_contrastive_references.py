"""Makes tests/trainer/strategies/contrastive_references.npz: losses of embeddings and their gradients, float64.

    python tests/trainer/strategies/make_contrastive_references.py

needs torch and sentence-transformers 6; the tests need neither. Of queries, positives and two hard negatives each
(`embeddings` [4, Q, D], not of length 1): MultipleNegativesRankingLoss of the library, with and without the negatives,
in one direction (infonce) and in both (symmetric); the library has no sigmoid loss, so that is one written here after
arXiv 2303.15343, algorithm 1, which says what is meant there by the mean.
"""

from pathlib import Path

import numpy as np
import sentence_transformers
import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

QUERIES, SIZE, SCALE, BIAS = 5, 6, 20.0, -10.0


def siglip(parts: list[torch.Tensor]) -> torch.Tensor:
  queries, texts = (torch.nn.functional.normalize(x, dim=-1) for x in (parts[0], torch.cat(parts[1:])))
  logits = queries @ texts.T * 10.0 + BIAS
  signs = 2 * torch.eye(len(queries), len(texts), dtype=logits.dtype) - 1
  return -torch.nn.functional.logsigmoid(signs * logits).sum() / len(queries)


def main() -> None:
  drawn = torch.randn(4, QUERIES, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
  drawn[1] += drawn[0]  # a positive is near its query
  losses = {"infonce": dict(), "symmetric": dict(directions=("query_to_doc", "doc_to_query"),
                                                 partition_mode="per_direction")}
  found = {"embeddings": drawn.numpy(), "versions": [f"{m.__name__} {m.__version__}" for m in (
      torch, sentence_transformers)]}
  for name in ("infonce", "symmetric", "siglip"):
    for negatives in (0, 2):
      parts = [part.clone().requires_grad_() for part in drawn[:2 + negatives]]
      made = None if name == "siglip" else MultipleNegativesRankingLoss(None, scale=SCALE, **losses[name])
      loss = siglip(parts) if made is None else made.compute_loss_from_embeddings(parts, None)
      loss.backward()
      found[f"{name}_{negatives}"] = loss.detach().numpy()
      found[f"{name}_{negatives}_gradient"] = torch.stack([part.grad for part in parts]).numpy()
  np.savez(Path(__file__).parent / "contrastive_references.npz", **found)


if __name__ == "__main__":
  main()
