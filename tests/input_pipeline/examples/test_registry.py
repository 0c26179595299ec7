"""Texts and rows of tokens as documents with weights; every malformed row is named with its place, key and content."""

import json
import re
import sys
import types

import numpy as np
import pytest
from ml_collections import ConfigDict

from input_pipeline.examples import registry as examples
from input_pipeline.examples.base import Encoded
from input_pipeline.examples.registry import (
  EitherEncoder,
  TextEncoder,
  TokenizedEncoder,
  learns_texts,
  make_encoder,
  open_examples,
)
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from trainer.config import defaults, source
from trainer.errors import ConfigError, DataError
from trainer.strategies import learns


def record(**fields):
  return Record("x:7", "data/x.jsonl:7", fields)


def encode(encoder, **fields):
  (result,) = encoder.encode([record(**fields)])
  return result


def plain(encoded):
  return encoded.ids.tolist(), None if encoded.weights is None else encoded.weights.tolist()


def fails(said, encoder, **fields):
  with pytest.raises(DataError) as error:
    encode(encoder, **fields)
  assert str(error.value).startswith("data/x.jsonl:7: ") and said in str(error.value), str(error.value)


@pytest.mark.parametrize("bos, eos", [(True, True), (False, True), (True, False), (False, False)])
def test_texts_have_the_ends_that_are_asked_for(bos, eos):
  encoder = TextEncoder(BytesTokenizer(), "body", (256,) * bos, eos)
  assert plain(encode(encoder, body="aé", other=1)) == ([256] * bos + [*"aé".encode()] + [257] * eos, None)
  assert encode(encoder, body="a").ids.dtype == np.int32
  assert list(encoder.texts(record(body="aé"))) == ["aé"]


def test_a_tokenizer_without_ends_adds_none():
  class Endless(BytesTokenizer):
    bos_id = eos_id = None

  assert plain(encode(TextEncoder(Endless(), "text", (), True), text="ab")) == ([*b"ab"], None)


@pytest.mark.parametrize("fields, said", [
    (dict(body="x", id=2), "no key 'text'; found 'body', 'id'. Set input.sources.mine.text_key."),
    (dict(), "no key 'text'; found no keys."),
    (dict(text=7), "'text' must be a string, found int. Set input.sources.mine.text_key, or filter such rows out."),
    (dict(text=None), "'text' must be a string, found null."),
    (dict(text=b"\xff"), "'text' must be a string, found bytes that are not UTF-8."),
    (dict(text=[{"role": "user"}]), "'text' must be a string, found a list that holds {'role': 'user'}."),
])
def test_rows_without_a_text(fields, said):
  encoder = TextEncoder(BytesTokenizer(), "text", (256,), True, "input.sources.mine.text_key")
  fails(said, encoder, **fields)
  with pytest.raises(DataError):
    encoder.texts(record(**fields))


@pytest.mark.parametrize("fields, wanted", [
    (dict(input_ids=[5, 6, 7]), ([5, 6, 7], None)),
    (dict(input_ids=[5, 6, 7], labels=[-100, 6, -100]), ([5, 6, 7], [0, 1, 0])),
    (dict(input_ids=[5, 6, 7], labels=[5, 6, 7]), ([5, 6, 7], None)),
    (dict(input_ids=[5, 6, 7], labels=[-100, 6, 7]), ([5, 6, 7], None)),  # the first is never predicted
    (dict(input_ids=[5, 6, 7], labels=None), ([5, 6, 7], None)),
    (dict(input_ids=[5, 6, 7], weights=[1, 0.5, 0]), ([5, 6, 7], [1, 0.5, 0])),
    (dict(input_ids=(5, 257), weights=(0, 3)), ([5, 257], [0, 3])),
    (dict(input_ids=[5, 6], attention_mask=[1, 1], text="also"), ([5, 6], None)),
])
def test_rows_of_tokens(fields, wanted):
  result = encode(TokenizedEncoder(BytesTokenizer()), **fields)
  assert plain(result) == wanted
  assert result.ids.dtype == np.int32 and (result.weights is None or result.weights.dtype == np.float32)


