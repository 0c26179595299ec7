"""Conversations, prompts with completions, and texts: their tokens, and which of these are trained.

`schema.py` says what a row is, `spans.py` which part of a rendered conversation each message is; here it is decided
what is trained of it, and everything becomes token ids and weights.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.chat.builtin import find_template, no_template
from input_pipeline.chat.image_parts import refuse_stand_in, text_of
from input_pipeline.chat.image_placeholders import image_format
from input_pipeline.chat.image_template import ImageTemplate
from input_pipeline.chat.schema import COLUMNS, REASONING, Conversation, Plain, ShapeReader
from input_pipeline.chat.segments import Segment, SegmentEncoder, Tokens
from input_pipeline.chat.spans import POLICIES, SpanFinder
from input_pipeline.chat.template import ChatTemplate
from input_pipeline.examples.base import NOTHING_TO_TRAIN, Encoded
from input_pipeline.images.images import EncodedImage, ImageRef
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import Tokenizer, begins_with
from trainer.errors import ConfigError, DataError, one_of

# Raise when the same rows and options would give other tokens or weights.
VERSION = 3
TRAIN_ON = ("auto", "completion", "assistant", "last_assistant", "all")


class ChatEncoder:
  """Rows of every shape in `schema.py` as tokens with weights.

  Args:
    config: the whole config, of which `chat`, `tokenizer` and what concerns images count.
    trains_all: `chat.train_on` = auto stands for all: pretraining, which comes here for rows with images alone, learns
      all that it reads.

  Attributes:
    images: how the model sees images; None: it does not.

  Raises:
    ConfigError: a value of `chat` that is not allowed, an unknown template; see `ImageFormat`.
    DataError: a template that is not valid.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None, trains_all: bool = False):
    self._chat, self._tokenizer = config.chat, tokenizer
    self._head = () if tokenizer is None else begins_with(config.tokenizer, tokenizer)
    self._add_eos = config.tokenizer.add_eos
    one_of("chat.train_on", self._chat.train_on, TRAIN_ON)
    one_of("chat.on_rewritten_history", self._chat.on_rewritten_history, POLICIES)
    self._roles = _roles(self._chat)
    self.images = image_format(config, tokenizer)
    trains_all = trains_all and self.images is not None and not self._roles
    self._train_on = "all" if trains_all and self._chat.train_on == "auto" else self._chat.train_on
    self.sees_images = self.images is not None
    self._shapes = ShapeReader(fields_of(self._chat), self._roles, self.images)
    # What turns conversations into text, for export and for generation; None: the tokenizer came with none.
    self.template: ChatTemplate | None = None if tokenizer is None else find_template(self._chat, tokenizer)

  @cached_property
  def fingerprint(self) -> str:
    c, template = self._chat, self.template
    bos = () if self._tokenizer.bos_id is None else (self._tokenizer.bos_id,)
    head = True if self._head == bos else list(self._head) or False  # as caches of version 0.1 have it
    sources = None if template is None else [
        [t.source, t.special_tokens] for t in (template, template.tool_use) if t is not None]
    return json.dumps(["chat", VERSION, self._tokenizer.fingerprint, self._tokenizer.stop_ids, sources, c.date,
                       self._train_on, self._roles, c.on_rewritten_history, sorted(fields_of(c).items()), head,
                       self._add_eos, *([] if self.images is None else [self.images.fingerprint])], sort_keys=True)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end what the model says: the tokenizer's, and the one with which the template ends a turn.

    Raises:
      DataError: the template ends a turn with no token.
    """
    if self.template is None:
      return self._tokenizer.stop_ids
    if self.finder.problem is not None:
      raise self.finder.problem
    return self.finder.stop_ids

  def describe(self, record: Record) -> str:
    """The row's shape, and whether its end is not trained, to be counted for each source."""
    row = self._shapes.read(record)
    if isinstance(row, Conversation) and row.messages[-1]["role"] != "assistant":
      return f"{row.shape}, ends with the {row.messages[-1]['role']}"
    return row.shape

  def columns(self, record: Record) -> frozenset[str]:
    return self._shapes.columns(record)

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    """See `Encoder`. A conversation gives several documents where its template rewrites the history."""
    examples, places = [], []
    results: list[Encoded | str] = []
    for record in records:
      row = self._shapes.read(record)
      images = self.load(self._in_order(row, record.where))
      if isinstance(images, str):
        results.append(images)
        continue
      found = self.segments(row, record.where)
      if not found:
        results.append(NOTHING_TO_TRAIN)
      for segments in found:
        examples.append(segments)
        places.append((len(results), record.where, images))
        results.append(NOTHING_TO_TRAIN)
    tokenized = self.tokenize(examples, [where for _, where, _ in places], [images for *_, images in places])
    for (place, _, images), (ids, weights, remarks) in zip(places, tokenized, strict=True):
      if len(weights) < 2 or weights[1:].any():
        ids, weights, seen = self.finish(ids, weights, images)
        every = (weights[1:] == 1).all()
        results[place] = Encoded(ids, None if every else weights, images=tuple(images[:len(seen)]), places=seen,
                                 remarks=remarks)
    return results

  def _in_order(self, row: Conversation | Plain, where: str) -> Sequence[ImageRef]:
    """The row's images as they stand in its text."""
    if self.images is None or isinstance(row, Conversation):
      return row.images
    try:
      return self.images.in_order(row.completion if row.prompt is None else row.prompt, row.images)
    except DataError as e:
      raise DataError(f"{where}: {e}") from e

  def load(self, refs: Sequence[ImageRef]) -> list[EncodedImage] | str:
    """The images of a row, or why it is dropped. Raises ImageError: one of them cannot be used."""
    return self.images.load(refs) if refs else []

  def finish(self, ids: np.ndarray, weights: np.ndarray, images: Sequence[EncodedImage]
             ) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """See `ImageFormat.finish`."""
    return (ids, weights, ()) if self.images is None else self.images.finish(ids, weights, images)

  def segments(self, row: Conversation | Plain, where: str, empty: bool = False) -> list[list[Segment]]:
    """The examples that a row gives; none if nothing in it is trained. `empty`: what is trained may say nothing.

    Raises:
      DataError: the row and the template do not fit; begins with `where`.
      ConfigError: there is no template.
    """
    if self.template is None and not isinstance(row, Plain):
      raise no_template(f"{where} is a conversation")
    try:
      return self._plain(row, empty) if isinstance(row, Plain) else self._conversation(row, empty)
    except DataError as e:
      raise DataError(f"{where}: {e}") from e

  def tokenize(self, examples: list[list[Segment]], wheres: list[str], images: Sequence[Sequence[EncodedImage]]
               ) -> list[Tokens]:
    """The tokens of each example, which `wheres` name in messages, with its images.

    Raises:
      DataError: BOS twice in one place.
    """
    tokenized = self.segment_encoder.encode(examples, images)
    for tokens, where in zip(tokenized, wheres, strict=True):
      self._check_bos(tokens.ids, where)
    return tokenized

  def texts(self, record: Record) -> Iterable[str]:
    row = self._shapes.read(record)
    if isinstance(row, Plain):
      return (row.completion,) if row.prompt is None else (row.prompt, row.completion)
    return [text for message in row.messages for text in texts_of(message)]

  @cached_property
  def finder(self) -> SpanFinder:
    """What finds turns in conversations. Raises ConfigError if there is no template."""
    if self.template is None:
      raise no_template("the data has conversations")
    return SpanFinder(self.renderer, self._tokenizer)

  @cached_property
  def renderer(self) -> ChatTemplate | ImageTemplate:
    """The template, whose output has IMAGE where there are images."""
    return self.template if self.images is None else ImageTemplate(self.template, self._tokenizer, self.images)

  @cached_property
  def segment_encoder(self) -> SegmentEncoder:
    """What turns texts into tokens."""
    return SegmentEncoder(self._tokenizer, self.images)

  def _conversation(self, row: Conversation, empty: bool = False) -> list[list[Segment]]:
    """The examples that a conversation gives; none if nothing in it is trained."""
    finder = self.finder
    if self._train_on == "all" and not self._roles:
      return [finder.whole(row, row.weights)]
    weights = [w if trained else 0.0 for w, trained in zip(row.weights, self._trained(row), strict=True)]
    for i, (message, weight) in enumerate(zip(row.messages, weights, strict=True)):
      if weight and not empty and not any(text.strip() for text in texts_of(message)):
        raise DataError(f"messages[{i}].content is empty, and this message is trained. Remove the row, or give the "
                        'message "weight": 0.')
    return finder.turns(row, weights, self._chat.on_rewritten_history)

  def _trained(self, row: Conversation) -> list[bool]:
    """Which messages are."""
    roles = [message["role"] for message in row.messages]
    if self._roles:
      return [role in self._roles for role in roles]
    said = [i for i, role in enumerate(roles) if role == "assistant"]
    train_on = self._train_on
    if train_on == "completion" or train_on == "auto" and row.shape in ("prompt/completion", "instruction/output"):
      said = [i for i in said if i >= row.prompt]
    elif train_on == "last_assistant":
      said = said[-1:]
    return [i in said for i in range(len(roles))]

  def _plain(self, row: Plain, empty: bool = False) -> list[list[Segment]]:
    """Strings as they stand, with BOS before and EOS behind."""
    train_on, key = self._train_on, "text" if row.prompt is None else "completion"
    if not empty and not row.completion.strip():
      raise DataError(f"{key} is empty. Remove the row.")
    if row.prompt is None:
      if self._roles or train_on not in ("auto", "all"):
        option = f"chat.roles={self._roles}" if self._roles else f"chat.train_on={train_on!r}"
        raise DataError(f"a text has no turns, of which {option} could choose. Leave it unset, or take texts from a "
                        "source of their own.")
      before = answer = 1.0
    else:
      before = float("user" in self._roles if self._roles else train_on == "all")
      answer = float(not self._roles or "assistant" in self._roles)
    t = self._tokenizer
    if self._add_eos and t.eos_id is None:
      raise DataError(f"the tokenizer has no EOS to end this {key} with, so that the model would never learn to stop. "
                      "Name one in tokenizer_config.json (eos_token), or set tokenizer.add_eos=False.")
    names = t.named_tokens
    head = [Segment(t.decode(self._head, skip_special=False), rest=min(before, answer))] if self._head else []
    eos = [Segment(names["eos_token"], rest=answer)] if self._add_eos else []
    prompt, completion, first = row.prompt or "", row.completion, ""
    if self.images is not None:
      first, asked, _ = self.images.place(completion if row.prompt is None else prompt, row.images)
      prompt, completion = ("", asked) if row.prompt is None else (asked, completion)
      refuse_stand_in(row.completion)
    # Both at once, as transformers and TRL tokenise them: cut, the second would begin like a text.
    text = self.segment_encoder.ordinary(prompt + completion, before)._replace(
        spans=((len(prompt), len(prompt) + len(completion), answer),))
    return [[*([Segment(first)] if first else []), *head, text, *eos]]

  def _check_bos(self, ids: np.ndarray, where: str) -> None:
    """A template may begin each turn with BOS; two of them in one place are a mistake, of its or of the tokenizer's."""
    bos = self._tokenizer.bos_id
    if bos is None or bos in self._tokenizer.stop_ids:
      return
    doubled = np.flatnonzero((ids[1:] == bos) & (ids[:-1] == bos))
    if len(doubled):
      raise DataError(f"{where}: BOS stands twice at the place {doubled[0]} of its {len(ids)} tokens. Correct the "
                      f"template ({'' if self.template is None else self.template.where}).")


