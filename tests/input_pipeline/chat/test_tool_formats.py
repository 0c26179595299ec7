"""Calls of tools are found in the format in which the model's own template writes them."""

import pytest

from input_pipeline.chat import tool_formats
from input_pipeline.chat.builtin import find_template
from input_pipeline.chat.template import ChatTemplate
from input_pipeline.chat.tool_formats import ToolCall
from input_pipeline.chat.tool_functions import schema_of
from input_pipeline.tokenizer.tokenizer import load_tokenizer
from tests.input_pipeline.references import example_tools
from tests.tiny import ROOT
from trainer.config import defaults
from trainer.errors import ConfigError

REFERENCES = ROOT / "tests" / "input_pipeline" / "references"
TINY = load_tokenizer(REFERENCES / "tiny")
ADD = schema_of(example_tools.add)


def template(name):
  chat = defaults().chat
  chat.template = name
  return find_template(chat, TINY)


@pytest.mark.parametrize("name, found", [
    ("qwen3", tool_formats.tagged), ("llama3", tool_formats.bare), ("mistral", tool_formats.listed),
    (str(REFERENCES / "templates" / "llama3.jinja"), tool_formats.bare),
])
def test_a_template_says_how_calls_are_written(name, found):
  assert tool_formats.find_format("auto", template(name), ADD) is found
  assert tool_formats.find_format("tagged", template(name), ADD) is tool_formats.tagged


def test_what_shows_no_tools_is_refused():
  with pytest.raises(ConfigError, match="does not show tools: add is not in"):
    tool_formats.find_format("auto", template("gemma"), ADD)
  with pytest.raises(ConfigError, match="the tokenizer has none"):
    tool_formats.find_format("auto", None, ADD)
  with pytest.raises(ConfigError, match="rollout.tool_format is 'xml'; allowed: auto, tagged, listed, bare"):
    tool_formats.find_format("xml", template("qwen3"), ADD)


@pytest.mark.parametrize("find, text, calls", [
    ("tagged", 'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "b"}',
     [("add", {"a": 1}), ("b", {})]),
    ("tagged", "<think><tool_call>x</tool_call></think>42", []),
    ("tagged", "<think>so <tool_call>x", []),
    ("listed", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefg"}, {"name": "b", "arguments": {}}]',
     [("add", {"a": 1}), ("b", {})]),
    ("listed", "42", []),
    ("bare", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
    ("bare", '{"answer": 42}', []),
    ("bare", "The answer is {", []),
    ("bare", "[" * 100_000, []),
])
def test_calls_in_completions(find, text, calls):
  assert [(call.name, call.arguments) for call in tool_formats.FORMATS[find](text)] == calls


@pytest.mark.parametrize("find, text, problem", [
    ("tagged", "<tool_call>add(1)</tool_call>", "the call is not valid JSON"),
    ("tagged", "<tool_call>[1]</tool_call>", "a call is an object with name and arguments"),
    ("tagged", '<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "the arguments of a call are an object"),
    ("listed", "[TOOL_CALLS] add", "is not valid JSON"),
    ("listed", "[TOOL_CALLS] " + "[" * 100_000, "is not valid JSON: maximum recursion depth"),
    ("tagged", '<tool_call>{"name": ' + "1" * 5_000, "the call is not valid JSON: Exceeds the limit"),
])
def test_calls_that_cannot_be_read_say_why(find, text, problem):
  (call,) = tool_formats.FORMATS[find](text)
  assert isinstance(call, ToolCall) and problem in call.problem


@pytest.mark.parametrize("written, message", [
    ("{{ raise_exception('no calls') }}",
     r"refuses a call of a tool .*no calls.* Set rollout\.tool_format to one of tagged, listed"),
    ("CALL {{ m.tool_calls[0].function.name }}", "writes a call of a tool as 'CALL add', a format that is not known")])
def test_calls_that_a_template_writes_in_no_known_way_are_refused(written, message):
  source = ("{{ tools }}{% for m in messages %}{% if m.tool_calls %}" + written +
            "{% else %}{{ m.content }}{% endif %}{% endfor %}")
  with pytest.raises(ConfigError, match=message):
    tool_formats.find_format("auto", ChatTemplate(source, {}), ADD)
