"""Retrieval on held-out pairs: each query looks for the texts that answer it among those of all queries."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from evaluators import common
from input_pipeline.examples.roles import NEGATIVE, POSITIVE, QUERY
from trainer import strategies
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.strategies import similarity

# Queries whose cosines with all texts are held at a time.
QUERIES = 256


class Retrieval:
  """Yields `recall@k` (the share of a query's answers among the k texts nearest to it, a mean over queries), `mrr@10`
  (1 / the rank of its first answer, 0 beyond 10) and `ndcg@10` (Järvelin and Kekäläinen 2002, with gains of 1).

  The texts are the positives and hard negatives of the whole split, each once; queries that are the same are one, with
  the answers of all. Of equal cosines an answer comes last, so that a model that tells nothing apart finds nothing.
  """

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    config = setup.config
    if strategies.of(config).data != "matches" or config.model.head != "embedding":
      raise ConfigError(f"evals.{name} is of type 'retrieval', which compares embeddings of queries and texts; "
                        f"strategy {config.strategy.name!r} learns none. Use strategy contrastive.")
    if not cfg.recall_at or any(not isinstance(k, int) or k < 1 for k in cfg.recall_at):
      raise ConfigError(f"evals.{name}.recall_at is {tuple(cfg.recall_at)}; it must be numbers of 1 or more.")
    self._recall_at = tuple(cfg.recall_at)
    self._examples = common.Examples(name, cfg, setup)
    model, pooling = setup.model, config.strategy.pooling

    def embed(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
      hidden_BxTxD = model.apply(params, batch).hidden
      return (similarity.embeddings(hidden_BxTxD, batch, pooling), similarity.text_hashes(batch),
              batch["segment_roles"])

    self._embed = jax.jit(embed)

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]:
    queries: dict[bytes, np.ndarray] = {}
    texts: dict[bytes, np.ndarray] = {}
    answers: dict[bytes, set[bytes]] = {}
    for batch in self._examples:
      asked = b""
      for vector, name, role in zip(*(part.reshape(-1, *part.shape[2:]) for part in processes.on_every_host(
          self._embed(params, batch))), strict=True):
        key = name.tobytes()
        if role == QUERY:
          asked = key
          queries.setdefault(key, vector)
        elif role in (POSITIVE, NEGATIVE):
          texts.setdefault(key, vector)
          if role == POSITIVE:
            answers.setdefault(asked, set()).add(key)
    place = {key: number for number, key in enumerate(texts)}
    right = [np.array(sorted(place[text] for text in answers[query])) for query in queries]
    yield from metrics(np.stack([*queries.values()]), np.stack([*texts.values()]), right, self._recall_at)


def metrics(queries_QxD: np.ndarray, texts_CxD: np.ndarray, answers: list[np.ndarray], recall_at: tuple[int, ...]
            ) -> Iterator[tuple[str, float]]:
  """The evaluator's numbers. `answers`: of each query, the numbers of the texts that answer it, at least one.

  Raises:
    ValueError: embeddings that are not finite.
  """
  found = []
  for begin in range(0, len(queries_QxD), QUERIES):
    cosines = queries_QxD[begin:begin + QUERIES] @ texts_CxD.T
    if not np.isfinite(cosines).all():
      raise ValueError("embeddings are not finite.")
    found += [ranks(row, right) for row, right in zip(cosines, answers[begin:begin + QUERIES], strict=True)]
  for k in recall_at:
    yield f"recall@{k}", float(np.mean([np.mean(rank <= k) for rank in found]))
  yield "mrr@10", float(np.mean([1 / rank[0] if rank[0] <= 10 else 0.0 for rank in found]))
  yield "ndcg@10", float(np.mean([_gain(rank[rank <= 10]) / _gain(np.arange(1, min(len(rank), 10) + 1))
                                  for rank in found]))


def ranks(cosines_C: np.ndarray, answers: np.ndarray) -> np.ndarray:
  """Where the answers to a query stand among all texts, from 1 on, ascending."""
  others, mine = np.delete(cosines_C, answers), -np.sort(-cosines_C[answers])
  return np.sum(others[None] >= mine[:, None], axis=1) + np.arange(1, len(mine) + 1)


def _gain(ranks: np.ndarray) -> float:
  return float(np.sum(1 / np.log2(ranks + 1.0)))
