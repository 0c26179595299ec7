"""The stream of prompts that completions are sampled for, as a pure function of (seed, index).

    prompts = make_prompt_data(config, tokenizer)
    item = prompts.item(17)     # its ids, its text for rewards, the record's other columns

All prompts are tokenised at the start and kept. Which source, and which of its prompts, is number k follows from the
mixture (mixture.py) and from a permutation of each source for each of its epochs, as rows do in training.
"""

import contextlib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from input_pipeline.bad_rows import BAD_ROW, BadRows, Policy
from input_pipeline.chat.image_placeholders import BAD_IMAGE
from input_pipeline.chat.tool_functions import load_tools, schema_of
from input_pipeline.examples.prompts import Prompt, Prompter
from input_pipeline.examples.routed import NOBODY, Router
from input_pipeline.images.images import ImageError, Images
from input_pipeline.loader import used_sources
from input_pipeline.mixture import Mixture, stage_weights
from input_pipeline.packing import permutation
from input_pipeline.remarks import Tally
from input_pipeline.sources.readers import Record
from input_pipeline.sources.sources import Source, open_source, stable
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError, DataError

OVER_LONG = ("auto", "drop", "error")
DUPLICATE, TOO_LONG = "duplicate", "too long"


class PromptItem(NamedTuple):
  """A prompt of the stream.

  Attributes:
    prompt: its ids, text and place (`where`).
    content: the text, or the messages, as reward functions and environments get them.
    columns: the record's fields but those that the prompt was made of, of JSON's types (dates and bytes as strings).
      What the assistant says at the end of a conversation, which is no part of the prompt, is `answer`, unless the
      record has a column of that name.
    tools, variables: of the chat template, to render further turns.
    source: index of its source in sorted order.
    number: its place in the stream.
    teacher: the number of the one that the record names (examples/routed.py); -1: records name none.
  """

  prompt: Prompt
  content: str | list[dict]
  columns: dict[str, Any]
  tools: list[dict] | None = None
  variables: dict = {}
  source: int = 0
  number: int = -1
  teacher: int = NOBODY


class PromptSource(NamedTuple):
  """A source's prompts in the order of its records, and how many records were left out, by reason."""

  name: str
  items: list[PromptItem]
  skipped: int
  dropped: dict[str, int]
  # Records by what they were taken for.
  shapes: dict[str, int]
  # Equal if and only if all items are, and their order.
  fingerprint: str


def make_prompt_data(config: ConfigDict, tokenizer: Tokenizer, progress: bool = False) -> "PromptData":
  """The prompts of `input.sources`, each short enough for `rollout.max_new_tokens` to follow it in `seq_len`.

  Raises:
    ConfigError: no sources, bad weights, or options that prompts do not have.
    DataError: a record without a prompt, a source without one, or too many that are too long.
  """
  i, rollout = config.input, config.rollout
  if i.over_long not in OVER_LONG:
    raise ConfigError(f"input.over_long is {i.over_long!r}, but a prompt is not cut. Use one of {', '.join(OVER_LONG)} "
                      "(auto drops what is too long).")
  if i.mixture_by != "examples":
    raise ConfigError(f"input.mixture_by is {i.mixture_by!r}; prompts are mixed by their number. Use 'examples'.")
  if not 1 <= rollout.max_new_tokens < config.seq_len:
    raise ConfigError(f"rollout.max_new_tokens is {rollout.max_new_tokens}; with seq_len={config.seq_len} it must be "
                      f"from 1 to {config.seq_len - 1}, so that a prompt fits before the completion.")
  names = used_sources(i)
  for name in i.sources:
    if name not in names:
      open_source(i.sources[name], name)  # its keys are checked all the same
      logging.warning("source %r has weight 0 throughout and is not used.", name)
  prompter = Prompter(config, tokenizer)
  tools = load_tools(rollout.tools, "rollout.tools")
  _check_shown(tools, prompter)
  router = Router(config.strategy) if config.strategy.get("teacher_key") else None
  sources = []
  for number, name in enumerate(names):
    source = open_source(i.sources[name], name, texts=False)
    sources.append(_read(source, prompter, config, number, progress, tools, router))
  starts, weights = stage_weights({n: i.sources[n].weight for n in sorted(i.sources)}, i.weight_stages)
  shares = np.array([[stage[name] for name in names] for stage in weights], np.float64)
  mixture = Mixture(starts, shares, [len(source.items) for source in sources], i.stop, names)
  order = [config.seed, starts, shares.tolist(), names, [source.fingerprint for source in sources]]
  return PromptData(sources, mixture, config.seed, _hash(order), prompter, tools)


def _check_shown(tools: Mapping[str, Callable], prompter: Prompter) -> None:
  """Refuses tools of the config that the template shows to nobody: no row is to blame, and all would be.

  Raises:
    ConfigError: it renders a plain question, but not with the tools.
  """
  if not tools or prompter.template is None:
    return
  asked: list[dict] = [{"role": "user", "content": "a"}]
  with contextlib.suppress(DataError):  # else the rows tell
    prompter.messages(asked, None, "a question", ())
    try:
      prompter.messages(asked, [schema_of(function) for function in tools.values()], "a question", ())
    except DataError as e:
      raise ConfigError(f"rollout.tools: {prompter.template.where} does not show them, so that the policy would not "
                        "know what it may call. Use a template that does, such as chat.template='qwen3'.") from e


