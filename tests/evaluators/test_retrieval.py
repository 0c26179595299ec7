"""Retrieval: ranks by a loop, and a run whose evaluation finds what the export would find."""

import json
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from evaluators import retrieval
from input_pipeline.examples.roles import NEGATIVE, POSITIVE, QUERY
from tests import tiny
from tests.trainer.strategies import test_contrastive_runs as runs
from trainer import train
from trainer.config import defaults, evaluator, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.embed import command as embed
from trainer.errors import ConfigError
from trainer.generate.command import load_run
from trainer.telemetry.writers import read_rows


def by_loop(queries, texts, answers, ks):
  """The same, by sorting each query's texts, answers behind others where cosines are equal."""
  recalls, reciprocal, gains = {k: [] for k in ks}, [], []
  for query, right in zip(queries, answers, strict=True):
    order = sorted(range(len(texts)), key=lambda j: (-float(query @ texts[j]), j in right))
    for k in ks:
      recalls[k].append(sum(j in right for j in order[:k]) / len(right))
    first = next(place for place, j in enumerate(order, 1) if j in right)
    reciprocal.append(1 / first if first <= 10 else 0.0)
    gain = sum(1 / np.log2(place + 1) for place, j in enumerate(order[:10], 1) if j in right)
    gains.append(gain / sum(1 / np.log2(place + 1) for place in range(1, min(len(right), 10) + 1)))
  return {**{f"recall@{k}": np.mean(some) for k, some in recalls.items()}, "mrr@10": np.mean(reciprocal),
          "ndcg@10": np.mean(gains)}


@pytest.mark.parametrize("coarse", [False, True])
def test_numbers_are_those_of_a_loop(coarse):
  rng = np.random.default_rng(0)
  queries, texts = rng.normal(size=(300, 4)), rng.normal(size=(40, 4))
  if coarse:  # many cosines are equal
    queries, texts = np.round(queries), np.round(texts)
  answers = [np.sort(rng.choice(40, size=rng.integers(1, 14), replace=False)) for _ in range(300)]
  found = dict(retrieval.metrics(queries.astype(np.float32), texts.astype(np.float32), answers, (1, 3)))
  expected = by_loop(queries.astype(np.float32), texts.astype(np.float32), answers, (1, 3))
  assert found.keys() == expected.keys() and 0 < found["recall@1"] < found["recall@3"] < 1
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, abs=1e-9), name


def test_a_model_that_tells_nothing_apart_finds_nothing():
  same = np.ones((5, 2), np.float32)
  assert dict(retrieval.metrics(same, same, [np.array([i]) for i in range(5)], (1,)))["recall@1"] == 0
  with pytest.raises(ValueError, match="not finite"):
    dict(retrieval.metrics(same * np.nan, same, [np.array([0])] * 5, (1,)))


def test_a_run_is_evaluated_by_the_embeddings_of_its_checkpoint(tmp_path):
  c = runs.config_of(tmp_path, evals=dict(
      held_out=evaluator(type="retrieval", split="all", at_start=False, recall_at=(1, 2), batch_size=3)))
  train(c, tmp_path / "w")
  rows = [json.loads(line) for line in (tmp_path / "matches.jsonl").read_text().splitlines()]
  mesh = mesh_lib.make_mesh({})
  made = embed.Embedder(load_run(tmp_path / "w", mesh), mesh, 4)
  queries = list(dict.fromkeys(row["query"] for row in rows))
  texts = list(dict.fromkeys(text for row in rows for text in (row["positive"], row.get("negative")) if text))
  answers = [np.array(sorted({texts.index(row["positive"]) for row in rows if row["query"] == query}))
             for query in queries]
  assert len(queries) < len(rows) and max(map(len, answers)) == 2
  expected = by_loop(made(queries, "query")[0], made(texts, "document")[0], answers, (1, 2))
  found = [row for row in read_rows(tmp_path / "w" / "metrics.jsonl") if "eval/held_out/mrr@10" in row][-1]
  for name, value in expected.items():
    assert found[f"eval/held_out/{name}"] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("changed, told", [
    (dict(recall_at=()), "evals.r.recall_at is ..; it must be numbers of 1 or more"),
    (dict(recall_at=(0,)), "recall_at is .0,."),
])
def test_what_cannot_be_is_refused(tmp_path, changed, told):
  c = runs.config_of(tmp_path, evals=dict(r=evaluator(type="retrieval", split="all", **changed)))
  with pytest.raises(ConfigError, match=told):
    train(c, tmp_path / "w")