@pytest.mark.parametrize("fields, reason", [
    (dict(input_ids=[]), "no tokens"),
    (dict(input_ids=[5, 6], labels=[5, -100]), "nothing to train"),
    (dict(input_ids=[5, 6], weights=[1, 0]), "nothing to train"),
    (dict(input_ids=[5, 6], labels=[-100, -100]), "nothing to train"),
])
def test_rows_of_tokens_that_train_nothing_are_dropped_for_a_reason(fields, reason):
  assert encode(TokenizedEncoder(BytesTokenizer()), **fields) == reason


@pytest.mark.parametrize("fields, said", [
    (dict(input_ids="abc"), "'input_ids' must be a list of whole numbers, found str."),
    (dict(input_ids=None), "'input_ids' must be a list of whole numbers, found null."),
    (dict(input_ids=[1, 2.5]), "'input_ids' must be a list of whole numbers, found a list of numbers with fractions"),
    (dict(input_ids=[1, 2**70]), "'input_ids' must be a list of whole numbers, found a list of numbers with fractions "
                                 "or beyond 64 bits"),
    (dict(input_ids=[1, None]), "'input_ids' must be a list of whole numbers, found a list that holds None."),
    (dict(input_ids=[1, "2"]), "found a list that holds '2'."),
    (dict(input_ids=[[1], [2]]), "found a list that holds [1]."),
    (dict(input_ids=[[1], [2, 3]]), "found a list that holds [1]."),
    (dict(input_ids=[True, False]), "found a list that holds True."),
    (dict(input_ids=[1, 258]), "input_ids[1] is 258, which is not in the tokenizer's vocabulary of 258."),
    (dict(input_ids=[-1, 2]), "input_ids[0] is -1, which is not in the tokenizer's vocabulary of 258."),
    (dict(input_ids=[1, 2], labels=[1]), "'labels' has 1 entries, but 'input_ids' has 2."),
    (dict(input_ids=[1, 2], labels=[2, -100]), "labels[0] is 2, but input_ids[0] is 1. A label is the token at its"),
    (dict(input_ids=[1, 2], labels=7), "'labels' must be a list of whole numbers, found int."),
    (dict(input_ids=[1, 2], weights=[1, 1, 1]), "'weights' has 3 entries, but 'input_ids' has 2."),
    (dict(input_ids=[1, 2], weights=[1, -0.5]),
     "weights[1] is -0.5; weights are finite numbers from 0 on, in float32."),
    (dict(input_ids=[1, 2], weights=[1, float("nan")]), "weights[1] is nan; weights are finite"),
    (dict(input_ids=[1, 2], weights=[1, float("inf")]), "weights[1] is inf; weights are finite"),
    (dict(input_ids=[1, 2], weights=["a", 1]), "'weights' must be a list of numbers, found a list that holds 'a'."),
    (dict(input_ids=[1, 2], weights=[1, 1], labels=[1, 2]), "has both 'labels' and 'weights'."),
    (dict(input_ids=[1, 2], attention_mask=[1, 0]), "'attention_mask' is not 1 for each of the 2 tokens."),
    (dict(input_ids=[1, 2], attention_mask=[1]), "'attention_mask' is not 1 for each of the 2 tokens."),
])
def test_malformed_rows_of_tokens(fields, said):
  fails(said, TokenizedEncoder(BytesTokenizer()), **fields)


def test_columns_with_other_names_are_named_in_messages():
  encoder = TokenizedEncoder(BytesTokenizer(), {"input_ids": "ids", "labels": "targets"})
  assert plain(encode(encoder, ids=[1, 2, 3], targets=[-100, -100, 3])) == ([1, 2, 3], [0, 0, 1])
  fails("ids[0] is 300", encoder, ids=[300])
  fails("targets[1] is 9, but ids[1] is 2", encoder, ids=[1, 2], targets=[1, 9])


