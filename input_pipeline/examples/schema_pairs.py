"""Preferences, and single answers with a label, as rows have them: what is compared, what is the prompt.

    prompt, chosen, rejected          strings, or lists of messages
    chosen, rejected                  that begin alike: what they have in common is the prompt
    margin                            beside them: a number, by how much the chosen one is better; default 0
    prompt, completion, label         an answer that is wanted (true) or not (false)

The prompt may also be what LLaMA-Factory has in its place: instruction (input, history), or conversations or messages.
The answers are then strings or messages; of labelled rows, the output or the last message; the label may be `kto_tag`.
"""

import math
import re
from typing import NamedTuple

from input_pipeline.chat.image_parts import text_of
from input_pipeline.chat.schema import Conversation, Plain, ShapeReader
from input_pipeline.files import shown_names
from input_pipeline.sources.readers import Record
from trainer.errors import DataError

SHAPE = "prompt/completion"


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
    record = self._ours(record, ("chosen", "rejected"))
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

  def margin(self, record: Record) -> float:
    """By how much the chosen side of a preference is better; 0 where the row does not say it. Raises: see `pair`."""
    key = self._name("margin")
    value = record.fields.get(key)
    if value is None:
      return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
      raise DataError(f"{record.where}: {key} is {value!r:.60} ({type(value).__name__}); expected a finite number, by "
                      "how much the score of the chosen side is to be above that of the rejected one.")
    return float(value)

  def labelled(self, record: Record) -> tuple[Side, bool]:
    """(the answer, whether it is wanted).

    Raises:
      DataError: names the record, the key, and what was found.
    """
    record = self._ours(record, ())
    self._require(record, ("prompt", "completion", "label"), "An example is prompt, completion and label",
                  '(("label", "good"),)')
    key, label = self._name("completion"), record.fields[self._name("label")]
    if isinstance(label, str):  # as tables of texts have it
      label = {"true": True, "false": False}.get(label.strip().lower(), label)
    if not isinstance(label, bool):
      raise DataError(f"{record.where}: {self._name('label')} is {label!r:.60} ({type(label).__name__}); expected true "
                      "for an answer that is wanted, false for one that is not.")
    side = self.answered(record)
    self._check_side(record, key, side.row)
    return side, label

  def answered(self, record: Record) -> Side:
    """The prompt with its completion, whatever that says. Raises: see `pair`."""
    return Side(self._pair(record), self._name("completion"))

  def is_implicit(self, record: Record) -> bool:
    """Whether the prompt is what both sides begin with."""
    return not self._has(self._ours(record, ("chosen", "rejected")), "prompt")

  def side_columns(self, record: Record, answers: tuple[str, ...], more: tuple[str, ...] = ()) -> frozenset[str]:
    """The names of the row's columns that are read, `more` among them; see `_ours` for `answers`."""
    ours, column = self._ours(record, answers), self._instead_of_prompt(record)
    main = ["prompt", *(answers or ("completion", "label"))]
    if ours is not record and column:
      instead = [column, *(("input", "history") if column == "instruction" else ())]
      main = [*instead, *(answers or ("output", "response", "label"))]
    if not self._has(record, "label") and not answers:
      main.append("kto_tag")
    strings = isinstance(ours.fields.get(self._name((answers or ("completion",))[0])), str)
    return self._with_beside([*main, *more], strings)

  def _instead_of_prompt(self, record: Record) -> str | None:
    """The column that has the prompt in other formats; None: the row has none of them, or a prompt."""
    if self._has(record, "prompt"):
      return None
    return next((name for name in ("instruction", "conversations", "messages") if self._has(record, name)), None)

  def _ours(self, record: Record, answers: tuple[str, ...]) -> Record:
    """The row with a prompt and answers that are lists of messages, where they stand in other columns.

    `answers`: the columns of a preference's; () if the row is labelled. Answers that begin with the prompt are left.
    """
    fields = dict(record.fields)
    if not answers and not self._has(record, "label") and fields.get("kto_tag") is not None:
      fields[self._name("label")] = fields["kto_tag"]
      record = record._replace(fields=fields)
    column = self._instead_of_prompt(record)
    sides = {} if column is None else {key: self._side(record, key) for key in answers}
    if column is None or any(side is None for side in sides.values()):
      return record
    if column == "instruction":
      prompt = self._questions(record)
      answer = next((key for key in ("output", "response", "completion") if self._has(record, key)), None)
      if not answers and answer:
        sides["completion"] = [{"role": "assistant", "content": self._string(record, answer)}]
    else:
      prompt, _ = self._messages(record, column)
      if not answers:
        sides["completion"], prompt = prompt[-1:], prompt[:-1]
    if not prompt or prompt[-1]["role"] == "assistant":
      raise DataError(f"{record.where}: {self._name(column)} ends with what the assistant says, and its answers are in "
                      "columns of their own. Take that message out." if answers or prompt else
                      f"{record.where}: {self._name(column)} has no question before its answer.")
    named = {key: self._name(key) for key in ("role", "content")}
    for key, messages in ({"prompt": prompt} | sides).items():
      fields[self._name(key)] = [{named.get(part, part): value for part, value in m.items()} for m in messages]
    return record._replace(fields=fields)

  def _side(self, record: Record, key: str) -> list[dict] | None:
    """An answer as messages; None: there is none, or it begins with the prompt."""
    value = record.fields.get(self._name(key))
    if isinstance(value, str):
      return [{"role": "assistant", "content": value}]
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
      return None
    found, _ = self._messages(record._replace(fields={self._name(key): messages}), key)
    return found if found[0]["role"] == "assistant" else None

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
                        f"{texts[1][:40]!r}), and there is no {self._name('prompt')!r}; the row's columns are "
                        f"{shown_names(record.fields)}. Add it, or name the column that it is, as in "
                        'chat.fields=(("prompt", "question"),), or make both begin with the same prompt.')
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
