"""What a row is, by its columns: a conversation, a prompt with its completion, or a text.

    messages                          role and content; also tools, chat_template_kwargs, and a weight on a message
    prompt, completion                two strings, or two lists of messages
    instruction, (input,) output      one question and its answer; `response` is another name of output
    conversations                     ShareGPT: from and value, or role and content
    text
    prefix, suffix                    two strings, for models that see images alone

Each row is recognised by itself. It may have images (`image`, `images`) if the model sees them. Whatever else is in it
is left alone.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from input_pipeline.files import DataError, NotJSONError, parse_json, shown_names
from input_pipeline.image_texts import ImageFormat, attach, column_refs, content_parts
from input_pipeline.images import ImageRef
from input_pipeline.readers import Record

# Each shape's columns; of alternatives in a tuple one must be there.
SHAPES: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "messages": ("messages",),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", ("output", "response")),
    "conversations": ("conversations",),
    "text": ("text",),
}
# Of models that see images: what stands between the two is `chat.prefix_end`.
SHAPES_WITH_IMAGES = SHAPES | {"prefix/suffix": ("prefix", "suffix")}
# Names that `chat.fields` may map: columns, and the keys of a message.
COLUMNS = ("messages", "prompt", "completion", "instruction", "input", "output", "response", "conversations", "text",
           "system", "tools", "chat_template_kwargs", "role", "content", "from", "value", "input_ids", "labels",
           "weights", "chosen", "rejected", "label", "prompts", "responses", "rewards", "masks", "prefix",
           "suffix", "image", "images")
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
                  "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant"}
# Variables of a template that a row may not set: they follow from the row, or are what functions call what they get.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "inert_tokens",
            "images", "where", "self")
MAX_WEIGHT = 1e6
REASONING = ("reasoning_content", "thinking", "reasoning")


class Conversation(NamedTuple):
  """Messages as chat templates take them. `weights` are factors, one a message; `prompt`: how many come before what
  is to be answered; `variables`: more of the template's; `images`: in the order of their parts in the messages."""

  shape: str
  messages: list[dict]
  weights: list[float]
  prompt: int
  tools: list[dict] | None = None
  variables: dict = {}
  images: tuple[ImageRef, ...] = ()


class Plain(NamedTuple):
  """Strings that no template touches: a prompt with its completion, or a text, which has no prompt; and the images of
  the prompt."""

  shape: str
  prompt: str | None
  completion: str
  images: tuple[ImageRef, ...] = ()


