"""Preferences, and single answers with a label: their tokens, as documents of several parts.

`schema_pairs.py` says what a row compares. Each side of a preference is a part: the prompt with its completion,
tokenised and weighted as fine-tuning does it. What is trained of it is the completion, with the token that ends it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.chat.schema import BESIDE, Plain
from input_pipeline.examples.base import Encoded
from input_pipeline.examples.conversations import ChatEncoder, fields_of, texts_of
from input_pipeline.examples.roles import ABSENT, CHOSEN, DESIRABLE, MISMATCHED, REJECTED, UNDESIRABLE
from input_pipeline.examples.schema_pairs import PairReader, Side
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError, DataError

# Raise when the same rows and options would give other tokens or weights.
VERSION = 2
TRAIN_ON = ("auto", "completion")


class SidesEncoder:
  """What encoders of prompts with completions share; see `Encoder`.

  Args:
    config: the whole config, of which `chat` and `tokenizer` count.

  Raises:
    ConfigError: see `ChatEncoder`; or options of `chat` that preferences do not have.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None):
    chat, strategy = config.chat, config.strategy.name
    if chat.train_on not in TRAIN_ON or tuple(chat.roles):
      option = f"chat.roles={tuple(chat.roles)}" if tuple(chat.roles) else f"chat.train_on={chat.train_on!r}"
      raise ConfigError(f"{option}: strategy {strategy!r} trains completions. Leave chat.roles empty, and "
                        f"chat.train_on at one of {', '.join(TRAIN_ON)}.")
    self._chat = ChatEncoder(config, tokenizer)
    self._reader = PairReader(fields_of(chat), images=self._chat.images)

  @property
  def sees_images(self) -> bool:
    return self._chat.sees_images

  def _encode_sides(self, sides: list[tuple[Side, str]], empty: bool = False) -> list[Encoded | str]:
    """The ids and weights of sides, of which `where` says whose they are; or why one is dropped. `empty`: completions
    may say nothing."""
    examples, wheres, images, shown = [], [], [], []
    results: list[Encoded | str] = []
    for side, where in sides:
      images.append(self._chat.load(side.row.images))
      results.append(images[-1] if isinstance(images[-1], str) else "")
      if results[-1]:
        continue
      where = f"{where}: {side.column}"
      found = self._chat.segments(side.row, where, empty)
      if len(found) > 1:
        raise DataError(f"{where}: the template renders earlier turns of it differently once later ones follow, so "
                        "that it is no single text. Set chat.on_rewritten_history='last' to train the last turn alone.")
      if not found:
        raise DataError(f"{where}: no token of it is trained. Remove the row.")
      examples.append(found[0])
      wheres.append(where)
      shown.append(images[-1])
    tokenized = zip(self._chat.tokenize(examples, wheres, shown), wheres, strict=True)
    for i, (dropped, loaded) in enumerate(zip(results, images, strict=True)):
      if dropped:
        continue
      (ids, weights, remarks), where = next(tokenized)
      if not weights[1:].any():
        raise DataError(f"{where}: no token of it is trained. Remove the row.")
      ids, weights, places = self._chat.finish(ids, weights, loaded)
      results[i] = Encoded(ids, weights, images=tuple(loaded[:len(places)]), places=places, remarks=remarks)
    return results


class PairEncoder(SidesEncoder):
  """Preferences as documents of two parts, chosen and rejected, each the prompt with a completion; `graded`: with the
  row's margin for the chosen one."""

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None, graded: bool = False):
    super().__init__(config, tokenizer)
    self._graded = graded

  @cached_property
  def fingerprint(self) -> str:
    return json.dumps(["graded" if self._graded else "pairs", VERSION, self._chat.fingerprint])

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    sides = [(side, record.where) for record in records for side in self._reader.pair(record)]
    tokenized = self._encode_sides(sides)
    results = []
    for record, chosen, rejected in zip(records, tokenized[::2], tokenized[1::2], strict=True):
      if isinstance(chosen, str) or isinstance(rejected, str):
        results.append(chosen if isinstance(chosen, str) else rejected)
        continue
      if np.array_equal(chosen.ids, rejected.ids) and _contents(chosen) == _contents(rejected):
        raise DataError(f"{record.where}: both sides have the same tokens: there is nothing to prefer. Remove the row.")
      pair = _joined(chosen, rejected, (CHOSEN, REJECTED))
      results.append(pair._replace(advantages=(self._reader.margin(record), 0.0)) if self._graded else pair)
    return results

  def texts(self, record: Record) -> Iterable[str]:
    chosen, rejected = (side.row for side in self._reader.pair(record))
    if isinstance(chosen, Plain):
      return chosen.prompt, chosen.completion, rejected.completion
    messages = [*chosen.messages, *rejected.messages[rejected.prompt:]]
    return [text for message in messages for text in texts_of(message)]

  def columns(self, record: Record) -> frozenset[str]:
    return self._reader.side_columns(record, ("chosen", "rejected"), ("margin",) * self._graded)

  def describe(self, record: Record) -> str:
    kind = "strings" if isinstance(self._reader.pair(record)[0].row, Plain) else "messages"
    return f"pairs of {kind}{', implicit prompt' if self._reader.is_implicit(record) else ''}"


