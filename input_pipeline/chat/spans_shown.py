"""Whether a template shows what a conversation has: other conversations to compare it with."""

from collections.abc import Iterator
from typing import Any

from input_pipeline.chat.image_parts import text_of, with_more
from input_pipeline.chat.schema import REASONING, Conversation


def contents(conversation: Conversation, trained: set[int]) -> Iterator[tuple[str, Any, str, int, list[Conversation]]]:
  """(what it is, its kind, its text, how many messages to render, conversations with it changed) of all that should be
  shown: what the messages of the indices `trained` say, what others say to them, and the tools."""

  def changed(i: int, **given) -> Conversation:
    return conversation._replace(messages=[*conversation.messages[:i], {**conversation.messages[i], **given}])

  for i, message in enumerate(conversation.messages[:max(trained) + 1] if trained else conversation.messages):
    if message["role"] == "assistant" and i not in trained:
      continue
    content, where = message.get("content", ""), f"messages[{i}]"
    content, other = text_of(content), changed(i, content=with_more(content, " a"))
    if i in trained:
      yield f"{where}.content", (message["role"], "tool_calls" in message), content, i + 1, [other]
    else:
      other = other._replace(messages=other.messages + conversation.messages[i + 1:])
      yield (f"{where}, of the role {message['role']!r},", (message["role"], i == 0), content,
             len(conversation.messages), [other])
    for key in REASONING:
      if key in message and i in trained:
        yield f"{where}.{key}", key, message[key], i + 1, [changed(i, **dict.fromkeys(REASONING, f"{message[key]} a"))]
    calls = message.get("tool_calls", ()) if i in trained else ()
    for n, call in enumerate(calls):
      more = [*calls[:n], {**call, "function": _renamed(call["function"])}, *calls[n + 1:]]
      yield (f"{where}.tool_calls", "tool_calls", call["function"]["name"], i + 1,
             [changed(i, tool_calls=more), changed(i, tool_calls=[])])
  tools = conversation.tools or ()
  for n, tool in enumerate(tools):
    inner = tool.get("function", tool)
    if isinstance(inner, dict) and isinstance(inner.get("name"), str):
      named = {**tool, "function": _renamed(inner)} if "function" in tool else _renamed(tool)
      yield (f"the tool {inner['name']!r}", "tools", inner["name"], len(conversation.messages),
             [conversation._replace(tools=[*tools[:n], named, *tools[n + 1:]]), conversation._replace(tools=None)])


def _renamed(function: dict) -> dict:
  """A function with another name."""
  return {**function, "name": f"{function['name']}_a"}


def beginning(message: dict, char: str) -> dict:
  """The message with each text in it beginning with that character."""
  changed: dict[str, Any] = {key: f"{char}{text_of(message[key])}" for key in ("content", *REASONING) if key in message}
  if "tool_calls" in message:
    changed["tool_calls"] = [{**call, "function": {**call["function"], "name": f"{char}{call['function']['name']}"}}
                             for call in message["tool_calls"]]
  return {**message, **changed}


def holds(text: str, said: str) -> bool:
  """Whether a text has what is said, whatever the spaces."""
  return said.strip() in text or "".join(said.split()) in "".join(text.split())
