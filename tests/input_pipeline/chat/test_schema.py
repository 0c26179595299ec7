"""Rows are recognised by their columns, and malformed ones are named with file, line and key."""

import copy
import re
import types

import pytest

from input_pipeline.chat.schema import Conversation, Plain, ShapeReader
from input_pipeline.sources.readers import Record
from trainer.errors import DataError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def read(fields, mapped=None, roles=()):
  record = Record("a.jsonl:7", "data/a.jsonl:7", fields)
  before = copy.deepcopy(fields)
  try:
    return ShapeReader(mapped, roles).read(record)
  finally:
    assert fields == before


def test_messages():
  row = read({"id": 5, "messages": [USER, {**ANSWER, "weight": 0.5, "name": "bot", "tool_calls": None}],
              "chat_template_kwargs": {"enable_thinking": False, "x": None}, "tools": '[{"name": "f"}]'})
  assert row == Conversation("messages", [USER, {**ANSWER, "name": "bot"}], [1.0, 0.5], 1, [{"name": "f"}],
                             {"enable_thinking": False})


def test_prompt_and_completion_as_strings_and_as_messages():
  assert read({"prompt": "", "completion": " b"}) == Plain("prompt/completion", "", " b")
  row = read({"prompt": [USER], "completion": [ANSWER]})
  assert row == Conversation("prompt/completion", [USER, ANSWER], [1.0, 1.0], 1)


@pytest.mark.parametrize("answer", ["output", "response"])
def test_instruction(answer):
  fields = {"instruction": "Add", "input": "1, 2", answer: "3", "system": "Be exact"}
  row = read(fields)
  assert row.messages == [{"role": "system", "content": "Be exact"}, {"role": "user", "content": "Add\n\n1, 2"},
                          {"role": "assistant", "content": "3"}]
  assert row.prompt == 2
  for nothing in ("", None):
    assert read({**fields, "input": nothing, "system": nothing}).messages[0]["content"] == "Add"


def test_sharegpt():
  row = read({"conversations": [
      {"from": "system", "value": "s"}, {"from": "human", "value": "Hi"},
      {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
      {"from": "observation", "value": "2"}, {"from": "gpt", "value": "Two"}]})
  assert [m["role"] for m in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
  assert row.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
  assert row.messages[4] == {"role": "assistant", "content": "Two"}
  assert row.prompt == 2  # what follows the last question
  assert read({"conversations": [USER, ANSWER]}).messages == [USER, ANSWER]


def test_text():
  assert read({"text": "abc", "url": "x"}) == Plain("text", None, "abc")


def test_fields_map_columns_and_keys_of_messages():
  row = read({"dialogue": [{"speaker": "user", "says": "Hi"}, {"speaker": "assistant", "says": "Hello"}]},
             {"messages": "dialogue", "role": "speaker", "content": "says"})
  assert row.messages == [USER, ANSWER]
  assert read({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}).completion == "b"
  with pytest.raises(DataError, match=r"a\.jsonl:7: dialogue\[0\] has no 'speaker', only 'role', 'content'"):
    read({"dialogue": [USER]}, {"messages": "dialogue", "role": "speaker"})


def test_of_several_shapes_the_mapped_one_is_meant():
  fields = {"text": "Hi Hello", "messages": [USER, ANSWER]}
  with pytest.raises(DataError, match=r"fit several shapes: messages; text.*chat.fields"):
    read(fields)
  assert read(fields, {"text": "text"}).completion == "Hi Hello"
  assert read(fields, {"messages": "messages"}).messages == [USER, ANSWER]
  assert read({**fields, "text": None}).messages == [USER, ANSWER]  # null: not there


def test_content_in_parts_is_joined():
  parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "index": None}]
  assert read({"messages": [{"role": "user", "content": parts}, ANSWER]}).messages[0]["content"] == "ab"


def test_arguments_of_calls_become_objects():
  """Data have them as strings of JSON, templates want objects."""
  call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
  expected = [{**call, "function": {"name": "f", "arguments": {"x": [1]}}}]
  for given in ([call], [{"id": "c", "name": "f", "arguments": {"x": [1]}}]):
    message = read({"messages": [USER, {"role": "assistant", "tool_calls": given}]}).messages[1]
    assert message == {"role": "assistant", "tool_calls": expected}


