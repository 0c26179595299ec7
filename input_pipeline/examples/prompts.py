"""Prompts for generation: conversations, texts and records as the token ids that a completion follows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.chat.builtin import no_template
from input_pipeline.chat.image_parts import IMAGE, KINDS, attach, columns_of, content_parts, parts_of, text_of
from input_pipeline.chat.schema import BESIDE, Conversation, ShapeReader
from input_pipeline.chat.segments import Segment, SegmentEncoder
from input_pipeline.examples.conversations import ChatEncoder, fields_of
from input_pipeline.files import shown_names
from input_pipeline.images.images import EncodedImage, ImageRef, Images
from input_pipeline.images.video_file import is_video
from input_pipeline.remarks import Remark
from input_pipeline.sources.readers import Record
from input_pipeline.sources.sources import utf8
from input_pipeline.tokenizer.tokenizer import Tokenizer, begins_with
from trainer.errors import ConfigError, DataError

# Columns that may hold a prompt, and those of them in which it is a whole conversation, with the answer at its end.
PROMPT_COLUMNS = ("prompt", "prompts", "messages", "conversations", "instruction")
WITH_ANSWER = ("messages", "conversations")


class Prompt(NamedTuple):
  """What is to be completed: its ids (int32 [n]), its text for people, the right answer if one is known, its place.

  `images`: as `to_pixels` gives each, decoded when asked for. Their tokens begin at `image_places`. `segments` are what
  it was tokenised from, `remarks` what is to be counted (`remarks.py`).
  """

  ids: np.ndarray
  text: str
  answer: str | None = None
  where: str = ""
  images: Sequence[np.ndarray] = ()
  image_places: tuple[int, ...] = ()
  segments: tuple[Segment, ...] = ()
  remarks: tuple[Remark, ...] = ()


class Asked(NamedTuple):
  """What a record asks for: a text to continue, or messages to answer with the template's tools and variables.

  `columns` are the names of those it was made of; `answer` is what the assistant said next in these, None if unknown.
  `images` are those of the text, or of the messages' parts, in order.
  """

  content: str | list[dict]
  columns: frozenset[str]
  tools: list[dict] | None = None
  variables: dict = {}
  answer: str | None = None
  images: tuple[ImageRef, ...] = ()


class PromptReader(ShapeReader):
  """Finds the prompt in a record, whatever else it has, and checks it. Args: see `ShapeReader`."""

  def ask(self, record: Record, prompt_key: str | None = None, chat: bool = False) -> Asked:
    """The record's prompt: a string is a text to continue, a list of messages is to be answered.

    Args:
      record: has one of PROMPT_COLUMNS, unless a column is named. `system`, `tools` and `chat_template_kwargs` may
        stand beside messages. A conversation that ends with the assistant is asked without that end.
      prompt_key: the column that holds it.
      chat: a string in that column is what the user says.

    Raises:
      DataError: no such column, or several; what is wrong in it.
    """
    refs = self.images_of(record)
    column = self._column(record) if prompt_key is None else prompt_key
    key = column if prompt_key is not None else self._name(column)
    value = record.fields.get(key)
    if isinstance(value, list):
      messages, _ = self._messages(record, column)
      return self._asked(record, column, messages, {key}, ends=prompt_key is not None or column in WITH_ANSWER)
    if prompt_key is None and column == "instruction":
      messages = self._questions(record)
      return self._asked(record, column, messages, {key, self._name("input"), self._name("history")}, ends=False)
    if prompt_key is None and column in WITH_ANSWER or isinstance(value, bool) or not isinstance(
        value, str if prompt_key is None else (str, int, float)):
      raise self._no_prompt(record, key, value)
    if prompt_key is None or not chat:
      text = self._prefix(record) if self.is_prefix(key) else str(value)
      return Asked(text, frozenset({key, *self._image_columns(record)}), images=refs)
    return self._asked(record, column, [{"role": "user", "content": str(value)}], {key}, ends=False)

  def _column(self, record: Record) -> str:
    known = PROMPT_COLUMNS if self._images is None else (*PROMPT_COLUMNS, "prefix")
    found = [column for column in known if self._has(record, column)]
    if len(found) > 1:  # named in chat.fields, it is meant
      found = [column for column in found if column in self._fields] or found
    if len(found) == 1:
      return found[0]
    columns = shown_names(record.fields)
    if found:
      raise DataError(f"{record.where}: {' and '.join(map(self._name, found))} may each be the prompt; its columns are "
                      f"{columns}. Say which it is with --config.rollout.prompt_key={self._name(found[0])}.")
    raise DataError(f"{record.where}: no prompt; its columns are {columns}. A prompt is in one of "
                    f"{', '.join(PROMPT_COLUMNS)}, or in the column that rollout.prompt_key names.")

  def is_prefix(self, key: str) -> bool:
    """Whether a column holds prefixes, which end as they do in training."""
    return self._images is not None and key == self._name("prefix")

  def _image_columns(self, record: Record) -> list[str]:
    return [] if self._images is None else columns_of(record.fields, self._name)

  def _no_prompt(self, record: Record, key: str, value: Any) -> DataError:
    if key not in record.fields:
      return DataError(f"{record.where}: no key {key!r}; found {shown_names(record.fields)}. Set "
                       "rollout.prompt_key to a column that there is.")
    found = "null" if value is None else type(value).__name__
    return DataError(f"{record.where}: {key!r} is {found}; a prompt is a string or a list of messages. Set "
                     "rollout.prompt_key to another column, or remove such rows.")

  def _asked(self, record: Record, column: str, messages: list[dict], used: set[str], ends: bool) -> Asked:
    """`ends`: what the assistant says at the end is no part of the prompt."""
    answer = None
    if messages[-1]["role"] == "assistant":
      if not ends or len(messages) == 1:
        raise DataError(f"{record.where}: {self._name(column)} ends with what the assistant says, so that there is "
                        "nothing to answer. Take that message out.")
      content = messages[-1].get("content")
      answer = None if content is None else text_of(content)
      messages = messages[:-1]
    row = self._conversation(record, column, messages, [1.0] * len(messages), None)
    beside = {self._name(key) for key in BESIDE if self._has(record, key)}
    columns = frozenset({*used, *beside, *self._image_columns(record)})
    return Asked(row.messages, columns, row.tools, row.variables, answer, row.images)


class Prompter:
  """Makes prompts as fine-tuning makes the beginnings of its examples.

  Args:
    config: the whole config, of which `chat`, `tokenizer` and what concerns images count.

  Attributes:
    template: the chat template, None if there is none.
    stop_ids: ids that end a completion: the tokenizer's, and with a template the one that ends a turn.

  Raises:
    ConfigError, DataError: see `ChatEncoder`.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer):
    self._encoder = encoder = ChatEncoder(config, tokenizer)
    self.template, self.stop_ids = encoder.template, encoder.stop_ids
    self._tokenizer = tokenizer
    head = begins_with(config.tokenizer, tokenizer)
    self._head = [Segment(tokenizer.decode(head, skip_special=False))] if head else []
    self._images = encoder.images
    self._shapes = ShapeReader(fields_of(config.chat), config.chat.roles, self._images)
    self._prompts = PromptReader(fields_of(config.chat), config.chat.roles, self._images)
    self._protocol = ShapeReader({}, config.chat.roles, self._images)

  def text(self, text: str, where: str = "prompt", images: Iterable[Any] = ()) -> Prompt:
    """A text to be continued, after what begins texts (`tokenizer.add_bos`). No special token is recognised in it.

    Args:
      text: with a marker for each image (`chat.image_marker`), or for none: then they stand before it.
      images: of it: paths, the bytes of image files, or whatever else rows may have.

    Raises:
      DataError: it has no tokens; ImageError: an image cannot be used.
    """
    utf8(text, where)
    refs: Sequence[ImageRef] = self._refs(images, where)
    first, placed = "", text
    if refs:
      try:
        first, placed, refs = self._images.place(text, refs)
      except DataError as e:
        raise DataError(f"{where}: {e}") from e
    head = self._head
    if not head and not text and not refs and (bos := self._tokenizer.named_tokens.get("bos_token")):
      head = [Segment(bos)]  # something has to be there, and transformers begins with it, too
    segments = [*([Segment(first)] if first else []), *head, self._segments.ordinary(placed)]
    return self._prompt(segments, text, refs, where)

  def messages(self, messages: Iterable[Mapping], tools: Iterable[Mapping] | None = None, where: str = "prompt",
               images: Iterable[Any] = (), **variables: Any) -> Prompt:
    """A conversation that the assistant is to go on with; special tokens only where the template writes them.

    Args:
      messages: a content is a string or a list of parts, {"type": "text", "text": …}, {"type": "image", "image": …}
        or {"type": "video", "video": …}.
      tools, **variables: of the template.
      images: those of parts without an image of their own, or of markers in the texts; see `text`.

    Raises:
      ConfigError: there is no chat template.
      DataError: the template refuses the conversation, or leaves out what others than the assistant say in it, or a
        tool.
    """
    if self.template is None:
      raise no_template(f"{where} is a conversation")
    shown, refs = self._attached(messages, where, self._refs(images, where))
    schemas = None if tools is None else [dict(tool) for tool in tools]
    try:
      rendered = self._encoder.renderer.render_spans(shown, tools=schemas, add_generation_prompt=True,
                                                     inert_tokens=self._tokenizer.special_tokens, **variables)
      self._encoder.finder.check_shown(Conversation("", shown, [], len(shown), schemas, variables), [], [rendered])
    except DataError as e:
      raise DataError(f"{where}: {e}") from e
    utf8(rendered.text, where)
    return self._prompt([Segment(rendered.text, rendered.inert)], rendered.text, refs, where)

  def request(self, fields: Mapping[str, Any]) -> Prompt:
    """A conversation as requests of chat completions have it, whatever names the run's own rows have: `messages`,
    `tools` and `chat_template_kwargs`. Raises: see `messages`; DataError: what is wrong in it."""
    messages, tools, variables = self._protocol.request(Record("", "request", dict(fields)))
    return self.messages(messages, tools, "request", **variables)

  def _attached(self, messages: Iterable[Mapping], where: str, refs: tuple[ImageRef, ...] = ()
                ) -> tuple[list[dict], tuple[ImageRef, ...]]:
    """See `attach`; unchanged where the model sees no images."""
    if self._images is None:
      return [dict(m) for m in messages], refs
    parts = [{**m, "content": content_parts(
        m["content"], f"{where}: messages[{i}].content", self._images.check_videos)}
             if isinstance(m.get("content"), list) else dict(m) for i, m in enumerate(messages)]
    return attach(parts, refs, where, None, self._images.markers)

  def _refs(self, images: Iterable[Any], where: str) -> tuple[ImageRef, ...]:
    refs = tuple(image if isinstance(image, ImageRef) else ImageRef(
        image, f"{where}: image {i}", video=isinstance(image, bytes) and is_video(image))
                 for i, image in enumerate(images))
    if refs and self._images is None:
      raise ConfigError(f"{where} has images, but the model sees none (model.vision.tower is 'none').")
    return refs

  def _prompt(self, segments: list[Segment], text: str, refs: Sequence[ImageRef], where: str) -> Prompt:
    loaded = self._images.read(refs) if refs else []
    ((ids, weights, remarks),) = self._encoder.tokenize([segments], [where], [loaded])
    if not len(ids):
      raise DataError(f"{where}: the prompt is empty, and there is no BOS token to start from.")
    prompt = Prompt(ids, text, where=where, segments=tuple(segments), remarks=remarks)
    if not refs:
      return prompt
    ids, _, places = self._images.finish(ids, weights, loaded)
    shown = Images(loaded, self._images.preprocess)
    return prompt._replace(ids=ids, text=self._shown(text, loaded), images=shown, image_places=places)

  def _shown(self, text: str, images: Sequence[EncodedImage]) -> str:
    """A text for people, with the marker of each image or video in its place."""
    for image in images:
      text = text.replace(IMAGE, self._images.markers[image.seconds is not None], 1)
    return text

  def answered(self, prompt: Prompt, answer: str) -> tuple[np.ndarray, int]:
    """(ids of a prompt with a text behind it, int32 [n]; how many of them are the prompt's).

    They are those of the whole text, so that the answer is tokenised as in training. A token that has characters of
    both is the answer's. No special token is recognised in the latter.
    """
    last, start = prompt.segments[-1], len(prompt.segments[-1].text)
    inert = (*last.inert, *(start + at for at in self._segments.literals(answer)))
    whole = Segment(last.text + answer, inert, ((start, start + len(answer), 1.0),))
    images = getattr(prompt.images, "files", ())
    ((ids, weights, _),) = self._segments.encode([[*prompt.segments[:-1], whole]], [images])
    if self._images is not None:
      ids, weights, _ = self._images.finish(ids, weights, images)
    return ids, int(np.argmax(weights > 0)) if weights.any() else len(ids)

  def ask(self, record: Record, prompt_key: str | None = None) -> Asked:
    """The record's prompt, not rendered yet; a string in the column `prompt_key` is what the user says where there is a
    chat template. See `PromptReader.ask`."""
    return self._prompts.ask(record, prompt_key, self.template is not None)

  def asked(self, asked: Asked, where: str) -> Prompt:
    """The prompt that a record asks for, with the answer if it is known. Raises: see `text`, `messages`."""
    if isinstance(asked.content, str):
      return self.text(asked.content, where, asked.images)
    prompt = self.messages(asked.content, asked.tools, where, asked.images, **asked.variables)
    return prompt._replace(answer=asked.answer)

  def added_text(self, text: str) -> np.ndarray:
    """Ids, int32 [n], of a text behind a completion that has ended. No special token is recognised in it."""
    return self._segments.behind(self._tokenizer.named_tokens.get("eos_token"), self._segments.ordinary(text))

  def added_messages(self, messages: list[dict], answer: str, added: list[dict], tools: list[dict] | None = None, *,
                     ended: bool = True, **variables: Any) -> tuple[np.ndarray, Sequence[np.ndarray]]:
    """(ids, int32 [n], of all that a template writes from the end of what the assistant says to its next turn; the
    images in it).

    Args:
      messages: the conversation up to what the assistant answers.
      added: the messages behind its answer.
      ended: the answer has the token that ends it; else that is among these ids.
      tools, **variables: see `messages`.

    Raises:
      DataError: the template refuses the conversation, or hides the assistant's answer in it; an image cannot be used,
        or the model sees none.
    """
    if self._images is None and any(not isinstance(message["content"], str) for message in added):
      raise DataError("what is added has parts, but the model sees no images (model.vision.tower is 'none').")
    shown, refs = self._attached(added, "what is added")
    loaded = self._images.read(refs) if refs else []
    ids = self._segments.behind(*self._encoder.finder.behind(messages, answer, shown, tools, variables, ended), loaded)
    if not refs:
      return ids, ()
    return self._images.finish(ids, np.zeros(len(ids), np.float32), loaded)[0], Images(loaded, self._images.preprocess)

  @property
  def _segments(self) -> SegmentEncoder:
    return self._encoder.segment_encoder

  def record(self, record: Record, prompt_key: str | None = None, answer_key: str | None = None) -> Prompt:
    """A record's prompt with its answer.

    Args:
      record: of one of the shapes of fine-tuning, unless columns are named.
      prompt_key: column of a question, which with a chat template becomes what the user says.
      answer_key: column of its answer.

    Raises:
      DataError: naming the record and what it lacks.
    """
    if prompt_key is not None:
      question, answer = (self._string(record, key) for key in (prompt_key, answer_key))
      refs = self._shapes.images_of(record)
      if self.template is None:
        question += self._images.prefix_end if self._prompts.is_prefix(prompt_key) else ""
        return self.text(question, record.where, refs)._replace(answer=answer)
      asked = [dict(role="user", content=question)]
      return self.messages(asked, where=record.where, images=refs)._replace(answer=answer)
    row = self._shapes.read(record)
    if not isinstance(row, Conversation):
      if row.prompt is None:
        raise DataError(f"{record.where}: is a text, without a prompt and an answer. Name the columns that hold them: "
                        "prompt_key and answer_key of the evaluator.")
      return self.text(row.prompt, record.where, row.images)._replace(answer=row.completion)
    said = [i for i, message in enumerate(row.messages) if message["role"] == "assistant" and message.get("content")]
    if not said or said[-1] == 0:
      raise DataError(f"{record.where}: the assistant answers nothing, so that there is no answer to compare with.")
    before = row.messages[:said[-1]]
    images = row.images[:sum(part["type"] in KINDS for message in before for part in parts_of(message))]
    prompt = self.messages(before, row.tools, record.where, images, **row.variables)
    return prompt._replace(answer=text_of(row.messages[said[-1]]["content"]))

  def _string(self, record: Record, key: str) -> str:
    if key not in record.fields:
      raise DataError(f"{record.where}: no key {key!r}; found {shown_names(record.fields)}. Set "
                      "prompt_key and answer_key to columns that there are.")
    value = record.fields[key]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
      raise DataError(f"{record.where}: {key!r} must be a string or a number, found {type(value).__name__}.")
    return str(value)
