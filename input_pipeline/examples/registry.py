"""What is trained on in a record: from fields to token ids and the weight of each.

An encoder belongs to what a strategy learns from; `ENCODERS` below is the table. All of
them understand rows that are tokenised already.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.chat.image_parts import columns_of
from input_pipeline.chat.image_placeholders import sees
from input_pipeline.examples.base import NOT_TRAINED, NOTHING_TO_TRAIN, Encoded, Encoder
from input_pipeline.examples.conversations import ChatEncoder, fields_of
from input_pipeline.examples.matches import MatchEncoder
from input_pipeline.examples.pairs import LabelledEncoder, PairEncoder
from input_pipeline.examples.rollouts import RolloutEncoder
from input_pipeline.examples.routed import RoutedEncoder
from input_pipeline.examples.top_k import COLUMNS as OF_TEACHER
from input_pipeline.examples.top_k import ROWS, TopKReader
from input_pipeline.examples.top_k import VERSION as TOP_K_VERSION
from input_pipeline.files import shown_names
from input_pipeline.remarks import LITERAL
from input_pipeline.sources.readers import Record
from input_pipeline.sources.sources import Source, open_source
from input_pipeline.tokenizer import special_tokens
from input_pipeline.tokenizer.tokenizer import Tokenizer, begins_with
from trainer.errors import ConfigError, DataError


class TextEncoder:
  """A text is a document, with ids before it, BOS say, and EOS after it where the tokenizer has it.

  Args:
    text_key: the field that holds the text.
    head: ids that begin each document (`begins_with`).
    option: how messages call `text_key`.
  """

  def __init__(self, tokenizer: Tokenizer | None, text_key: str, head: tuple[int, ...], add_eos: bool,
               option: str = "text_key"):
    self._tokenizer, self._key, self._option = tokenizer, text_key, option
    self._head, self._add_eos = head, add_eos

  @property
  def fingerprint(self) -> str:
    return json.dumps(["text", self._tokenizer.fingerprint, self._key, *(self._head or [None]), self._end()])

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    end = self._end()
    head, tail = np.array(self._head, np.int32), np.array([] if end is None else [end], np.int32)
    texts = [self._text(record) for record in records]
    literal = special_tokens.pattern(tuple(self._tokenizer.special_tokens))
    found = [() if literal is None else tuple((LITERAL, token) for token in set(literal.findall(text)))
             for text in texts]
    return [Encoded(np.concatenate([head, ids, tail]), remarks=remarks)
            for ids, remarks in zip(self._tokenizer.encode_batch(texts), found, strict=True)]

  def texts(self, record: Record) -> Iterable[str]:
    return (self._text(record),)

  def describe(self, record: Record) -> str:
    return "text"

  def columns(self, record: Record) -> frozenset[str]:
    return frozenset({self._key})

  def _end(self) -> int | None:
    return self._tokenizer.eos_id if self._add_eos else None

  def _text(self, record: Record) -> str:
    where, key, fields = record.where, self._key, record.fields
    if key not in fields:
      found = shown_names(fields, "no keys")
      raise DataError(f"{where}: no key {key!r}; found {found}. Set {self._option}.")
    if not isinstance(fields[key], str):
      found = _kind(fields[key])
      raise DataError(f"{where}: {key!r} must be a string, found {found}. Set {self._option}, or filter such rows out.")
    return fields[key]


class TokenizedEncoder:
  """Rows that are tokens already: `input_ids`, with `labels` or `weights`, or neither to train on all.

  `labels` are aligned with `input_ids`, as in transformers: labels[t] is input_ids[t] where that token is trained, and
  -100 where not. `weights` are numbers from 0 on, one a token. BOS and EOS are not added.

  Args:
    tokenizer: whose vocabulary the ids are checked against.
    fields: other names of these columns, {"input_ids": "ids"}.
    images: the model sees images, which such rows cannot have.
    top_k: above 0: so many entries are kept of what a teacher has said of each token, in columns of the row (top_k.py).
  """

  def __init__(self, tokenizer: Tokenizer | None, fields: Mapping[str, str] | None = None, images: bool = False,
               top_k: int = 0):
    self._tokenizer, self._fields, self._images, self._top_k = tokenizer, dict(fields or {}), images, top_k

  @property
  def fingerprint(self) -> str:
    names = [self._name(key) for key in ("input_ids", "labels", "weights")]
    taught = [TOP_K_VERSION, self._top_k, *map(self._name, OF_TEACHER)] if self._top_k else []
    return json.dumps(["tokenized", self._tokenizer.fingerprint, names, *taught])

  def knows(self, record: Record) -> bool:
    """Whether it is a row of tokens."""
    return record.fields.get(self._name("input_ids")) is not None

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    return [self._encode(record) for record in records]

  def texts(self, record: Record) -> Iterable[str]:
    return ()

  def describe(self, record: Record) -> str:
    labelled = [key for key in ("labels", "weights") if record.fields.get(self._name(key)) is not None]
    return " with ".join(["tokens", *labelled, *["a teacher's top-k"] * (self._top_k > 0)])

  def columns(self, record: Record) -> frozenset[str]:
    taught = OF_TEACHER if self._top_k else ()
    return frozenset({"attention_mask", *map(self._name, ("input_ids", "labels", "weights", *taught))})

  def _encode(self, record: Record) -> Encoded | str:
    if self._images and columns_of(record.fields, self._name):
      raise DataError(f"{record.where}: has tokens ({self._name('input_ids')}) and images. Give the text in place of "
                      "the tokens, so that the places of the images are known.")
    if self._top_k and not self.knows(record):
      raise DataError(f"{record.where}: no {self._name('input_ids')!r} (or null); its columns are "
                      f"{shown_names(record.fields)}. What a teacher has said goes with token ids, since a text may "
                      f"become other tokens than it read (strategy.teacher={ROWS!r}).")
    ids = self._ids(record, "input_ids")
    size = self._tokenizer.vocab_size
    bad = np.flatnonzero((ids < 0) | (ids >= size))
    if len(bad):
      raise DataError(f"{record.where}: {self._name('input_ids')}[{bad[0]}] is {ids[bad[0]]}, which is not in the "
                      f"tokenizer's vocabulary of {size}. Use the tokenizer that these rows were made with.")
    self._refuse_padding(record, len(ids))
    weights = self._weights(record, ids)
    if not len(ids):
      return "no tokens"
    if weights is not None and len(ids) > 1 and not weights[1:].any():
      return NOTHING_TO_TRAIN
    top_k = None
    if self._top_k:
      trained = np.ones(len(ids), bool) if weights is None else weights != 0
      trained[0] = False  # nothing predicts it
      top_k = TopKReader(self._top_k, size, self._name).read(record, trained)
    every = weights is None or (weights[1:] == 1).all()
    return Encoded(ids.astype(np.int32), None if every else weights, top_k=top_k)

  def _weights(self, record: Record, ids: np.ndarray) -> np.ndarray | None:
    given = [key for key in ("labels", "weights") if record.fields.get(self._name(key)) is not None]
    if len(given) == 2:
      raise DataError(f"{record.where}: has both {self._name('labels')!r} and {self._name('weights')!r}. Keep one of "
                      "them: a label of -100 is a weight of 0.")
    if not given:
      return None
    if given == ["labels"]:
      labels = self._ids(record, "labels")
      self._check_length(record, "labels", len(labels), len(ids))
      bad = np.flatnonzero((labels != ids) & (labels != NOT_TRAINED))
      if len(bad):
        t = bad[0]
        raise DataError(f"{record.where}: {self._name('labels')}[{t}] is {labels[t]}, but "
                        f"{self._name('input_ids')}[{t}] is {ids[t]}. A label is the token at its own place, not the "
                        "next one, or -100 where nothing is trained.")
      return (labels != NOT_TRAINED).astype(np.float32)
    weights = _array(record.fields[self._name("weights")])
    if weights is None or weights.dtype.kind not in "iuf":
      raise self._not_a_list(record, "weights", "numbers")
    self._check_length(record, "weights", len(weights), len(ids))
    with np.errstate(over="ignore"):  # told below
      kept = weights.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(kept) & (kept >= 0)))
    if len(bad):
      raise DataError(f"{record.where}: {self._name('weights')}[{bad[0]}] is {weights[bad[0]]}; weights are finite "
                      "numbers from 0 on, in float32.")
    return kept

  def _ids(self, record: Record, key: str) -> np.ndarray:
    ids = _array(record.fields[self._name(key)])
    if ids is None or ids.dtype.kind not in "iu":
      raise self._not_a_list(record, key, "whole numbers")
    return ids

  def _refuse_padding(self, record: Record, length: int) -> None:
    """A padded row would be trained on its padding."""
    mask = record.fields.get("attention_mask")
    if mask is None:
      return
    mask = _array(mask)
    if mask is None or len(mask) != length or not (mask == 1).all():
      raise DataError(f"{record.where}: 'attention_mask' is not 1 for each of the {length} tokens. Remove the padding "
                      "from these rows; it is added here as needed.")

  def _check_length(self, record: Record, key: str, found: int, wanted: int) -> None:
    if found != wanted:
      raise DataError(f"{record.where}: {self._name(key)!r} has {found} entries, but {self._name('input_ids')!r} has "
                      f"{wanted}. They must have one for each token.")

  def _not_a_list(self, record: Record, key: str, of: str) -> DataError:
    found = _kind(record.fields[self._name(key)])
    return DataError(f"{record.where}: {self._name(key)!r} must be a list of {of}, found {found}.")

  def _name(self, key: str) -> str:
    return self._fields.get(key, key)


class EitherEncoder:
  """Rows of tokens go to the one, all others to the other. A row with the field `prefer` is not one of tokens."""

  def __init__(self, tokenized: TokenizedEncoder, other: Encoder, prefer: str | None = None):
    self._tokenized, self._other, self._prefer = tokenized, other, prefer

  @property
  def fingerprint(self) -> str:
    return json.dumps([self._tokenized.fingerprint, self._other.fingerprint, self._prefer])

  @property
  def sees_images(self) -> bool:
    return getattr(self._other, "sees_images", False)

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    results, start = [], 0
    while start < len(records):  # runs of one kind, so that texts are tokenised together
      stop, encoder = start + 1, self._encoder(records[start])
      while stop < len(records) and self._encoder(records[stop]) is encoder:
        stop += 1
      results += encoder.encode(records[start:stop])
      start = stop
    return results

  def texts(self, record: Record) -> Iterable[str]:
    return self._encoder(record).texts(record)

  def describe(self, record: Record) -> str:
    return self._encoder(record).describe(record)

  def columns(self, record: Record) -> frozenset[str]:
    return self._encoder(record).columns(record)

  def _encoder(self, record: Record) -> Encoder:
    if self._prefer is not None and record.fields.get(self._prefer) is not None or not self._tokenized.knows(record):
      return self._other
    return self._tokenized


def _array(value: Any) -> np.ndarray | None:
  """A list of numbers as an array; None for anything else."""
  if not isinstance(value, (list, tuple)):
    return None
  if not value:
    return np.zeros(0, np.int64)
  try:
    array = np.asarray(value)
  except (ValueError, OverflowError):  # lists of several lengths in it; numbers beyond 64 bits
    return None
  return array if array.ndim == 1 else None


def _kind(value: Any) -> str:
  """What a value is, for messages."""
  if value is None:
    return "null"
  if isinstance(value, (list, tuple)):
    invalid = [v for v in value if isinstance(v, bool) or not isinstance(v, (int, float))]
    return f"a list that holds {invalid[0]!r:.60}" if invalid else "a list of numbers with fractions or beyond 64 bits"
  return "bytes that are not UTF-8" if isinstance(value, bytes) else type(value).__name__


def _chat(config: ConfigDict, tokenizer: Tokenizer | None, trains_all: bool = False) -> Encoder:
  return EitherEncoder(TokenizedEncoder(tokenizer, fields_of(config.chat), images=sees(config)),
                       ChatEncoder(config, tokenizer, trains_all))


def _taught(config: ConfigDict, tokenizer: Tokenizer | None) -> Encoder:
  return TokenizedEncoder(tokenizer, fields_of(config.chat), top_k=config.strategy.cached_top_k)


def _routed(config: ConfigDict, tokenizer: Tokenizer | None) -> Encoder:
  return RoutedEncoder(_chat(config, tokenizer), config.strategy)


# {kind (kinds.py): what encodes its rows}; texts are encoded so only where the model sees images.
ENCODERS: dict[str, Callable[..., Encoder]] = {
    "texts": functools.partial(_chat, trains_all=True), "conversations": _chat, "taught": _taught, "routed": _routed,
    "pairs": PairEncoder, "graded": functools.partial(PairEncoder, graded=True), "labelled": LabelledEncoder,
    "mismatched": functools.partial(LabelledEncoder, mismatched=True), "rollouts": RolloutEncoder,
    "matches": MatchEncoder}


def learns_texts(config: ConfigDict, learns: str) -> bool:
  """Whether documents are texts, to be cut and joined at will."""
  return learns == "texts" and not sees(config)


def make_encoder(config: ConfigDict, tokenizer: Tokenizer | None, text_key: str = "text",
                 option: str = "text_key", *, learns: str) -> Encoder:
  """The encoder of what is learned from.

  Args:
    tokenizer: None if only `texts` is used (to train one).
    text_key: of a source; where documents are texts, the field that holds them.
    option: how messages call `text_key`.
    learns: one of `kinds.KINDS`.
  """
  if not learns_texts(config, learns):
    return ENCODERS[learns](config, tokenizer)
  head = () if tokenizer is None else begins_with(config.tokenizer, tokenizer)
  text = TextEncoder(tokenizer, text_key, head, config.tokenizer.add_eos, option)
  return EitherEncoder(TokenizedEncoder(tokenizer), text, prefer=text_key)


def open_examples(
    config: ConfigDict, tokenizer: Tokenizer | None, cfg: ConfigDict, name: str, *, learns: str,
    split: str | None = None, max_documents: int | None = None, streams: bool = False,
) -> tuple[Source, Encoder]:
  """The source that `cfg` describes, and the encoder for its records; reads no file yet.

  Args:
    tokenizer, learns: see `make_encoder`.
    split, max_documents, streams: see `open_source`.

  Raises:
    ConfigError: see `open_source`; or a `text_key` for a strategy that finds columns by `chat.fields`.
  """
  source = open_source(cfg, name, split=split, max_documents=max_documents, texts=learns_texts(config, learns),
                       streams=streams)
  if source.text_key != "text" and not learns_texts(config, learns):
    raise ConfigError(f"input.sources.{name}.text_key is {source.text_key!r}, which strategy {config.strategy.name!r} "
                      f'has no use for. Leave it out, and set chat.fields=(("text", "{source.text_key}"),) instead.')
  return source, make_encoder(config, tokenizer, source.text_key, source.text_option, learns=learns)
