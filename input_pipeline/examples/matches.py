"""Queries with texts that answer them: their tokens, each text a part of a document, for embeddings.

    query, positive                   texts; a positive may be a list, each with the query a document of its own
    negative                          near, but no answer (hard negatives): a text or a list
    image, images                     of models that see images: those that have a place in these texts, in this order;
                                      without places they stand before the query. If there is no query, or no positive,
                                      they are it

What a text is: embedded.py. `anchor` is another name of query; `pos` of positive; `negatives`, `neg` and `negative_1`,
`negative_2`, … of negative.
"""

import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.chat.image_placeholders import ImageFormat, image_format, sees
from input_pipeline.chat.schema import IMAGES, ShapeReader
from input_pipeline.examples.base import Encoded
from input_pipeline.examples.conversations import fields_of
from input_pipeline.examples.embedded import (
  Embedded,
  Text,
  TextReader,
  is_text,
  max_length_of,
  strings_of,
  text_tokens,
)
from input_pipeline.examples.roles import ABSENT, NEGATIVE, POSITIVE, QUERY
from input_pipeline.files import shown_names
from input_pipeline.images.images import ImageError
from input_pipeline.remarks import CUT
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import DataError

# Raise when the same rows and options would give other tokens.
VERSION = 2
ALIASES = {"query": r"query|anchor", "positive": r"positive|pos", "negative": r"negatives?|neg|negative_\d+"}


class Match(NamedTuple):
  """A row."""

  query: Text
  positives: list[Text]
  negatives: list[Text]


class MatchReader:
  """Finds query, positives and negatives in a row, and checks them.

  Args:
    fields: {our name: theirs}.
    images: how the model sees images; None: it does not.
  """

  def __init__(self, fields: dict[str, str], images: ImageFormat | None = None):
    self._patterns = {ours: re.compile(re.escape(fields[ours]) if ours in fields else aliases)
                      for ours, aliases in ALIASES.items()}
    self._fields, self._images = fields, {ours: fields.get(ours, ours) for ours in IMAGES}
    self._beside, self._texts = ShapeReader(fields, images=images), TextReader(images)

  def match(self, record: Record) -> Match:
    """The row.

    Raises:
      DataError: names the record, the key, and what was found.
    """
    given = {ours: self._values(record, ours) for ours in ALIASES}
    shared = self._beside.images_of(self._without_texts(record))
    if shared and len(missing := [ours for ours in ("query", "positive") if not self.columns_of(record, ours)]) == 1:
      given[missing[0]] = [(missing[0], {"images": [ref.value for ref in shared]})]
      shared = ()
    for ours in ("query", "positive"):
      if not given[ours] and (there := self.columns_of(record, ours)):
        raise DataError(f"{record.where}: {there[0]} is an empty list; expected a text, or a list of texts. Repair or "
                        "remove the row.")
      if not given[ours]:
        named = f", which chat.fields has for {ours!r}" if ours in self._fields else ""
        raise DataError(f"{record.where}: no {self._fields.get(ours, ours)!r} (or null){named}; its columns are "
                        f"{shown_names(record.fields)}. A row is query and positive, perhaps with negative; other "
                        'names are mapped by chat.fields, ours first: (("query", "question"), ("positive", "answer")).')
    if len(given["query"]) > 1:
      raise DataError(f"{record.where}: several queries ({', '.join(self.columns_of(record, 'query'))}). Give each a "
                      "row.")
    texts = self._texts.read(record, [value for some in given.values() for value in some], shared)
    first = 1 + len(given["positive"])
    return Match(texts[0], texts[1:first], texts[first:])

  def columns_of(self, record: Record, ours: str) -> list[str]:
    """Names of the row's columns that hold these texts, in their order, numbered ones by number."""
    found = [key for key in record.fields if isinstance(key, str) and self._patterns[ours].fullmatch(key)]
    return sorted((key for key in found if record.fields[key] is not None),
                  key=lambda key: int(re.findall(r"\d+$", key)[0]) if re.search(r"\d$", key) else -1)

  def columns(self, record: Record) -> frozenset[str]:
    """Names of the row's columns that are read."""
    texts = {key for ours in ALIASES for key in self.columns_of(record, ours)}
    return frozenset(texts | record.fields.keys() & {*self._images.values()})

  def _values(self, record: Record, ours: str) -> list[tuple[str, Any]]:
    """(column, value) of each of these texts."""
    return [(key, text) for key in self.columns_of(record, ours) for value in [record.fields[key]]
            for text in ([value] if ours == "query" or is_text(value) else value)]

  def _without_texts(self, record: Record) -> Record:
    """The row without the columns of its texts, one of which may be called image."""
    texts = {key for ours in ALIASES for key in self.columns_of(record, ours)}
    return record._replace(fields={key: value for key, value in record.fields.items() if key not in texts})


