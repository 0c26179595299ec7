"""Completions that were sampled and rewarded elsewhere: rows of a prompt, its responses and their rewards.

    prompt, responses, rewards        strings, or lists of messages; a number or null for each response
    masks                             optional, true where a response is to be trained
    prompt, responses, rewards, masks responses as lists of token ids; masks then may be a list for each
    logprobs                          optional, for responses of token ids: what their sampler gave each token

Each response is a document of one part, the prompt with the response, tokenised and weighted as fine-tuning does it.
Its advantage is that among the responses of its row (input_pipeline/examples/advantages.py).
"""

import json
import math
import sys
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.chat.image_placeholders import vocab_size
from input_pipeline.chat.schema import Conversation, Plain
from input_pipeline.examples import advantages
from input_pipeline.examples.base import NOTHING_TO_TRAIN, Encoded
from input_pipeline.examples.conversations import fields_of, texts_of
from input_pipeline.examples.pairs import SidesEncoder
from input_pipeline.examples.prompts import Asked, Prompter, PromptReader
from input_pipeline.examples.roles import COMPLETION
from input_pipeline.examples.schema_pairs import SHAPE, Side
from input_pipeline.files import shown_names
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError, DataError

# Raise when the same rows and options would give other tokens, weights or advantages.
VERSION = 2
NO_REWARD, MASKED = "a response without a reward", "a response masked"


class Tokens(NamedTuple):
  """A response of token ids, int64 [n], with the weight of each, float32, and maybe the log-prob that it was sampled
  with, float32, NaN where nothing is trained."""

  ids: np.ndarray
  weights: np.ndarray
  logprobs: np.ndarray | None


class Rollout(NamedTuple):
  """A row: what was asked (token ids int64, or what a template or nothing renders), and for each response what was
  said, its reward (NaN: none) and whether it is trained."""

  asked: Asked | np.ndarray
  responses: list[Side | Tokens]
  rewards: np.ndarray
  trained: list[bool]


