"""What an evaluator is, and making those that a config names.

An evaluator is a class with

    __init__(self, name, cfg, setup)        cfg: config.evals.<name>; setup: a Setup
    run(self, params, step) -> iterator of (metric name, float)

It yields sums divided by weights, so that its values do not depend on batch sizes. All processes call `run` together.
With the class attribute `wants_reference = True` it is called as `run(params, step, reference)`, with the parameters of
the strategy's reference policy as they are now; None: the state holds none.
A config adds its own by dotted path: config.evals.mine = dict(type="my_package.MyEvaluator", …).
"""

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from input_pipeline import loader
from input_pipeline.batches import check_ids
from trainer import strategies
from trainer.distributed.mesh import batch_sharding, check_batch, place_batch
from trainer.dotted import load_class
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Setup:
  """What evaluators are built from."""

  config: Any
  model: Any
  tokenizer: Any
  mesh: Mesh
  workdir: Path
  writer: Any
  # Data that the reference's log-probs are computed for before the first step, if the strategy says so.
  datasets: list[Any] = field(default_factory=list)


class Evaluator(Protocol):
  def __init__(self, name: str, cfg: Any, setup: Setup): ...

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]: ...


BUILT_IN = {"loss": "evaluators.loss.Loss", "samples": "evaluators.samples.Samples",
            "generate": "evaluators.generate.Generate",
            "classify": "evaluators.classify.Classify", "preference": "evaluators.preference.Preference",
            "retrieval": "evaluators.retrieval.Retrieval"}


def make(name: str, cfg: Any, setup: Setup) -> Evaluator:
  """The evaluator `config.evals.<name>`.

  Raises:
    ConfigError: if its type is unknown or cannot be imported.
  """
  return load_class(cfg.type, f"evals.{name}.type", BUILT_IN)(name, cfg, setup)


def make_all(setup: Setup) -> dict[str, Evaluator]:
  """The evaluators of `config.evals`, by name.

  Raises:
    ConfigError: see `make`; or `keep_best` names a metric of none of them.
  """
  config = setup.config
  evaluators = {name: make(name, config.evals[name], setup) for name in config.evals}
  if config.keep_best and config.keep_best.split("/")[:2] not in [["eval", name] for name in evaluators]:
    raise ConfigError(f"keep_best is {config.keep_best!r}; it names a metric of an evaluator, as in "
                      f"eval/{next(iter(evaluators), 'NAME')}/loss.")
  return evaluators


def sources(name: str, cfg: Any, config: Any) -> tuple[Any, str | None]:
  """(the sources of an evaluator by name, the split in place of their own): its own, or those of training.

  Raises:
    ConfigError: if training uses the part that is to be evaluated.
  """
  if len(cfg.sources):
    return cfg.sources, None  # they name their splits themselves
  leaking = [n for n in config.input.sources if config.input.sources[n].split == "all"]
  if cfg.split != "all" and leaking:
    raise ConfigError(
        f"evals.{name} evaluates the split {cfg.split!r} of the training sources, but input.sources.{leaking[0]} "
        f"trains on all of it. Use --config.input.sources.{leaking[0]}.split=train, or "
        f"--config.evals.{name}.split=all to evaluate on training data on purpose.")
  return config.input.sources, cfg.split


class Examples:
  """The examples of an evaluator's split, each exactly once, in batches on the mesh.

  Args:
    name, cfg, setup: the evaluator's.
    more: of `loader.make_eval_data`.

  Attributes:
    data: see `input_pipeline.evaluation.EvalData`.
  """

  def __init__(self, name: str, cfg: Any, setup: Setup, **more: Any):
    config = setup.config
    named, split = sources(name, cfg, config)
    self.data = loader.make_eval_data(
        config, setup.tokenizer, learns=strategies.learns(config), workdir=setup.workdir, sources=named, split=split,
        max_documents=cfg.max_documents, progress=jax.process_index() == 0, **more)
    self._batch_size = cfg.batch_size or config.batch_size // config.grad_accum_steps
    check_batch(setup.mesh, self._batch_size, f"evals.{name}.batch_size")
    self._sharding, self._vocab_size = batch_sharding(setup.mesh), setup.model.vocab_size

  def __iter__(self) -> Iterator[dict[str, jax.Array]]:
    for index in range(self.data.num_batches(self._batch_size)):
      yield place_batch(functools.partial(self._rows, index), self._batch_size, self._sharding)

  def _rows(self, index: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    return check_ids(self.data.batch(index, self._batch_size, rows), self._vocab_size)


def add_by_source(sums: np.ndarray, source_ids_B: np.ndarray, columns_BxK: Any) -> None:
  """Adds rows to `sums`, float64 [sources, K]; those of padding, whose source is below 0, are left out."""
  real = source_ids_B >= 0
  np.add.at(sums, source_ids_B[real], np.asarray(columns_BxK, np.float64)[real])


def write_samples(file: Path, rows: Sequence[dict[str, Any]], shown: str, page: str = "") -> None:
  """A table of samples: all rows in `file`.jsonl, the first for people in `file`.txt, a page of them in `file`.html."""
  file.parent.mkdir(parents=True, exist_ok=True)
  lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
  for suffix, text in ((".jsonl", lines), (".txt", f"{shown}\n"), (".html", page)):
    if text:
      file.with_name(file.name + suffix).write_text(text, encoding="utf-8")