def test_rows_of_both_kinds_keep_their_order():
  calls = []

  class Tokenizer(BytesTokenizer):
    def encode_batch(self, texts):
      calls.append(texts)
      return super().encode_batch(texts)

  config = defaults()
  encoder = make_encoder(config, Tokenizer(), learns=learns(config))
  rows = [record(text="a"), record(text="b"), record(input_ids=[1, 2]), record(text="c", input_ids=[9, 9])]
  assert [plain(e)[0] for e in encoder.encode(rows)] == [[256, 97, 257], [256, 98, 257], [1, 2], [256, 99, 257]]
  assert calls == [["a", "b"], ["c"]]
  assert [list(encoder.texts(row)) for row in rows] == [["a"], ["b"], [], ["c"]]
  rows[1] = record(input_ids=[1, 2], labels=[1, 2])
  assert [encoder.describe(row) for row in rows] == ["text", "tokens with labels", "tokens", "text"]


def test_the_fingerprint_follows_whatever_decides_the_tokens():
  class Other(BytesTokenizer):
    fingerprint = "other"

  seen = {make_encoder(defaults(), t, key, learns="texts").fingerprint
          for t in (BytesTokenizer(), Other()) for key in ("text", "body")}
  config = defaults()
  config.tokenizer.add_bos = False
  seen.add(make_encoder(config, BytesTokenizer(), learns=learns(config)).fingerprint)
  config.tokenizer.add_eos = False
  seen.add(make_encoder(config, BytesTokenizer(), learns=learns(config)).fingerprint)
  either = [EitherEncoder(TokenizedEncoder(BytesTokenizer(), f), TextEncoder(BytesTokenizer(), "text", (256,), True))
            for f in ({}, {"labels": "targets"})]
  assert len(seen | {e.fingerprint for e in either}) == 8
  same = [make_encoder(defaults(), BytesTokenizer(), learns="texts").fingerprint for _ in range(2)]
  assert same[0] == same[1]


class FakeChat:
  """Stands in for the encoder of conversations."""

  fingerprint = "fake"

  def __init__(self, config, tokenizer, trains_all=False):
    self.tokenizer = tokenizer

  def encode(self, records):
    return [Encoded(np.array([r.fields["n"]], np.int32)) for r in records]

  def texts(self, record):
    return [m["content"] for m in record.fields["messages"]]


def test_conversations_have_an_encoder_of_their_own(tmp_path, monkeypatch):
  monkeypatch.setattr(examples, "ChatEncoder", FakeChat)
  config = defaults()
  config.strategy = ConfigDict(dict(name="sft"))
  config.chat.fields = (("input_ids", "ids"),)
  assert not learns_texts(config, "conversations") and learns_texts(defaults(), "texts")
  (tmp_path / "x.jsonl").write_text('{"text": "", "n": 3, "messages": [{"content": "hi"}]}\n{"ids": [1, 2]}\n')
  mine, encoder = open_examples(config, BytesTokenizer(), source(type="jsonl", path=str(tmp_path)), "mine",
                                learns="conversations")
  rows = list(mine.records())
  assert [plain(e)[0] for e in encoder.encode(rows)] == [[3], [1, 2]]
  assert [list(encoder.texts(row)) for row in rows] == [["hi"], []]
  with pytest.raises(ConfigError, match=r'mine.text_key is .body., .* set chat.fields=\(\("text", "body"\),\)'):
    open_examples(config, None, source(type="jsonl", path=str(tmp_path), text_key="body"), "mine",
                  learns="conversations")
  config.chat.fields = ("ids",)
  with pytest.raises(ConfigError, match=re.escape("chat.fields has 'ids'; expected pairs of names")):
    make_encoder(config, None, learns="conversations")


