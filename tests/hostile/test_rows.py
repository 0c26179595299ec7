"""Rows that are not what they should be: JSON of all kinds, tokens, conversations, preferences, answers with labels,
prompts and responses."""

import pytest

from tests.hostile.common import config_of, named, prepare, refused, write

DEEP = 100_000
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
FINE = {"messages": [USER, ANSWER]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
JUDGED = {"prompt": "a", "responses": ["b", "c"], "rewards": [1, 0]}
CALL = {"function": {"name": "f", "arguments": {}}}


def said(*messages, **columns):
  return {"messages": list(messages), **columns}


def calls(value):
  return said(USER, {"role": "assistant", "tool_calls": value})


JSON = [
    ("not json", '{"text": oops}', "a.jsonl:2", "not valid JSON", "column 10"),
    ("cut in the middle", '{"text": "fi', "a.jsonl:2", "not valid JSON"),
    ("two objects in a line", '{"text": "a"}{"text": "b"}', "a.jsonl:2", "Extra data"),
    ("an array", "[1, 2]", "a.jsonl:2", "expected a JSON object, found list"),
    ("a number", "7", "a.jsonl:2", "expected a JSON object, found int"),
    ("null", "null", "a.jsonl:2", "found null"),
    ("deep arrays", "[" * DEEP + "]" * DEEP, "a.jsonl:2", "nested too deeply"),
    ("deep objects", '{"text":' * DEEP + "1" + "}" * DEEP, "a.jsonl:2", "nested too deeply"),
    ("brackets never closed", "[" * DEEP, "a.jsonl:2", "nested too deeply"),
    ("nul bytes", b"\0\0\0\0\n", "a.jsonl:2", "not valid JSON"),
    ("not utf-8", b'{"text": "\xff"}\n', "a.jsonl:2", "not valid UTF-8"),
    ("bom in the middle", b'\xef\xbb\xbf{"text": "a"}\n', "a.jsonl:2", "not valid JSON"),
    ("half a surrogate", r'{"text": "a\ud800b"}', "a.jsonl:2", "lone surrogate U+D800"),
    ("a control character raw", b'{"text": "a\x1b[2Jb"}\n', "a.jsonl:2", "not valid JSON"),
    ("the same key twice", '{"text": "a", "text": "b"}', "a.jsonl:2", "'text' twice"),
    ("a number of a million digits", '{"text": ' + "9" * 1_000_000 + "}", "a.jsonl:2"),
    ("a float of a million digits", '{"text": 0.' + "9" * 1_000_000 + "}", "a.jsonl:2", "must be a string"),
    ("ten megabytes of nothing", '{"text": ' + "x" * 10_000_000, "a.jsonl:2", "not valid JSON"),
    ("text is nan", '{"text": NaN}', "a.jsonl:2", "'text' must be a string, found float"),
    ("text is infinity", '{"text": -Infinity}', "a.jsonl:2", "'text' must be a string, found float"),
    ("text is a list", {"text": ["a"]}, "a.jsonl:2", "'text' must be a string, found a list"),
    ("text is an object", {"text": {"a": "b"}}, "a.jsonl:2", "'text' must be a string, found dict"),
    ("no such column", {"body": "a"}, "a.jsonl:2", "no key 'text'; found 'body'"),
    ("a thousand columns", {f"column {i}": i for i in range(10_000)}, "a.jsonl:2", "no key 'text'"),
    ("a column with a long name", {"x" * 1_000_000: 1}, "a.jsonl:2", "no key 'text'"),
    ("a column named by an escape", {"\x1b[2J": 1}, "a.jsonl:2", "no key 'text'"),
]
TOKENS = [
    ("ids are a string", {"input_ids": "1 2"}, "'input_ids' must be a list of whole numbers, found str"),
    ("ids are floats", {"input_ids": [1.5, 2]}, "'input_ids' must be a list of whole numbers"),
    ("ids are strings", {"input_ids": ["1"]}, "must be a list of whole numbers"),
    ("ids are true", {"input_ids": [True, False]}, "must be a list of whole numbers"),
    ("ids are nested", {"input_ids": [[1], [2, 3]]}, "must be a list of whole numbers"),
    ("ids are null", {"input_ids": [1, None]}, "must be a list of whole numbers"),
    ("ids beyond the vocabulary", {"input_ids": [1, 258]}, "input_ids[1] is 258", "vocabulary of 258"),
    ("ids negative", {"input_ids": [1, -1]}, "input_ids[1] is -1"),
    ("ids beyond 64 bits", {"input_ids": [1, 2**70]}, "whole numbers"),
    ("labels too short", {"input_ids": [1, 2], "labels": [1]}, "'labels' has 1 entries"),
    ("labels shifted", {"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels[0] is 2, but input_ids[0] is 1"),
    ("labels and weights", {"input_ids": [1, 2], "labels": [1, 2], "weights": [1, 1]}, "has both"),
    ("weights nan", '{"input_ids": [1, 2], "weights": [1, NaN]}', "weights[1] is nan"),
    ("weights infinite", '{"input_ids": [1, 2], "weights": [1, Infinity]}', "weights[1] is inf"),
    ("weights overflow", '{"input_ids": [1, 2], "weights": [1, 1e39]}', "weights[1] is 1e+39"),
    ("weights negative", {"input_ids": [1, 2], "weights": [1, -1]}, "weights[1] is -1"),
    ("weights are strings", {"input_ids": [1, 2], "weights": ["1", "1"]}, "'weights' must be a list of numbers"),
    ("padding", {"input_ids": [1, 2], "attention_mask": [1, 0]}, "'attention_mask' is not 1"),
    ("mask is a string", {"input_ids": [1, 2], "attention_mask": "11"}, "'attention_mask' is not 1"),
]
CHAT = [
    ("messages are a string", {"messages": "hello"}, "messages is 'hello' (str)"),
    ("messages are an object", {"messages": {"role": "user"}}, "expected a list of messages"),
    ("messages are empty", {"messages": []}, "messages is an empty list"),
    ("a message is a string", said("hi"), "messages[0] is 'hi' (str)"),
    ("a message is null", said(None), "messages[0] is null"),
    ("a message without a role", said({"content": "a"}), "messages[0] has no 'role'"),
    ("an unknown role", said({"role": "god", "content": "a"}), "messages[0].role is 'god'"),
    ("a role that is a list", said({"role": ["user"], "content": "a"}), "messages[0].role is ['user'] (list)"),
    ("a role of a megabyte", said({"role": "u" * 1_000_000, "content": "a"}), "messages[0].role is 'uuu"),
    ("no content", said(USER, {"role": "assistant"}), "messages[1] has no 'content'"),
    ("content is a number", said(USER, {"role": "assistant", "content": 7}), "messages[1].content is 7 (int)"),
    ("content is nan", '{"messages": [{"role": "user", "content": NaN}]}', "messages[0].content is nan"),
    ("content is empty and trained", said(USER, {"role": "assistant", "content": " "}), "messages[1].content is empty"),
    ("a part that is no text", said({"role": "user", "content": [{"type": "audio"}]}), "messages[0].content[0]"),
    ("a part whose text is a number", said({"role": "user", "content": [{"type": "text", "text": 1}]}),
     "messages[0].content[0]"),
    ("no user", said(ANSWER), "no message of the user"),
    ("two answers in a row", said(USER, ANSWER, ANSWER), "messages[1] and messages[2] are both the assistant's"),
    ("a weight that is a string", said(USER, {**ANSWER, "weight": "1"}), "messages[1].weight is '1'"),
    ("a weight below 0", said(USER, {**ANSWER, "weight": -1}), "messages[1].weight is -1"),
    ("a weight of nan", '{"messages": [{"role": "user", "content": "a", "weight": NaN}]}', "messages[0].weight is nan"),
    ("a weight far too large", said(USER, {**ANSWER, "weight": 1e300}), "messages[1].weight is 1e+300"),
    ("reasoning that is a list", said(USER, {**ANSWER, "reasoning": ["a"]}), "messages[1].reasoning"),
    ("tool calls that are a number", calls(7), "messages[1].tool_calls is 7 (int)"),
    ("tool calls that are an object", calls({"function": {"name": "f"}}), "expected a list of calls"),
    ("tool calls not json", calls("[{"), "messages[1].tool_calls", "not valid JSON"),
    ("tool calls nested deep", calls("[" * DEEP), "messages[1].tool_calls", "not valid JSON"),
    ("a call without a name", calls([{"function": {"arguments": {}}}]), "messages[1].tool_calls[0]"),
    ("a call that is a string", calls(["f()"]), "messages[1].tool_calls[0] is 'f()'"),
    ("arguments not json", calls([{"function": {"name": "f", "arguments": "{x}"}}]), "tool_calls[0].arguments"),
    ("arguments a list", calls([{"function": {"name": "f", "arguments": [1]}}]), "tool_calls[0].arguments"),
    ("arguments of many digits", calls([{"function": {"name": "f", "arguments": '{"a": ' + "9" * 9999 + "}"}}]),
     "tool_calls[0].arguments"),
    ("tools that are a string", said(USER, ANSWER, tools="f"), "tools is 'f' (str), which is not valid JSON"),
    ("tools that are numbers", said(USER, ANSWER, tools=[1]), "tools is [1] (list)"),
    ("variables that are a list", said(USER, ANSWER, chat_template_kwargs=[1]), "chat_template_kwargs is [1]"),
    ("variables of the program", said(USER, ANSWER, chat_template_kwargs={"messages": []}),
     "chat_template_kwargs.messages cannot be set"),
    ("two system messages", said({"role": "system", "content": "a"}, USER, ANSWER, system="b"), "column 'system'"),
    ("several shapes", {**FINE, "text": "a"}, "fit several shapes: messages; text"),
    ("no shape", {"question": "a"}, "its columns ('question') are none that are known"),
    ("a prompt without a completion", {"prompt": "a", "completion": None}, "none that are known"),
    ("a prompt that is a number", {"prompt": 1, "completion": "b"}, "prompt is 1 (int)"),
    ("a completion that is nothing", {"prompt": "a", "completion": " \n"}, "completion is empty"),
    ("a completion of the user", {"prompt": [USER], "completion": [USER]}, "completion[0].role is 'user'"),
    ("an output that is a number", {"instruction": "a", "output": 1}, "output is 1 (int)"),
    ("an unknown speaker", {"conversations": [{"from": "alien", "value": "a"}]}, "conversations[0].from is 'alien'"),
    ("a speaker without a value", {"conversations": [{"from": "human"}]}, "conversations[0] has no 'value'"),
    ("images for a model of text", {**FINE, "image": "a.png"}, "has images, which the model does not see"),
    ("half a surrogate",
     r'{"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}]}',
     "lone surrogate U+D800"),
    ("half a surrogate in a call",
     r'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": '
     r'[{"function": {"name": "f", "arguments": {"\udfff": 1}}}]}]}', "lone surrogate U+DFFF"),
    ("a noncharacter", said({"role": "user", "content": "a\ufdd0"}, ANSWER), "U+FDD0"),
    ("variables of functions", said(USER, ANSWER, chat_template_kwargs={"inert_tokens": []}),
     "chat_template_kwargs.inert_tokens cannot be set"),
    ("columns nested deep", '{"messages": ' + "[" * 5000 + "]" * 5000 + "}", "a.jsonl:2"),
    ("variables nested deep", said(USER, ANSWER, chat_template_kwargs={"a": eval("[" * 150 + "]" * 150)}),
     "nested too deeply: more than 100 levels"),
]
PAIRS = [
    ("half a surrogate", r'{"prompt": "a", "chosen": "\ud800", "rejected": "b"}', "lone surrogate U+D800"),
    ("no rejected side", {"prompt": "a", "chosen": "b"}, "no 'rejected' (or null)"),
    ("chosen is null", {**PAIR, "chosen": None}, "no 'chosen' (or null)"),
    ("sides of two kinds", {**PAIR, "rejected": [ANSWER]}, "chosen is a str and rejected a list"),
    ("sides that are numbers", {**PAIR, "chosen": 1, "rejected": 2}, "chosen is a int and rejected a int"),
    ("equal sides", {**PAIR, "rejected": "b"}, "chosen equals rejected"),
    ("an empty side", {**PAIR, "rejected": " "}, "rejected is empty"),
    ("sides that begin differently", {"chosen": "one", "rejected": "two"}, "begin differently"),
    ("a prompt that is a number", {**PAIR, "prompt": 3}, "prompt is 3 (int)"),
    ("a prompt that is a list", {**PAIR, "prompt": [USER]}, "prompt is [{'role': 'user'"),
    ("a side of the user", {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**USER, "content": "c"}]},
     "the prompts differ"),
    ("a side that says nothing", {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER]},
     "rejected says nothi"),
    ("half a weight", {"prompt": [USER], "chosen": [{**ANSWER, "weight": 0.5}], "rejected": [{**ANSWER,
     "content": "c"}]},
     "has the weight 0.5"),
]
LABELS = [
    ("half a surrogate", r'{"prompt": "\ud800", "completion": "b", "label": true}', "lone surrogate U+D800"),
    ("no label", {"prompt": "a", "completion": "b"}, "no 'label' (or null)"),
    ("a label that is a word", {"prompt": "a", "completion": "b", "label": "good"}, "label is 'good' (str)"),
    ("a label that is a number", {"prompt": "a", "completion": "b", "label": 1}, "label is 1 (int)"),
    ("a label of a megabyte", {"prompt": "a", "completion": "b", "label": "x" * 1_000_000}, "label is 'xxx"),
    ("an empty completion", {"prompt": "a", "completion": "", "label": True}, "completion is empty"),
]
RESPONSES = [
    ("half a surrogate", r'{"prompt": "a", "responses": ["\ud800"], "rewards": [1]}', "lone surrogate U+D800"),
    ("no responses", {"prompt": "a", "rewards": [1]}, "no 'responses' (or null)"),
    ("responses that are a string", {**JUDGED, "responses": "b"}, "responses is 'b' (str)"),
    ("no rewards", {**JUDGED, "rewards": None}, "no 'rewards' (or null)"),
    ("a reward too few", {**JUDGED, "rewards": [1]}, "rewards has 1 entries for 2 responses"),
    ("a reward of nan", '{"prompt": "a", "responses": ["b"], "rewards": [NaN]}', "rewards[0] is nan"),
    ("a reward beyond floats", '{"prompt": "a", "responses": ["b"], "rewards": [1' + "0" * 400 + "]}",
     "rewards[0] is 10"),
    ("a reward that is a string", {**JUDGED, "rewards": ["1", "0"]}, "rewards[0] is '1' (str)"),
    ("a response that is a number", {**JUDGED, "responses": [1, 2]}, "responses[0] is a int"),
    ("a response that is null", {**JUDGED, "responses": ["b", None]}, "responses[1] is null"),
    ("masks that are strings", {**JUDGED, "masks": ["yes", "no"]}, "masks[0] is 'yes'"),
    ("masks of tokens for strings", {**JUDGED, "masks": [[1], [0]]}, "masks[0] is [1]"),
    ("a mask that is an object", {**JUDGED, "masks": [{}, {}]}, "masks[0] is {}"),
    ("ids beyond the vocabulary", {"prompt": [1], "responses": [[2], [999]], "rewards": [1, 0]}, "the id 999"),
    ("ids beyond 64 bits", {"prompt": [1], "responses": [[2], [2**70]], "rewards": [1, 0]}, "1180591620717411303424"),
    ("a prompt beyond 64 bits", {"prompt": [2**70], "responses": [[2]], "rewards": [1]}, "1180591620717411303424"),
    ("a token mask too short", {"prompt": [1], "responses": [[2, 3]], "rewards": [1], "masks": [[1]]},
     "masks[0] has 1"),
    ("a token mask of strings", {"prompt": [1], "responses": [[2]], "rewards": [1], "masks": [["1"]]}, "masks[0]"),
    ("log-probs of one response", {**JUDGED, "logprobs": [[0.0]]}, "logprobs has 1 entries for 2 responses"),
    ("log-probs of texts", {**JUDGED, "logprobs": [[0.0], [0.0]]}, "logprobs[0] goes with responses of token ids"),
    ("probabilities", {"prompt": [1], "responses": [[2]], "rewards": [1], "logprobs": [[0.5]]},
     "logprobs[0] has 0.5 for token 0"),
    ("log-probs that are no numbers", {"prompt": [1], "responses": [[2]], "rewards": [1], "logprobs": [[None]]},
     "logprobs[0] has None for token 0"),
    ("two prompts", {**JUDGED, "messages": [USER]}, "may each be the prompt"),
    ("no prompt", {"responses": ["b"], "rewards": [1]}, "no prompt"),
    ("a prompt that is a number", {**JUDGED, "prompt": 3}, "'prompt' is int"),
]
PROMPTS = [
    ("no prompt", {"question": "a"}, "no prompt; its columns are 'question'"),
    ("a prompt that is null", {"prompt": None, "x": 1}, "no prompt"),
    ("a prompt that is a number", {"prompt": 1.5}, "'prompt' is float"),
    ("a prompt that is an object", {"prompt": {"a": 1}}, "'prompt' is dict"),
    ("a prompt of nobody", {"prompt": [{"content": "a"}]}, "prompt[0] has no 'role'"),
    ("a prompt that is answered", {"prompt": [USER, ANSWER]}, "ends with what the assistant says"),
    ("messages that are a string", {"messages": "a"}, "'messages' is str"),
    ("variables that name files", {"prompt": [USER], "chat_template_kwargs": {"images": ["/etc/passwd"]}},
     "chat_template_kwargs.images cannot be set"),
    ("variables that name the object", {"prompt": [USER], "chat_template_kwargs": {"self": 1}},
     "chat_template_kwargs.self cannot be set"),
    ("half a surrogate", r'{"prompt": "a\ud800"}', "lone surrogate U+D800"),
    ("a prompt too long", {"prompt": "a" * 10_000}, "prompts (50.0%; the longest: 10,001 tokens)"),
    ("a conversation too deep", {"prompt": [USER],
     "chat_template_kwargs": {"a": eval("[" * 150 + "]" * 150)}},
     "nested too deeply: more than 100 levels"),
]
TABLE = [
    *((f"json {n}", "seq", {"text": "fine"}, row, expected) for n, row, *expected in JSON),
    *((f"tokens {n}", "sft", FINE, row, expected) for n, row, *expected in TOKENS),
    *((f"chat {n}", "sft", FINE, row, expected) for n, row, *expected in CHAT),
    *((f"pairs {n}", "dpo", PAIR, row, expected) for n, row, *expected in PAIRS),
    *((f"labels {n}", "kto", {"prompt": "a", "completion": "b", "label": False}, row, expected)
      for n, row, *expected in LABELS),
    *((f"responses {n}", "grpo", JUDGED, row, expected) for n, row, *expected in RESPONSES),
    *((f"prompts {n}", "prompts", {"prompt": "a"}, row, expected) for n, row, *expected in PROMPTS),
]


@pytest.mark.parametrize("strategy, fine, row, expected", named(TABLE))
def test_a_bad_row_is_one_message_with_its_line(strategy, fine, row, expected, tmp_path, guard):
  file = write(tmp_path / "data" / "a.jsonl", fine, row)
  config = config_of(file, strategy="grpo" if strategy == "prompts" else strategy, split="all")
  config.chat.template = None if strategy == "seq" else "plain"
  if strategy == "prompts":
    config.rollout.update(num_prompts=1, max_new_tokens=8)
    config.rollout.rewards.right = {"type": "length", "max_length": 8}
  with guard.only(tmp_path / "work"):
    message = refused(lambda: prepare(config, tmp_path / "work"), *expected)
  assert f"{file}:2" in message or "too long" in message or "the longest" in message, message
