"""Preferences, and single answers with a label: their tokens, as documents of several parts.

    prompt, chosen, rejected          strings, or lists of messages
    chosen, rejected                  that begin alike: what they have in common is the prompt
    prompt, completion, label         an answer that is wanted (true) or not (false)

Each side of a preference is a part: the prompt with its completion, tokenised and weighted as fine-tuning does it. What
is trained of it is the completion, with the token that ends it.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.examples import MISMATCHED, Encoded
from input_pipeline.examples_chat import ChatEncoder, fields_of, texts_of
from input_pipeline.files import DataError, shown_names
from input_pipeline.image_texts import text_of
from input_pipeline.readers import Record
from input_pipeline.shapes import Conversation, Plain, ShapeReader
from input_pipeline.tokenizer import Tokenizer
from trainer.config import ConfigError

# Raise when the same rows and options would give other tokens or weights.
VERSION = 1
SHAPE = "prompt/completion"
TRAIN_ON = ("auto", "completion")


class Side(NamedTuple):
  """A prompt with a completion; `column` is what messages call the latter."""

  row: Conversation | Plain
  column: str


class PairReader(ShapeReader):
  """Finds the two sides of a preference, or an answer and its label, and checks them. Args: see `ShapeReader`."""

  def pair(self, record: Record) -> tuple[Side, Side]:
    """(chosen, rejected).

    Raises:
      DataError: names the record, the key, and what was found.
    """
    self._require(record, ("chosen", "rejected"), "A preference is prompt, chosen and rejected, or chosen and rejected "
                  "that begin alike", '(("chosen", "better"), ("rejected", "worse"))')
    keys = [self._name(key) for key in ("chosen", "rejected")]
    kinds = [type(record.fields[key]) for key in keys]
    if kinds not in ([str, str], [list, list]):
      raise DataError(f"{record.where}: {keys[0]} is a {kinds[0].__name__} and {keys[1]} a {kinds[1].__name__}; they "
                      "are two strings or two lists of messages.")
    equal = DataError(f"{record.where}: {keys[0]} equals {keys[1]}: there is nothing to prefer. Remove the row.")
    if record.fields[keys[0]] == record.fields[keys[1]]:
      raise equal
    if kinds[0] is str:
      rows = self._strings(record, keys)
    else:
      sides, weights = zip(*(self._messages(record, column) for column in ("chosen", "rejected")), strict=True)
      if sides[0] == sides[1]:  # spelt differently
        raise equal
      rows = self._lists(record, keys, sides, weights)
    return tuple(Side(row, key) for row, key in zip(rows, keys, strict=True))

  def labelled(self, record: Record) -> tuple[Side, bool]:
    """(the answer, whether it is wanted).

    Raises:
      DataError: names the record, the key, and what was found.
    """
    self._require(record, ("prompt", "completion", "label"), "An example is prompt, completion and label",
                  '(("label", "good"),)')
    key, label = self._name("completion"), record.fields[self._name("label")]
    if not isinstance(label, bool):
      raise DataError(f"{record.where}: {self._name('label')} is {label!r:.60} ({type(label).__name__}); expected true "
                      "for an answer that is wanted, false for one that is not.")
    row = self._pair(record)
    self._check_side(record, key, row)
    return Side(row, key), label

  def is_implicit(self, record: Record) -> bool:
    """Whether the prompt is what both sides begin with."""
    return not self._has(record, "prompt")

  def _require(self, record: Record, columns: tuple[str, ...], what: str, example: str) -> None:
    missing = [self._name(column) for column in columns if not self._has(record, column)]
    if missing:
      found = shown_names(record.fields)
      raise DataError(f"{record.where}: no {missing[0]!r} (or null); its columns are {found}. {what}; other names are "
                      f"mapped by chat.fields, ours first: {example}.")

  def _strings(self, record: Record, keys: list[str]) -> list[Plain]:
    texts = [record.fields[key] for key in keys]
    prompt = self._string(record, "prompt") if self._has(record, "prompt") else None
    if prompt is None:
      prompt = common_prompt(*texts)
      if not prompt.strip():
        raise DataError(f"{record.where}: {keys[0]} and {keys[1]} begin differently ({texts[0][:40]!r}, "
                        f"{texts[1][:40]!r}), and there is no {self._name('prompt')!r}. Add it, or make both begin "
                        "with the same prompt.")
      texts = [text[len(prompt):] for text in texts]
    rows = [Plain(SHAPE, prompt, text, self.images_of(record)) for text in texts]
    for key, row in zip(keys, rows, strict=True):
      self._check_side(record, key, row)
    return rows

  def _lists(self, record: Record, keys: list[str], sides: tuple, weights: tuple) -> list[Conversation]:
    """The rows of two lists of messages, with or without the prompt before them."""
    before = self._prompt(record, *sides)
    answers = []
    for key, messages, factors in zip(keys, sides, weights, strict=True):
      start = len(before) if messages[:len(before)] == before else 0
      answers.append((key, messages[start:], factors[start:]))
      if not messages[start:]:
        raise DataError(f"{record.where}: {key} says nothing beyond the prompt. Remove the row.")
    rows = []
    for key, messages, factors in answers:
      if messages[0]["role"] != "assistant":
        said = text_of(messages[0].get("content", ""))
        raise DataError(f"{record.where}: the prompts differ: where the sides part, {key} goes on with what the "
                        f"{messages[0]['role']} says ({said[:40]!r}). Both sides must begin with the same messages, up "
                        "to what the assistant says.")
      if bad := [w for w in factors if w not in (0, 1)]:
        raise DataError(f"{record.where}: a message of {key} has the weight {bad[0]:g}; in preferences it is 0 or 1.")
      row = self._conversation(record, SHAPE, before + messages, [1.0] * len(before) + factors, len(before))
      self._check_side(record, key, row)
      rows.append(row)
    return rows

  def _prompt(self, record: Record, chosen: list[dict], rejected: list[dict]) -> list[dict]:
    """The messages of the prompt: of its own column, or those that both sides begin with."""
    key = self._name("prompt")
    count = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
                 min(len(chosen), len(rejected)))
    if not self._has(record, "prompt") or isinstance(record.fields[key], str):
      common = chosen[:count]
      if not common:
        raise DataError(f"{record.where}: the prompts differ: {self._name('chosen')}[0] is not "
                        f"{self._name('rejected')}[0], and there is no {key!r} that is a list of messages.")
      prompt = record.fields.get(key)
      asked = [text_of(message.get("content", "")) for message in common if message["role"] == "user"]
      if prompt is not None and prompt.strip() not in (text.strip() for text in asked):
        raise DataError(f"{record.where}: {key} is a string ({prompt[:40]!r}) that no message of the user says which "
                        f"{self._name('chosen')} and {self._name('rejected')} have in common. Give it as a list of "
                        "messages, or take it out.")
      return common
    before, _ = self._messages(record, "prompt")
    return before

  def _check_side(self, record: Record, key: str, row: Conversation | Plain) -> None:
    """Refuses an answer that says nothing, or does not end with what the assistant says."""
    if isinstance(row, Plain):
      if not row.completion.strip():
        raise DataError(f"{record.where}: {key} is empty. Remove the row.")
    elif row.messages[-1]["role"] != "assistant":
      raise DataError(f"{record.where}: {key} ends with what the {row.messages[-1]['role']} says; expected the "
                      "assistant.")


def common_prompt(a: str, b: str) -> str:
  """What two texts begin with, up to the last space between words (line breaks included), which the rests keep.

      >>> common_prompt("Q: 1 + 1? A: Two", "Q: 1 + 1? A: Twelve")
      'Q: 1 + 1? A:'
  """
  count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
  if a[count:count + 1].isspace() and b[count:count + 1].isspace():
    return a[:count].rstrip()
  spaces = list(re.finditer(r"\s+", a[:count]))
  return a[:spaces[-1].start()] if spaces else ""


class SidesEncoder:
  """What encoders of prompts with completions share; see `Encoder`.

  Args:
    config: the whole config, of which `chat` and `tokenizer` count.
    tokenizer: what encodes; None if only `texts` and `describe` are used.

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
  def tokens_per_image(self) -> int:
    return self._chat.tokens_per_image

  def _encode_sides(self, sides: list[tuple[Side, str]]) -> list[Encoded | str]:
    """The ids and weights of sides, of which `where` says whose they are; or why one is dropped."""
    examples, wheres, images = [], [], []
    results: list[Encoded | str] = []
    for side, where in sides:
      images.append(self._chat.load(side.row.images))
      results.append(images[-1] if isinstance(images[-1], str) else "")
      if results[-1]:
        continue
      where = f"{where}: {side.column}"
      found = self._chat.segments(side.row, where)
      if len(found) > 1:
        raise DataError(f"{where}: the template renders earlier turns of it differently once later ones follow, so "
                        "that it is no single text. Set chat.on_rewritten_history='last' to train the last turn alone.")
      if not found:
        raise DataError(f"{where}: no token of it is trained. Remove the row.")
      examples.append(found[0])
      wheres.append(where)
    tokenized = zip(self._chat.tokenize(examples, wheres), wheres, strict=True)
    for i, (dropped, loaded) in enumerate(zip(results, images, strict=True)):
      if dropped:
        continue
      (ids, weights, remarks), where = next(tokenized)
      if not weights[1:].any():
        raise DataError(f"{where}: no token of it is trained. Remove the row.")
      ids, places = self._chat.finish(ids)
      results[i] = Encoded(ids, weights, images=tuple(loaded[:len(places)]), places=places, remarks=remarks)
    return results


