"""Steps that are not finite: skipped, counted, and the rows that made them so written out."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline import loader
from tests import tiny
from trainer import strategies, train
from trainer.distributed import mesh as mesh_lib
from trainer.metrics import Mean
from trainer.telemetry.row_losses import Rows
from trainer.telemetry.writers import read_rows

pytestmark = [pytest.mark.devices(8), pytest.mark.host_patches]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


def config(corpus, **changed):
  c = tiny.config(corpus, total_steps=6, grad_accum_steps=2, **changed)
  c.evals = {}
  c.mesh.update(data=4, tensor=2)
  return c


def poison(monkeypatch, step, rows, value):
  """Gives a loss weight of these rows of one step's batch another value."""
  batch = loader.TrainData.batch

  def poisoned(self, number, only=None):
    made = batch(self, number) if only is None else batch(self, number, only)
    if number == step - 1:
      for at, row in enumerate(range(8) if only is None else only):
        if row in rows:
          made["loss_weights"][at, 5] = value
    return made

  monkeypatch.setattr(loader.TrainData, "batch", poisoned)


def told(workdir):
  """{step: rows written} of the files of steps that were not finite."""
  return {file.stem: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
          for file in sorted((workdir / "nonfinite").glob("*.jsonl"))}


def test_a_nan_batch_is_skipped_counted_and_its_rows_are_written(corpus, tmp_path, monkeypatch, caplog):
  poison(monkeypatch, 3, {1, 6}, np.nan)
  with caplog.at_level(logging.WARNING):
    run = train(config(corpus), tmp_path)
  assert run.step == 6 and int(run.state["nonfinite"]) == 1
  found = told(tmp_path)
  assert list(found) == ["step-3"] and [row["row"] for row in found["step-3"]] == [1, 6]
  for row in found["step-3"]:
    assert np.isnan(row["loss"]) and np.isnan(row["loss_weights"][5]) and row["source"] == "main" and row["text"]
  assert "Step 3: rows 1, 6 of 8: " + str(tmp_path / "nonfinite" / "step-3.jsonl") in caplog.text
  assert [row["nonfinite_steps"] for row in read_rows(tmp_path / "metrics.jsonl") if "loss" in row] == [
      0, 0, 1, 1, 1, 1]
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.state["params"]))


def with_root_of_zero(monkeypatch, marked):
  """Adds sqrt(0 · embedding) to the loss of rows that `marked(batch)` [B] names: 0, with an infinite derivative."""
  seq = strategies.STRATEGIES["seq"]

  def loss(model, params, batch, rng, cfg):
    terms, metrics = seq.loss(model, params, batch, rng, cfg)
    zero = jnp.sum(params["embed"]["embedding"] * 0.0)
    plus_B = jnp.sqrt(jnp.where(marked(batch), zero, 1.0))  # two wheres: else the others had 0 times infinity
    return {"loss": Mean(terms["loss"].sum + jnp.where(marked(batch), plus_B, 0.0), terms["loss"].weight)}, metrics

  monkeypatch.setitem(strategies.STRATEGIES, "seq", replace(seq, loss=loss))


def test_rows_with_a_loss_but_no_finite_gradient_are_found_by_halves(corpus, tmp_path, monkeypatch, caplog):
  with_root_of_zero(monkeypatch, lambda batch: batch["loss_weights"][:, 5] == 3.0)
  poison(monkeypatch, 2, {0, 4, 7}, 3.0)
  with caplog.at_level(logging.WARNING):
    run = train(config(corpus), tmp_path)
  assert int(run.state["nonfinite"]) == 1
  assert [row["row"] for row in told(tmp_path)["step-2"]] == [0, 4, 7]
  assert all(np.isfinite(row["loss"]) for row in told(tmp_path)["step-2"])
  assert "Step 2: rows 0, 4, 7 of 8" in caplog.text


def test_where_no_row_alone_is_to_blame_all_are_written(corpus, tmp_path, monkeypatch, caplog):
  """Rows 0 and 2 are of one micro-batch, which is bad if both are in it."""
  with_root_of_zero(monkeypatch, lambda batch: jnp.sum(batch["loss_weights"][:, 5] == 3.0) == 2)
  poison(monkeypatch, 2, {0, 2}, 3.0)
  with caplog.at_level(logging.WARNING):
    run = train(config(corpus), tmp_path)
  assert int(run.state["nonfinite"]) == 1
  assert [row["row"] for row in told(tmp_path)["step-2"]] == list(range(8))
  assert "no row alone" in caplog.text


