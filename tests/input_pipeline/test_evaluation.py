"""Evaluation rows: each document once, in order, whatever the batch size; bytes and texts of the split."""

import numpy as np
import pytest

from input_pipeline.evaluation import make_eval_data
from input_pipeline.tokenizer import BytesTokenizer
from trainer.config import ConfigError, defaults, source


def make(folder, packing="concat", split=None, max_documents=None, **cfg):
  sources = defaults().input.sources
  for name in ("b", "a"):
    (folder / f"{name}.txt").write_text("".join(f"{name}{i} é{'.' * (7 * i % 20)}\n" for i in range(40)))
    sources[name] = source(path=str(folder / f"{name}.txt"), documents="line", **cfg)
  return make_eval_data(sources, BytesTokenizer(), seq_len=16, split=split, max_documents=max_documents,
                        packing=packing, cache_dir=folder / "cache", add_bos=True, add_eos=True)


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
    make_eval_data(
        defaults().input.sources, BytesTokenizer(), seq_len=8, cache_dir=tmp_path, add_bos=True, add_eos=True)