class PairEncoder(SidesEncoder):
  """Preferences as documents of two parts, chosen and rejected, each the prompt with a completion."""

  @cached_property
  def fingerprint(self) -> str:
    return json.dumps(["pairs", VERSION, self._chat.fingerprint])

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
      results.append(_joined(chosen, rejected, (1.0, 1.0)))
    return results

  def texts(self, record: Record) -> Iterable[str]:
    chosen, rejected = (side.row for side in self._reader.pair(record))
    if isinstance(chosen, Plain):
      return chosen.prompt, chosen.completion, rejected.completion
    messages = [*chosen.messages, *rejected.messages[rejected.prompt:]]
    return [text for message in messages for text in texts_of(message)]

  def describe(self, record: Record) -> str:
    kind = "strings" if isinstance(self._reader.pair(record)[0].row, Plain) else "messages"
    return f"pairs of {kind}{', implicit prompt' if self._reader.is_implicit(record) else ''}"


class LabelledEncoder(SidesEncoder):
  """Prompts with an answer and a label, for KTO: marked 1 where the answer is wanted, -1 where not.

  For the loss "kto" a second part has the prompt with the completion of the next example in the source whose prompt is
  another one (partners.py), marked MISMATCHED. Its weights say which tokens to sum up; where there is no other prompt
  it is empty, and marked 0.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None):
    super().__init__(config, tokenizer)
    self.with_next = _with_mismatched if config.strategy.loss == "kto" else None

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
        parts=(len(answer.ids),), marks=(1.0 if label else -1.0,))
            for answer, (_, label) in zip(tokenized, rows, strict=True)]

  def texts(self, record: Record) -> Iterable[str]:
    row = self._reader.labelled(record)[0].row
    if isinstance(row, Plain):
      return row.prompt, row.completion
    return [text for message in row.messages for text in texts_of(message)]

  def describe(self, record: Record) -> str:
    side, label = self._reader.labelled(record)
    kind = "strings" if isinstance(side.row, Plain) else "messages"
    return f"{kind}, {'wanted' if label else 'not wanted'}"


def _with_mismatched(document: Encoded, following: Encoded | None) -> Encoded:
  """`document` with its prompt and the completion of `following` as a second part."""
  if following is None:
    return document._replace(parts=(*document.parts, 0), marks=(*document.marks, 0.0))
  prompt, answer = (int(np.argmax(d.weights > 0)) for d in (document, following))
  ids = np.concatenate([document.ids[:prompt], following.ids[answer:]])
  weights = np.concatenate([np.zeros(prompt, np.float32), following.weights[answer:]])
  places = [at for at in document.places if at < prompt]
  later = sum(at < answer for at in following.places)
  mismatched = Encoded(ids, weights, images=(*document.images[:len(places)], *following.images[later:]),
                       places=(*places, *(at - answer + prompt for at in following.places[later:])))
  return _joined(document, mismatched, (*document.marks, MISMATCHED))


def _joined(first: Encoded, second: Encoded, marks: tuple[float, ...]) -> Encoded:
  """A document of two parts."""
  ids, weights = (np.concatenate([getattr(first, key), getattr(second, key)]) for key in ("ids", "weights"))
  places = (*first.places, *(at + len(first.ids) for at in second.places))
  return Encoded(ids, weights, (len(first.ids), len(second.ids)), marks, first.images + second.images, places,
                 first.remarks + second.remarks)


def _contents(document: Encoded) -> list[bytes]:
  return [image.data for image in document.images]
