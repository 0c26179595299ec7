"""Evaluation rows: each document once, in order, whatever the batch size; bytes and texts of the split."""

import json

import numpy as np
import pytest

from input_pipeline.evaluation import make_eval_data
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from trainer.config import defaults, source
from trainer.errors import ConfigError
from trainer.strategies import learns


def make(folder, packing="concat", split=None, max_documents=None, over_long="auto", **cfg):
  config = defaults()
  config.seq_len, config.input.packing, config.input.over_long, config.input.max_over_long = 16, packing, over_long, 1.0
  sources = config.input.sources
  for name in ("b", "a"):
    (folder / f"{name}.txt").write_text("".join(f"{name}{i} é{'.' * (7 * i % 20)}\n" for i in range(40)))
    sources[name] = source(path=str(folder / f"{name}.txt"), documents="line", **cfg)
  return make_eval_data(config, BytesTokenizer(), learns=learns(config), workdir=folder, split=split,
                        max_documents=max_documents)


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_every_byte_of_every_document_is_predicted_once(tmp_path, packing, batch_size):
  data = make(tmp_path, packing)
  batches = [data.batch(i, batch_size) for i in range(data.num_batches(batch_size))]
  assert {len(b["tokens"]) for b in batches} == {batch_size}
  ids = np.concatenate([b["source_ids"] for b in batches])
  assert ids.tolist() == sorted(ids[:data.num_rows].tolist()) + [-1] * (len(ids) - data.num_rows)
  for s, name in enumerate(("a", "b")):
    predicted = [(b["source_ids"] == s)[:, None] & (b["loss_weights"] > 0) for b in batches]
    tokens = np.concatenate([b["tokens"][p] for b, p in zip(batches, predicted, strict=True)])
    text = (tmp_path / f"{name}.txt").read_text().replace("\n", "").encode()
    assert np.sort(tokens[tokens < 256]).tolist() == sorted(text)
    if packing != "best_fit":  # in order
      assert bytes(tokens[tokens < 256].tolist()) == text
    assert (tokens == 257).sum() == 40 == data.num_documents[name] and data.num_bytes[name] == len(text)
  padding = np.concatenate([b["segment_ids"] for b in batches])[ids < 0]
  assert not padding.any()


def test_row_slices_are_slices_of_the_batch(tmp_path):
  data = make(tmp_path)
  i, size = data.num_batches(7) - 1, 7
  whole = data.batch(i, size)
  for rows in (slice(0, 3), slice(3, 7), np.array([6, 0])):
    for key, value in data.batch(i, size, rows).items():
      np.testing.assert_array_equal(value, whole[key][rows])


def test_splits_limits_and_texts(tmp_path):
  train, validation = (make(tmp_path, split=s, validation_fraction=0.3) for s in ("train", "validation"))
  texts = set(train.raw_texts()), set(validation.raw_texts())
  assert not texts[0] & texts[1] and texts[0] | texts[1] == set(make(tmp_path).raw_texts())
  assert sum(validation.num_bytes.values()) == len("".join(validation.raw_texts()).encode())
  assert make(tmp_path, max_documents=5).num_documents == {"a": 5, "b": 5}
  assert make(tmp_path, split=None).num_documents == make(tmp_path, split="all").num_documents == {"a": 40, "b": 40}


def test_no_sources(tmp_path):
  with pytest.raises(ConfigError, match="no evaluation sources"):
    make_eval_data(defaults(), BytesTokenizer(), learns="texts", workdir=tmp_path)


def rows_of_tokens(folder, rows):
  config = defaults()
  config.seq_len = 16
  (folder / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
  config.input.sources.x = source(type="jsonl", path=str(folder / "x.jsonl"))
  return make_eval_data(config, BytesTokenizer(), learns=learns(config), workdir=folder)


def test_bytes_are_known_only_of_whole_texts_that_count_fully(tmp_path):
  assert make(tmp_path, over_long="truncate_end").num_bytes == {"a": None, "b": None}
  assert make(tmp_path, over_long="drop").num_bytes == {"a": None, "b": None}
  assert rows_of_tokens(tmp_path, [{"text": "ab é"}]).num_bytes == {"x": 5}
  assert rows_of_tokens(tmp_path, [{"text": "ab"}, {"input_ids": [1, 2]}]).num_bytes == {"x": None}
  weighed = rows_of_tokens(tmp_path, [{"input_ids": [1, 2, 3], "weights": [0, 0.5, 1]}])
  assert weighed.num_bytes == {"x": None} and list(weighed.raw_texts()) == []


def test_weights_and_the_table_are_those_of_training(tmp_path):
  data = rows_of_tokens(tmp_path, [{"input_ids": [1, 2, 3], "weights": [7, 0.5, 1]}, {"text": "ab"}])
  batch = data.batch(0, 1)
  assert batch["tokens"][0, :7].tolist() == [1, 2, 3, 256, *b"ab", 257]
  assert batch["loss_weights"][0].tolist() == [0, 0.5, 1, 0, 1, 1, 1, *[0] * 9]
  (row,) = data.stats()
  assert (row["documents"], row["tokens"], row["bytes"]) == (2, 7, 2)
  assert row["supervised %"] == pytest.approx(100 * 5 / 16)