def prompt_texts(config: ConfigDict) -> Callable[[], Iterator[str]]:
  """A function that gives, from the start at each call, what a tokenizer is trained on: every string in the records of
  the prompts, answers and whatever else rewards are told included."""
  for name in used_sources(config.input):
    open_source(config.input.sources[name], name)  # its keys are checked now

  def texts() -> Iterator[str]:
    for name in used_sources(config.input):
      bad = BadRows(name, Policy.of(config))
      for record in open_source(config.input.sources[name], name, texts=False).records(bad):
        yield from _strings(record.fields)
      bad.finish()

  return texts


def _strings(value: Any) -> Iterator[str]:
  if isinstance(value, str):
    yield value
  elif isinstance(value, (list, dict)):
    for part in value.values() if isinstance(value, dict) else value:
      yield from _strings(part)


class PromptData:
  """Prompts by number. One epoch is as many prompts as all used sources have together, whatever their weights.

  Each source goes through all its prompts before it begins anew, each time in another order.

  Attributes:
    source_names: sorted.
    fingerprint: equal if and only if every prompt of the stream is (`stop` changes none).
    num_prompts: of one epoch.
    num_items: how many there are until the data end; None: endless (`input.stop="never"`).
    prompter: what the prompts were made with.
    tools: {name: function} of those that the prompts show, beside those of their records.
  """

  def __init__(self, sources: list[PromptSource], mixture: Mixture, seed: int, fingerprint: str,
               prompter: Prompter, tools: Mapping[str, Callable]):
    self._sources, self._mixture, self.prompter, self.tools = sources, mixture, prompter, tools
    self.source_names, self.fingerprint = mixture.names, fingerprint
    self.num_prompts = int(mixture.rows.sum())
    self.num_items: int | None = mixture.num_rows

    # Two epochs of each source, as a batch may span them.
    @functools.lru_cache(maxsize=2 * len(sources))
    def order(source: int, epoch: int) -> np.ndarray:
      return permutation(len(sources[source].items), seed, sources[source].name, "prompts", epoch)

    self._order = order

  def __len__(self) -> int:
    return self.num_prompts

  def item(self, index: int) -> PromptItem:
    """Prompt `index` of the stream, from 0. Neither the calls before nor the thread matter.

    Raises:
      IndexError: the data end before it.
    """
    source, row = self._locate(index)
    return self._sources[source].items[row]._replace(number=index)

  def place(self, index: int) -> int:
    """Which of `every_item` prompt `index` of the stream is."""
    source, row = self._locate(index)
    return sum(len(before.items) for before in self._sources[:source]) + row

  def _locate(self, index: int) -> tuple[int, int]:
    """(source, which of its prompts) of prompt `index` of the stream."""
    if index < 0 or self.num_items is not None and index >= self.num_items:
      raise IndexError(f"prompt {index} of {self.num_items}")
    (source,), (epoch,), (row,) = (part.tolist() for part in self._mixture.locate(np.array([index])))
    return source, int(self._order(source, epoch)[row])

  def every_item(self) -> Iterator[PromptItem]:
    """All prompts, once each, source by source."""
    for source in self._sources:
      yield from source.items

  def epoch(self, index: int) -> float:
    """Epochs taken by the prompts before `index`."""
    return self._taken(index) / self.num_prompts

  def counters(self, index: int) -> dict[str, dict[str, float]]:
    """For each source, its prompts before `index`, and the epochs of it that these are."""
    draws, sizes = self._mixture.draws(self._taken(index)).tolist(), self._mixture.rows.tolist()
    return {n: {"prompts": d, "epoch": d / s} for n, d, s in zip(self.source_names, draws, sizes, strict=True)}

  def stats(self) -> list[dict[str, Any]]:
    """One row a source for the start-up table (`trainer.telemetry.terminal.stats`)."""
    reasons = [why for why in (DUPLICATE, TOO_LONG, BAD_IMAGE, BAD_ROW)
               if any(source.dropped[why] for source in self._sources)]
    table = []
    for source in self._sources:
      lengths = [len(item.prompt.ids) for item in source.items]
      table.append({"source": source.name, "prompts": len(lengths), "skipped": source.skipped,
                    **{f"dropped: {why}": source.dropped[why] for why in reasons}, "tokens": sum(lengths),
                    "longest": max(lengths), "records": ", ".join(f"{n:,} {s}" for s, n in source.shapes.items())})
    return table

  def _taken(self, index: int) -> int:
    return index if self.num_items is None else min(index, self.num_items)


