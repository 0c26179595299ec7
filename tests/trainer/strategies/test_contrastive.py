"""Contrastive losses: sentence-transformers' values, a float64 loop, and the same from however many micro-batches."""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from input_pipeline.examples.roles import NEGATIVE, POSITIVE, QUERY
from models.hf.sentence_transformers import Found
from tests import tiny
from tests.models.initial import initial
from tests.trainer.strategies import pairs
from trainer import tree, update
from trainer.config import defaults, strategy
from trainer.errors import ConfigError
from trainer.metrics import to_floats
from trainer.strategies import Objective, contrastive, similarity

REFERENCES = dict(np.load(Path(__file__).parent / "contrastive_references.npz"))
CASES = dict(infonce=dict(), symmetric=dict(symmetric=True), siglip=dict(loss="siglip", temperature=0.1, bias=-10.0))


def options(**changed):
  given = dict(pooling="last", temperature=0.05, bias=None, query_prompt="", document_prompt="", max_length=8)
  return pairs.options("contrastive", **given | changed)


# ---------------------------------------------------------------------- the loss of embeddings


@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_sentence_transformers(name, negatives):
  cfg = options(negatives=negatives, **CASES[name])
  given_BxSxD = jnp.asarray(REFERENCES["embeddings"][:2 + negatives].swapaxes(0, 1), jnp.float32)
  count = len(given_BxSxD)
  of = similarity.Labels(jnp.ones(count, bool), jnp.ones(count * (1 + negatives), bool),
                         jnp.zeros((count, count * (1 + negatives)), bool))

  def mean(given_BxSxD):
    scalars = contrastive._scalars({}, cfg)
    return jnp.mean(similarity.compare(similarity.unit(given_BxSxD), scalars, of, cfg)[0])

  value, gradient = jax.value_and_grad(mean)(given_BxSxD)
  expected = REFERENCES[f"{name}_{negatives}"]
  assert float(value) == pytest.approx(float(expected), rel=1e-6)
  expected = REFERENCES[f"{name}_{negatives}_gradient"].swapaxes(0, 1)
  np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6 * np.linalg.norm(expected))


def test_siglip_begins_with_the_scale_and_bias_of_its_paper():
  """t' = log 10 and b = -10: arXiv 2303.15343, section 3.2."""
  config = defaults()
  config.model.head, config.strategy = "embedding", strategy("contrastive", loss="siglip")
  contrastive.fill_in(config)
  params = initial(tiny.model(head="embedding", similarity=config.model.similarity), 0)
  scalars = contrastive._scalars(params["similarity"], config.strategy)
  assert [float(x) for x in scalars] == pytest.approx([10.0, -10.0])


# ---------------------------------------------------------------------- the loss of texts in rows

# (query, positive, negatives); the second positive is that of the first, the third query that of the first.
TEXTS = [([1, 2, 3], [4, 5], [[6]]), ([2, 3], [4, 5], [[7, 8, 9], [10]]), ([1, 2, 3], [11, 12, 13, 14], []),
         ([15], [16, 17], [[18, 19, 20]]), ([21, 22], [23], [[4, 5]])]
ROWS = [TEXTS[:2], TEXTS[2:3], TEXTS[3:], []]
NEGATIVES = 2


def batch(rows, length=24, groups=2):
  """A batch of rows of TEXTS, each group of segments with room for two negatives."""
  def segments(row):
    for query, positive, negatives in row:
      yield from ((query, [], QUERY), (positive, [], POSITIVE), *((text, [], NEGATIVE) for text in negatives))
      yield from [([], [], 0)] * (NEGATIVES - len(negatives))
  return pairs.layout([list(segments(row)) for row in rows], length, groups * (2 + NEGATIVES))


def made(**changed):
  model = tiny.model(head="embedding", **changed)
  params = initial(model, 3)
  if "similarity" in params:
    params["similarity"] = {name: jnp.float32(0.3) for name in params["similarity"]}
  return model, params


