"""Generation scored against known answers: exact match or what a regex extracts, VQA accuracy, pass@k, and a table."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from evaluators import common, questions, vqa
from evaluators.questions import Question
from input_pipeline.examples.answers import compile_pattern, extract, normalize
from input_pipeline.examples.prompts import Prompter
from trainer.errors import ConfigError, one_of
from trainer.generate.completion import Completion
from trainer.generate.sampler import Sampler
from trainer.generate.sampling import Options
from trainer.generate.stop_strings import StopStrings, columns, ending
from trainer.report import pages

SHOWN = 8  # samples in the readable file
MATCHES = ("exact", "vqa")


class Generate:
  """Samples `num_samples` completions of every prompt of a split; each is right if its answer is one of the record's.

  Yields `accuracy` (the mean over samples; with `match="vqa"` of what each is worth, see evaluators/vqa.py), `pass@k`
  for each k of `pass_at` (the mean over prompts), `stopped` (the share of samples that ended by themselves) and
  `length` (mean tokens of a sample). Every sample is a line of samples/<name>-<step>.jsonl, from which these numbers
  can be computed again; samples/<name>-<step>.txt shows the first few, and the page samples/<name>-<step>.html more,
  with their images. What is drawn is the same at every step but for the parameters.
  """

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    self._name, self._setup, self._match = name, setup, cfg.match
    self._num_samples, self._new, self._pass_at = cfg.num_samples, cfg.max_new_tokens, tuple(cfg.pass_at)
    self._options = Options(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)
    self._check(name)
    self._stop = StopStrings(setup.tokenizer, cfg.stop, cfg.keep_stop, f"evals.{name}.stop")
    self._extract = compile_pattern(cfg.extract, f"evals.{name}.extract")
    prompter = Prompter(setup.config, setup.tokenizer)
    self._stop_ids, self._seed = prompter.stop_ids, setup.config.seed
    self._questions = questions.read(name, cfg, setup, prompter)
    self._sampler = Sampler(setup.model, setup.mesh, rows=cfg.batch_size or 32)
    self._sampler.check([question.prompt.ids for question in self._questions], self._new, f"evals.{name}.")

  def _check(self, name: str) -> None:
    self._options.check(f"evals.{name}.")
    one_of(f"evals.{name}.match", self._match, MATCHES)
    if self._num_samples < 1 or self._new < 1:
      raise ConfigError(f"evals.{name}: found num_samples={self._num_samples}, max_new_tokens={self._new}; allowed: 1 "
                        "or more.")
    wrong = [k for k in self._pass_at if not isinstance(k, int) or not 1 <= k <= self._num_samples]
    if wrong:
      raise ConfigError(f"evals.{name}.pass_at: found {wrong[0]!r}, allowed: whole numbers from 1 to num_samples="
                        f"{self._num_samples}.")
    if self._options.temperature == 0 and self._num_samples > 1:
      raise ConfigError(f"evals.{name}: temperature 0 makes all {self._num_samples} samples of a prompt the same. Use "
                        "num_samples=1, or a temperature above 0.")

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]:
    rows = []
    for begin, images in questions.in_parts(self._questions):
      part = self._questions[begin:] if images is None else self._questions[begin:begin + len(images)]
      completions = self._sampler.generate(
          params, [question.prompt.ids for question in part], num_samples=self._num_samples, max_new_tokens=self._new,
          stop_ids=self._stop_ids, seed=self._seed, **self._options._asdict(), **self._stop.options,
          **({} if images is None else dict(images=images)))
      rows += [self._row(part[c.prompt], dataclasses.replace(c, prompt=c.prompt + begin)) for c in completions]
    if jax.process_index() == 0:
      self._write(step, rows)
    yield from metrics(rows, self._pass_at)

  def _row(self, question: Question, completion: Completion) -> dict[str, Any]:
    """A line of the table."""
    text, prompt = self._stop.text(completion), question.prompt
    extracted, answers = extract(text, self._extract), [extract(answer, self._extract) for answer in question.answers]
    # An answer without the mark is the answer itself.
    answers = [normalize(answer) if found is None else found
               for answer, found in zip(question.answers, answers, strict=True)]
    if self._match == "vqa":
      extracted, answers = extracted and vqa.normalize(extracted), [vqa.normalize(answer) for answer in answers]
      score = 0.0 if extracted is None else vqa.accuracy(extracted, answers)
    else:
      score = float(extracted is not None and extracted in answers)
    return {"where": prompt.where, "prompt_index": completion.prompt, "sample": completion.sample,
            "prompt": prompt.text, "completion": text, "extracted": extracted,
            "answer": answers[0] if len(answers) == 1 else answers, "correct": score == 1, "score": score,
            **columns(completion.finish_reason, completion.stop_reason), "tokens": len(completion.ids),
            "logprob": float(completion.logprobs.sum(dtype=np.float64))}

  def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
    marks = {True: "right", False: "wrong"}
    shown = "\n\n".join(
        f"--- {row['where']}, {ending(row)}, {marks[row['correct']]}: {row['extracted']!r}, the answer is "
        f"{row['answer']!r}\n{row['prompt']}\n>>> {row['completion']}" for row in rows[:SHOWN])
    self._setup.writer.write_texts(step, {f"eval/{self._name}": shown})
    notes = "\n".join(f"{name} {value:.4f}" for name, value in metrics(rows, self._pass_at))
    cards = list(map(self._card, rows[:pages.MOST_CARDS]))
    page = pages.cards_page(f"{self._name}, step {step}", cards, len(rows), notes)
    common.write_samples(self._setup.workdir / "samples" / f"{self._name}-{step}", rows, shown, page)

  def _card(self, row: dict[str, Any]) -> pages.Card:
    answers = [row["answer"]] if isinstance(row["answer"], str) else row["answer"]
    images = self._questions[row["prompt_index"]].prompt.images
    lines = [("prompt", row["prompt"]), ("completion", row["completion"]), ("answer", " | ".join(answers)),
             ("ended by", ending(row))]
    return pages.Card(f"{row['where']}, sample {row['sample']}", images, lines, row["correct"])


def metrics(rows: list[dict[str, Any]], pass_at: tuple[int, ...]) -> Iterator[tuple[str, float]]:
  """The evaluator's numbers from the lines of its table."""
  right: dict[int, list[bool]] = {}
  for row in rows:
    right.setdefault(row["prompt_index"], []).append(row["correct"])
  yield "accuracy", sum(row["score"] for row in rows) / len(rows)
  for k in pass_at:
    yield f"pass@{k}", sum(pass_at_k(len(found), sum(found), k) for found in right.values()) / len(right)
  yield "stopped", sum(row["finish_reason"] == "stop" for row in rows) / len(rows)
  yield "length", sum(row["tokens"] for row in rows) / len(rows)


def pass_at_k(n: int, c: int, k: int) -> float:
  """The chance that one of k samples is right, from n of which c are: unbiased (Chen et al. 2021, eq. 1)."""
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)
