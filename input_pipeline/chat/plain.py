"""What templates are given: copies made of JSON's types alone."""

from collections.abc import Mapping
from typing import Any

from input_pipeline.chat.tool_calls import written_calls
from trainer.errors import DataError

REASONING = ("reasoning_content", "thinking", "reasoning")


def plain(value: Any, where: str, depth: int = 0) -> Any:
  """A copy made of JSON's types alone; anything else is refused, since a template could call its methods."""
  if depth > 100:
    raise DataError(f"{where.split('[')[0]}: nested more than 100 levels deep (or in itself).")
  if value is None or isinstance(value, (bool, int, float)):
    return value if value is None or isinstance(value, bool) else (int if isinstance(value, int) else float)(value)
  if isinstance(value, str):
    return str.__str__(value)
  if isinstance(value, Mapping):
    for key in value:
      if not isinstance(key, str):
        raise DataError(f"{where}: has the key {key!r}; expected strings.")
    return {str.__str__(k): plain(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
  raise DataError(f"{where}: is a {type(value).__name__}; expected a string, a number, true, false, null, a list or an "
                  "object of these.")


def records(given: Any, key: str) -> list[dict] | None:
  """Plain copies of a list of objects."""
  if given is None:
    return None
  copied = plain(list(given) if isinstance(given, (list, tuple)) else given, key)
  if not isinstance(copied, list):
    raise DataError(f"{key}: is a {type(copied).__name__}; expected a list of objects.")
  for i, record in enumerate(copied):
    if not isinstance(record, dict):
      raise DataError(f"{key}[{i}]: is a {type(record).__name__}; expected an object.")
  return copied


def messages_of(messages: Any, written: bool = False) -> list[dict]:
  """Plain copies of messages, with reasoning under each name that templates read; `written`: calls have their arguments
  as strings of JSON."""
  copied = records(messages, "messages")
  if not copied:
    raise DataError("messages: the conversation is empty. Give at least one message.")
  result = []
  for message, given in zip(copied, messages, strict=True):
    if written and isinstance(given.get("tool_calls"), list):
      message["tool_calls"] = plain(written_calls(given["tool_calls"]), "tool_calls")
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:
      message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    result.append(message)
  return result
