"""What evaluators share: whose data they take, rows by their sources, and the files of samples."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from evaluators import common
from trainer.config import defaults, evaluator, source
from trainer.errors import ConfigError, DataError


def config(**splits):
  c = defaults()
  c.input.sources = {name: source(type="text", path=name, split=split) for name, split in splits.items()}
  return c


@pytest.mark.parametrize("split, of_training, told", [
    ("validation", "train", None), ("all", "train", None), ("all", "all", None), ("validation", "all", "b"),
    ("train", "all", "b")])
def test_what_is_trained_on_is_not_evaluated_unless_that_is_meant(split, of_training, told):
  c = config(a="train", b=of_training)
  cfg = evaluator(type="loss", split=split)
  if told is None:
    assert common.sources("val", cfg, c) == (c.input.sources, split)
    return
  with pytest.raises(ConfigError, match=f"evals.val evaluates the split '{split}' of the training sources, but "
                                        f"input.sources.{told} trains on all of it"):
    common.sources("val", cfg, c)


def test_sources_of_its_own_name_their_splits_themselves():
  cfg = evaluator(type="loss", split="validation")
  cfg.sources = {"mine": source(type="text", path="x", split="all")}
  named, split = common.sources("val", cfg, config(a="all"))
  assert list(named) == ["mine"] and split is None


def test_rows_are_added_to_their_sources_in_float64_and_padding_to_none():
  sums = np.zeros((3, 2))
  common.add_by_source(sums, np.array([0, 2, -1, 0]), np.array([[1, 2], [3, 4], [100, 100], [5, 6]], np.float32))
  common.add_by_source(sums, np.array([2, -1]), np.array([[2.0**-40, 1], [7, 7]], np.float32))
  np.testing.assert_array_equal(sums, [[6, 8], [0, 0], [3 + 2.0**-40, 5]])


@pytest.mark.parametrize("batch_size, expected", [(None, 4), (6, 6)])
def test_examples_come_in_batches_of_a_micro_batch_unless_told_otherwise(batch_size, expected, monkeypatch):
  """Ten rows, of which the last batch has what is left and padding; what the data are asked for."""
  asked, placed = {}, []
  data = SimpleNamespace(num_batches=lambda size: -(-10 // size),
                         batch=lambda index, size, rows: {"tokens": index * size + np.arange(size)[rows][None]})
  monkeypatch.setattr(common.loader, "make_eval_data", lambda *_, **given: (asked.update(given), data)[1])
  monkeypatch.setattr(common, "check_batch", lambda mesh, size, where: placed.append((size, where)))
  monkeypatch.setattr(common, "batch_sharding", lambda mesh: "sharding")
  monkeypatch.setattr(common, "place_batch", lambda rows, size, sharding: rows(slice(0, size)))
  c = config(a="train")
  c.batch_size, c.grad_accum_steps = 16, 4
  setup = common.Setup(c, SimpleNamespace(vocab_size=99), "tokenizer", "mesh", "workdir", None)
  cfg = evaluator(type="loss", split="validation", batch_size=batch_size, max_documents=7)
  found = [batch["tokens"][0].tolist() for batch in common.Examples("val", cfg, setup, share_prompts=True)]
  assert found == [list(range(n, n + expected)) for n in range(0, 10, expected)]
  assert placed == [(expected, "evals.val.batch_size")]
  assert (asked["max_documents"], asked["split"], asked["learns"], asked["workdir"], asked["share_prompts"]) == (
      7, "validation", "texts", "workdir", True)
  assert asked["sources"] == c.input.sources and asked["progress"]
  small = common.Setup(c, SimpleNamespace(vocab_size=9), "tokenizer", "mesh", "workdir", None)
  with pytest.raises(DataError, match="token 9 .* is not in the model's vocabulary of 9"):
    list(common.Examples("val", cfg, small))
  cfg.sources = {"mine": source(type="text", path="x")}
  common.Examples("val", cfg, setup)
  assert asked["sources"] == cfg.sources and asked["split"] is None


def test_samples_are_a_line_each_a_text_and_a_page_if_there_is_one(tmp_path):
  rows = [{"text": "ä\n"}, {"text": "b"}]
  common.write_samples(tmp_path / "samples" / "val-3.5", rows, "shown")
  common.write_samples(tmp_path / "samples" / "val-4", rows, "shown", "<html>")
  assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
      "val-3.5.jsonl", "val-3.5.txt", "val-4.html", "val-4.jsonl", "val-4.txt"]
  lines = (tmp_path / "samples" / "val-4.jsonl").read_text(encoding="utf-8").splitlines()
  assert [json.loads(line) for line in lines] == rows and "ä" in lines[0]
  assert (tmp_path / "samples" / "val-4.txt").read_text() == "shown\n"


@pytest.mark.parametrize("best, told", [
    ("eval/val/loss", False), (None, False), ("eval/other/loss", True), ("loss", True)])
def test_the_metric_of_the_best_checkpoint_is_of_an_evaluator(best, told, monkeypatch):
  monkeypatch.setattr(common, "make", lambda name, cfg, setup: name)
  c = config(a="train")
  c.evals, c.keep_best = {"val": evaluator(type="loss")}, best
  setup = SimpleNamespace(config=c)
  if told:
    with pytest.raises(ConfigError, match=f"keep_best is '{best}'; .*eval/val/loss"):
      common.make_all(setup)
  else:
    assert common.make_all(setup) == {"val": "val"}
