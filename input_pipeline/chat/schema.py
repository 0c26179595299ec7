"""What a row is, by its columns: a conversation, a prompt with its completion, or a text.

    messages                          role and content; also tools, chat_template_kwargs, and a weight on a message
    prompt, completion                two strings, or two lists of messages
    instruction, (input,) output      one question and its answer; `response` is another name of output; `history` has
                                      earlier ones, as pairs
    conversations                     ShareGPT: from and value, or role and content
    text
    prefix, suffix                    two strings, for models that see images alone

Each row is recognised by itself. It may have images (`image`, `images`) if the model sees them, and conversations have
`system`, `tools` and `chat_template_kwargs` beside them. Whatever else is in it is left alone (`ShapeReader.columns`).
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from input_pipeline.chat.image_parts import COLUMNS as IMAGE_COLUMNS
from input_pipeline.chat.image_parts import attach, column_refs, columns_of, content_parts
from input_pipeline.chat.image_placeholders import ImageFormat
from input_pipeline.chat.plain import REASONING
from input_pipeline.chat.tool_calls import CALLING, SPEAKERS, calls_of, found, from_json, joined, said_call
from input_pipeline.files import shown_names
from input_pipeline.images.images import ImageRef
from input_pipeline.sources.readers import Record
from trainer.errors import DataError

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
# What may stand beside the messages of a conversation, and the images and films of any row.
BESIDE, IMAGES = ("system", "tools", "functions", "chat_template_kwargs"), (
    *IMAGE_COLUMNS["image"], *IMAGE_COLUMNS["video"])
# The columns of messages that may have ShareGPT's keys.
WITH_FROM = ("conversations", "chosen", "rejected")
WITH_HISTORY = "instruction/output with history"
# Names that `chat.fields` may map: columns, and the keys of a message.
COLUMNS = ("messages", "prompt", "completion", "instruction", "input", "output", "response", "history",
           "conversations", "text", "system", "tools", "functions", "chat_template_kwargs", "role", "content", "from",
           "value", "input_ids", "labels", "weights", "teacher_ids", "teacher_logprobs", "chosen", "rejected", "margin",
           "label", "prompts", "responses", "rewards", "masks", "logprobs", "query", "positive", "negative", "prefix",
           "suffix", *IMAGES)
ROLES = ("system", "developer", "user", "assistant", "tool")
# Variables of a template that a row may not set: they follow from the row, or are what functions call what they get.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "inert_tokens",
            "images", "where", "self")
MAX_WEIGHT = 1e6


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
    roles: allowed besides ROLES.
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
    columns = shown_names(record.fields)
    if matches:
      first = _names(self._known[matches[0]][0])[0]
      raise DataError(f"{record.where}: its columns ({columns}) fit several shapes: {'; '.join(matches)}. Say which is "
                      f'meant by naming its column in chat.fields, e.g. (("{first}", "{self._name(first)}"),), or '
                      "remove the others.")
    more = "" if self._images is None else "; prefix and suffix"
    raise DataError(
        f"{record.where}: its columns ({columns}) are none that are known. Known are: messages; prompt and completion; "
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

  def request(self, record: Record) -> tuple[list[dict], list[dict] | None, dict]:
    """(messages, tools, variables of the template) of a conversation that somebody asks about; whoever may speak.
    Raises: see `read`."""
    return self._messages(record, "messages")[0], self._tools(record), self._variables(record)

  def images_of(self, record: Record) -> tuple[ImageRef, ...]:
    """The images and films in the row's columns. Raises DataError if the model sees none."""
    if self._images is not None:
      refs = column_refs(record.fields, self._name, record.where, record.folder)
      for ref in refs:
        if ref.film:
          self._images.check_films(ref.where)
      return tuple(refs)
    if any(record.fields[key] for key in columns_of(record.fields, str)):
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
        raise DataError(f"{record.where}: {self._name(key)} is {found(value)}; prompt and completion are two strings "
                        "or two lists of messages.")
    before, weights = self._messages(record, "prompt")
    after, more = self._messages(record, "completion")
    if after[0]["role"] != "assistant":
      raise DataError(f"{record.where}: {self._name('completion')}[0].{self._name('role')} is "
                      f"{after[0]['role']!r}; a completion begins with what the assistant says.")
    return self._conversation(record, "prompt/completion", before + after, weights + more, len(before))

  def _instruction(self, record: Record) -> Conversation:
    answer = "output" if self._has(record, "output") else "response"
    said = [*self._questions(record), {"role": "assistant", "content": self._string(record, answer)}]
    # What was answered in the history is trained, as in LLaMA-Factory, unless completions alone are.
    shape = WITH_HISTORY if len(said) > 2 else "instruction/output"
    return self._conversation(record, shape, said, [1.0] * len(said), len(said) - 1)

  def _questions(self, record: Record) -> list[dict]:
    """The messages up to the question of an instruction, which is the last."""
    question = self._string(record, "instruction")
    if self._has(record, "input"):
      more = self._string(record, "input")
      question += f"\n\n{more}" if more else ""
    said = [*self._history(record), question]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]

  def _history(self, record: Record) -> list[str]:
    """What was asked and answered before, in turn."""
    key, pairs = self._name("history"), record.fields.get(self._name("history")) or []
    for i, pair in enumerate(pairs if isinstance(pairs, list) else [pairs]):
      if not isinstance(pairs, list) or not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(
          isinstance(text, str) for text in pair):
        raise DataError(f"{record.where}: {key}[{i}] is {found(pair)}; expected a list of pairs, each what was asked "
                        "and what was answered: [[\"Hi\", \"Hello\"], …].")
    return [text for pair in pairs for text in pair]

  def columns(self, record: Record) -> frozenset[str]:
    """The names of the row's columns that are read, whatever they are called. Raises: see `shape`."""
    shape = self.shape(record)
    main = [next(name for name in _names(names) if self._has(record, name)) for names in self._known[shape]]
    if shape == "instruction/output":
      main += ["input", "history"]
    strings = shape in ("text", "prefix/suffix") or shape == "prompt/completion" and isinstance(
        record.fields[self._name("prompt")], str)
    return self._with_beside(main, strings)

  def _with_beside(self, main: Collection[str], strings: bool) -> frozenset[str]:
    """The names of these columns, and of those that are read beside them; strings have nothing but images there."""
    return frozenset(map(self._name, (*main, *IMAGES, *(() if strings else BESIDE))))

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
      messages, refs = attach(messages, refs, record.where, record.folder, self._images.markers)
    return Conversation(shape, messages, weights, prompt, self._tools(record), self._variables(record), refs)

  def _messages(self, record: Record, column: str) -> tuple[list[dict], list[float]]:
    """The messages of a column, and the weight of each."""
    key = self._name(column)
    raw = record.fields[key]
    if not isinstance(raw, list):
      raise DataError(f"{record.where}: {key} is {found(raw)}; expected a list of messages.")
    if not raw:
      raise DataError(f"{record.where}: {key} is an empty list; expected messages. Remove the row.")
    messages: list[dict] = []
    weights: list[float] = []
    for i, message in enumerate(raw):
      where = f"{record.where}: {key}[{i}]"
      if not isinstance(message, Mapping):
        raise DataError(f"{where} is {found(message)}; expected an object with role and content.")
      message = {k: v for k, v in message.items() if v is not None}
      weight = _weight(message.pop("weight", 1.0), f"{where}.weight")
      sharegpt = column in WITH_FROM and self._name("from") in message
      role, content = ("from", "value") if sharegpt else ("role", "content")
      calling = message.get(self._name(role)) in CALLING and message[self._name(role)] not in self._roles
      message = self._message(message, self._name(role), self._name(content), where)
      if not calling or not messages or messages[-1]["role"] != "assistant":
        messages.append(message)
        weights.append(weight)
        continue
      if weight != weights[-1]:
        raise DataError(f"{where}.weight is {weight:g}, but {weights[-1]:g} before it in the same turn, which it is a "
                        "call of. Give both the same.")
      messages[-1] = joined(messages[-1], message)
    return messages, weights

  def _message(self, message: dict, role_key: str, content_key: str, where: str) -> dict:
    """A message as templates take it; `role_key` and `content_key` are what the row calls the two."""
    if role_key not in message:
      raise DataError(f"{where} has no {role_key!r}, only {shown_names(message, 'nothing')}. Each message "
                      'needs a role; other names of it are mapped by chat.fields: (("role", "speaker"),).')
    speaker = message.pop(role_key)
    if not isinstance(speaker, str) or speaker not in self._roles and speaker not in SPEAKERS:
      raise DataError(f"{where}.{role_key} is {found(speaker)}; allowed: {', '.join((*self._roles, *SPEAKERS))}. "
                      "Others can be named in chat.roles, if the template knows them.")
    role = speaker if speaker in self._roles else SPEAKERS[speaker]
    if speaker in CALLING and speaker not in self._roles:
      if content_key not in message:
        raise DataError(f"{where} has no {content_key!r}, only {shown_names([role_key, *message])}.")
      return {"role": role, **said_call(message.pop(content_key), f"{where}.{content_key}"), **message}
    result = {"role": role}
    if role == "assistant" and not message.get("tool_calls") and message.get("function_call"):
      message["tool_calls"] = [message.pop("function_call")]  # before there were several
    calls = role == "assistant" and message.get("tool_calls")
    if content_key in message:
      result["content"] = self._content(message.pop(content_key), f"{where}.{content_key}")
    elif not calls:
      raise DataError(f"{where} has no {content_key!r} (or null), only "
                      f"{shown_names([role_key, *message])}. Each message but an assistant's with tool_calls "
                      "needs one.")
    for name in REASONING:
      if name in message and not isinstance(message[name], str):
        raise DataError(f"{where}.{name} is {found(message[name])}; expected a string.")
    if "tool_calls" in message:
      calls = calls_of(message.pop("tool_calls"), f"{where}.tool_calls")
      message |= {"tool_calls": calls} if calls else {}
    return result | message

  def _content(self, value: Any, where: str) -> str | list[dict]:
    """A message's text, of which parts are joined; parts alone where one of them is an image."""
    if isinstance(value, str):
      return value
    if not isinstance(value, list):
      raise DataError(f"{where} is {found(value)}; expected a string, or a list of parts with type 'text'.")
    if self._images is not None:
      return content_parts(value, where, self._images.check_films)
    texts = []
    for i, part in enumerate(value):
      if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise DataError(f"{where}[{i}] is {found(part)}; expected {{'type': 'text', 'text': …}}. Images and other "
                        "parts are not trained on here.")
      texts.append(part["text"])
    return "".join(texts)

  def _tools(self, record: Record) -> list[dict] | None:
    """What the model may call: `tools`, or `functions`, as OpenAI's older format has them."""
    column = "tools" if self._has(record, "tools") else "functions"
    key = self._name(column)
    if not self._has(record, column) or record.fields[key] == "":
      return None
    tools = from_json(record.fields[key], f"{record.where}: {key}")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
      raise DataError(f"{record.where}: {key} is {found(record.fields[key])}; expected a list of JSON schemas, or a "
                      "string of JSON that holds one.")
    if column == "functions":
      tools = [{"type": "function", "function": tool} for tool in tools]
    return tools or None

  def _variables(self, record: Record) -> dict:
    key = self._name("chat_template_kwargs")
    if not self._has(record, "chat_template_kwargs"):
      return {}
    value = record.fields[key]
    if not isinstance(value, Mapping):
      raise DataError(f"{record.where}: {key} is {found(value)}; expected an object with variables of the template.")
    variables = {k: v for k, v in value.items() if v is not None}
    for name in RESERVED:
      if name in variables:
        raise DataError(f"{record.where}: {key}.{name} cannot be set there; it follows from the row.")
    return variables

  def _string(self, record: Record, key: str) -> str:
    value = record.fields[self._name(key)]
    if not isinstance(value, str):
      raise DataError(f"{record.where}: {self._name(key)} is {found(value)}; expected a string.")
    return value

  def _has(self, record: Record, names: str | tuple[str, ...]) -> bool:
    return any(record.fields.get(self._name(name)) is not None for name in _names(names))

  def _name(self, key: str) -> str:
    return self._fields.get(key, key)


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
  return (names,) if isinstance(names, str) else names


def _weight(value: Any, where: str) -> float:
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not number or not 0 <= value <= MAX_WEIGHT:
    raise DataError(f"{where} is {found(value)}; expected a number from 0 to {MAX_WEIGHT:g}; 0: not trained.")
  return float(value)