class RolloutReader(PromptReader):
  """Finds prompts with rewarded responses, and checks them. Args: see `ShapeReader`."""

  def rollout(self, record: Record, prompt_key: str | None = None, chat: bool = False) -> Rollout:
    """The row. Args: see `ask`.

    Raises:
      DataError: names the record, the key, and what was found.
    """
    responses = self._list(record, "responses")
    rewards = [self._reward(record, i, value) for i, value in enumerate(self._list(record, "rewards", len(responses)))]
    masks = self._list(record, "masks", len(responses)) if self._has(record, "masks") else [True] * len(responses)
    known = self._list(record, "logprobs", len(responses)) if self._has(record, "logprobs") else [None] * len(responses)
    asked = self._asked_ids(record, prompt_key)
    if asked is None:
      asked = self.ask(record, prompt_key, chat)
    found, trained = [], []
    for i, (response, mask, logprobs) in enumerate(zip(responses, masks, known, strict=True)):
      found.append(self._response(record, i, response, mask, asked))
      if logprobs is not None:
        found[-1] = self._with_logprobs(record, i, found[-1], logprobs)
      trained.append(self._trained(record, i, mask, found[-1]))
    return Rollout(asked, found, np.array(rewards, np.float64), trained)

  def columns(self, record: Record, prompt_key: str | None = None, chat: bool = False) -> frozenset[str]:
    """The names of the row's columns that are read. Args: see `ask`."""
    if self._asked_ids(record, prompt_key) is None:
      asked = self.ask(record, prompt_key, chat).columns
    else:
      asked = frozenset({self._name(self._column(record)) if prompt_key is None else prompt_key})
    return asked | {self._name(key) for key in ("responses", "rewards", "masks", "logprobs")}

  def has_responses(self, record: Record) -> bool:
    """Whether it is such a row, and no prompt alone."""
    return self._has(record, "responses")

  def _list(self, record: Record, column: str, length: int | None = None) -> list:
    key, found = self._name(column), shown_names(record.fields)
    value = record.fields.get(key)
    if value is None:
      raise DataError(f"{record.where}: no {key!r} (or null); its columns are {found}. A row is prompt, responses and "
                      'rewards; other names are mapped by chat.fields, ours first: (("responses", "samples"),).')
    if not isinstance(value, list) or not value:
      raise DataError(f"{record.where}: {key} is {value!r:.60} ({type(value).__name__}); expected a list with an entry "
                      "for each response.")
    if length is not None and len(value) != length:
      raise DataError(f"{record.where}: {key} has {len(value)} entries for {length} responses.")
    return value

  def _reward(self, record: Record, i: int, value: Any) -> float:
    if value is None:
      return math.nan
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:  # nor nan
      raise DataError(f"{record.where}: {self._name('rewards')}[{i}] is {value!r:.60} ({type(value).__name__}); "
                      "expected a finite number, or null for none.")
    return float(value)

  def _asked_ids(self, record: Record, prompt_key: str | None) -> np.ndarray | None:
    """A prompt of token ids; None if it is not one."""
    key = self._name(self._column(record)) if prompt_key is None else prompt_key
    value = record.fields.get(key)
    return _ids(record, key, value) if value and _are_ids(value) else None

  def _response(self, record: Record, i: int, value: Any, mask: Any, asked: Asked | np.ndarray) -> Side | Tokens:
    key = f"{self._name('responses')}[{i}]"
    if isinstance(value, list) and _are_ids(value):
      if not value:
        raise DataError(f"{record.where}: {key} is empty. Remove it, with its reward.")
      return Tokens(_ids(record, key, value), self._weights(record, i, mask, len(value)), None)
    if isinstance(asked, np.ndarray):
      raise DataError(f"{record.where}: {key} is {_kind(value)}, but the prompt is a list of token ids; then "
                      "responses are, too.")
    if isinstance(asked.content, str):
      if not isinstance(value, str):
        raise DataError(f"{record.where}: {key} is {_kind(value)}, but the prompt is a string; then "
                        "responses are strings or lists of token ids.")
      row: Plain | Conversation = Plain(SHAPE, asked.content, value, asked.images)
    else:
      row = self._answered(record, key, value, asked)
    return Side(row, key)

  def _answered(self, record: Record, key: str, value: Any, asked: Asked) -> Conversation:
    if isinstance(value, str):
      value = [{"role": "assistant", "content": value}]
    messages, factors = self._messages(Record(record.name, record.where, {key: value}), key)
    if messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
      role = messages[0 if messages[0]["role"] != "assistant" else -1]["role"]
      raise DataError(f"{record.where}: {key} begins or ends with what the {role} says; expected the assistant.")
    if bad := [w for w in factors if w not in (0, 1)]:
      raise DataError(f"{record.where}: a message of {key} has the weight {bad[0]:g}; in responses it is 0 or 1.")
    # The system message is in `said` already.
    beside = {k: v for k, v in record.fields.items() if k != self._name("system")}
    return self._conversation(record._replace(fields=beside), SHAPE, asked.content + messages,
                              [1.0] * len(asked.content) + factors, len(asked.content), asked.images)

  def _weights(self, record: Record, i: int, mask: Any, length: int) -> np.ndarray:
    if not isinstance(mask, list):
      return np.ones(length, np.float32)
    if len(mask) != length or any(value not in (0, 1) for value in mask):
      raise DataError(f"{record.where}: {self._name('masks')}[{i}] has {len(mask)} entries for a response of {length} "
                      "tokens; expected one for each, true or false (1 or 0).")
    return np.array(mask, np.float32)

  def _with_logprobs(self, record: Record, i: int, response: Side | Tokens, values: Any) -> Tokens:
    key = f"{self._name('logprobs')}[{i}]"
    if isinstance(response, Side):
      raise DataError(f"{record.where}: {key} goes with responses of token ids, and {response.column} is text, whose "
                      "tokens may be others than those that were sampled. Give the ids, or remove the column.")
    if not isinstance(values, list) or len(values) != len(response.ids):
      found = f"has {len(values)} entries" if isinstance(values, list) else f"is {values!r:.60}"
      raise DataError(f"{record.where}: {key} {found} for a response of {len(response.ids)} tokens; expected one for "
                      "each: its log-prob in nats.")
    bad = [n for n, (value, weight) in enumerate(zip(values, response.weights, strict=True))
           if weight and (not isinstance(value, (int, float)) or not -math.inf < value <= 0)]
    if bad:
      raise DataError(f"{record.where}: {key} has {values[bad[0]]!r:.60} for token {bad[0]}; expected a log-prob in "
                      "nats, at most 0, of each token that is trained.")
    known = [value if weight else math.nan for value, weight in zip(values, response.weights, strict=True)]
    return response._replace(logprobs=np.array(known, np.float32))

  def _trained(self, record: Record, i: int, mask: Any, response: Side | Tokens) -> bool:
    if isinstance(mask, list) and isinstance(response, Tokens):
      return True
    if mask not in (0, 1):
      what = " A list, one entry a token, goes with responses of token ids." if isinstance(mask, list) else ""
      raise DataError(f"{record.where}: {self._name('masks')}[{i}] is {mask!r:.60}; expected true (train it) or false."
                      f"{what}")
    return bool(mask)