def test_other_roles_by_name():
  critic = {"role": "critic", "content": "x"}
  assert read({"messages": [critic, USER]}, roles=("critic",)).messages == [critic, USER]


def test_two_users_in_a_row_are_left_to_the_template():
  assert len(read({"messages": [USER, USER, ANSWER]}).messages) == 3


def messages(*changed, **columns):
  return {"messages": list(changed), **columns}


MALFORMED = {
    "unknown columns": ({"question": "a", "answer": "b"},
                        r"its columns \('question', 'answer'\) are none that are known\. Known are: messages; prompt "
                        r"and completion; .*chat\.fields.*\(\"prompt\", \"question\"\)"),
    "no columns": ({}, r"its columns \(none\)"),
    "not a list": ({"messages": "Hi"}, r"messages is 'Hi' \(str\); expected a list"),
    "empty list": ({"messages": []}, r"messages is an empty list"),
    "not an object": (messages(USER, "Hello"), r"messages\[1\] is 'Hello' \(str\); expected an object"),
    "missing role": (messages({"content": "Hi"}), r"messages\[0\] has no 'role', only 'content'"),
    "missing content": (messages(USER, {"role": "assistant"}), r"messages\[1\] has no 'content' \(or null\)"),
    "null content": (messages({"role": "user", "content": None}), r"messages\[0\] has no 'content' \(or null\)"),
    "unknown role": (messages(USER, {"role": "bot", "content": "x"}),
                     r"messages\[1\]\.role is 'bot' \(str\); allowed: system, .*, tool.*chat\.roles"),
    "role that is no string": (messages({"role": 3, "content": "x"}), r"messages\[0\]\.role is 3 \(int\)"),
    "number as content": (messages(USER, {"role": "assistant", "content": 5}),
                          r"messages\[1\]\.content is 5 \(int\); expected a string"),
    "object as content": (messages({"role": "user", "content": {"a": 1}}),
                          r"messages\[0\]\.content is \{'a': 1\} \(dict\)"),
    "image": (messages({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}),
              r"messages\[0\]\.content\[1\] is \{'type': 'image'\}.*Images"),
    "images beside": (messages(USER, ANSWER, images=["x.png"]), r"has images"),
    "two assistants": (messages(USER, ANSWER, ANSWER), r"messages\[1\] and messages\[2\] are both the assistant's"),
    "no user": (messages({"role": "system", "content": "x"}, ANSWER), r"no message of the user, only system"),
    "negative weight": (messages(USER, {**ANSWER, "weight": -1}), r"messages\[1\]\.weight is -1 \(int\)"),
    "NaN weight": (messages(USER, {**ANSWER, "weight": float("nan")}), r"messages\[1\]\.weight is nan \(float\)"),
    "infinite weight": (messages(USER, {**ANSWER, "weight": float("inf")}), r"messages\[1\]\.weight is inf"),
    "boolean weight": (messages(USER, {**ANSWER, "weight": True}), r"messages\[1\]\.weight is True \(bool\)"),
    "huge weight": (messages(USER, {**ANSWER, "weight": 10 ** 400}), r"messages\[1\]\.weight is 1000"),
    "reasoning": (messages(USER, {**ANSWER, "reasoning": ["x"]}), r"messages\[1\]\.reasoning is \['x'\] \(list\)"),
    "tools": (messages(USER, ANSWER, tools={"a": 1}), r"tools is \{'a': 1\} \(dict\); expected a list"),
    "tools not JSON": (messages(USER, ANSWER, tools="[{"), r"tools is '\[\{' \(str\), which is not valid JSON"),
    "tools of strings": (messages(USER, ANSWER, tools=["f"]), r"tools is \['f'\] \(list\)"),
    "variables": (messages(USER, ANSWER, chat_template_kwargs=[1]), r"chat_template_kwargs is \[1\] \(list\)"),
    "reserved variable": (messages(USER, ANSWER, chat_template_kwargs={"tools": []}),
                          r"chat_template_kwargs\.tools cannot"),
    "calls": (messages(USER, {"role": "assistant", "tool_calls": [{"function": "f"}]}),
              r"messages\[1\]\.tool_calls\[0\] is \{'function': 'f'\}"),
    "call's arguments": (messages(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x"}]}),
                         r"messages\[1\]\.tool_calls\[0\]\.arguments is '\{x' \(str\), which is not valid JSON"),
    "string and messages": ({"prompt": "a", "completion": [ANSWER]}, r"prompt is 'a' \(str\).*two strings or"),
    "prompt as number": ({"prompt": 1, "completion": 2}, r"prompt is 1 \(int\)"),
    "completion by the user": ({"prompt": [USER], "completion": [USER]}, r"completion\[0\]\.role is 'user'"),
    "instruction": ({"instruction": ["a"], "output": "b"}, r"instruction is \['a'\] \(list\)"),
    "output": ({"instruction": "a", "output": 4}, r"output is 4 \(int\); expected a string"),
    "two systems": (messages({"role": "system", "content": "a"}, USER, system="b"), r"column 'system' and begins"),
    "text": ({"text": 3.5}, r"text is 3\.5 \(float\)"),
    "sharegpt role": ({"conversations": [{"from": "alien", "value": "x"}]},
                      r"conversations\[0\]\.from is 'alien' \(str\); allowed: .*user, .*human, gpt"),
    "sharegpt value": ({"conversations": [{"from": "human", "text": "x"}]}, r"conversations\[0\] has no 'value'"),
    "sharegpt call without a value": ({"conversations": [{"from": "function_call", "text": "x"}]},
                                      r"conversations\[0\] has no 'value', only 'from', 'text'"),
    "sharegpt call": ({"conversations": [{"from": "function_call", "value": "f(1)"}]},
                      r"conversations\[0\]\.value is 'f\(1\)' \(str\), which is not valid JSON"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rows_are_named_with_file_line_and_key(name):
  fields, message = MALFORMED[name]
  with pytest.raises(DataError) as error:
    read(fields)
  assert re.match(rf"data/a\.jsonl:7: .*{message}", str(error.value), re.DOTALL), str(error.value)


def test_a_history_is_what_was_said_before_the_instruction():
  """As LLaMA-Factory's converter of Alpaca rows has it; the system prompt stands before all."""
  fields = {"instruction": "And 2?", "input": "now", "output": "4", "history": [["1?", "2"], ["Sure?", "Yes"]],
            "system": "Double."}
  row = read(fields)
  said = [("system", "Double."), ("user", "1?"), ("assistant", "2"), ("user", "Sure?"), ("assistant", "Yes"),
          ("user", "And 2?\n\nnow"), ("assistant", "4")]
  assert [(m["role"], m["content"]) for m in row.messages] == said
  assert (row.shape, row.prompt, row.weights) == ("instruction/output with history", 6, [1.0] * 7)
  renamed = {**fields, "past": fields["history"], "history": None}
  assert read(renamed, {"history": "past"}).messages == row.messages
  for nothing in ([], None):
    assert read({**fields, "history": nothing}).shape == "instruction/output"
  for bad in ([["a"]], [["a", "b"], ["a", None]], [{"role": "user"}], "a", ["ab"]):
    with pytest.raises(DataError, match=r"history\[\d\] is .*; expected a list of pairs"):
      read({**fields, "history": bad})


CALL = ['{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": "{\\"y\\": 2}"}']
CALLED = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
          {"type": "function", "function": {"name": "g", "arguments": {"y": 2}}}]


@pytest.mark.parametrize("by, of, calling, told", [("from", "value", "function_call", "observation"),
                                                   ("role", "content", "tool_call", "tool_response")])
def test_several_calls_in_a_row_are_one_turn(by, of, calling, told):
  def rows(*said):
    return read({"conversations": [{by: who, of: what} for who, what in said]}).messages

  user, tool = ("human", "Do it."), [(told, "1"), (told, "2")]
  wanted = [{"role": "user", "content": "Do it."}, {"role": "assistant", "tool_calls": CALLED},
            {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "Ok"}]
  assert rows(user, (calling, CALL[0]), (calling, CALL[1]), *tool, ("gpt", "Ok")) == wanted
  # A list in one message is the same, which is how LLaMA-Factory itself writes them.
  assert rows(user, (calling, f"[{', '.join(CALL)}]"), *tool, ("gpt", "Ok")) == wanted
  spoken = rows(user, ("gpt", "Let me see."), (calling, CALL[0]), (calling, CALL[1]), *tool, ("gpt", "Ok"))
  assert spoken == [wanted[0], {"role": "assistant", "content": "Let me see.", "tool_calls": CALLED}, *wanted[2:]]
  # Calls that follow what a tool said are another turn.
  apart = rows(user, (calling, CALL[0]), tool[0], (calling, CALL[1]), tool[1], ("gpt", "Ok"))
  assert [m["role"] for m in apart] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
  assert [m.get("tool_calls") for m in apart] == [None, CALLED[:1], None, CALLED[1:], None, None]
  thought = rows(user, (calling, "<think>Hm.</think>\n" + CALL[0]), tool[0], ("gpt", "Ok"))
  assert thought[1] == {"role": "assistant", "content": "<think>Hm.</think>", "tool_calls": CALLED[:1]}
  with pytest.raises(DataError, match="are both the assistant's"):
    rows(user, (calling, CALL[0]), ("gpt", "Ok"))
  with pytest.raises(DataError, match=r"conversations\[2\].weight is 0, but 1 before it in the same turn"):
    read({"conversations": [{by: "human", of: "a"}, {by: calling, of: CALL[0]}, {by: calling, of: CALL[1], "weight": 0},
                            {by: told, of: "x"}, {by: "gpt", of: "b"}]})
  with pytest.raises(DataError, match=rf"conversations\[1\].{of} is .*not valid JSON"):
    rows(user, (calling, "f(1)"), tool[0], ("gpt", "Ok"))


def test_roles_that_a_template_knows_stay_as_they_are():
  messages = [USER, {"role": "tool_call", "content": "f"}, {"role": "observation", "content": "1"}, ANSWER]
  assert read({"messages": messages}, roles=("tool_call", "observation")).messages == messages


def test_the_older_names_of_openai():
  row = read({"messages": [USER, {"role": "assistant", "content": None, "function_call": {
      "name": "f", "arguments": '{"x": 1}'}}, {"role": "function", "name": "f", "content": "2"}, ANSWER],
      "functions": [{"name": "f", "parameters": {}}]})
  assert row.messages[1:3] == [{"role": "assistant", "tool_calls": CALLED[:1]},
                               {"role": "tool", "content": "2", "name": "f"}]
  assert row.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_columns_are_those_that_are_read():
  beside = {"system": "s", "tools": [], "id": 1}
  for fields, mapped, wanted in (
      ({"messages": [USER, ANSWER], **beside}, {}, {"messages", "system", "tools"}),
      ({"dialogue": [USER, ANSWER], **beside}, {"messages": "dialogue"}, {"dialogue", "system", "tools"}),
      ({"prompt": "a", "completion": "b", **beside}, {}, {"prompt", "completion"}),
      ({"prompt": [USER], "completion": [ANSWER], **beside}, {}, {"prompt", "completion", "system", "tools"}),
      ({"instruction": "a", "input": "b", "output": "c", "response": "d", "history": [], **beside}, {},
       {"instruction", "input", "output", "history", "system", "tools"}),
      ({"text": "a", **beside}, {}, {"text"})):
    found = ShapeReader(mapped).columns(Record("a:1", "a:1", fields))
    assert found & set(fields) == wanted, fields


def test_images_stay_with_two_strings():
  """As with a text, or messages."""
  images = types.SimpleNamespace(markers=("<image>", "<video>"))
  reader = ShapeReader(images=images)
  reader.images_of = lambda record: ("a picture",)
  read = reader.read(Record("a.jsonl:7", "data/a.jsonl:7", {"prompt": "Hi", "completion": "Hello"}))
  assert isinstance(read, Plain) and read.images == ("a picture",)
