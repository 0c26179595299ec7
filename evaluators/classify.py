"""Classification by scoring options: which of the possible answers the model finds likeliest, and is it right."""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from evaluators import common, questions
from evaluators.questions import Question
from input_pipeline.batches import check_ids
from input_pipeline.examples.prompts import Prompter
from trainer.distributed.mesh import batch_sharding, check_batch, place
from trainer.errors import ConfigError, DataError, one_of
from trainer.generate import image_tokens
from trainer.generate.buckets import bucket
from trainer.generate.slots import MIN_LENGTH
from trainer.report import pages
from trainer.strategies import logprobs, seq

SCORES = ("sum", "mean")
SHOWN = 8  # questions in the readable file


class Classify:
  """Takes the option with the highest log-prob after the prompt: nothing is drawn, and no option is cut short.

  The log-prob of an option is that of its tokens and, with `with_end`, of the end of the text right behind it (any of
  the stop tokens), so that an option that another one begins with gains nothing by it. `score`: their sum, or their
  mean over these tokens. Options are those of the config or of a column of each record, and the right answer is one.

  Yields `accuracy`, and `nll`, the mean of -log of the right one's share among the options (softmax of the scores).
  samples/<name>-<step>.jsonl has a line for each question, .txt the counts of (answer, taken), .html the first ones
  with their images.
  """

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    self._name, self._setup, self._mean, self._with_end = name, setup, cfg.score == "mean", cfg.with_end
    options = tuple(map(str, cfg.options))
    one_of(f"evals.{name}.score", cfg.score, SCORES)
    if bool(options) == (cfg.options_key is not None):
      raise ConfigError(f"evals.{name}: options={options} and options_key={cfg.options_key!r}; set one of them, to the "
                        "possible answers or to the column that lists them.")
    prompter = Prompter(setup.config, setup.tokenizer)
    self._questions = questions.read(name, cfg, setup, prompter)
    self._options = [options or questions.strings(q.record, cfg.options_key) for q in self._questions]
    self._right = [_right(q, some, f"evals.{name}") for q, some in zip(self._questions, self._options, strict=True)]
    self._layout, self._pad_id = image_tokens.layout_of(setup.model), setup.tokenizer.pad_id
    self._rows, self._prefixes = self._make_rows(prompter)
    self._batch_size = cfg.batch_size or setup.config.batch_size // setup.config.grad_accum_steps
    check_batch(setup.mesh, self._batch_size, f"evals.{name}.batch_size")
    self._sharding, stop_ids = batch_sharding(setup.mesh), np.array(sorted(prompter.stop_ids), np.int32)
    if self._with_end and not len(stop_ids):
      raise ConfigError(f"evals.{name}.with_end is True, but the tokenizer has no token that ends a text. Use False.")
    self._scores = jax.jit(functools.partial(_scores, setup.model, stop_ids if self._with_end else None),
                           out_shardings=NamedSharding(setup.mesh, PartitionSpec()))

  def _make_rows(self, prompter: Prompter) -> tuple[list[tuple[int, int, np.ndarray]], dict[tuple[int, int], int]]:
    """((question, option, ids) of all texts, the longest first; how many of these ids are before the option)."""
    longest, rows, prefixes = self._setup.config.seq_len, [], {}
    for number, (question, options) in enumerate(zip(self._questions, self._options, strict=True)):
      for option, text in enumerate(options):
        ids, prefixes[number, option] = prompter.answered(question.prompt, text)
        if prefixes[number, option] == len(ids):
          raise DataError(f"{question.prompt.where}: option {option} is empty. Leave it out, or give it a text.")
        if len(ids) > longest:
          raise DataError(f"{question.prompt.where}: with option {option} {len(ids)} tokens, more than seq_len="
                          f"{longest}. Raise seq_len, or leave such rows out.")
        rows.append((number, option, ids))
    return sorted(rows, key=lambda row: -len(row[2])), prefixes

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]:
    scores = [np.zeros(len(options)) for options in self._options]
    for begin in range(0, len(self._rows), self._batch_size):
      part = self._rows[begin:begin + self._batch_size]
      batch = self._batch(part)
      found = np.asarray(self._scores(params, place(batch, self._sharding)), np.float64)
      for (question, option, ids), (option_sum, end) in zip(part, found, strict=False):
        count = len(ids) - self._prefixes[question, option] + self._with_end
        scores[question][option] = (option_sum + end) / (count if self._mean else 1)
    rows = [self._row(number, some) for number, some in enumerate(scores)]
    values = dict(metrics(rows))
    if jax.process_index() == 0:
      self._write(step, rows, values)
    yield from values.items()

  def _batch(self, part: list[tuple[int, int, np.ndarray]]) -> dict[str, np.ndarray]:
    """One text a row, whose option has the weight 1."""
    length = min(bucket(len(part[0][2]), MIN_LENGTH), self._setup.config.seq_len)
    prompts = [self._questions[number].prompt for number, _, _ in part]
    shown = [image_tokens.of_text(self._layout, ids, prompt.images, self._prefixes[number, option], prompt.where)
             for (number, option, ids), prompt in zip(part, prompts, strict=True)]
    batch = image_tokens.batch_of_texts(self._layout, self._batch_size, length, self._pad_id,
                                        [ids for _, _, ids in part], shown)
    for row, (number, option, ids) in enumerate(part):
      batch["loss_weights"][row, self._prefixes[number, option]:len(ids)] = 1
    return check_ids(batch, self._setup.model.vocab_size)

  def _row(self, number: int, scores: np.ndarray) -> dict[str, Any]:
    """A line of the table."""
    prompt, options, right = self._questions[number].prompt, self._options[number], self._right[number]
    taken = int(np.argmax(scores))
    return {"where": prompt.where, "prompt": prompt.text, "options": list(options), "scores": scores.tolist(),
            "taken": options[taken], "answer": options[right], "correct": taken == right,
            "nll": float(np.logaddexp.reduce(scores) - scores[right])}

  def _write(self, step: int, rows: list[dict[str, Any]], values: dict[str, float]) -> None:
    notes = "\n".join([*(f"{key} {value:.4f}" for key, value in values.items()), "", *confusion(rows)])
    shown = "\n\n".join([notes, *(
        f"--- {row['where']}, {'right' if row['correct'] else 'wrong'}: {row['taken']!r}, the answer is "
        f"{row['answer']!r}\n{row['prompt']}" for row in rows[:SHOWN])])
    self._setup.writer.write_texts(step, {f"eval/{self._name}": shown})
    cards = [
        pages.Card(row["where"], question.prompt.images,
                   [("prompt", row["prompt"]), ("taken", row["taken"]), ("answer", row["answer"])], row["correct"])
        for row, question in list(zip(rows, self._questions, strict=True))[:pages.MOST_CARDS]]
    page = pages.cards_page(f"{self._name}, step {step}", cards, len(rows), notes)
    common.write_samples(self._setup.workdir / "samples" / f"{self._name}-{step}", rows, shown, page)