def texts_of(message: dict) -> list[str]:
  """What a message says."""
  calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
  reasoning = [message[key] for key in REASONING if key in message][:1]
  return [*reasoning, text_of(message.get("content", "")), *calls]


def _roles(chat: ConfigDict) -> list[str]:
  roles = list(chat.roles)
  if not all(isinstance(role, str) and role for role in roles):
    raise ConfigError(f"chat.roles is {chat.roles!r}; expected names of roles, e.g. ('assistant', 'tool').")
  if roles and chat.train_on != "auto":
    raise ConfigError(f"chat.roles and chat.train_on={chat.train_on!r} are both set. roles takes the place of "
                      "train_on: leave one of them at its default.")
  return roles


def fields_of(chat: ConfigDict) -> dict[str, str]:
  """{our name: theirs}."""
  fields = {}
  for pair in chat.fields:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
      raise ConfigError(f"chat.fields has {pair!r}; expected pairs of names, ours first: "
                        '(("messages", "dialogue"),).')
    ours, theirs = pair
    if ours not in COLUMNS or ours in fields:
      reason = "is named twice" if ours in fields else "is no name of ours"
      raise ConfigError(f"chat.fields: {ours!r} {reason}; names are {', '.join(COLUMNS)}, each with theirs behind it.")
    fields[ours] = theirs
  return fields
