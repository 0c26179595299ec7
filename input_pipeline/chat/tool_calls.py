"""Calls of tools in rows: as templates take them, whoever's format they are in.

OpenAI's `tool_calls`, its older `function_call`, and the `function_call` messages of ShareGPT files (LLaMA-Factory) or
`tool_call` ones (ms-swift), of which several in a row are calls of one turn.
"""

import json
from collections.abc import Mapping
from typing import Any

from input_pipeline.files import NotJSONError, parse_json
from trainer.errors import DataError

# Who a message is of, by names that are no roles of templates. CALLING say what the assistant calls.
CALLING = ("function_call", "tool_call")
SPEAKERS = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool", "tool_response": "tool",
            **dict.fromkeys(CALLING, "assistant")}
THOUGHT = ("<think>", "</think>")


class Arguments(dict):
  """Of a call, with the string of JSON that the data have of them."""

  written: str = ""


def written_calls(calls: list[dict]) -> list[dict]:
  """The calls with their arguments as a string of JSON, as OpenAI has them: the data's own, if they have one."""
  def written(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), Mapping):
      return call
    said = getattr(arguments, "written", "") or json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": said}}

  return [written(call) for call in calls]


def calls_of(value: Any, where: str) -> list[dict]:
  """Calls as templates take them, with arguments as an object even where the data have a string of JSON."""
  calls = from_json(value, where)
  if not isinstance(calls, list):
    raise DataError(f"{where} is {found(value)}; expected a list of calls.")
  result = []
  for i, call in enumerate(calls):
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
      raise DataError(f"{where}[{i}] is {found(call)}; expected {{'function': {{'name': …, 'arguments': …}}}}.")
    arguments = from_json(function.get("arguments") or {}, f"{where}[{i}].arguments")
    if not isinstance(arguments, Mapping):
      raise DataError(f"{where}[{i}].arguments is {found(arguments)}; expected an object, or a string of JSON that "
                      "holds one.")
    if isinstance(function.get("arguments"), str):
      arguments, said = Arguments(arguments), function["arguments"]
      arguments.written = said
    if "function" in call:  # templates may write it as it is: the order of its keys stays
      kept = {k: v for k, v in call.items() if v is not None}
      result.append(kept | {"function": {**function, "arguments": arguments}})
    else:
      more = {k: v for k, v in call.items() if k not in ("name", "arguments") and v is not None}
      result.append({"type": "function", **more, "function": {"name": function["name"], "arguments": arguments}})
  return result


def said_call(value: Any, where: str) -> dict:
  """The `tool_calls`, and the `content` if there is any, of a message that is a call or a list of them.

  As in LLaMA-Factory, a thought may stand before the JSON; it is what the assistant says before it calls.
  """
  content = ""
  if isinstance(value, str) and value.lstrip().startswith(THOUGHT[0]) and THOUGHT[1] in value:
    thought, _, value = value.lstrip().partition(THOUGHT[1])
    content = thought + THOUGHT[1]
  calls = from_json(value, where)
  calls = calls_of(calls if isinstance(calls, list) else [calls], where)
  return {"content": content, "tool_calls": calls} if content else {"tool_calls": calls}


def joined(first: dict, second: dict) -> dict:
  """One message of the assistant's that makes the calls of both."""
  return first | {"tool_calls": [*first.get("tool_calls", ()), *second["tool_calls"]]}


def from_json(value: Any, where: str) -> Any:
  """`value`, parsed if it is a string."""
  if not isinstance(value, str):
    return value
  try:
    return parse_json(value)
  except NotJSONError as e:
    raise DataError(f"{where} is {found(value)}, which is not valid JSON ({e}).") from e


def found(value: Any) -> str:
  """A value and its type, for messages."""
  if value is None:
    return "null"
  shown = repr(value)
  return f"{shown[:60]}{'…' if len(shown) > 60 else ''} ({type(value).__name__})"
