"""Texts that are embedded: what they may look like in rows, and the tokens they become.

    "…"                                     a string
    {"text": "…", "image" or "images": …}   with images, where `chat.image_marker` stands, else before it
    {"image" or "images": …}, bytes         images alone; {"bytes": …, "path": …} is one, too
    [messages], {"messages": …, "tools": …, "images": …}    a conversation, which the chat template renders

Images are those of docs/images.md, of models that see images.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.chat.builtin import find_template, no_template
from input_pipeline.chat.image_parts import IMAGE_KIND, PART_TYPES, attach
from input_pipeline.chat.image_placeholders import ImageFormat, image_format
from input_pipeline.chat.image_template import ImageTemplate
from input_pipeline.chat.schema import IMAGES, Conversation, Plain, ShapeReader
from input_pipeline.chat.segments import Segment, SegmentEncoder
from input_pipeline.chat.template import ChatTemplate
from input_pipeline.examples.conversations import texts_of
from input_pipeline.images.images import KEYS, EncodedImage, ImageRef
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import Tokenizer, begins_with
from trainer.errors import ConfigError, DataError

# A text that is embedded; a Plain has images.
Text = str | Plain | Conversation
ENDS = ("tokenizer", "eos")
# Ends of texts that are taken for forgotten images rather than for words.
_FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".avif", ".jp2")


class Embedded(NamedTuple):
  """The tokens of a text (int32 [n]), whether it was cut, and its images, whose tokens begin at `places`."""

  ids: np.ndarray
  cut: bool
  images: tuple[EncodedImage, ...] = ()
  places: tuple[int, ...] = ()


class TextReader:
  """Finds the texts in the values of a row. `images`: how the model sees them; None: it does not."""

  def __init__(self, images: ImageFormat | None = None):
    self._images, self._shapes = images, ShapeReader(images=images)

  def read(self, record: Record, values: Sequence[tuple[str, Any]], shared: Sequence[ImageRef] = ()) -> list[Text]:
    """The text of each (column, value).

    Args:
      values: in order.
      shared: the images in the row's own columns, for the places in the texts that have none of their own; without such
        places they stand before the first text.

    Raises:
      DataError: names the row, the column, and what was found.
    """
    if any(ref.video for ref in shared):
      raise DataError(f"{record.where}: has a video in a column of its own; here it belongs to a text: {{\"text\": …, "
                      "\"video\": …}. Put it there.")
    places = [self._places(value) if shared else 0 for _, value in values]
    if shared and not any(places) and not _has_own(values[0][1]):
      places[0] = len(shared)
    if sum(places) != len(shared):
      raise DataError(f"{record.where}: its columns have {len(shared)} image(s), for {sum(places)} places of images in "
                      "its texts. Have one for each.")
    waiting = iter([ref.value for ref in shared])
    return [self._text(record, key, value, [next(waiting) for _ in range(count)])
            for (key, value), count in zip(values, places, strict=True)]

  def _places(self, value: Any) -> int:
    """How many images a text waits for: its parts without an image of their own, else the markers in it."""
    marker, fields = self._images.markers[0], {"text": value} if isinstance(value, str) else _fields(value) or {}
    if _has_own(value):
      return 0
    messages = fields.get("messages")
    contents = [fields.get("text"), *(message.get("content") for message in messages if isinstance(message, dict))] if (
        isinstance(messages, list)) else [fields.get("text")]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    of_images = [part for part in parts if PART_TYPES.get(str(part.get("type"))) == IMAGE_KIND]
    bare = sum(not any(part.get(key) is not None for key in KEYS) for part in of_images)
    texts = [content for content in contents if isinstance(content, str)] + [
        part["text"] for part in parts if isinstance(part.get("text"), str)]
    return bare or sum(text.count(marker) for text in texts)

  def _text(self, record: Record, key: str, value: Any, shared: list[Any]) -> Text:
    fields = {"text": value} if isinstance(value, str) and (shared or value.strip()) else _fields(value)
    if fields is None:
      what = "empty" if isinstance(value, str) else f"{value!r:.60} ({type(value).__name__})"
      more = "" if self._images is None else ', or {"text": …, "image": …}'
      raise DataError(f"{record.where}: {key} is {what}; expected a text, or messages{more}. Repair or remove the row.")
    where = f"{record.where}: {key}"
    if shared:
      fields = {**fields, "images": shared}
    found = self._shapes.read(record._replace(where=where, fields=fields))
    if isinstance(found, Conversation):
      if any(weight != 1 for weight in found.weights):
        raise DataError(f"{where} has messages with a weight, but all of a text is embedded. Leave it out.")
      return found
    if found.images:
      return found
    if not found.completion.strip():
      raise DataError(f"{where} is empty; expected a text. Repair or remove the row.")
    if self._images is not None and _is_file(found.completion):
      raise DataError(f"{where} is {found.completion[:60]!r}, a text that looks like an image. Write it as "
                      f'{{"image": …}} (docs/embeddings.md).')
    return found.completion


def is_text(value: Any) -> bool:
  """Whether a list is one text, a conversation, and not several."""
  return not isinstance(value, list) or _fields(value) is not None


def _fields(value: Any) -> dict[str, Any] | None:
  """What a value that is no string says, as the columns of a row; None: no text."""
  if isinstance(value, bytes):
    return {"text": "", "image": value}
  if isinstance(value, list):
    messages = value and all(isinstance(m, dict) and not {"messages", "text", *IMAGES, *KEYS} & m.keys() for m in value)
    return {"messages": value} if messages else None
  if not isinstance(value, dict):
    return None
  given = {key: entry for key, entry in value.items() if entry is not None}
  if "messages" in given:
    return given
  if not given.keys() - {"text", *IMAGES}:
    return {"text": "", **given} if given else None
  return {"text": "", "image": given} if {*KEYS} & given.keys() and not given.keys() - {*KEYS} else None


def _has_own(value: Any) -> bool:
  """Whether a value has images of its own beside its text or messages."""
  fields = None if isinstance(value, str) else _fields(value)
  return fields is not None and any(fields.get(key) is not None for key in IMAGES)


def _is_file(text: str) -> bool:
  return text.startswith("data:image/") or not any(c.isspace() for c in text) and text.lower().endswith(_FILES)


class Rendering(NamedTuple):
  """How conversations become texts.

  Attributes:
    template: None: they do not.
    generation_prompt: they end with what begins the model's next message.
    as_messages: each text is what the user says in one, and a prompt its system message.
  """

  template: ChatTemplate | None = None
  generation_prompt: bool = False
  as_messages: bool = False


class TextTokens:
  """What a text that is embedded becomes: a prompt before it, cut to a length, with what begins and ends each text.

  With ends="tokenizer" that is what other readers of the tokenizer's folder write around a text (its post-processor),
  with "eos" also EOS, and BOS where they write nothing, as `tokenizer.add_eos` and `add_bos` say. A conversation is
  what its template renders, as transformers' `apply_chat_template` has it: nothing stands before or behind it; what is
  behind the user's last words stays where these are cut.

  Args:
    section: `config.tokenizer`.
    max_length: tokens of a text, ends and images included.
    ends: one of ENDS.
    rendering: of conversations.
    images: how the model sees images; None: it does not.

  Attributes:
    head, tail: ids before and after each text.

  Raises:
    ConfigError: a tokenizer without EOS, which is to end texts; no template for messages; or no room for text.
  """

  def __init__(self, tokenizer: Tokenizer, section: ConfigDict, max_length: int, ends: str = "eos",
               rendering: Rendering = Rendering(), images: ImageFormat | None = None):  # noqa: B008 (it is frozen)
    head, tail = getattr(tokenizer, "ends", ((), ()))
    add_eos = section.add_eos and ends == "eos" and not tail
    if add_eos and tokenizer.eos_id is None:
      raise ConfigError("the tokenizer has no EOS to end texts with. Name one in tokenizer_config.json (eos_token), or "
                        "set tokenizer.add_eos=False.")
    self.head = begins_with(section, tokenizer) if ends == "eos" and not head and not tail else head
    self.tail = (tokenizer.eos_id,) if add_eos else tail
    self._tokenizer, self._room, self._max = tokenizer, max_length - len(self.head) - len(self.tail), max_length
    self._template, self._generation_prompt, self._as_messages = rendering
    self._images = images
    if self._as_messages and self._template is None:
      raise no_template("strategy.as_messages makes conversations of texts")
    if self._room < 1:
      raise ConfigError(f"strategy.max_length is {max_length}: beside {len(self.head) + len(self.tail)} tokens that "
                        "begin and end a text there is no room for it. Raise it, or seq_len.")

  def prompted(self, prompt: str, text: Text) -> Text:
    """With the prompt that texts of its kind have, which stands before images that are before the text, too. In a
    conversation an instruction is a message of its own, unless all texts are made conversations."""
    if not self._as_messages:
      return prompt + text if isinstance(text, str) else (
          text._replace(prompt=prompt) if isinstance(text, Plain) else text)
    talk = text if isinstance(text, Conversation) else self._said(text)
    system = [{"role": "system", "content": prompt}] if prompt else []
    return talk._replace(messages=[*system, *talk.messages])

  def _said(self, text: str | Plain) -> Conversation:
    """A text as what the user says."""
    said, refs = (text, ()) if isinstance(text, str) else (text.completion, text.images)
    messages = [{"role": "user", "content": said}]
    if refs and self._images is not None:
      messages, refs = attach(messages, refs, "a text", None, self._images.markers)
    return Conversation("messages", messages, [1.0], 1, images=refs)

  def encode(self, texts: Sequence[Text]) -> list[Embedded | str]:
    """The tokens of each text, prompts included; or why its row is dropped, for an image that cannot be used and may
    be.

    Raises:
      DataError: a conversation, and there is no template, or it refuses it; images that are too many for the length, or
        for their places; ImageError: one that cannot be used.
    """
    head, tail = (np.array(ids, np.int32) for ids in (self.head, self.tail))
    plain = iter(self._tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
    others = iter(self._others([text for text in texts if not isinstance(text, str)]))
    found: list[Embedded | str] = []
    for text in texts:
      if isinstance(text, str):
        ids = next(plain)
        found.append(Embedded(np.concatenate([head, ids[:self._room], tail]), len(ids) > self._room))
      else:
        found.append(next(others))
    return found

  @cached_property
  def fingerprint(self) -> list:
    """What conversations and images are made with."""
    t = self._template
    seen: list = [] if self._images is None else [self._images.fingerprint]
    seen += ["as messages"] * self._as_messages
    return seen if t is None else [self._generation_prompt, str(t.date), [
        [of.source, of.special_tokens] for of in (t, t.tool_use) if of is not None], *seen]

  def _others(self, texts: list[Plain | Conversation]) -> list[Embedded | str]:
    """Those of texts that are no strings."""
    if not texts:
      return []
    pieces = [self._conversation(text) if isinstance(text, Conversation) else self._around_head(text) for text in texts]
    images = [self._load(text) for text in texts]
    # All of a text's stand in one of its pieces.
    shown = [[] if isinstance(own, str) else own for own, some in zip(images, pieces, strict=True) for _ in some]
    tokens = iter(self._encoder.encode([[segment] for some in pieces for segment in some], shown))
    found: list[Embedded | str] = []
    for text, some, own in zip(texts, pieces, images, strict=True):
      ids = [next(tokens).ids for _ in some]
      found.append(own if isinstance(own, str) else self._whole(text, ids, own))
    return found

  def _load(self, text: Plain | Conversation) -> list[EncodedImage] | str:
    """A text's images as they stand in it; or why it is dropped."""
    if not text.images or self._images is None:
      return []
    refs = self._images.in_order(text.completion, text.images) if isinstance(text, Plain) else text.images
    return self._images.load(refs)

  def _conversation(self, talk: Conversation) -> list[Segment]:
    if self._template is None:
      raise no_template("texts that are embedded are conversations")
    rendered = self._renderer.render_spans(
        talk.messages, tools=talk.tools, inert_tokens=self._tokenizer.special_tokens,
        add_generation_prompt=self._generation_prompt, **talk.variables)
    return [Segment(rendered.text, rendered.inert)]

  @cached_property
  def _ending(self) -> np.ndarray:
    """The ids that a template writes behind what the user says last; none if it refuses to say."""
    try:
      one, other = (self._conversation(self._said(said))[0].text for said in "ab")
    except DataError:
      return np.zeros(0, np.int32)
    ending = os.path.commonprefix([one[::-1], other[::-1]])[::-1]
    return self._encoder.encode([[Segment(ending)]])[0].ids

  def _around_head(self, text: Plain) -> list[Segment]:
    """What stands before the ids that begin each text, if anything, and behind them."""
    assert self._images is not None
    before, placed, _ = self._images.place(text.completion, text.images)
    return [*([Segment(before)] if before else []), self._encoder.ordinary((text.prompt or "") + placed)]

  def _whole(self, text: Plain | Conversation, pieces: list[np.ndarray], images: list[EncodedImage]) -> Embedded:
    """The text with its ends, and its images in their places, cut to its length behind the last of them."""
    tail = np.array(() if isinstance(text, Conversation) else self.tail, np.int32)
    head = np.array(() if isinstance(text, Conversation) else self.head, np.int32)
    ids = np.concatenate([*pieces[:-1], head, pieces[-1]])
    places: tuple[int, ...] = ()
    if images and self._images is not None:
      ids, _, places = self._images.finish(ids, np.zeros(len(ids), np.float32), images)
    if isinstance(text, Conversation) and len(ids) > self._max:  # which keeps how it ends, too
      ends_so = len(self._ending) and np.array_equal(ids[-len(self._ending):], self._ending)
      tail, ids = (self._ending, ids[:-len(self._ending)]) if ends_so else (tail, ids)
    room = self._max - len(tail)
    if places and (last := places[-1] + images[-1].tokens) > room:
      raise DataError(f"a text has {last + len(tail)} tokens up to the end of its last image, but strategy.max_length "
                      f"is {self._max}, and no image is cut. Raise it, and seq_len, or make images smaller "
                      "(docs/images.md).")
    return Embedded(np.concatenate([ids[:room], tail]), len(ids) > room, tuple(images), places)

  @cached_property
  def _encoder(self) -> SegmentEncoder:
    return SegmentEncoder(self._tokenizer, self._images)

  @cached_property
  def _renderer(self) -> ChatTemplate | ImageTemplate:
    assert self._template is not None
    return self._template if self._images is None else ImageTemplate(self._template, self._tokenizer, self._images)


def max_length_of(config: ConfigDict) -> int:
  """Tokens of a text at most: `strategy.max_length`, or as many as let all texts of a row fit into seq_len."""
  own = config.strategy.max_length
  return config.seq_len // (2 + config.strategy.negatives) if own is None else own


def text_tokens(config: ConfigDict, tokenizer: Tokenizer) -> TextTokens:
  """That of a run."""
  cfg = config.strategy
  rendering = Rendering(find_template(config.chat, tokenizer), bool(cfg.generation_prompt), bool(cfg.as_messages))
  return TextTokens(tokenizer, config.tokenizer, max_length_of(config), cfg.text_ends, rendering,
                    image_format(config, tokenizer))


def strings_of(text: Text) -> Iterable[str]:
  """What it says."""
  if isinstance(text, Conversation):
    return [part for message in text.messages for part in texts_of(message)]
  return [text.completion if isinstance(text, Plain) else text]