class RolloutEncoder(SidesEncoder):
  """Rewarded responses as documents of one part, with their advantages; see `Encoder`.

  The token that ends a turn, or EOS, stands behind each response and is trained, unless it is of token ids, which are
  taken as they are. A response without a reward is in no baseline and not trained; one that is masked is not trained.

  Args:
    config: the whole config, of which `chat`, `tokenizer`, `strategy` and `rollout.prompt_key` count.

  Raises:
    ConfigError: see `ChatEncoder`; or advantages that compare the rows of a batch.
  """

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer | None):
    super().__init__(config, tokenizer)
    self._config, self._tokenizer = config, tokenizer
    self._key, self._kinds = config.rollout.prompt_key, advantages.kinds(config.strategy)
    self._rollouts = RolloutReader(fields_of(config.chat), images=self._chat.images)

  @cached_property
  def fingerprint(self) -> str:
    return json.dumps(["rollouts", VERSION, self._chat.fingerprint, self._key, *self._kinds])

  def encode(self, records: list[Record]) -> list[Encoded | str]:
    self._check()
    rows = [(record, self._read(record)) for record in records]
    sides = [(response, record.where) for record, row in rows for i, response in enumerate(row.responses)
             if isinstance(response, Side) and _why_not(row, i) is None]
    tokenized = iter(self._encode_sides(sides))
    results: list[Encoded | str] = []
    for record, row in rows:
      values = advantages.advantages(row.rewards[None], *self._kinds)[0]
      for i, response in enumerate(row.responses):
        if why := _why_not(row, i):
          results.append(why)
          continue
        answer = self._join(record, row, response) if isinstance(response, Tokens) else next(tokenized)
        if isinstance(answer, str):
          results.append(answer)
          continue
        advantage = float(values[i]) + 0.0  # no negative zero
        document = answer._replace(parts=(len(answer.ids),), roles=(COMPLETION,), advantages=(advantage,))
        results.append(document if answer.weights[1:].any() else NOTHING_TO_TRAIN)
    return results

  def texts(self, record: Record) -> Iterable[str]:
    row = self._read(record) if self._rollouts.has_responses(record) else None
    asked = self._rollouts.ask(record, self._key, self._chat.template is not None) if row is None else row.asked
    said: list[str | dict] = []
    if isinstance(asked, Asked):
      said += [asked.content] if isinstance(asked.content, str) else asked.content
    for response in [] if row is None else row.responses:
      if isinstance(response, Side):
        answer = response.row
        said += [answer.completion] if isinstance(answer, Plain) else answer.messages[answer.prompt:]
    return [text for part in said for text in ([part] if isinstance(part, str) else texts_of(part))]

  def describe(self, record: Record) -> str:
    row = self._read(record)
    if isinstance(row.responses[0], Tokens):
      return "responses of tokens"
    return f"responses of {'strings' if isinstance(row.responses[0].row, Plain) else 'messages'}"

  def columns(self, record: Record) -> frozenset[str]:
    return self._rollouts.columns(record, self._key, self._chat.template is not None)

  def _read(self, record: Record) -> Rollout:
    return self._rollouts.rollout(record, self._key, self._chat.template is not None)

  def _check(self) -> None:
    """Refuses what rows cannot tell. (Not at the beginning: prompts to sample for are read by their texts alone.)"""
    if problem := advantages.mismatch(*self._kinds):
      raise ConfigError(f"strategy: {problem}")
    if advantages.apart(self._config.strategy):
      raise ConfigError("strategy.combine is 'normalize_then_sum', but the responses are in the data "
                        "(rollout.num_prompts=0), whose rewards are one number each, and rows are prepared before "
                        "there are batches. Use 'sum_then_normalize', or sample the responses (rollout.num_prompts).")
    for key, value in zip(("baseline", "scale"), self._kinds, strict=True):
      if value == "batch":
        raise ConfigError(f"strategy.{key} is 'batch', but the responses are in the data (rollout.num_prompts=0), "
                          "whose rows are prepared before there are batches. Use 'group' or 'none', or sample the "
                          "responses (rollout.num_prompts).")

  def _join(self, record: Record, row: Rollout, response: Tokens) -> Encoded | str:
    """The ids and weights of a response of token ids behind its prompt; or why it is dropped."""
    asked, images, places = row.asked, (), ()
    if isinstance(asked, np.ndarray):
      prompt = asked
      if self._rollouts.images_of(record):
        raise DataError(f"{record.where}: has images, and a prompt of token ids. Give the prompt as text or messages, "
                        "so that the places of the images are known.")
    else:
      loaded = self._chat.load(asked.images)
      if isinstance(loaded, str):
        return loaded
      found = self._prompter.asked(asked, record.where)
      prompt, images, places = found.ids, tuple(loaded), found.image_places
    ids = np.concatenate([prompt, response.ids])
    size = vocab_size(self._config, self._tokenizer)
    if bad := [i for i in ids.tolist() if not 0 <= i < size]:
      raise DataError(f"{record.where}: the id {bad[0]} is not in the tokenizer's vocabulary of {size}. Use the "
                      "tokenizer that these rows were made with.")
    weights = np.concatenate([np.zeros(len(prompt), np.float32), response.weights])
    logprobs = response.logprobs
    if logprobs is not None:
      logprobs = np.concatenate([np.full(len(prompt), np.nan, np.float32), logprobs])
    return Encoded(ids.astype(np.int32), weights, images=images, places=places, logprobs=logprobs)

  @cached_property
  def _prompter(self) -> Prompter:
    return Prompter(self._config, self._tokenizer)


def _are_ids(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def _kind(value: Any) -> str:
  return "null" if value is None else f"a {type(value).__name__}"


def _ids(record: Record, key: str, value: list[int]) -> np.ndarray:
  if bad := [v for v in value if abs(v) >= 1 << 63]:
    raise DataError(f"{record.where}: {key} has the id {bad[0]}, which is in no vocabulary. Use the tokenizer that "
                    "these rows were made with.")
  return np.array(value, np.int64)


def _why_not(row: Rollout, i: int) -> str | None:
  """Why a response is left out; None: it is not."""
  return NO_REWARD if math.isnan(row.rewards[i]) else None if row.trained[i] else MASKED