class ShapeReader:
  """Finds what a row is, and checks it.

  Args:
    fields: other names of COLUMNS, {"messages": "dialogue"}.
    roles: allowed beside ROLES.
    images: how the model sees images; None: rows with images are refused.
  """

  def __init__(self, fields: Mapping[str, str] | None = None, roles: Collection[str] = (),
               images: ImageFormat | None = None):
    self._fields, self._images = dict(fields or {}), images
    self._known = SHAPES if images is None else SHAPES_WITH_IMAGES
    self._roles = (*ROLES, *(role for role in roles if role not in ROLES))

  def shape(self, record: Record) -> str:
    """One of SHAPES.

    Raises:
      DataError: none of them or several; names what was found and what to set.
    """
    matches = [name for name, columns in self._known.items() if all(self._has(record, c) for c in columns)]
    if len(matches) > 1:  # named in chat.fields, it is meant
      chosen = [name for name in matches
                if any(c in self._fields for columns in self._known[name] for c in _names(columns))]
      matches = chosen if len(chosen) == 1 else matches
    if len(matches) == 1:
      return matches[0]
    found = shown_names(record.fields)
    if matches:
      first = _names(self._known[matches[0]][0])[0]
      raise DataError(f"{record.where}: its columns ({found}) fit several shapes: {'; '.join(matches)}. Say which is "
                      f'meant by naming its column in chat.fields, e.g. (("{first}", "{self._name(first)}"),), or '
                      "remove the others.")
    more = "" if self._images is None else "; prefix and suffix"
    raise DataError(
        f"{record.where}: its columns ({found}) are none that are known. Known are: messages; prompt and completion; "
        f"instruction (with input) and output or response; conversations; text; input_ids{more}. Other names are "
        'mapped by chat.fields, ours first: (("messages", "dialogue"),) or (("prompt", "question"), ("completion", '
        '"answer")).')

  def read(self, record: Record) -> Conversation | Plain:
    """The row's conversation or strings.

    Raises:
      DataError: names the record, the key path and what was found.
    """
    shape = self.shape(record)
    refs = self.images_of(record)
    if shape == "text":
      return Plain(shape, None, self._string(record, "text"), refs)
    if shape == "prefix/suffix":
      return Plain(shape, self._prefix(record), self._string(record, "suffix"), refs)
    if shape == "prompt/completion":
      return self._pair(record)
    if shape == "instruction/output":
      return self._instruction(record)
    messages, weights = self._messages(record, shape)
    return self._conversation(record, shape, messages, weights, None)

  def images_of(self, record: Record) -> tuple[ImageRef, ...]:
    """The images in the row's columns. Raises DataError if the model sees none."""
    if self._images is not None:
      return tuple(column_refs(record.fields, self._name("image"), self._name("images"), record.where, record.folder))
    if record.fields.get("images") or record.fields.get("image"):
      raise DataError(f"{record.where}: has images, which the model does not see. Set config.model.vision.tower, or "
                      "remove the column or such rows.")
    return ()

  def _prefix(self, record: Record) -> str:
    """The prefix with what stands between it and its suffix."""
    return self._string(record, "prefix") + self._images.prefix_end

  def _pair(self, record: Record) -> Conversation | Plain:
    prompt, completion = (record.fields[self._name(key)] for key in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
      return Plain("prompt/completion", prompt, completion, self.images_of(record))
    for key, value in (("prompt", prompt), ("completion", completion)):
      if not isinstance(value, list):
        raise DataError(f"{record.where}: {self._name(key)} is {_found(value)}; prompt and completion are two strings "
                        "or two lists of messages.")
    before, weights = self._messages(record, "prompt")
    after, more = self._messages(record, "completion")
    if after[0]["role"] != "assistant":
      raise DataError(f"{record.where}: {self._name('completion')}[0].{self._name('role')} is "
                      f"{after[0]['role']!r}; a completion begins with what the assistant says.")
    return self._conversation(record, "prompt/completion", before + after, weights + more, len(before))

  def _instruction(self, record: Record) -> Conversation:
    answer = "output" if self._has(record, "output") else "response"
    question = self._string(record, "instruction")
    if self._has(record, "input"):
      more = self._string(record, "input")
      question += f"\n\n{more}" if more else ""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": self._string(record, answer)}]
    return self._conversation(record, "instruction/output", messages, [1.0, 1.0], 1)

  def _conversation(self, record: Record, shape: str, messages: list[dict], weights: list[float],
                    prompt: int | None, images: tuple[ImageRef, ...] | None = None) -> Conversation:
    """Adds what stands in columns of its own, and checks who speaks when; `images`: those of the messages, known."""
    if self._has(record, "system"):
      if messages[0]["role"] == "system":
        raise DataError(f"{record.where}: has a column {self._name('system')!r} and begins with a system message. "
                        "Keep one of them.")
      system = self._string(record, "system")
      if system:
        messages, weights = [{"role": "system", "content": system}, *messages], [1.0, *weights]
        prompt = None if prompt is None else prompt + 1
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
      raise DataError(f"{record.where}: no message of the user, only {', '.join(m['role'] for m in messages)}. A "
                      "conversation needs one; for plain text use the column 'text'.")
    for i in range(1, len(messages)):
      if messages[i]["role"] == messages[i - 1]["role"] == "assistant":
        raise DataError(f"{record.where}: messages[{i - 1}] and messages[{i}] are both the assistant's. Join them, or "
                        "put the user's or a tool's between.")
    prompt = users[-1] + 1 if prompt is None else prompt
    refs = self.images_of(record) if images is None else images
    if self._images is not None:
      messages, refs = attach(messages, refs, record.where, record.folder, self._images.marker)
    return Conversation(shape, messages, weights, prompt, self._tools(record), self._variables(record), refs)

  def _messages(self, record: Record, column: str) -> tuple[list[dict], list[float]]:
    """The messages of a column, and the weight of each."""
    key = self._name(column)
    raw = record.fields[key]
    if not isinstance(raw, list):
      raise DataError(f"{record.where}: {key} is {_found(raw)}; expected a list of messages.")
    if not raw:
      raise DataError(f"{record.where}: {key} is an empty list; expected messages. Remove the row.")
    messages, weights = [], []
    for i, message in enumerate(raw):
      where = f"{record.where}: {key}[{i}]"
      if not isinstance(message, Mapping):
        raise DataError(f"{where} is {_found(message)}; expected an object with role and content.")
      message = {k: v for k, v in message.items() if v is not None}
      weights.append(_weight(message.pop("weight", 1.0), f"{where}.weight"))
      sharegpt = column == "conversations" and self._name("from") in message
      messages.append(self._sharegpt(message, where) if sharegpt else self._message(message, where))
    return messages, weights

  def _message(self, message: dict, where: str) -> dict:
    role_key, content_key = self._name("role"), self._name("content")
    if role_key not in message:
      raise DataError(f"{where} has no {role_key!r}, only {shown_names(message, 'nothing')}. Each message "
                      'needs a role; other names of it are mapped by chat.fields: (("role", "speaker"),).')
    role = message.pop(role_key)
    if not isinstance(role, str) or role not in self._roles:
      raise DataError(f"{where}.{role_key} is {_found(role)}; allowed: {', '.join(self._roles)}. Others can be named "
                      "in chat.roles, if the template knows them.")
    result = {"role": role}
    calls = role == "assistant" and message.get("tool_calls")
    if content_key in message:
      result["content"] = self._content(message.pop(content_key), f"{where}.{content_key}")
    elif not calls:
      raise DataError(f"{where} has no {content_key!r} (or null), only "
                      f"{shown_names([role_key, *message])}. Each message but an assistant's with tool_calls "
                      "needs one.")
    for name in REASONING:
      if name in message and not isinstance(message[name], str):
        raise DataError(f"{where}.{name} is {_found(message[name])}; expected a string.")
    if "tool_calls" in message:
      calls = _tool_calls(message.pop("tool_calls"), f"{where}.tool_calls")
      message |= {"tool_calls": calls} if calls else {}
    return result | message

  def _content(self, value: Any, where: str) -> str | list[dict]:
    """A message's text, of which parts are joined; parts alone where one of them is an image."""
    if isinstance(value, str):
      return value
    if not isinstance(value, list):
      raise DataError(f"{where} is {_found(value)}; expected a string, or a list of parts with type 'text'.")
    if self._images is not None:
      return content_parts(value, where)
    texts = []
    for i, part in enumerate(value):
      if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"{where}[{i}] is {_found(part)}; expected {{'type': 'text', 'text': …}}. Images and other "
                        "parts are not trained on here.")
      texts.append(part["text"])
    return "".join(texts)

  def _sharegpt(self, message: dict, where: str) -> dict:
    from_key, value_key = self._name("from"), self._name("value")
    speaker = message.pop(from_key)
    known = {**SHAREGPT_ROLES, **{role: role for role in self._roles}}
    if not isinstance(speaker, str) or speaker not in known:
      raise DataError(f"{where}.{from_key} is {_found(speaker)}; allowed: {', '.join(known)}.")
    if value_key not in message:
      raise DataError(f"{where} has no {value_key!r}, only {shown_names([from_key, *message])}.")
    value = message.pop(value_key)
    if speaker == "function_call":
      return {"role": "assistant", "tool_calls": _tool_calls([_json(value, f"{where}.{value_key}")],
                                                            f"{where}.{value_key}"), **message}
    return {"role": known[speaker], "content": self._content(value, f"{where}.{value_key}"), **message}

  def _tools(self, record: Record) -> list[dict] | None:
    key = self._name("tools")
    if not self._has(record, "tools") or record.fields[key] == "":
      return None
    tools = _json(record.fields[key], f"{record.where}: {key}")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
      raise DataError(f"{record.where}: {key} is {_found(record.fields[key])}; expected a list of JSON schemas, or a "
                      "string of JSON that holds one.")
    return tools or None

  def _variables(self, record: Record) -> dict:
    key = self._name("chat_template_kwargs")
    if not self._has(record, "chat_template_kwargs"):
      return {}
    value = record.fields[key]
    if not isinstance(value, Mapping):
      raise DataError(f"{record.where}: {key} is {_found(value)}; expected an object with variables of the template.")
    variables = {k: v for k, v in value.items() if v is not None}
    for name in RESERVED:
      if name in variables:
        raise DataError(f"{record.where}: {key}.{name} cannot be set there; it follows from the row.")
    return variables

  def _string(self, record: Record, key: str) -> str:
    value = record.fields[self._name(key)]
    if not isinstance(value, str):
      raise DataError(f"{record.where}: {self._name(key)} is {_found(value)}; expected a string.")
    return value

  def _has(self, record: Record, names: str | tuple[str, ...]) -> bool:
    return any(record.fields.get(self._name(name)) is not None for name in _names(names))

  def _name(self, key: str) -> str:
    return self._fields.get(key, key)


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
  return (names,) if isinstance(names, str) else names