def test_only_the_first_such_steps_are_looked_into(corpus, tmp_path, monkeypatch):
  c = config(corpus)
  c.optimizer.update(name="sgd", learning_rate=1e30, max_nonfinite_steps=5, clip_norm=0.0)
  with pytest.raises(FloatingPointError):
    train(c, tmp_path)
  assert len(told(tmp_path)) == 3


def test_rows_are_looked_at_with_the_dropout_of_their_update():
  """Update 7 follows 6 others. Of four rows in two micro-batches, the first has rows 0 and 2."""
  def loss_fn(params, micro, rng):
    return {"loss": Mean(jax.random.uniform(rng, micro["tokens"].shape[:1]), micro["loss_weights"].sum(1))}, {}

  mesh = mesh_lib.make_mesh({}, jax.devices()[:1])
  run = SimpleNamespace(mesh=mesh, state={"params": {}}, reference=None, config=SimpleNamespace(activation_rules=()),
                        program=SimpleNamespace(loss_fn=loss_fn, options=SimpleNamespace(seed=5, micro_batch_size=2)))
  batch = {"tokens": jnp.zeros((4, 3), jnp.int32), "loss_weights": jnp.ones((4, 3)), "stop_requests": jnp.zeros(1)}
  sums_B, weights_B = Rows(run).losses(batch, 7)
  key = jax.random.fold_in(jax.random.key(5), 6)
  of_micros = [jax.random.uniform(jax.random.fold_in(key, index), (2,)) for index in (0, 1)]
  np.testing.assert_array_equal(sums_B, np.stack(of_micros, axis=1).reshape(-1))
  assert weights_B.tolist() == [3.0] * 4


def test_a_file_of_rows_says_what_each_is_and_what_is_no_padding_of_it(tmp_path):
  """The second row is padding; the third has a loss that nothing is trained on and that is not finite."""
  rows = object.__new__(Rows)
  rows._run = SimpleNamespace(data=SimpleNamespace(source_names=("a", "b")), tokenizer=SimpleNamespace(
      decode=lambda ids, skip_special: f"{ids.tolist()} {skip_special}"))
  batch = dict(tokens=np.array([[5, 6, 9], [9, 9, 9], [7, 8, 3]]),
               segment_ids=np.array([[1, 1, 0], [0, 0, 0], [1, 2, 2]]),
               loss_weights=np.array([[0.0, 2.0, 9.0], [9.0, 9.0, 9.0], [0.0, 0.0, 0.0]]),
               source_ids=np.array([1, -1, 0]))
  entropies = np.ma.masked_array(np.float32([[0.1, 0.2, 9], [9, 9, 9], [0.3, 0.4, 0.5]]), np.eye(3, dtype=bool))
  folder, given = tmp_path / "made" / "nonfinite", (batch, np.array([3.0, 0.0, np.inf]), np.array([2.0, 0.0, 0.0]))
  rows.write(folder / "step-3.jsonl", *given)
  rows.write(folder / "step-4.jsonl", *given, only=[2, 0], of_tokens={"entropy": entropies})
  first, *others = [json.loads(line) for line in (folder / "step-3.jsonl").read_text().splitlines()]
  assert first == dict(row=0, source="b", loss=1.5, weight=2.0, tokens=[5, 6], loss_weights=[0.0, 2.0],
                       text="[5, 6] False")
  assert others == [dict(row=1, source=None, loss=0.0, weight=0.0, tokens=[], loss_weights=[], text="[] False"),
                    dict(row=2, source="a", loss=np.inf, weight=0.0, tokens=[7, 8, 3], loss_weights=[0.0] * 3,
                         text="[7, 8, 3] False")]
  found = [json.loads(line) for line in (folder / "step-4.jsonl").read_text().splitlines()]
  assert [(row["row"], row["entropy"]) for row in found] == [(2, [0.3, 0.4, None]), (0, [None, 0.2])]


@pytest.mark.parametrize("together, alone, found", [
    ({0, 2}, set(), []), (set(), {0, 4, 7}, [0, 4, 7]), (set(), {3}, [3])])
def test_rows_without_a_finite_gradient_are_found_by_leaving_the_others_out(together, alone, found):
  rows, asked = object.__new__(Rows), []
  rows._finite = "the function"

  def call(fn, batch, step, kept_B):
    asked.append((fn, batch, step))
    kept = {*np.flatnonzero(kept_B)}
    return not (kept & alone or together and together <= kept)

  rows.call = call
  batch = {"tokens": np.zeros((8, 1))}
  assert rows.offending(batch, 7, np.zeros(8)) == found
  assert all(fn == "the function" and given is batch and step == 7 for fn, given, step in asked)
  assert rows.offending(batch, 7, np.array([0, np.nan, 0, 0, 0, -np.inf, 0, 0])) == [1, 5]
