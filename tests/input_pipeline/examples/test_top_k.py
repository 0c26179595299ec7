"""What rows bring of a teacher: the entries that are kept, what is left for the rest, malformed rows by their place."""

import math

import numpy as np
import pytest

from input_pipeline.examples.registry import TokenizedEncoder, make_encoder
from input_pipeline.examples.top_k import LEAST, NEVER, NOBODY
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests.input_pipeline.examples.test_registry import encode, fails, record
from trainer.config import defaults, strategy

VOCAB = BytesTokenizer().vocab_size


def taught(k=3, **fields):
  return TokenizedEncoder(BytesTokenizer(), fields, top_k=k)


def row(ids=(7, 8, 9), teacher_ids=(None, [8, 3], [9, 4]), probs=(None, [0.5, 0.25], [0.1, 0.6]), **more):
  logprobs = [None if part is None else [math.log(p) for p in part] for part in probs]
  return dict(input_ids=list(ids), teacher_ids=list(teacher_ids), teacher_logprobs=logprobs, **more)


def of(k, ids, probs, size=3):
  """The expectation, from a list for each token: the kept in order, and the mass of all else."""
  wanted = np.zeros((size, k), np.int32), np.zeros((size, k + 1))
  for t, (some, mass) in enumerate(zip(ids, probs, strict=True)):
    if some is not None:
      wanted[0][t], wanted[1][t] = some, [math.log(p) if p else NEVER for p in mass]
  return wanted


def check(found, wanted):
  np.testing.assert_array_equal(found.ids, wanted[0])
  np.testing.assert_allclose(found.logprobs, wanted[1], rtol=1e-6, atol=1e-7)
  assert found.ids.dtype == np.int32 and found.logprobs.dtype == np.float32


def test_the_most_probable_are_kept_whatever_their_order():
  check(encode(taught(2), **row()).top_k, of(2, [None, [8, 3], [4, 9]], [None, [0.5, 0.25, 0.25], [0.6, 0.1, 0.3]]))
  # Those beyond k count to the rest, as a server's extra entry for the token that follows does.
  check(encode(taught(1), **row()).top_k, of(1, [None, [8], [4]], [None, [0.5, 0.5], [0.6, 0.4]]))
  check(encode(taught(3), **row()).top_k, of(3, [None, [8, 3, NOBODY], [4, 9, NOBODY]],
                                             [None, [0.5, 0.25, 0, 0.25], [0.6, 0.1, 0, 0.3]]))


def test_what_is_not_trained_needs_no_entries():
  found = encode(taught(1), **row(labels=[-100, -100, 9], teacher_ids=[None, None, [9]], probs=[None, None, [0.5]]))
  check(found.top_k, of(1, [None, None, [9]], [None, None, [0.5, 0.5]]))
  assert found.weights.tolist() == [0, 0, 1]
  assert encode(taught(), **row(labels=[7, -100, -100])) == "nothing to train"
  # What stands there all the same is not looked at.
  encode(taught(1), **row(labels=[-100, -100, 9], teacher_ids=[[1, 1], [VOCAB], [9]], probs=[[1, 1], [3], [0.5]]))


def test_nothing_left_for_others_is_a_little_unless_all_are_there():
  found = encode(taught(2), **row(probs=[None, [0.75, 0.25], [0.9, 0.105]])).top_k  # rounded: 1.005
  np.testing.assert_allclose(np.exp(found.logprobs[1:].astype(np.float64)).sum(-1), 1, rtol=1e-6)
  np.testing.assert_allclose(found.logprobs[1:, -1], math.log(LEAST), rtol=1e-3)
  every = list(range(VOCAB))
  found = encode(taught(VOCAB), **row([1, 2], [None, every], [None, [1 / VOCAB] * VOCAB])).top_k
  assert found.logprobs[1, -1] < NEVER / 2 and sorted(found.ids[1].tolist()) == every


def test_columns_have_other_names_and_are_counted_as_read():
  encoder = taught(2, teacher_ids="ids", teacher_logprobs="lps")
  given = row()
  renamed = dict(input_ids=given["input_ids"], ids=given["teacher_ids"], lps=given["teacher_logprobs"])
  check(encode(encoder, **renamed).top_k, encode(taught(2), **given).top_k)
  assert {"ids", "lps"} <= encoder.columns(record(**renamed)) and "top-k" in encoder.describe(record(**renamed))
  assert "teacher_ids" not in TokenizedEncoder(BytesTokenizer()).columns(record(**given))
  fails("ids[1] has 1 entries, lps[1] has 2", encoder, **renamed | {"ids": [None, [1], [2, 3]]})
  assert taught(2).fingerprint != taught(3).fingerprint != TokenizedEncoder(BytesTokenizer()).fingerprint


@pytest.mark.parametrize("changed, said", [
  (dict(teacher_ids=None), "no 'teacher_ids' (or null), and strategy.teacher is 'rows'"),
  (dict(teacher_logprobs="x"), "teacher_logprobs is 'x', but there are 3 tokens (input_ids)"),
  (dict(teacher_ids=[[8], [9]]), "teacher_ids has 2 entries, but there are 3 tokens"),
  (dict(teacher_ids=[None, None, [9, 4]]), "teacher_ids[1] is None, but this token is trained"),
  (dict(teacher_logprobs=[None, [], [-1, -2]]), "teacher_logprobs[1] is [], but this token is trained"),
  (dict(teacher_ids=[None, [8, 3], [9]]), "teacher_ids[2] has 1 entries, teacher_logprobs[2] has 2"),
  (dict(teacher_ids=[None, [8, 3], [9, VOCAB]]), f"teacher_ids[2] has {VOCAB}, which is not in the tokenizer's"),
  (dict(teacher_ids=[None, [8, -1], [9, 4]]), "teacher_ids[1] has -1, which is not in the tokenizer's"),
  (dict(teacher_ids=[None, [8, 8], [9, 4]]), "teacher_ids[1] has 8, a second time"),
  (dict(teacher_ids=[None, [8, 3.0], [9, 4]]), "teacher_ids[1] has 3.0; expected whole numbers"),
  (dict(teacher_ids=[None, [8, 2**70], [9, 4]]), f"teacher_ids[1] has {2**70}; expected whole numbers"),
  (dict(teacher_logprobs=[None, [-1, None], [-1, -2]]), "teacher_logprobs[1] has None; expected numbers"),
  (dict(teacher_logprobs=[None, [-1, 0.5], [-1, -2]]), "teacher_logprobs[1] has 0.5, expected a finite log-prob"),
  (dict(teacher_logprobs=[None, [-1, math.nan], [-1, -2]]), "teacher_logprobs[1] has nan, expected a finite"),
  (dict(teacher_logprobs=[None, [-1, -math.inf], [-1, -2]]), "teacher_logprobs[1] has -inf, expected a finite"),
  (dict(teacher_logprobs=[None, [-1, -2], [-0.1, -0.2]]), "teacher_logprobs[2] add up to 1.724"),
  (dict(input_ids=None, prompt="a", completion="b"), "no 'input_ids' (or null)"),
])
def test_malformed_rows_are_named(changed, said):
  fails(said, taught(), **row() | changed)


def test_a_config_asks_for_them():
  c = defaults()
  c.strategy = strategy("distill", teacher="rows", cached_top_k=2)
  encoder = make_encoder(c, BytesTokenizer(), learns="taught")
  (found,) = encoder.encode([Record("x", "x", row())])
  assert found.top_k.ids.shape == (3, 2)