def alone(model, params, pooling):
  """{text: its embedding, float64}, each text a row of its own."""
  texts = sorted({tuple(text) for query, positive, negatives in TEXTS for text in (query, positive, *negatives)})
  tokens = np.array([text + (0,) * (4 - len(text)) for text in texts], np.int32)
  there = np.array([[1] * len(text) + [0] * (4 - len(text)) for text in texts], np.int32)
  hidden = jax.jit(model.apply)(params, dict(tokens=tokens, positions=None, segment_ids=there)).hidden
  found = {}
  for text, row in zip(texts, np.asarray(hidden, np.float64), strict=True):
    vector = row[len(text) - 1] if pooling == "last" else row[:len(text)].mean(0)
    found[text] = vector / np.linalg.norm(vector)
  return found


def loop(vectors, scale, bias, cfg):
  """Every query against every candidate, by the formulas, in float64: (mean loss, metrics)."""
  candidates = [(i, tuple(positive)) for i, (_, positive, _) in enumerate(TEXTS)]
  candidates += [(None, tuple(text)) for n in range(NEGATIVES) for *_, some in TEXTS for text in some[n:n + 1]]
  losses, accurate, own_all, others_all, masked_all = [], [], [], [], []
  for i, (query, positive, _) in enumerate(TEXTS):
    def cosine(text, query=query):
      return vectors[tuple(query)] @ vectors[text]
    own, others, masked = cosine(tuple(positive)), [], 0
    for j, text in candidates:
      if j == i:
        continue
      same = text == tuple(positive) or j is not None and TEXTS[j][0] == query
      masked += same
      if not (same and cfg.mask_duplicates):
        others.append(cosine(text))
    if cfg.loss == "siglip":
      loss = np.log1p(np.exp(-(scale * own + bias))) + sum(np.log1p(np.exp(scale * c + bias)) for c in others)
    else:
      loss = -np.log(np.exp(scale * own) / (np.exp(scale * own) + sum(np.exp(scale * c) for c in others)))
    if cfg.symmetric:
      back = np.exp(scale * own)
      for j, (other, its, _) in enumerate(TEXTS):
        if j != i and not (cfg.mask_duplicates and (its == positive or other == query)):
          back += np.exp(scale * vectors[tuple(other)] @ vectors[tuple(positive)])
      loss = (loss - np.log(np.exp(scale * own) / back)) / 2
    losses.append(loss)
    accurate.append(own > max(others))
    own_all.append(own)
    others_all.append(np.mean(others))
    masked_all.append(masked)
  return np.mean(losses), dict(accuracy=np.mean(accurate), positive_similarity=np.mean(own_all),
                               negative_similarity=np.mean(others_all), duplicates=np.mean(masked_all),
                               pairs=len(TEXTS))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_metrics_of_packed_rows_are_those_of_the_texts_alone(name, pooling, masked):
  cfg = options(negatives=NEGATIVES, pooling=pooling, mask_duplicates=masked, **CASES[name])
  model, params = made(similarity={"siglip": "scale_bias"}.get(name, "scale"))
  terms, metrics = jax.jit(lambda p, b: contrastive.loss(model, p, b, None, cfg))(params, batch(ROWS))
  found = to_floats({key: type(m)(m.sum.sum(), m.weight.sum()) if hasattr(m, "sum") and hasattr(m, "weight") else m
                     for key, m in {**terms, **metrics}.items()})
  scale, bias = np.exp(0.3) / cfg.temperature, 0.3 + (cfg.bias or 0.0)
  loss, expected = loop(alone(model, params, pooling), scale, bias, cfg)
  expected |= dict(loss=loss, temperature=1 / scale, **({"bias": bias} if name == "siglip" else {}))
  assert expected["duplicates"] == 6 / 5 and found.keys() == expected.keys()
  for key, value in expected.items():
    assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def gradient(model, params, batch, cfg, micro_batch_size):
  """({path: gradient}, metrics) of an update."""
  optimizer = types.SimpleNamespace(split=lambda params: (params, {}), merge=lambda trainable, _: trainable)
  objective = Objective(lambda params, batch, rng: contrastive.loss(model, params, batch, rng, cfg),
                        lambda params, batch, each: contrastive.whole(model, params, batch, cfg, each))
  fn = update.make_gradient_fn(objective, optimizer, update.Options(0, micro_batch_size, ("a", "b")))
  grads, _, metrics = jax.jit(fn)(params, batch, 0, None)
  return {path: np.asarray(leaf) for path, leaf in tree.flatten(grads).items()}, to_floats(jax.device_get(metrics))


