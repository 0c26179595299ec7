"""Queries with texts that answer them: their tokens, each text a part of a document, for embeddings.

    query, positive                   texts; a positive may be a list, each with the query a document of its own
    negative                          near, but no answer (hard negatives): a text or a list

A text is a string, or a conversation that the chat template renders: messages, or {"messages": …, "tools": …}.
`anchor` is another name of query; `pos` of positive; `negatives`, `neg` and `negative_1`, `negative_2`, … of negative.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.chat.builtin import find_template, template_names
from input_pipeline.chat.image_placeholders import sees
from input_pipeline.chat.schema import Conversation, ShapeReader
from input_pipeline.chat.segments import Segment, SegmentEncoder
from input_pipeline.chat.template import ChatTemplate
from input_pipeline.examples.base import Encoded
from input_pipeline.examples.conversations import fields_of, texts_of
from input_pipeline.examples.roles import ABSENT, NEGATIVE, POSITIVE, QUERY
from input_pipeline.files import shown_names
from input_pipeline.remarks import CUT
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import Tokenizer, begins_with
from trainer.errors import ConfigError, DataError

# Raise when the same rows and options would give other tokens.
VERSION = 1
# A text that is embedded.
Text = str | Conversation
ENDS = ("tokenizer", "eos")
ALIASES = {"query": r"query|anchor", "positive": r"positive|pos", "negative": r"negatives?|neg|negative_\d+"}


class Match(NamedTuple):
  """A row."""

  query: Text
  positives: list[Text]
  negatives: list[Text]


class TextTokens:
  """What a text that is embedded becomes: a prompt before it, cut to a length, with what begins and ends each text.

  With ends="tokenizer" that is what other readers of the tokenizer's folder write around a text (its post-processor),
  with "eos" also EOS, and BOS where they write nothing, as `tokenizer.add_eos` and `add_bos` say. A conversation is
  what its template renders, as transformers' `apply_chat_template` has it: nothing stands before or behind it.

  Args:
    tokenizer: what encodes.
    section: `config.tokenizer`.
    max_length: tokens of a text, ends included.
    ends: one of ENDS.
    template: what renders conversations; None: there is none.
    generation_prompt: conversations end with what begins the model's next message.

  Attributes:
    head, tail: ids before and after each text.

  Raises:
    ConfigError: a tokenizer without EOS, which is to end texts; or no room for text.
  """

  def __init__(self, tokenizer: Tokenizer, section: ConfigDict, max_length: int, ends: str = "eos",
               template: ChatTemplate | None = None, generation_prompt: bool = False):
    head, tail = getattr(tokenizer, "ends", ((), ()))
    add_eos = section.add_eos and ends == "eos" and not tail
    if add_eos and tokenizer.eos_id is None:
      raise ConfigError("the tokenizer has no EOS to end texts with. Name one in tokenizer_config.json (eos_token), or "
                        "set tokenizer.add_eos=False.")
    self.head = begins_with(section, tokenizer) if ends == "eos" and not head and not tail else head
    self.tail = (tokenizer.eos_id,) if add_eos else tail
    self._tokenizer, self._room, self._max = tokenizer, max_length - len(self.head) - len(self.tail), max_length
    self._template, self._generation_prompt = template, generation_prompt
    if self._room < 1:
      raise ConfigError(f"strategy.max_length is {max_length}: beside {len(self.head) + len(self.tail)} tokens that "
                        "begin and end a text there is no room for it. Raise it, or seq_len.")

  def encode(self, texts: Sequence[Text]) -> list[tuple[np.ndarray, bool]]:
    """(ids int32 [n], whether it was cut) of each text, prompts included.

    Raises:
      DataError: a conversation, and there is no template, or it refuses it.
    """
    head, tail = (np.array(ids, np.int32) for ids in (self.head, self.tail))
    plain = iter(self._tokenizer.encode_batch([text for text in texts if isinstance(text, str)]))
    rendered = iter(self._rendered([text for text in texts if not isinstance(text, str)]))
    found = []
    for text in texts:
      ids, room = (next(plain), self._room) if isinstance(text, str) else (next(rendered), self._max)
      cut = ids[:room]
      found.append((np.concatenate([head, cut, tail]) if isinstance(text, str) else cut, len(ids) > room))
    return found

  @cached_property
  def fingerprint(self) -> list:
    """What conversations are made with."""
    t = self._template
    return [] if t is None else [self._generation_prompt, str(t.date), [
        [of.source, of.special_tokens] for of in (t, t.tool_use) if of is not None]]

  def _rendered(self, conversations: list[Conversation]) -> list[np.ndarray]:
    if conversations and self._template is None:
      raise DataError("a conversation, but the tokenizer has no chat template. Set chat.template to a file or to one "
                      f"of {', '.join(template_names())}.")
    segments = []
    for talk in conversations:
      rendered = self._template.render_spans(
          talk.messages, tools=talk.tools, inert_tokens=self._tokenizer.special_tokens,
          add_generation_prompt=self._generation_prompt, **talk.variables)
      segments.append([Segment(rendered.text, rendered.inert)])
    return [tokens.ids for tokens in SegmentEncoder(self._tokenizer).encode(segments)] if segments else []


def max_length_of(config: ConfigDict) -> int:
  """Tokens of a text at most: `strategy.max_length`, or as many as let all texts of a row fit into seq_len."""
  own = config.strategy.max_length
  return config.seq_len // (2 + config.strategy.negatives) if own is None else own


def text_tokens(config: ConfigDict, tokenizer: Tokenizer) -> TextTokens:
  """That of a run."""
  return TextTokens(tokenizer, config.tokenizer, max_length_of(config), config.strategy.text_ends,
                    find_template(config.chat, tokenizer), config.strategy.generation_prompt)


def prompted(prompt: str, text: Text) -> Text:
  """With the prompt that texts of its kind have, if it is a string: an instruction in a conversation is a message."""
  return prompt + text if isinstance(text, str) else text


def conversation(record: Record, key: str, value: Any) -> Conversation | None:
  """The conversation that a value of that column is; None: it is none.

  Raises:
    DataError: it is one that cannot be rendered.
  """
  fields = value if isinstance(value, dict) and "messages" in value else {"messages": value}
  if fields is not value and not (isinstance(value, list) and value and all(isinstance(m, dict) for m in value)):
    return None
  found = ShapeReader().read(record._replace(where=f"{record.where}: {key}", fields=fields))
  assert isinstance(found, Conversation)
  if any(weight != 1 for weight in found.weights):
    raise DataError(f"{record.where}: {key} has messages with a weight, but all of a text is embedded. Leave it out.")
  return found


class MatchReader:
  """Finds query, positives and negatives in a row, and checks them. `fields`: {our name: theirs}."""

  def __init__(self, fields: dict[str, str]):
    self._patterns = {ours: re.compile(re.escape(fields[ours]) if ours in fields else aliases)
                      for ours, aliases in ALIASES.items()}

  def match(self, record: Record) -> Match:
    """The row.

    Raises:
      DataError: names the record, the key, and what was found.
    """
    query, positives = self._texts(record, "query"), self._texts(record, "positive")
    for ours, found in (("query", query), ("positive", positives)):
      if not found and (there := self.columns_of(record, ours)):
        raise DataError(f"{record.where}: {there[0]} is an empty list; expected a text, or a list of texts. Repair or "
                        "remove the row.")
      if not found:
        raise DataError(f"{record.where}: no {ours!r} (or null); its columns are {shown_names(record.fields)}. A row "
                        "is query and positive, perhaps with negative; other names are mapped by chat.fields, ours "
                        'first: (("query", "question"), ("positive", "answer")).')
    if len(query) > 1:
      raise DataError(f"{record.where}: several queries ({', '.join(self.columns_of(record, 'query'))}). Give each a "
                      "row.")
    return Match(query[0], positives, self._texts(record, "negative"))

  def columns_of(self, record: Record, ours: str) -> list[str]:
    """Names of the row's columns that hold these texts, in their order, numbered ones by number."""
    found = [key for key in record.fields if isinstance(key, str) and self._patterns[ours].fullmatch(key)]
    return sorted((key for key in found if record.fields[key] is not None),
                  key=lambda key: int(re.findall(r"\d+$", key)[0]) if re.search(r"\d$", key) else -1)

  def _texts(self, record: Record, ours: str) -> list[Text]:
    texts: list[Text] = []
    for key in self.columns_of(record, ours):
      value: Any = record.fields[key]
      whole = conversation(record, key, value) is not None
      several = value if isinstance(value, list) and ours != "query" and not whole else [value]
      for text in several:
        if (talk := conversation(record, key, text)) is not None:
          texts.append(talk)
          continue
        if not isinstance(text, str) or not text.strip():
          what = "empty" if isinstance(text, str) else f"{text!r:.60} ({type(text).__name__})"
          more = "" if ours == "query" else ", or a list of texts"
          raise DataError(f"{record.where}: {key} is {what}; expected a text, or messages{more}. Repair or remove the "
                          "row.")
        texts.append(text)
    return texts


