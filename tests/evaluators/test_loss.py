"""The loss evaluator: values do not depend on the batch size or the mesh (I6), and equal a reference."""

import gzip
import json
import lzma
import math
import types

import jax
import numpy as np
import pytest

from evaluators import common
from evaluators import loss as loss_evaluator
from evaluators import loss as loss_lib
from input_pipeline import loader
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from models import api
from tests import tiny
from tests.models.initial import initial
from trainer.config import checks as config_checks
from trainer.config import evaluator, source
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.strategies import learns


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def make(corpus, workdir, mesh_sizes=None, packing="auto", **changed):
  """(evaluator, model, params, setup) on the tiny corpus's validation split."""
  config = tiny.config(corpus)
  config.evals.val = evaluator(**changed)
  config.input.packing = packing
  config = config_checks.View(config_checks.resolve(config))
  tokenizer = BytesTokenizer()
  model = api.make_model(config.model, vocab_size=tokenizer.vocab_size, params_dtype="float32", compute_dtype="float32")
  mesh = mesh_lib.make_mesh(mesh_sizes) if mesh_sizes else jax.make_mesh(
      (1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
  setup = common.Setup(config, model, tokenizer, mesh, workdir, None)
  params = initial(model)
  return common.make("val", config.evals.val, setup), model, params, setup


def test_the_value_does_not_depend_on_the_batch_size(corpus, tmp_path):
  """I6, with padding rows: 1, 3 and 64 rows a batch."""
  values = [dict(e.run(params, 0)) for e, _, params, _ in (make(corpus, tmp_path, batch_size=b) for b in (1, 3, 64))]
  for other in values[1:]:
    for name, value in values[0].items():
      assert other[name] == pytest.approx(value, rel=1e-7 if name != "perplexity" else 1e-6), name


@pytest.mark.devices(8)
def test_the_value_does_not_depend_on_the_mesh(corpus, tmp_path):
  one, _, params, _ = make(corpus, tmp_path, batch_size=8)
  eight, _, _, setup = make(corpus, tmp_path, dict(data=2, fsdp=2, tensor=2), batch_size=8)
  with mesh_lib.activation_rules(setup.mesh):
    sharded = dict(eight.run(params, 0))
  for name, value in one.run(params, 0):
    assert sharded[name] == pytest.approx(value, rel=1e-6), name


def test_it_equals_a_plain_computation_document_by_document(corpus, tmp_path):
  """I3 and bits per byte: each document alone, in float64 from full logits, against rows of several documents."""
  ev, model, params, setup = make(corpus, tmp_path, batch_size=4)
  config = tiny.config(corpus, seq_len=512)
  config.input.packing = "best_fit"
  data = loader.make_eval_data(config, setup.tokenizer, learns=learns(config), workdir=tmp_path, split="validation")
  assert data.num_rows < sum(data.num_documents.values())  # packed indeed
  nll = hits = tokens = num_bytes = 0
  logits_of = jax.jit(model.logits)
  for text in data.raw_texts():
    ids = np.concatenate([[setup.tokenizer.bos_id], setup.tokenizer.encode_batch([text])[0], [setup.tokenizer.eos_id]])
    num_bytes += len(text.encode())
    padded = np.pad(ids, (0, 512 - len(ids))).astype(np.int32)  # one shape, one program
    logits = np.asarray(logits_of(params, padded[None]), np.float64)[0, :len(ids) - 1, :setup.tokenizer.vocab_size]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll -= logp[np.arange(len(ids) - 1), ids[1:]].sum()
    hits += (logits.argmax(-1) == ids[1:]).sum()
    tokens += len(ids) - 1
  ev._examples.data = ev._data = data
  values = dict(ev.run(params, 0))
  assert values["loss"] == pytest.approx(nll / tokens, rel=1e-6)
  assert values["accuracy"] == pytest.approx(hits / tokens, rel=1e-6)
  assert values["bits_per_byte"] == pytest.approx(nll / np.log(2) / num_bytes, rel=1e-6)
  assert values["perplexity"] == pytest.approx(np.exp(nll / tokens), rel=1e-5)


def test_weights_count_as_in_training_and_leave_no_bits_per_byte(corpus, tmp_path):
  rng = np.random.default_rng(0)
  rows = [{"input_ids": rng.integers(0, 256, n).tolist(), "weights": rng.choice([0, 0.5, 1], n).tolist()}
          for n in range(4, 30)]
  (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
  sources = {"x": source(type="jsonl", path=str(tmp_path / "x.jsonl"))}
  ev, model, params, setup = make(corpus, tmp_path, packing="best_fit", batch_size=4, sources=sources)
  nll = hits = weight = 0
  logits_of = jax.jit(model.logits)
  for row in rows:
    padded = np.pad(row["input_ids"], (0, 30 - len(row["input_ids"])))  # one shape, one program
    logits = np.asarray(logits_of(params, padded[None]), np.float64)[0, :len(row["input_ids"]) - 1, :258]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids, w = np.array(row["input_ids"][1:]), np.array(row["weights"][1:])
    nll -= (w * logp[np.arange(len(ids)), ids]).sum()
    hits += (w * (logits.argmax(-1) == ids)).sum()
    weight += w.sum()
  values = dict(ev.run(params, 0))
  assert values["loss"] == pytest.approx(nll / weight, rel=1e-6)
  assert values["accuracy"] == pytest.approx(hits / weight, rel=1e-6)
  assert values.keys() == {"loss", "perplexity", "accuracy"}
  with pytest.raises(ConfigError, match=r"evals.val.baselines is \('xz',\), but bits per byte mean nothing here"):
    make(corpus, tmp_path, sources=sources, baselines=("xz",))


def test_baselines_compress_the_same_text(corpus, tmp_path):
  ev, _, params, setup = make(corpus, tmp_path, baselines=("gzip", "xz"))
  values = dict(ev.run(params, 0))
  text = "".join(ev._data.raw_texts()).encode()
  assert len(text) == sum(ev._data.num_bytes.values())
  assert values["bits_per_byte_gzip"] == 8 * len(gzip.compress(text, 9)) / len(text)
  assert values["bits_per_byte_xz"] == 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def test_training_and_validation_documents_may_not_overlap_silently(corpus, tmp_path):
  config = tiny.config(corpus)
  config.input.sources.main.split = "all"
  config = config_checks.View(config_checks.resolve(config))
  with pytest.raises(ConfigError, match="--config.input.sources.main.split=train"):
    common.make("val", config.evals.val, common.Setup(config, None, BytesTokenizer(), None, tmp_path, None))


def test_sources_of_its_own(corpus, tmp_path):
  other = tiny.write_corpus(tmp_path / "other", files=3, seed=9)
  ev, _, params, _ = make(corpus, tmp_path, sources={"held_out": source(type="text", path=str(other))})
  values = dict(ev.run(params, 0))
  assert ev._data.source_names == ("held_out",) and values["loss"] > 0


def test_max_documents_limits_each_source(corpus, tmp_path):
  ev, _, _, _ = make(corpus, tmp_path, max_documents=2)
  assert ev._data.num_documents == {"main": 2}


@pytest.mark.parametrize("sums, num_bytes, expected", [
    ((2.0, 0.125, 0.25), None, dict(loss=8.0, perplexity=math.exp(8), accuracy=0.5)),  # weights may be small
    ((900.0, 3.0, 9.0), 120, dict(loss=100.0, perplexity=math.exp(100), accuracy=1 / 3,
                                  bits_per_byte=900 / math.log(2) / 120)),
    ((9000.0, 0.0, 9.0), None, dict(loss=1000.0, perplexity=math.exp(700), accuracy=0.0))])  # e^1000 is no float64
def test_the_numbers_of_a_split_by_hand(sums, num_bytes, expected):
  found = dict(loss_lib._values("/a", np.array(sums), num_bytes))
  assert found == {f"{name}/a": pytest.approx(value, rel=1e-12) for name, value in expected.items()}


def test_of_several_sources_each_has_its_own_bytes_and_all_have_all():
  """Two sources of 3 and 1 rows with 2 nats and 2 tokens each, of 30 and 5 bytes; with a baseline that is known."""
  made = loss_lib.Loss.__new__(loss_lib.Loss)
  made._data = types.SimpleNamespace(source_names=("a", "b"))
  made._examples = [{"source_ids": np.array([0, 0, 1, -1])}, {"source_ids": np.array([0, -1, -1, -1])}]
  made._row_sums = lambda params, batch: np.where(batch["source_ids"][:, None] < 0, 0.0, np.array([2.0, 1.0, 2.0]))
  made._num_bytes, made._all_bytes, made._baselines = {"a": 30, "b": 5}, 35, {"gzip": 2.5}
  found = dict(made.run(None, 3))
  bits = 1 / math.log(2)
  assert {name: value for name, value in found.items() if "bits" in name} == {
      "bits_per_byte": pytest.approx(8 * bits / 35), "bits_per_byte/a": pytest.approx(6 * bits / 30),
      "bits_per_byte/b": pytest.approx(2 * bits / 5), "bits_per_byte_gzip": 2.5}
  assert found["loss"] == found["loss/b"] == 1.0 and found["accuracy/a"] == 0.5


def test_nothing_to_evaluate_and_losses_beyond_numbers():
  for suffix, where in (("", ""), ("_web", " in web")):
    with pytest.raises(ValueError, match=f"^nothing to evaluate{where}: no token has a weight.$"):
      dict(loss_evaluator._values(suffix, np.zeros(3), None))
  found = dict(loss_evaluator._values("_web", np.array([8.0, 1.0, 4.0]), 16))
  assert found == {"loss_web": 2.0, "perplexity_web": pytest.approx(np.exp(2)), "accuracy_web": 0.25,
                   "bits_per_byte_web": pytest.approx(8 / np.log(2) / 16)}
  assert np.isfinite(dict(loss_evaluator._values("", np.array([1e6, 0, 1]), None))["perplexity"])