def _tool_calls(value: Any, where: str) -> list[dict]:
  """Calls as templates take them, with arguments as an object even where the data have a string of JSON."""
  calls = _json(value, where)
  if not isinstance(calls, list):
    raise DataError(f"{where} is {_found(value)}; expected a list of calls.")
  result = []
  for i, call in enumerate(calls):
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
      raise DataError(f"{where}[{i}] is {_found(call)}; expected {{'function': {{'name': …, 'arguments': …}}}}.")
    arguments = _json(function.get("arguments") or {}, f"{where}[{i}].arguments")
    if not isinstance(arguments, Mapping):
      raise DataError(f"{where}[{i}].arguments is {_found(arguments)}; expected an object, or a string of JSON that "
                      "holds one.")
    if "function" in call:  # templates may write it as it is: the order of its keys stays
      kept = {k: v for k, v in call.items() if v is not None}
      result.append(kept | {"function": {**function, "arguments": arguments}})
    else:
      more = {k: v for k, v in call.items() if k not in ("name", "arguments") and v is not None}
      result.append({"type": "function", **more, "function": {"name": function["name"], "arguments": arguments}})
  return result


def _json(value: Any, where: str) -> Any:
  """`value`, parsed if it is a string."""
  if not isinstance(value, str):
    return value
  try:
    return parse_json(value)
  except NotJSONError as e:
    raise DataError(f"{where} is {_found(value)}, which is not valid JSON ({e}).") from e


def _weight(value: Any, where: str) -> float:
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not number or not 0 <= value <= MAX_WEIGHT:
    raise DataError(f"{where} is {_found(value)}; expected a number from 0 to {MAX_WEIGHT:g}; 0: not trained.")
  return float(value)


def _found(value: Any) -> str:
  """A value and its type, for messages."""
  if value is None:
    return "null"
  shown = repr(value)
  return f"{shown[:60]}{'…' if len(shown) > 60 else ''} ({type(value).__name__})"