class MatchEncoder:
  """Each query with a text that answers it, and its hard negatives, as a document of 2 + `strategy.negatives` parts,
  of which those that a row lacks are ABSENT; see `Encoder`.

  Args:
    config: the whole config, of which `strategy`, `tokenizer`, `chat`, `seq_len` and what concerns images count.

  Raises:
    ConfigError: see `TextTokens`, `ImageFormat`.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None):
    cfg, self._fields = config.strategy, fields_of(config.chat)
    self.sees_images = sees(config)
    self._reader, self._negatives = MatchReader(self._fields, image_format(config, tokenizer)), cfg.negatives
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
    tokens = iter([made for record, row in zip(records, rows, strict=True) for made in self._encoded(record, row)])
    documents: list[Encoded | str] = []
    for record, row in zip(records, rows, strict=True):
      query = next(tokens)
      positives, negatives = ([next(tokens) for _ in some] for some in (row.positives, row.negatives))
      for positive in positives:
        documents.append(self._document(record, [query, positive, *negatives]))
    return documents

  def texts(self, record: Record) -> Iterable[str]:
    row = self._reader.match(record)
    for text in (row.query, *row.positives, *row.negatives):
      yield from strings_of(text)

  def describe(self, record: Record) -> str:
    row = self._reader.match(record)
    count = len(row.negatives)
    negatives = [_called(f"{count} negative{'s' * (count > 1)}", row.negatives)] * (count > 0)
    return ", ".join([f"{_called('query', [row.query])} and {_called('positive', row.positives)}", *negatives])

  def columns(self, record: Record) -> frozenset[str]:
    return self._reader.columns(record)

  def _encoded(self, record: Record, row: Match) -> list[Embedded | str]:
    prompts = (self._prompts[0], *[self._prompts[1]] * (len(row.positives) + len(row.negatives)))
    texts = (row.query, *row.positives, *row.negatives)
    try:
      return self._tokens.encode([*map(self._tokens.prompted, prompts, texts)])
    except ImageError:  # which names the row
      raise
    except DataError as e:
      raise DataError(f"{record.where}: {e}") from e

  def _row(self, record: Record) -> Match:
    row = self._reader.match(record)
    if len(row.negatives) > self._negatives:
      count = len(row.negatives)
      raise DataError(f"{record.where}: {count} negatives, but strategy.negatives is {self._negatives}. Use "
                      f"--config.strategy.negatives={count} (rows with fewer are fine), or leave them out.")
    return row

  def _document(self, record: Record, made: list[Embedded | str]) -> Encoded | str:
    """Of a query, a positive and negatives; or why it is dropped, as one of them is."""
    parts = [part for part in made if not isinstance(part, str)]
    if dropped := [why for why in made if isinstance(why, str)]:
      return dropped[0]
    if any(_same(parts[1], negative) for negative in parts[2:]):
      raise DataError(f"{record.where}: a negative has the same tokens as a positive. Remove it.")
    absent, lengths = 2 + self._negatives - len(parts), [len(part.ids) for part in parts]
    roles = (QUERY, POSITIVE, *[NEGATIVE] * (len(parts) - 2), *[ABSENT] * absent)
    names = ("query", "positive", *["negative"] * (len(parts) - 2))
    cut = tuple((CUT, name) for name, part in zip(names, parts, strict=True) if part.cut)
    begins = np.cumsum([0, *lengths[:-1]]).tolist()
    return Encoded(np.concatenate([part.ids for part in parts]), None, (*lengths, *[0] * absent), roles,
                   images=tuple(image for part in parts for image in part.images),
                   places=tuple(begin + at for begin, part in zip(begins, parts, strict=True) for at in part.places),
                   remarks=cut)


def _same(one: Embedded, other: Embedded) -> bool:
  return np.array_equal(one.ids, other.ids) and [i.data for i in one.images] == [i.data for i in other.images]


def _called(name: str, texts: Iterable[Text]) -> str:
  """What these are called, and whether there are images in them."""
  return f"{name} with images" if any(not isinstance(text, str) and text.images for text in texts) else name