def same(one, other, bound):
  norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in one.values()))
  assert norm > 1e-2
  for path, leaf in one.items():
    np.testing.assert_allclose(other[path], leaf, rtol=0, atol=bound * norm, err_msg=path)


@pytest.mark.parametrize("name, size", [("infonce", 1), ("symmetric", 2), ("siglip", 1), ("siglip", 2)])
def test_micro_batches_have_the_gradient_of_the_whole_batch(name, size):
  cfg = options(negatives=NEGATIVES, pooling="mean", **CASES[name])
  model, params = made(similarity={"siglip": "scale_bias"}.get(name, "scale"))
  one, metrics = gradient(model, params, batch(ROWS), cfg, 4)
  other, metrics_of_parts = gradient(model, params, batch(ROWS), cfg, size)
  same(one, other, 2e-6)
  assert abs(one["similarity/log_scale"]) > 1e-3
  assert metrics.keys() == metrics_of_parts.keys()
  for key, value in metrics.items():
    assert metrics_of_parts[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key


def test_with_dropout_both_passes_of_a_micro_batch_drop_the_same():
  cfg = options(negatives=NEGATIVES)
  model, params = made(dropout=0.3)
  rows = batch(ROWS)
  found, _ = gradient(model, params, rows, cfg, 2)

  def objective(params):  # all at once, each micro-batch with its key
    micros, count = update.micro_batches(rows, 2)
    embedded = []
    for i in range(count):
      micro = {key: part[i] for key, part in micros.items()}
      hidden = model.apply(params, micro, rng=update.step_key(0, 0, i), train=True).hidden
      embedded.append(similarity.embeddings(hidden, micro, "last"))
    embedded_BxSxD = jnp.stack(embedded, axis=1).reshape(4, *embedded[0].shape[1:])
    of = similarity.labels(rows, NEGATIVES)
    return jnp.sum(similarity.compare(embedded_BxSxD, contrastive._scalars({}, cfg), of, cfg)[0]) / len(TEXTS)

  expected = {path: np.asarray(leaf) for path, leaf in tree.flatten(jax.jit(jax.grad(objective))(params)).items()}
  same(expected, found, 2e-6)


def test_packed_or_a_group_a_row_is_the_same():
  cfg = options(negatives=NEGATIVES, **CASES["symmetric"])
  model, params = made()
  one, metrics = gradient(model, params, batch(ROWS), cfg, 4)
  other, metrics_apart = gradient(model, params, batch([[some] for some in TEXTS], length=12, groups=1), cfg, 5)
  same(one, other, 2e-6)
  assert metrics["loss"] == pytest.approx(metrics_apart["loss"], rel=1e-6)


@pytest.mark.devices(8)
@pytest.mark.parametrize("size", [8, 16])
def test_eight_devices_compare_the_whole_batch(size):
  cfg = options(negatives=NEGATIVES, **CASES["siglip"])
  model, params = made(similarity="scale_bias", num_layers=1)
  rows = batch(ROWS * 4)
  rows["tokens"] = (rows["tokens"] + np.arange(16)[:, None]) % 24  # no copies
  one, metrics = gradient(model, params, rows, cfg, 16)
  mesh = Mesh(np.array(jax.devices()), ("data",))
  placed = {key: jax.device_put(part, NamedSharding(mesh, PartitionSpec("data"))) for key, part in rows.items()}
  other, metrics_of_eight = gradient(model, params, placed, cfg, size)
  same(one, other, 5e-6)
  assert metrics_of_eight["loss"] == pytest.approx(metrics["loss"], rel=1e-6) and metrics["pairs"] == 20


def test_equal_texts_have_equal_hashes_and_no_others():
  rows = batch([[([1, 2], [2, 1], [[1, 2, 0], [1]])], [([1, 2], [2, 1], [[3], [0, 1, 2]])]])
  hashes = np.asarray(similarity.text_hashes(rows)).reshape(-1, 2)
  texts = [(1, 2), (2, 1), (1, 2, 0), (1,), None, None, None, None, (1, 2), (2, 1), (3,), (0, 1, 2)]
  for i, one in enumerate(texts):
    for j, other in enumerate(texts):
      if one is not None and other is not None:
        assert (hashes[i] == hashes[j]).all() == (one == other), (one, other)


def filled(monkeypatch, found=None, model=None, seq_len=100, **options):
  """(strategy, model, lines) of a config whose folder says what `found` has."""
  c = defaults()
  c.seq_len, c.strategy = seq_len, strategy("contrastive", **options)
  c.model.update(dict(head="embedding", hf=None if found is None else "a/folder") | (model or {}))
  base = Found("mean", "query: ", "text: ", None)
  monkeypatch.setattr(contrastive.sentence_transformers, "read", lambda folder: {
      "a/folder": None if found is None else base._replace(**found)}[folder])
  return c.strategy, c.model, contrastive.fill_in(c)


def test_what_is_not_given_follows_from_the_folder_or_has_a_default(monkeypatch):
  cfg, model, said = filled(monkeypatch, negatives=2)
  assert (cfg.pooling, cfg.text_ends, cfg.query_prompt, cfg.document_prompt, cfg.max_length) == (
      "last", "eos", "", "", 25)
  assert (cfg.as_messages, cfg.generation_prompt, cfg.bias, model.similarity) == (None, False, None, "fixed")
  assert said == [f"strategy: pooling = last, max_length = 25 tokens of a text, temperature = {cfg.temperature:g}"]
  cfg, model, said = filled(monkeypatch, dict(max_length=20, as_messages=True), negatives=2)
  assert (cfg.pooling, cfg.text_ends, cfg.query_prompt, cfg.document_prompt, cfg.max_length) == (
      "mean", "tokenizer", "query: ", "text: ", 20)
  assert cfg.as_messages is True and len(said) == 1
  assert filled(monkeypatch, dict(max_length=26), negatives=2)[0].max_length == 25  # no longer than a row has room for
  assert filled(monkeypatch, dict(max_length=20), max_length=30)[0].max_length == 30
  assert filled(monkeypatch, as_messages=True)[0].text_ends == "tokenizer"
  cfg, model, _ = filled(monkeypatch, loss="siglip")
  assert (cfg.bias, model.similarity) == (-10.0, "scale_bias")
  assert filled(monkeypatch, model=dict(head="lm"))[1].similarity is None
  assert filled(monkeypatch, temperature=0.5, bias=-3.0, loss="siglip")[0].bias == -3.0


def test_what_the_config_says_of_it_wins_over_the_folder_and_is_told(monkeypatch):
  cfg, _, said = filled(monkeypatch, {}, pooling="last", query_prompt="query: ")
  assert cfg.pooling == "last" and said[:-1] == [
      "strategy.pooling = 'last', as this config says; a/folder says 'mean'"]


@pytest.mark.parametrize("options, message", [
    (dict(max_length=0), "strategy.max_length is 0; it must be 1 or more"),
    (dict(negatives=-1), "strategy.negatives is -1; it must be 0 or more")])
def test_lengths_that_cannot_be(monkeypatch, options, message):
  with pytest.raises(ConfigError, match=message):
    filled(monkeypatch, **options)
