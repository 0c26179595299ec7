"""Preferences and labelled answers in other programs' columns are the same as in Weft's."""

import math

import pytest

from input_pipeline.examples.schema_pairs import PairReader, common_prompt
from input_pipeline.sources.readers import Record
from trainer.errors import DataError

USER = {"role": "user", "content": "Add\n\n1, 2"}
YES, NO = {"role": "assistant", "content": "It is 3"}, {"role": "assistant", "content": "It is 4"}
PAST = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SYSTEM = {"role": "system", "content": "Be exact"}
ALPACA = {"instruction": "Add", "input": "1, 2"}
SHAREGPT = {"conversations": [{"from": "human", "value": USER["content"]}]}


def record(fields):
  return Record("a:1", "a:1", fields)


def pair(fields, mapped=None):
  return [(side.row.messages, side.row.prompt) for side in PairReader(mapped).pair(record(fields))]


@pytest.mark.parametrize("fields", [
    {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    # Strings that begin alike, of which "It is" would else have been the prompt, and the instruction lost.
    {**ALPACA, "chosen": "It is 3", "rejected": "It is 4"},
    {**ALPACA, "chosen": [YES], "rejected": [NO]},
    {**SHAREGPT, "chosen": {"from": "gpt", "value": "It is 3"}, "rejected": {"from": "gpt", "value": "It is 4"}},
    {"messages": [USER], "chosen": YES, "rejected": NO},
    {"messages": [USER], "chosen": "It is 3", "rejected": "It is 4"},
    # The whole conversation in both sides: what stands in another column is not the prompt.
    {"messages": [USER, YES], "chosen": [USER, YES], "rejected": [USER, NO]},
])
def test_preferences(fields):
  assert pair(fields) == [([USER, YES], 1), ([USER, NO], 1)]
  assert pair({**fields, "system": "Be exact"}) == [([SYSTEM, USER, YES], 2), ([SYSTEM, USER, NO], 2)]


@pytest.mark.parametrize("a, b, prompt", [
    ("H: Hi\n\nA: Yes", "H: Hi\n\nA: Yesterday", "H: Hi\n\nA:"),
    ("H: Hi\n\nA:  yes", "H: Hi\n\nA:  no", "H: Hi\n\nA:"),
    ("It is", "It is so", "It"),
    ("It is now", "It is\nnow", "It is"),
    ("It is  now", "It is \nnow", "It is"),
    ("yes", "no", ""),
    ("yes it is", "yesterday", ""),
])
def test_the_prompt_of_strings_ends_before_the_spaces_between_words(a, b, prompt):
  assert common_prompt(a, b) == common_prompt(b, a) == prompt


def test_history_and_other_names():
  fields = {**ALPACA, "history": [["Hi", "Hello"]], "chosen": "It is 3", "rejected": "It is 4"}
  assert pair(fields) == [([*PAST, USER, YES], 3), ([*PAST, USER, NO], 3)]
  said = {"messages": [{"who": "user", "said": "Add\n\n1, 2"}], "chosen": "It is 3", "rejected": "It is 4"}
  assert pair(said, {"role": "who", "content": "said"}) == [([USER, YES], 1), ([USER, NO], 1)]


@pytest.mark.parametrize("label", ["label", "kto_tag"])
@pytest.mark.parametrize("fields", [
    {"prompt": [USER], "completion": [YES]}, {**ALPACA, "output": "It is 3"}, {**ALPACA, "response": "It is 3"},
    {"messages": [USER, YES]}, {"conversations": [*SHAREGPT["conversations"], {"from": "gpt", "value": "It is 3"}]},
])
def test_labelled_answers(fields, label):
  for wanted in (True, False):
    side, found = PairReader().labelled(record({**fields, label: wanted}))
    assert (side.row.messages, side.row.prompt, found) == ([USER, YES], 1, wanted)


def test_what_is_wrong_is_said():
  for fields, said in (
      ({"messages": [USER, YES], "chosen": "a", "rejected": "b"}, "messages ends with what the assistant says"),
      ({**ALPACA, "chosen": "a"}, "no 'rejected' .or null."),
      ({**ALPACA, "chosen": "a", "rejected": "b", "history": ["x"]}, r"history\[0\] is 'x'")):
    with pytest.raises(DataError, match=said):
      pair(fields)
  for fields, said in (({"messages": [YES], "label": True}, "messages has no question before its answer"),
                       ({**ALPACA, "label": True}, "no 'completion'"),
                       ({**ALPACA, "output": "a", "label": 1}, r"label is 1 \(int\)")):
    with pytest.raises(DataError, match=said):
      PairReader().labelled(record(fields))


@pytest.mark.parametrize("value, found", [(2, 2.0), (None, 0.0), (0.5, 0.5), (True, "bool"), ("1", "str"),
                                          (math.nan, "float"), (math.inf, "float")])
def test_margins_are_finite_numbers(value, found):
  fields = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": value}
  if isinstance(found, float):
    assert PairReader().margin(record(fields)) == found
    return
  with pytest.raises(DataError, match=rf"margin is .* \({found}\); expected a finite number"):
    PairReader().margin(record(fields))


def test_columns_are_those_that_are_read():
  more = {"system": "s", "score": 1}
  for fields, answers, wanted in (
      ({"prompt": "q", "chosen": "a", "rejected": "b", "messages": [USER, YES]}, True,
       {"prompt", "chosen", "rejected"}),
      ({**ALPACA, "chosen": "a", "rejected": "b"}, True, {"instruction", "input", "chosen", "rejected", "system"}),
      ({"messages": [USER], "chosen": YES, "rejected": NO}, True, {"messages", "chosen", "rejected", "system"}),
      ({"messages": [USER, YES], "chosen": [USER, YES], "rejected": [USER, NO]}, True,
       {"chosen", "rejected", "system"}),
      ({"messages": [USER, YES], "kto_tag": True}, False, {"messages", "kto_tag", "system"}),
      ({"prompt": "q", "completion": "a", "label": True}, False, {"prompt", "completion", "label"})):
    found = PairReader().side_columns(record(fields | more), ("chosen", "rejected") if answers else ())
    assert found & set(fields | more) == wanted, fields


def test_of_several_answers_the_first_of_their_usual_names_counts():
  wrong = dict(label=True, completion="It is 4")
  for key in ("output", "response"):
    side, _ = PairReader().labelled(record({**ALPACA, key: "It is 3", **wrong}))
    assert side.row.messages == [USER, YES]
  side, _ = PairReader().labelled(record({**ALPACA, "response": "It is 4", "output": "It is 3", "label": True}))
  assert side.row.messages == [USER, YES]