def test_strategies_of_ones_own_learn_texts(monkeypatch):
  def mine(model, params, batch, rng, cfg): ...
  monkeypatch.setitem(sys.modules, "own_module", types.SimpleNamespace(mine=mine))
  config = defaults()
  config.strategy = ConfigDict(dict(name="own_module.mine"))
  assert learns_texts(config, learns(config))
  assert plain(encode(make_encoder(config, BytesTokenizer(), learns=learns(config)), text="a"))[0] == [256, 97, 257]


def test_the_column_that_is_read_is_told_whatever_it_is_called():
  for key in ("text", "content"):
    assert TextEncoder(BytesTokenizer(), key, (), True).columns(record(text="a", content="b")) == {key}


class Told:
  """An encoder that says by which of two it was asked."""

  def __init__(self, name):
    self.fingerprint, self.asked = name, []

  def encode(self, records):
    self.asked.append([record.fields["n"] for record in records])
    return [f"{self.fingerprint} {record.fields['n']}" for record in records]

  def _said(self, record):
    return f"{self.fingerprint} {record.fields['n']}"

  texts = describe = columns = _said

  def knows(self, record):
    return "ids" in record.fields


def test_rows_of_two_kinds_go_to_their_encoders_in_runs():
  ours, other = Told("ids"), Told("other")
  either = EitherEncoder(ours, other, "prefer")
  rows = [record(n=0), record(n=1, ids=1), record(n=2, ids=1), record(n=3, ids=1, prefer=0),
          record(n=4, ids=1, prefer=None), record(n=5)]
  expected = ["other 0", "ids 1", "ids 2", "other 3", "ids 4", "other 5"]
  assert either.encode(rows) == expected and ours.asked == [[1, 2], [4]] and other.asked == [[0], [3], [5]]
  for ask in (either.texts, either.describe, either.columns):
    assert [ask(row) for row in rows] == expected
  assert json.loads(either.fingerprint) == ["ids", "other", "prefer"] and either.sees_images is False
  other.sees_images = True
  assert either.sees_images is True and EitherEncoder(ours, other).encode(rows[3:4]) == ["ids 3"]


@pytest.mark.parametrize("mask, refused", [
    ([1, 1, 1], False), (None, False), ([1, 1, 0], True), ([1, 1], True), ([1, 1, 1, 1], True), ("111", True),
    ([], True), ([[1, 1, 1]], True)])
def test_a_padded_row_is_refused(mask, refused):
  encoder = make_encoder(defaults(), BytesTokenizer(), learns="conversations")
  if refused:
    fails("'attention_mask' is not 1 for each of the 3 tokens. Remove the padding from these rows", encoder,
          input_ids=[1, 2, 3], attention_mask=mask)
  else:
    assert plain(encode(encoder, input_ids=[1, 2, 3], attention_mask=mask))[0] == [1, 2, 3]


def test_each_kind_of_data_has_its_encoder(monkeypatch):
  made = []

  def of(name):
    return lambda *given, **named: made.append((name, given[1:], named)) or name

  for name in ("TokenizedEncoder", "ChatEncoder", "RoutedEncoder", "EitherEncoder"):
    monkeypatch.setattr(examples, name, of(name))
  config = defaults()
  config.strategy = ConfigDict(dict(name="distill", cached_top_k=3))
  config.chat.fields = (("input_ids", "ids"),)
  fields = {"input_ids": "ids"}
  assert examples.ENCODERS["taught"](config, "t") == "TokenizedEncoder"
  assert made.pop() == ("TokenizedEncoder", (fields,), dict(top_k=3))
  examples.ENCODERS["texts"](config, "t")
  assert made == [("TokenizedEncoder", (fields,), dict(images=False)), ("ChatEncoder", ("t", True), {}),
                  ("EitherEncoder", ("ChatEncoder",), {})]
  made.clear()
  assert examples.ENCODERS["routed"](config, "t") == "RoutedEncoder"
  assert made[1:] == [("ChatEncoder", ("t", False), {}), ("EitherEncoder", ("ChatEncoder",), {}),
                      ("RoutedEncoder", (config.strategy,), {})]