def _read(source: Source, prompter: Prompter, config: ConfigDict, number: int, progress: bool,
          tools: Mapping[str, Callable], router: Router | None = None) -> PromptSource:
  """All prompts of a source that leave room for a completion."""
  room = config.seq_len - config.rollout.max_new_tokens
  schemas = [schema_of(function) for function in tools.values()]
  items: list = []
  lengths: list[int] = []
  seen: set = set()
  shapes: Counter = Counter()
  remarks = Tally()
  dropped, bad = {DUPLICATE: 0, TOO_LONG: 0, BAD_IMAGE: 0}, BadRows(source.name, Policy.of(config))
  with source.bar("tokenizing", progress) as advance:
    for record in source.records(bad):
      advance()
      try:
        item = _item(record, prompter, config.rollout.prompt_key, number, schemas)
        if router is not None:
          item = item._replace(teacher=router.number(record))
      except DataError as e:
        if isinstance(e, ImageError) and config.input.images.on_error == "drop":
          logging.info("dropped: %s", e)
          dropped[BAD_IMAGE] += 1
        else:
          bad.add(record.where, e)
        continue
      shapes["texts" if isinstance(item.content, str) else "conversations"] += 1
      remarks.add(item.prompt.remarks)
      key = _hash(_content(item))
      if key in seen:
        dropped[DUPLICATE] += 1
        continue
      seen.add(key)
      lengths.append(len(item.prompt.ids))
      if lengths[-1] > room:
        dropped[TOO_LONG] += 1
      else:
        items.append(item)
    advance()
  bad.finish()
  dropped[BAD_ROW] = bad.count
  remarks.say(source.name, shapes.total())
  _check_lengths(np.array(lengths), config, source.name)
  if shapes["texts"] and prompter.template is not None:
    logging.warning("source %r: %d prompts are texts to be continued, which the chat template does not touch. For what "
                    "a user says, name the column: rollout.prompt_key.", source.name, shapes["texts"])
  if any(dropped.values()):
    logging.warning("source %r: dropped %s", source.name, ", ".join(f"{n} ({why})" for why, n in dropped.items() if n))
  if not items:
    raise DataError(f"source {source.name!r}: none of its prompts can be used: {dropped[BAD_IMAGE]} have {BAD_IMAGE}, "
                    f"{dropped[BAD_ROW]} are bad rows.")
  content = _hash([_content(item) for item in items])
  skipped = source.tally.empty + source.tally.undecodable
  return PromptSource(source.name, items, skipped, dropped, dict(shapes.most_common()), content)


def _content(item: PromptItem) -> list:
  """All that makes a prompt what it is."""
  content = [item.prompt.ids.tolist(), item.content, item.columns, item.tools, item.variables]
  if item.teacher != NOBODY:
    content.append(item.teacher)
  images = item.prompt.images
  return [*content, [_hash(image) for image in images.encoded]] if isinstance(images, Images) else content


def _item(record: Record, prompter: Prompter, prompt_key: str | None, source: int, tools: Sequence[dict] = ()
          ) -> PromptItem:
  asked = prompter.ask(record, prompt_key)
  if tools and isinstance(asked.content, str):
    raise DataError(f"{record.where}: the prompt is a text to be continued, which shows no rollout.tools. Give "
                    "messages, or a chat template and the name of the column: rollout.prompt_key.")
  if tools:
    asked = asked._replace(tools=[*(asked.tools or ()), *tools])
  prompt = prompter.asked(asked, record.where)
  columns = {key: value for key, value in record.fields.items() if key not in asked.columns}
  if asked.answer is not None:
    columns.setdefault("answer", asked.answer)
  # Reward functions run in other processes, and the fingerprint is of what they get.
  columns = json.loads(json.dumps(columns, default=stable))
  return PromptItem(prompt, asked.content, columns, asked.tools, asked.variables, source)


def _check_lengths(lengths: np.ndarray, config: ConfigDict, name: str) -> None:
  """Raises DataError if more prompts are too long than may be, or all are."""
  over_long, new, most = config.input.over_long, config.rollout.max_new_tokens, config.input.max_over_long
  count = int(np.count_nonzero(lengths + new > config.seq_len))
  if not count:
    return
  share = count / len(lengths)
  if over_long != "error" and share <= most and count < len(lengths):
    return
  allowed = 0 if over_long == "error" else min(int(most * len(lengths)), len(lengths) - 1)
  enough = int(np.sort(lengths)[-1 - allowed]) + new
  limit = "input.over_long is 'error'" if over_long == "error" else f"input.max_over_long allows {most:.1%} of them"
  raise DataError(
      f"source {name!r}: {count:,} of {len(lengths):,} prompts ({share:.1%}; the longest: {lengths.max():,} tokens) "
      f"leave no room for rollout.max_new_tokens={new} in seq_len={config.seq_len}, and {limit}. Set "
      f"seq_len={enough} or more, a smaller rollout.max_new_tokens"
      f"{', or input.over_long=drop' if over_long == 'error' else ', or a larger input.max_over_long'}.")


def _hash(value: Any) -> str:
  return hashlib.blake2b(json.dumps(value, sort_keys=True, default=stable).encode(), digest_size=16).hexdigest()
