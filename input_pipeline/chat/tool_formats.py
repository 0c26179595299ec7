"""How models write calls of tools, and what they call in a completion.

Which format a model has is read from its chat template, which writes such a call itself: the format by which the call
that it wrote is found again.
"""

import json
import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from input_pipeline.chat.template import ChatTemplate
from trainer.errors import ConfigError, DataError

_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
  """A call that a model wrote.

  Attributes:
    name: the tool's; None: it cannot be read.
    arguments: by their names.
    id: the model's own for it.
    problem: why it cannot be read.
  """

  name: str | None
  arguments: dict[str, Any]
  id: str | None = None
  problem: str | None = None


# What json raises of a text that is none: also of thousands of brackets, and of numbers of thousands of digits.
NO_JSON = (ValueError, RecursionError)


def tagged(text: str) -> list[ToolCall]:
  """<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen, SmolLM 3. The last end may be missing, where it
  was a stop string."""
  return [_call(part) for part in _TAGGED.findall(_THOUGHT.sub("", text))]


def listed(text: str) -> list[ToolCall]:
  """[TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}, …]: Mistral."""
  _, mark, rest = text.partition("[TOOL_CALLS]")
  if not mark:
    return []
  try:
    calls, _ = json.JSONDecoder().raw_decode(rest.lstrip())
  except NO_JSON as e:
    return [ToolCall(None, {}, problem=f"what follows [TOOL_CALLS] is not valid JSON: {e}")]
  return [_read(call) for call in (calls if isinstance(calls, list) else [calls])]


def bare(text: str) -> list[ToolCall]:
  """{"name": …, "parameters": {…}} at the beginning, with or without <|python_tag|>: Llama 3. Anything else is an
  answer."""
  try:
    call, _ = json.JSONDecoder().raw_decode(text.replace("<|python_tag|>", "").lstrip())
  except NO_JSON:
    return []
  return [_read(call)] if isinstance(call, dict) and "name" in call else []


FORMATS: dict[str, Callable[[str], list[ToolCall]]] = {"tagged": tagged, "listed": listed, "bare": bare}


def without_calls(text: str) -> str:
  """What a completion says besides its calls, in any of these formats."""
  if bare(text):
    return ""
  return _TAGGED.sub("", text).partition("[TOOL_CALLS]")[0].strip()


def message_of(text: str, find: Callable[[str], list[ToolCall]] | None, raw: str | None = None) -> dict:
  """The assistant's message of a completion, as OpenAI's protocol has it: with `tool_calls` where there are some and
  each can be read.

  Args:
    find: finds calls in it; None: it has none.
    raw: the same with its special tokens, if the text is without.
  """
  raw = text if raw is None else raw
  calls = [] if find is None else find(raw)
  if not calls or any(call.problem is not None for call in calls):
    return {"role": "assistant", "content": text}
  # Some templates ask for an id of nine characters.
  told = [{"id": call.id or uuid.uuid4().hex[:9], "type": "function", "function": {
      "name": call.name or "", "arguments": json.dumps(call.arguments, ensure_ascii=False)}} for call in calls]
  return {"role": "assistant", "content": without_calls(raw) or None, "tool_calls": told}


def find_format(name: str, template: ChatTemplate | None, tool: dict) -> Callable[[str], list[ToolCall]]:
  """What finds calls in completions, text -> calls; none: it is an answer.

  Args:
    name: of FORMATS, or "auto": that in which the template writes calls.
    tool: some schema, to see whether the template shows it.

  Raises:
    ConfigError: the template does not show tools, or writes calls in no format that is known.
  """
  key = "rollout.tool_format"
  if name != "auto" and name not in FORMATS:
    raise ConfigError(f"{key} is {name!r}; allowed: auto, {', '.join(FORMATS)}.")
  if template is None:
    raise ConfigError("rollout.tools are shown by a chat template, but the tokenizer has none. Name one with "
                      "--config.chat.template, e.g. qwen3.")
  asked, function = "a question to the tool", tool["function"]["name"]
  question = {"role": "user", "content": asked}
  before = template.render([question], tools=[tool], add_generation_prompt=True)
  if function not in before:
    raise ConfigError(f"{template.where} does not show tools: {function} is not in what it makes of a prompt. Use a "
                      "template that does, e.g. --config.chat.template=qwen3.")
  if name != "auto":
    return FORMATS[name]
  call = {"type": "function", "id": "abcdefghi", "function": {"name": function, "arguments": {"x": 1}}}
  try:
    whole = template.render([question, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=[tool])
  except DataError as e:
    raise ConfigError(f"{template.where} refuses a call of a tool ({e}). Set {key} to one of "
                      f"{', '.join(FORMATS)}.") from e
  written = whole[len(before):] if whole.startswith(before) else whole.rpartition(asked)[2]
  for find in FORMATS.values():
    if [(c.name, c.arguments) for c in find(written)] == [(function, {"x": 1})]:
      return find
  raise ConfigError(f"{template.where} writes a call of a tool as {written!r:.200}, a format that is not known. Known "
                    f"are {', '.join(FORMATS)}, which {key} may name.")


def _call(text: str) -> ToolCall:
  try:
    return _read(json.loads(text))
  except NO_JSON as e:
    return ToolCall(None, {}, problem=f"the call is not valid JSON: {e}")


def _read(call: Any) -> ToolCall:
  if not isinstance(call, dict) or not isinstance(call.get("name"), str):
    return ToolCall(None, {}, problem="a call is an object with name and arguments")
  arguments = call.get("arguments", call.get("parameters", {}))
  if not isinstance(arguments, dict):
    return ToolCall(call["name"], {}, problem="the arguments of a call are an object")
  return ToolCall(call["name"], arguments, call["id"] if isinstance(call.get("id"), str) else None)