def metrics(rows: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
  """The evaluator's numbers from the lines of its table."""
  yield "accuracy", sum(row["correct"] for row in rows) / len(rows)
  yield "nll", math.fsum(row["nll"] for row in rows) / len(rows)


def confusion(rows: list[dict[str, Any]]) -> list[str]:
  """Lines that count (answer, taken), the most frequent answers first; of each answer what it was most taken for."""
  counts: dict[str, Counter] = {}
  for row in rows:
    counts.setdefault(row["answer"], Counter())[row["taken"]] += 1
  lines = ["answer: taken for, how often"]
  for answer, taken in sorted(counts.items(), key=lambda item: (-item[1].total(), item[0])):
    shown = ", ".join(f"{text!r} {count}" for text, count in sorted(taken.items(), key=lambda kv: (-kv[1], kv[0])))
    lines.append(f"{answer!r}: {shown}")
  return lines


def _right(question: Question, options: tuple[str, ...], where: str) -> int:
  """The number of the right option.

  Raises:
    DataError: options that repeat, or an answer that is none of them.
  """
  if len(options) < 2 or len(set(options)) < len(options):
    raise DataError(f"{question.prompt.where}: the options are {list(options)!r:.200}; {where} needs at least two, "
                    "each once.")
  found = [number for number, option in enumerate(options) if option.strip() == question.answers[0].strip()]
  if len(question.answers) > 1 or not found:
    raise DataError(f"{question.prompt.where}: the answer is {' | '.join(question.answers)!r:.80}; {where} wants it to "
                    f"be one of the options {list(options)!r:.200}.")
  return found[0]


def _scores(model: Any, stop_ids: np.ndarray | None, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
  """[B, 2]: each row's Σ of the log-probs of its option's tokens, and the log-prob of an end behind them (or 0)."""
  hidden_BxTxD = model.apply(params, batch).hidden
  targets_BxT, weights_BxT = seq.next_tokens(batch)
  stats = logprobs.token_stats(
      hidden_BxTxD, model.unembedding(params), targets_BxT, chunk=model.vocab_chunk, logit_cap=model.final_logit_cap,
      num_real_vocab=model.num_real_vocab, want=("logprob",))
  sums_B = jnp.sum(stats.logprob * weights_BxT, axis=1)
  if stop_ids is None:
    return jnp.stack([sums_B, jnp.zeros_like(sums_B)], axis=1)
  lengths_B = jnp.sum(batch["segment_ids"] > 0, axis=1)
  last_Bx1xD = jnp.take_along_axis(hidden_BxTxD, jnp.maximum(lengths_B - 1, 0)[:, None, None], axis=1)
  logprobs_BxV = jax.nn.log_softmax(model.unembed(params, last_Bx1xD)[:, 0])
  return jnp.stack([sums_B, jax.nn.logsumexp(logprobs_BxV[:, stop_ids], axis=1)], axis=1)
