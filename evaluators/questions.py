"""Questions with known answers, as evaluators ask them: the records of a split as prompts, and what is right."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from evaluators import common
from input_pipeline.bad_rows import BadRows, Policy
from input_pipeline.examples.prompts import Prompt, Prompter
from input_pipeline.sources.readers import Record
from input_pipeline.sources.sources import open_source
from trainer.errors import ConfigError, DataError

# Questions whose images are decoded at a time.
DECODED = 512


class Question(NamedTuple):
  """A prompt, the answers that are right, and the record that both are from."""

  prompt: Prompt
  answers: tuple[str, ...]
  record: Record


def read(name: str, cfg: Any, setup: common.Setup, prompter: Prompter) -> list[Question]:
  """The questions of the evaluator `name`, with its keys `sources`, `split`, `prompt_key` and `answer_key`.

  Raises:
    ConfigError: one of prompt_key and answer_key without the other.
    DataError: a record that is no question, or without an answer.
  """
  if (cfg.prompt_key is None) != (cfg.answer_key is None):
    raise ConfigError(f"evals.{name}: prompt_key={cfg.prompt_key!r} and answer_key={cfg.answer_key!r}; set both or "
                      "none.")
  sources, split = common.sources(name, cfg, setup.config)
  questions: list[Question] = []
  for key in sorted(sources):
    source = open_source(sources[key], key, split=split, max_documents=cfg.max_documents, texts=False)
    bad = BadRows(key, Policy.of(setup.config))
    for record in source.records(bad):
      with bad.none_in(record):
        questions.append(_question(record, cfg, prompter))
    bad.finish()
  return questions


def _question(record: Record, cfg: Any, prompter: Prompter) -> Question:
  several = record.fields.get(cfg.answer_key) if cfg.answer_key is not None else None
  if not isinstance(several, (list, tuple)):
    prompt = prompter.record(record, cfg.prompt_key, cfg.answer_key)
    return Question(prompt, (prompt.answer,), record)
  answers = strings(record, cfg.answer_key)
  # The prompt is the same whatever the answer.
  one = record._replace(fields={**record.fields, cfg.answer_key: answers[0]})
  return Question(prompter.record(one, cfg.prompt_key, cfg.answer_key), answers, record)


def strings(record: Record, key: str) -> tuple[str, ...]:
  """The texts of a column that holds a list: of strings or numbers, or of {"answer": …} as in VQAv2.

  Raises:
    DataError: naming the record and what it holds instead.
  """
  found = record.fields.get(key)
  if isinstance(found, (list, tuple)) and len(found):
    values = [value.get("answer") if isinstance(value, dict) else value for value in found]
    if all(isinstance(value, (str, int, float)) and not isinstance(value, bool) for value in values):
      return tuple(map(str, values))
  shown = f"no key {key!r}" if key not in record.fields else f"{key!r} is {found!r:.80}"
  raise DataError(f"{record.where}: {shown}; expected a list of texts, at least one. Name another column, or repair "
                  "the row.")


def in_parts(questions: Sequence[Question]) -> Iterator[tuple[int, list[list[np.ndarray]] | None]]:
  """(number of the first, the images of each) of up to DECODED questions at a time; all at once where none has any."""
  if not any(len(question.prompt.images) for question in questions):
    yield 0, None
    return
  for begin in range(0, len(questions), DECODED):
    yield begin, [list(question.prompt.images) for question in questions[begin:begin + DECODED]]