class AnswerEncoder(SidesEncoder):
  """What a model says to a prompt, tokenized as the sides of preferences are."""

  def ids(self, prompt: str | list[dict], completion: str | list[dict], columns: Mapping[str, Any], where: str
          ) -> np.ndarray:
    """The token ids of both together, int32 [n].

    Args:
      prompt, completion: two texts, or two lists of messages.
      columns: what else the record says; of it, what templates are given beside messages counts.

    Raises:
      DataError: they are no such thing, or none of it is the model's.
    """
    beside = {key: columns[key] for key in BESIDE if key in columns and key != "system"}
    record = Record("", where, {**beside, "prompt": prompt, "completion": completion})
    (encoded,) = self._encode_sides([(self._reader.answered(record), where)], empty=True)
    return encoded.ids


class LabelledEncoder(SidesEncoder):
  """Prompts with an answer and a label, for KTO: DESIRABLE where the answer is wanted, UNDESIRABLE where not.

  With `mismatched` a second part has the prompt with the completion of the next example in the source whose prompt is
  another one (partners.py), MISMATCHED. Its weights say which tokens to sum up; where there is no other prompt
  it is empty, and ABSENT.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None, mismatched: bool = False):
    super().__init__(config, tokenizer)
    self.with_next = _with_mismatched if mismatched else None

  @cached_property
  def fingerprint(self) -> str:
    mismatched = self.with_next is not None and "of another prompt"
    return json.dumps(["labelled", VERSION, self._chat.fingerprint, mismatched])

  def prompt_of(self, document: Encoded) -> bytes:
    """A name of all that stands before the completion: its tokens, and the images among them."""
    prompt = int(np.argmax(document.weights > 0))
    shown = sum(at < prompt for at in document.places)
    contents = [hashlib.blake2b(image.data, digest_size=16).digest() for image in document.images[:shown]]
    return hashlib.blake2b(document.ids[:prompt].astype("<i4").tobytes() + b"".join(contents), digest_size=16).digest()

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    rows = [self._reader.labelled(record) for record in records]
    tokenized = self._encode_sides([(side, record.where) for (side, _), record in zip(rows, records, strict=True)])
    return [answer if isinstance(answer, str) else answer._replace(
        parts=(len(answer.ids),), roles=(DESIRABLE if label else UNDESIRABLE,))
            for answer, (_, label) in zip(tokenized, rows, strict=True)]

  def texts(self, record: Record) -> Iterable[str]:
    row = self._reader.labelled(record)[0].row
    if isinstance(row, Plain):
      return row.prompt, row.completion
    return [text for message in row.messages for text in texts_of(message)]

  def columns(self, record: Record) -> frozenset[str]:
    return self._reader.side_columns(record, ())

  def describe(self, record: Record) -> str:
    side, label = self._reader.labelled(record)
    kind = "strings" if isinstance(side.row, Plain) else "messages"
    return f"{kind}, {'wanted' if label else 'not wanted'}"


def _with_mismatched(document: Encoded, following: Encoded | None) -> Encoded:
  """`document` with its prompt and the completion of `following` as a second part."""
  if following is None:
    return document._replace(parts=(*document.parts, 0), roles=(*document.roles, ABSENT))
  prompt, answer = (int(np.argmax(d.weights > 0)) for d in (document, following))
  ids = np.concatenate([document.ids[:prompt], following.ids[answer:]])
  weights = np.concatenate([np.zeros(prompt, np.float32), following.weights[answer:]])
  places = [at for at in document.places if at < prompt]
  later = sum(at < answer for at in following.places)
  mismatched = Encoded(ids, weights, images=(*document.images[:len(places)], *following.images[later:]),
                       places=(*places, *(at - answer + prompt for at in following.places[later:])))
  return _joined(document, mismatched, (*document.roles, MISMATCHED))


def _joined(first: Encoded, second: Encoded, roles: tuple[int, ...]) -> Encoded:
  """A document of two parts."""
  ids, weights = (np.concatenate([getattr(first, key), getattr(second, key)]) for key in ("ids", "weights"))
  places = (*first.places, *(at + len(first.ids) for at in second.places))
  return Encoded(ids, weights, (len(first.ids), len(second.ids)), roles, (), first.images + second.images,
                 places, first.remarks + second.remarks)


def _contents(document: Encoded) -> list[bytes]:
  return [image.data for image in document.images]