def test_what_it_is_of_is_looked_at_first():
  config = defaults()
  for name, head, recall_at, told in (
      ("seq", "tokens", (1,), "compares embeddings of queries and texts; strategy 'seq' learns none"),
      ("contrastive", "tokens", (1,), "strategy 'contrastive' learns none"),
      ("contrastive", "embedding", (), "evals.r.recall_at is ..; it must be numbers of 1 or more"),
      ("contrastive", "embedding", (1, 0), "recall_at is .1, 0."),
      ("contrastive", "embedding", (1, 2.5), "recall_at is .1, 2.5.")):
    config.strategy = strategy(name)
    config.model.head = head
    with pytest.raises(ConfigError, match=told):
      retrieval.Retrieval("r", SimpleNamespace(recall_at=recall_at), SimpleNamespace(config=config))


def test_other_strategies_have_no_embeddings(tmp_path):
  c = tiny.config(tiny.write_corpus(tmp_path / "texts"), evals=dict(r=evaluator(type="retrieval")))
  with pytest.raises(ConfigError, match="compares embeddings of queries and texts; strategy 'seq' learns none"):
    train(c, tmp_path / "w")


class Table:
  """A model whose embeddings are rows of a table, by the token at which a text ends."""

  def __init__(self, table):
    self.table = np.array(table, np.float32)

  def apply(self, params, batch):
    return SimpleNamespace(hidden=jnp.asarray(self.table)[batch["tokens"]] * params)


def test_texts_that_are_the_same_are_one_and_queries_have_all_their_answers(monkeypatch):
  """Three rows: query 1 is answered by 3, beside 4; query 1 again by 5, beside 6, which answers nothing; and query 2 by
  4 and by 3."""
  rows = [([1, 3, 4], [QUERY, POSITIVE, NEGATIVE]), ([1, 5, 6], [QUERY, POSITIVE, NEGATIVE]),
          ([2, 4, 3], [QUERY, POSITIVE, POSITIVE])]
  vectors = np.eye(7)[:, :4] + np.arange(28).reshape(7, 4) / 30
  batches = [dict(tokens=np.array([tokens]), segment_roles=np.array([of])) for tokens, of in rows]
  asked = []
  monkeypatch.setattr(retrieval.similarity, "embeddings", lambda hidden, batch, pooling: (
      asked.append(pooling) or hidden))
  monkeypatch.setattr(retrieval.similarity, "text_hashes", lambda batch: batch["tokens"][..., None])
  monkeypatch.setattr(retrieval.common, "Examples", lambda name, cfg, setup: batches)
  c = defaults()
  c.strategy, c.model.head = strategy("contrastive", pooling="mean"), "embedding"
  setup = SimpleNamespace(config=c, model=Table(vectors))
  found = dict(retrieval.Retrieval("r", SimpleNamespace(recall_at=(1, 2)), setup).run(2.0, 5))
  queries, texts = 2 * vectors[[1, 2]], 2 * vectors[[3, 4, 5, 6]]
  expected = dict(retrieval.metrics(queries, texts, [np.array([0, 2]), np.array([0, 1])], (1, 2)))
  assert found == pytest.approx(expected) and asked == ["mean"]


@pytest.mark.parametrize("head, name, recall, message", [
    ("lm", "contrastive", (1,), "evals.r is of type 'retrieval', which compares embeddings of queries and texts; stra"),
    ("embedding", "seq", (1,), "evals.r is of type 'retrieval', which compares embeddings of queries and texts; strateg"
                               "y 'seq' learns none. Use strategy contrastive."),
    ("embedding", "contrastive", (), "evals.r.recall_at is (); it must be numbers of 1 or more."),
    ("embedding", "contrastive", (1, 0), "evals.r.recall_at is (1, 0); it must"),
    ("embedding", "contrastive", (1, 2.5), "evals.r.recall_at is (1, 2.5); it must")])
def test_what_is_no_retrieval_is_refused(head, name, recall, message):
  c = defaults()
  c.strategy, c.model.head = strategy(name), head
  with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
    retrieval.Retrieval("r", SimpleNamespace(recall_at=recall), SimpleNamespace(config=c))
