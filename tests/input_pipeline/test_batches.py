"""The arrays of a row, written out by hand and against a plain loop."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from input_pipeline import batches
from input_pipeline.batches import PackedSource, check_ids, empty_batch, pack, resolve_layout, stats_table
from input_pipeline.cache import TokenizedSource
from input_pipeline.examples.roles import CHOSEN, REJECTED
from input_pipeline.packing import PACKINGS, make_plan
from trainer.config import defaults
from trainer.errors import ConfigError, DataError


def packed(lengths, packing, seq_len, shuffle=True, weights=None, normalize="token", **options):
  offsets = np.concatenate([[0], np.cumsum(lengths)])
  ids = np.arange(100, 100 + offsets[-1], dtype=np.uint16)
  tokens = TokenizedSource("s", ids, offsets, np.array(lengths), "", {}, weights)
  plan = make_plan(packing, np.array(lengths), seq_len, seed=0, name="s", shuffle=shuffle,
                   count=None if weights is None else tokens.count_trained, **options)
  return PackedSource(tokens, plan, normalize)


def test_two_rows_by_hand():
  batch = empty_batch(3, 4, pad_id=7)
  packed([3, 4], "concat", 4, shuffle=False).fill(batch, np.array([2, 0]), 0, np.array([0, 1]), 5)
  assert batch["tokens"].tolist() == [[103, 104, 105, 106], [7] * 4, [100, 101, 102, 103]]
  assert batch["segment_ids"].tolist() == [[1, 1, 1, 1], [0] * 4, [1, 1, 1, 2]]
  assert batch["positions"].tolist() == [[0, 1, 2, 3], [0] * 4, [0, 1, 2, 0]]
  assert batch["loss_weights"].tolist() == [[0, 1, 1, 1], [0] * 4, [0, 1, 1, 0]]
  assert batch["source_ids"].tolist() == [5, -1, 5]
  assert batch["loss_weights"].dtype == np.float32
  assert {batch[key].dtype for key in batch if key != "loss_weights"} == {np.dtype(np.int32)}


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("over_long", ["split", "truncate_end", "truncate_start", "drop"])
@pytest.mark.parametrize("weighted", [False, True])
def test_like_a_plain_loop_over_pieces(weighted, over_long, normalize):
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 30, 40)
  weights = rng.choice([0, 0, 0.3, 1], lengths.sum()).astype(np.float32) if weighted else None
  for packing in PACKINGS:
    source = packed(lengths, packing, 16, weights=weights, normalize=normalize, over_long=over_long)
    rows = np.arange(source.plan.num_rows)
    batch, wanted = empty_batch(len(rows), 16, 0), empty_batch(len(rows), 16, 0)
    source.fill(batch, rows, 1, rows, 0)
    wanted["source_ids"][:] = 0
    column, segment = np.zeros(len(rows), int), np.zeros(len(rows), int)
    for row, doc, begin, end in zip(*source.plan.pieces(1, rows), strict=True):
      segment[row] += 1
      for place, token in enumerate(range(begin, end)):
        at = row, column[row] + place
        wanted["tokens"][at] = source.tokens.tokens[source.tokens.offsets[doc] + token]
        wanted["positions"][at], wanted["segment_ids"][at] = place, segment[row]
        full = 1.0 if weights is None else weights[source.tokens.offsets[doc] + token]
        wanted["loss_weights"][at] = full if place else 0.0
      here = wanted["loss_weights"][row, column[row]:column[row] + end - begin]
      if normalize == "sequence" and here.any():
        here /= here.sum(dtype=np.float64)
      column[row] += end - begin
    for key in wanted:
      np.testing.assert_allclose(batch[key], wanted[key], rtol=1e-6 if normalize == "sequence" else 0,
                                 err_msg=f"{packing} {key}")


def test_an_id_beyond_the_models_vocabulary_is_named():
  batch = {"tokens": np.array([[1, 2, 3], [4, 9, 0]], np.int32)}
  assert check_ids(batch, 10) is batch
  with pytest.raises(DataError, match=r"token 9 \(row 1 of the batch, position 1\) is not in the model's .* of 9"):
    check_ids(batch, 9)


def test_weights_of_a_sequence_sum_to_one_and_keep_their_proportions():
  rng = np.random.default_rng(2)
  lengths = rng.integers(2, 40, 60)
  weights = rng.choice([0, 0.25, 1, 3], lengths.sum()).astype(np.float32)
  both = {}
  for normalize in ("token", "sequence"):
    source = packed(lengths, "best_fit", 16, weights=weights, normalize=normalize)
    both[normalize] = empty_batch(source.plan.num_rows, 16, 0)
    source.fill(both[normalize], np.arange(source.plan.num_rows), 0, np.arange(source.plan.num_rows), 0)
  segments, w, full = both["sequence"]["segment_ids"], both["sequence"]["loss_weights"], both["token"]["loss_weights"]
  pieces = 0
  for row in range(len(segments)):
    for segment in range(1, segments[row].max() + 1):
      here = segments[row] == segment
      assert w[row, here].sum(dtype=np.float64) == pytest.approx(1, rel=1e-6)
      np.testing.assert_allclose(w[row, here], full[row, here] / full[row, here].sum(), rtol=1e-6)
      pieces += 1
  assert pieces > 60 and not w[segments == 0].any()  # some documents are cut, and each piece counts as one


def config(strategy="seq", packing="auto", over_long="auto", **options):
  c = defaults()
  c.strategy = ConfigDict(dict(name=strategy, **options))
  c.seq_len = 8
  c.input.update(packing=packing, over_long=over_long, max_over_long=0.5)
  return c


# What strategies learn from.
LEARNS = {"seq": "texts", "sft": "conversations", "dpo": "pairs", "kto": "labelled", "contrastive": "matches"}


def layout(strategy="seq", *args, **options):
  return resolve_layout(config(strategy, *args, **options), LEARNS[strategy])


def test_auto_suits_the_strategy():
  assert layout() == ("concat", "split", "token")
  assert layout("sft", normalize="sequence") == ("best_fit", "truncate_end", "sequence")
  assert layout("sft", "none", "drop", normalize="token") == ("none", "drop", "token")
  assert layout("dpo") == layout("kto") == ("best_fit", "truncate_end", "token")
  assert layout("seq", "best_fit", "error") == ("best_fit", "error", "token")


@pytest.mark.parametrize("changed, said", [
    (dict(strategy="dpo", packing="concat"), "strategy 'dpo' needs them whole"),
    (dict(strategy="dpo", over_long="split"), "input.over_long is 'split', which strategy 'dpo' cannot do: the "
     "parts of an example belong together. Use truncate_end, truncate_start, drop, error."),
    (dict(strategy="kto", over_long="split"), "input.over_long is 'split', which strategy 'kto'"),
    (dict(strategy="sft", packing="concat"), "input.packing is 'concat', which would cut conversations"),
    (dict(strategy="contrastive", over_long="truncate_end"), "input.over_long is 'truncate_end', which would cut the "
     "ends of texts that are embedded"),
    (dict(strategy="sft", normalize="row"), "strategy.normalize is 'row'; allowed: token, sequence"),
])
def test_layouts_that_cannot_be(changed, said):
  with pytest.raises(ConfigError, match=re.escape(said)):
    layout(**changed)


def source_of(lengths, name="s", weights=None, **more):
  offsets = np.concatenate([[0], np.cumsum(lengths)])
  more = {"skipped": {"empty": 2, "undecodable": 1}, **more}
  tokens = np.zeros(offsets[-1], np.uint16)
  return TokenizedSource(name, tokens, offsets, np.array(lengths), "", weights=weights, **more)


def test_what_is_lost_is_said(caplog):
  weights = np.repeat([1, 1, 0], [5, 9, 4]).astype(np.float32)
  pack(config("sft", normalize="token"), source_of([5, 9, 4], weights=weights), learns="conversations")
  assert "source 's': of 3 documents, 1 are truncated and 0 dropped (input.over_long=truncate_end, seq_len=8): " in (
      caplog.text)
  assert "1 of 18 tokens are lost" in caplog.text
  assert "1 documents or parts of them are left out: none of their tokens is trained" in caplog.text
  caplog.clear()
  pack(config(), source_of([5, 9, 4]), learns="texts")
  assert not caplog.text


def test_the_table_has_a_column_for_whatever_was_left_out_of_any_source():
  plain, weights = source_of([5, 9, 4], "a"), np.repeat([1, 1, 0, 1], [5, 9, 4, 3]).astype(np.float32)
  weighed = source_of([5, 9, 4, 3], "b", weights=weights, dropped={"nothing to train": 7})
  (alone,) = stats_table([pack(config(), plain, learns="texts")])
  assert list(alone) == ["source", "documents", "skipped", "bytes", "tokens", "rows", "documents split", "padded %",
                         "supervised %"]
  c = config("sft", normalize="token")
  first, second = stats_table([pack(c, source, learns="conversations") for source in (plain, weighed)])
  assert list(first) == list(second) == [
      "source", "documents", "skipped", "dropped: nothing to train", "truncated", "tokens lost", "pieces untrained",
      "bytes", "tokens", "rows", "documents split", "padded %", "supervised %"]
  assert (first["truncated"], first["tokens lost"], first["pieces untrained"]) == (1, 1, 0)
  assert (first["dropped: nothing to train"], second["dropped: nothing to train"]) == (0, 7)
  assert (second["skipped"], second["pieces untrained"], second["rows"]) == (3, 1, 2)
  assert second["supervised %"] == pytest.approx(100 * (4 + 7 + 2) / 16)


def test_pairs_left_out_are_counted_by_reason():
  def pair(*sizes):
    return source_of([sum(sizes)], weights=np.ones(sum(sizes), np.float32)), sizes

  sources = [pair(3, 4), pair(9, 8), pair(2, 9), pair(5, 5)]
  parts = np.concatenate([[0], np.cumsum([size for _, sizes in sources for size in sizes])])
  weights = np.ones(parts[-1], np.float32)
  weights[-8:-5] = weights[-5:] = 0  # of the last pair, what fits is not trained
  weights[-1] = weights[-6] = 1
  tokens = source_of(np.diff(parts[::2]), weights=weights, dropped={"short": 2})._replace(
      parts=parts, roles=np.array([CHOSEN, REJECTED] * 4))
  c = config("dpo")
  c.input.max_over_long = 1.0
  source = pack(c, tokens, learns="pairs")
  (row,) = stats_table([source])
  assert list(row) == ["source", "documents", "skipped", "dropped: short", "dropped: one side too long",
                       "dropped: no room for a completion", "truncated", "tokens lost", "bytes", "tokens", "rows",
                       "documents split", "padded %", "supervised %"]
  assert (row["documents"], row["dropped: one side too long"], row["dropped: no room for a completion"]) == (4, 1, 1)
  assert (row["truncated"], row["tokens lost"], row["rows"]) == (1, 9 + 11 + 10, 2)
  assert row["supervised %"] == pytest.approx(100 * (2 + 3 + 3 + 3) / 16) and source.sequences == 2


@pytest.mark.parametrize("most", [(1, 3), (3, 1)])
def test_batches_have_room_for_the_images_of_any_source(most):
  """Those of the row that has the most, in whichever source; frames of videos if one has videos."""
  form = SimpleNamespace(layout=lambda most, videos: (most, videos))
  sources = [SimpleNamespace(row_images=form, most_images=count, videos=count == 1) for count in most]
  assert batches.image_layout(sources) == (3, True)
  assert batches.image_layout([SimpleNamespace(row_images=None)]) is None
