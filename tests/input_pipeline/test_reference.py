"""Reference log-probs: given once to every token that counts, kept by content, aligned with whatever row it is in."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.batches import Arrays
from input_pipeline.reference import ROUTE, PackedData, of_teachers
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from trainer.config import defaults, source
from trainer.config import strategy as section
from trainer.strategies import learns


def config(folder, strategy="dpo", seq_len=48, **changed):
  """Two sources of 40 and 12 examples, some too long for a row."""
  c = defaults()
  c.strategy = section(strategy)
  c.seq_len, c.batch_size, c.input.max_over_long = seq_len, 4, 1.0
  rng = np.random.default_rng(0)

  def text():
    return " " + "".join(map(chr, rng.integers(97, 123, rng.integers(1, 20))))

  for name, count in (("a", 40), ("b", 12)):
    rows = [{"prompt": f"{name}{i}", "chosen": text(), "rejected": text()} for i in range(count)]
    if strategy == "kto":
      rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 3 > 0} for i, r in enumerate(rows)]
    path = folder / f"{name}-{strategy}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    c.input.sources[name] = source(type="jsonl", path=str(path))
  c.input.update(changed)
  return c


def make(c, folder, share_prompts=False):
  return loader.make_train_data(c, BytesTokenizer(), learns=learns(c), workdir=folder, share_prompts=share_prompts)


def values_of(batch):
  """A log-prob for each place that depends on what it sees of its row, and on nothing else."""
  found = np.zeros(batch["tokens"].shape, np.float32)
  for row, segments in enumerate(batch["segment_ids"]):
    prompts = batch["prompt_ids"][row] if "prompt_ids" in batch else np.zeros_like(segments)
    for segment in np.unique(segments[segments > 0]):
      here = np.flatnonzero(segments == segment)
      seen = np.concatenate([np.flatnonzero((segments == prompts[here[0]]) & (prompts[here[0]] > 0)), here])
      sums = -np.cumsum(batch["tokens"][row, seen] * (1 + np.arange(len(seen)) % 5)) / 1000
      found[row, here] = sums[len(seen) - len(here):]
  return found


def fill(logprobs, batch_size, order=None):
  batches = list(logprobs.batches(batch_size))
  for i in range(len(batches)) if order is None else order(len(batches)):
    logprobs.store(batches[i], values_of(batches[i].arrays))
  logprobs.finish()


@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("strategy", ["dpo", "kto"])
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_every_token_gets_the_value_of_its_place_in_whatever_row(tmp_path, strategy, packing, share):
  c = config(tmp_path, strategy, packing=packing)
  data = make(c, tmp_path, share)
  assert any(data.batch(step).get("prompt_ids", np.zeros(1)).any() for step in range(5)) == share
  before = [data.batch(step) for step in range(30)]
  logprobs = data.reference("r1", tmp_path / "cache")
  assert not logprobs.complete
  fill(logprobs, 3, lambda n: np.random.default_rng(1).permutation(n))  # in any order
  assert logprobs.complete
  data.use(logprobs)
  assert data.epoch(30) > 2  # rows of later epochs are put together in other ways
  for step, old in enumerate(before):
    batch = data.batch(step)
    given = batch.pop("ref_logprobs")
    assert batch.keys() == old.keys() and all(np.array_equal(batch[key], old[key]) for key in old)
    np.testing.assert_array_equal(given, np.where(batch["loss_weights"] > 0, values_of(batch), 0))
    assert given.dtype == np.float32 and given.any()
    some = data.batch(step, np.array([2, 0]))
    np.testing.assert_array_equal(some["ref_logprobs"], given[[2, 0]])


def test_batches_have_every_document_once_in_the_rows_of_the_first_epoch(tmp_path):
  data = make(config(tmp_path), tmp_path)
  logprobs = data.reference("r1", tmp_path / "cache")
  assert logprobs.num_batches(7) == -(-data.rows_per_epoch // 7)
  seen = [[], []]
  rows = []
  for batch in logprobs.batches(7):
    assert batch.tokens_BxT.shape == (7, 48) and batch.arrays["segment_roles"].shape == (7, data.sequences)
    assert ((batch.tokens_BxT >= 0) == (batch.arrays["loss_weights"] > 0)).all()
    some = logprobs.batch(batch.index, 7, slice(2, 5))
    np.testing.assert_array_equal(some.tokens_BxT, batch.tokens_BxT[2:5])
    for s in (0, 1):
      mine = batch.tokens_BxT[batch.arrays["source_ids"] == s]
      seen[s] += mine[mine >= 0].tolist()
    rows += [row.tobytes() for row, s in zip(batch.arrays["tokens"], batch.arrays["source_ids"], strict=True) if s >= 0]
  for s, tokens in enumerate(seen):
    assert len(tokens) == len(set(tokens)) == data.reference("r", tmp_path)._packed[s].units.summed
  first = [row.tobytes() for step in range(200) for row in data.batch(step)["tokens"]]
  assert set(rows) <= set(first)


def test_they_are_found_again_by_content(tmp_path):
  c = config(tmp_path)
  cache = tmp_path / "cache"
  fill(make(c, tmp_path).reference("r1", cache), 4)
  data = make(c, tmp_path)
  again = data.reference("r1", cache)
  assert again.complete and len(list(cache.glob("*-reference-*"))) == 2 and not list(cache.glob(".tmp-*"))
  assert not make(c, tmp_path, share_prompts=True).reference("r1", cache).complete
  again.store(again.batch(0, 4), values_of(again.batch(0, 4).arrays) - 1)  # changes nothing
  again.finish()
  data.use(again)
  batch = data.batch(0)
  np.testing.assert_array_equal(batch["ref_logprobs"], np.where(batch["loss_weights"] > 0, values_of(batch), 0))
  assert not data.reference("r2", cache).complete  # another reference
  c.seq_len = 40  # other tokens are kept of what is too long
  assert not make(c, tmp_path).reference("r1", cache).complete
  c.seq_len = 48
  c.seed, c.batch_size, c.input.packing = 5, 8, "none"  # other rows of the same documents
  assert make(c, tmp_path).reference("r1", cache).complete
  other = tmp_path / "b-dpo.jsonl"
  other.write_text(other.read_text().replace("b0", "b9"))
  changed = make(c, tmp_path).reference("r1", cache)
  assert [file.complete for file in changed._files] == [True, False]
  fill(changed, 5)  # what is there already stays
  assert changed.complete


def test_evaluation_data_have_their_own(tmp_path):
  c = config(tmp_path)
  data = loader.make_eval_data(c, BytesTokenizer(), learns=learns(c), workdir=tmp_path)
  logprobs = data.reference("r1", tmp_path / "cache")
  fill(logprobs, 4)
  data.use(logprobs)
  for i in range(data.num_batches(5)):
    batch = data.batch(i, 5)
    np.testing.assert_array_equal(batch["ref_logprobs"], np.where(batch["loss_weights"] > 0, values_of(batch), 0))


def test_damage_is_found_and_computed_again(tmp_path, caplog):
  c, cache = config(tmp_path), tmp_path / "cache"
  fill(make(c, tmp_path).reference("r1", cache), 4)
  file = sorted(cache.glob("a-reference-*/logprobs.bin"))[0]
  raw = bytearray(file.read_bytes())
  raw[100] ^= 1
  file.write_bytes(raw)
  damaged = make(c, tmp_path).reference("r1", cache)
  assert not damaged.complete and "logprobs.bin does not match its checksum" in caplog.text
  with pytest.raises(ValueError, match=r"0 of \d+ reference log-probs of a-reference-\w+ were stored"):
    damaged.finish()
  fill(damaged, 4)
  assert damaged.complete and make(c, tmp_path).reference("r1", cache).complete


def test_what_is_not_complete_is_not_used(tmp_path):
  data = make(config(tmp_path), tmp_path)
  logprobs = data.reference("r1", tmp_path / "cache")
  with pytest.raises(ValueError, match="not complete"):
    data.use(logprobs)
  first, *_ = logprobs.batches(4)
  with pytest.raises(ValueError, match=re.escape("log-probs of shape (4, 47) for a batch of shape (4, 48)")):
    logprobs.store(first, np.zeros((4, 47)))
  bad = values_of(first.arrays)
  row, column = np.argwhere(first.arrays["loss_weights"] > 0)[3]
  bad[row, column] = np.nan
  with pytest.raises(ValueError, match=rf"row {row}, place {column} of batch 0\) the log-prob nan"):
    logprobs.store(first, bad)
  bad = np.where(first.arrays["loss_weights"] > 0, values_of(first.arrays), np.nan)
  logprobs.store(first, bad)  # elsewhere nothing is looked at
  with pytest.raises(ValueError, match=r"\d+ of \d+ reference log-probs"):
    logprobs.finish()
  assert not logprobs.complete and not list((tmp_path / "cache").glob("a-reference-*"))


def test_two_that_compute_at_once_agree_on_one(tmp_path):
  c, cache = config(tmp_path), tmp_path / "cache"
  one, two, third = (make(c, tmp_path).reference("r1", cache) for _ in range(3))
  fill(one, 4)
  fill(two, 6)
  assert two.complete and not third.complete
  third.reopen()
  assert third.complete and len(list(cache.glob("*-reference-*"))) == 2


def test_only_documents_with_parts_have_them(tmp_path):
  c = config(tmp_path)
  c.strategy = section("seq")
  for name in c.input.sources:
    c.input.sources[name].text_key = "chosen"
  data = make(c, tmp_path)
  assert data.sequences == 0 and not {"segment_roles", "ref_logprobs"} & data.batch(0).keys()
  with pytest.raises(ValueError, match="for preferences and labelled answers only"):
    data.reference("r1", tmp_path / "cache")


@pytest.mark.parametrize("most", [(2, 6), (6, 2)])
def test_rows_have_places_for_the_sequences_of_any_source(most):
  tokens = SimpleNamespace(teacher_ids=None, teachers=None, logprobs=None)
  packed = [SimpleNamespace(sequences=count, row_images=None, tokens=tokens, advantages=False, shares_prompts=False)
            for count in most]
  assert PackedData(packed, 8, 0).sequences == 6


def test_sources_have_what_their_teachers_say_in_order_and_whose_their_rows_are():
  """Of two teachers the second is heard in b alone; the rows of a name theirs. A second use takes the first one's
  place."""
  a, b = (SimpleNamespace(tokens=SimpleNamespace(name=name), routed=routed, kept=["before"]) for name, routed in (
      ("a", [("teacher_index", "whose")]), ("b", [])))
  data = object.__new__(PackedData)
  data._packed, data._arrays, data._routes = [a, b], Arrays(), (ROUTE,)
  both, one = ([{"ids": f"{who} ids of {name}", "logprobs": f"{who} of {name}"} for name in names] for who, names in (
      ("first", "ab"), ("second", "b")))
  kept = of_teachers(2, 4)
  for _ in range(2):
    data.use_teachers([SimpleNamespace(sources=names, values=values) for names, values in (
        (["a", "b"], both), (["b"], one))], kept)
    assert a.kept == [("teacher_ids", ["first ids of a"]), ("teacher_logprobs", ["first of a"]),
                      ("teacher_index", "whose")]
    assert b.kept == [("teacher_ids", ["first ids of b", "second ids of b"]),
                      ("teacher_logprobs", ["first of b", "second of b"])]
    assert data._arrays.kept == (*kept, ROUTE)