class MatchEncoder:
  """Each query with a text that answers it, and its hard negatives, as a document of 2 + `strategy.negatives` parts,
  of which those that a row lacks are ABSENT; see `Encoder`.

  Args:
    config: the whole config, of which `strategy`, `tokenizer`, `chat.fields` and `seq_len` count.
    tokenizer: None if only `texts` and `describe` are used.

  Raises:
    ConfigError: images; see `TextTokens`.
  """

  sees_images = False

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None):
    if sees(config):
      raise ConfigError(f"strategy {config.strategy.name!r} learns embeddings of texts, but the model sees images. Use "
                        "a model of text: --config.model.vision.tower=none.")
    cfg, self._fields = config.strategy, fields_of(config.chat)
    self._reader, self._negatives = MatchReader(self._fields), cfg.negatives
    self._prompts = (cfg.query_prompt or "", cfg.document_prompt or "")
    self._max_length, self._tokenizer = max_length_of(config), tokenizer
    self._tokens = None if tokenizer is None else text_tokens(config, tokenizer)

  @cached_property
  def fingerprint(self) -> str:
    return json.dumps(["matches", VERSION, self._tokenizer.fingerprint, sorted(self._fields.items()), self._prompts,
                       self._negatives, self._max_length, self._tokens.head, self._tokens.tail,
                       *self._tokens.fingerprint])

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    rows = [self._row(record) for record in records]
    of_query, of_document = self._prompts
    tokens = iter([made for record, row in zip(records, rows, strict=True) for made in self._encoded(record, [
        prompted(of_query, row.query), *(prompted(of_document, other) for other in (*row.positives, *row.negatives))])])
    documents: list[Encoded | str] = []
    for record, row in zip(records, rows, strict=True):
      query = next(tokens)
      positives, negatives = ([next(tokens) for _ in some] for some in (row.positives, row.negatives))
      for positive in positives:
        if any(np.array_equal(positive[0], negative[0]) for negative in negatives):
          raise DataError(f"{record.where}: a negative has the same tokens as a positive. Remove it.")
        documents.append(self._document([query, positive, *negatives]))
    return documents

  def texts(self, record: Record) -> Iterable[str]:
    row = self._reader.match(record)
    for text in (row.query, *row.positives, *row.negatives):
      yield from [text] if isinstance(text, str) else [part for m in text.messages for part in texts_of(m)]

  def describe(self, record: Record) -> str:
    row = self._reader.match(record)
    count = len(row.negatives)
    return f"query and positive{f', {count} negative' if count else ''}{'s' if count > 1 else ''}"

  def columns(self, record: Record) -> frozenset[str]:
    return frozenset(key for ours in ALIASES for key in self._reader.columns_of(record, ours))

  def _encoded(self, record: Record, texts: list[Text]) -> list[tuple[np.ndarray, bool]]:
    try:
      return self._tokens.encode(texts)
    except DataError as e:
      raise DataError(f"{record.where}: {e}") from e

  def _row(self, record: Record) -> Match:
    row = self._reader.match(record)
    if len(row.negatives) > self._negatives:
      count = len(row.negatives)
      raise DataError(f"{record.where}: {count} negatives, but strategy.negatives is {self._negatives}. Use "
                      f"--config.strategy.negatives={count} (rows with fewer are fine), or leave them out.")
    return row

  def _document(self, parts: list[tuple[np.ndarray, bool]]) -> Encoded:
    absent = 2 + self._negatives - len(parts)
    roles = (QUERY, POSITIVE, *[NEGATIVE] * (len(parts) - 2), *[ABSENT] * absent)
    names = ("query", "positive", *["negative"] * (len(parts) - 2))
    cut = tuple((CUT, name) for name, (_, was_cut) in zip(names, parts, strict=True) if was_cut)
    return Encoded(np.concatenate([ids for ids, _ in parts]), None,
                   (*(len(ids) for ids, _ in parts), *[0] * absent), roles, remarks=cut)
