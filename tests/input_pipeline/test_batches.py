"""The arrays of a row, written out by hand and against a plain loop."""

import numpy as np

from input_pipeline.batches import PackedSource, empty_batch
from input_pipeline.cache import TokenizedSource
from input_pipeline.packing import PACKINGS, make_plan


def packed(lengths, packing, seq_len, shuffle=True):
  offsets = np.concatenate([[0], np.cumsum(lengths)])
  tokens = TokenizedSource("s", np.arange(100, 100 + offsets[-1], dtype=np.uint16), offsets, np.array(lengths), "", {})
  return PackedSource(tokens, make_plan(packing, np.array(lengths), seq_len, seed=0, name="s", shuffle=shuffle))


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


def test_like_a_plain_loop_over_pieces():
  for packing in PACKINGS:
    source = packed(np.random.default_rng(0).integers(1, 30, 40), packing, 16)
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
        wanted["loss_weights"][at] = place > 0
      column[row] += end - begin
    for key in wanted:
      np.testing.assert_array_equal(batch[key], wanted[key], err_msg=f"{packing} {key}")
