"""What an evaluator is, and making those that a config names.

An evaluator is a class with

    __init__(self, name, cfg, setup)        cfg: config.evals.<name>; setup: a Setup
    run(self, params, step) -> iterator of (metric name, float)

It yields sums divided by weights, so that its values do not depend on batch sizes. All processes call `run` together.
A config adds its own by dotted path: config.evals.mine = dict(type="my_package.MyEvaluator", …).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jax.sharding import Mesh

from trainer.config import load_class


@dataclass(frozen=True)
class Setup:
  """What evaluators are built from."""

  config: Any
  model: Any
  tokenizer: Any
  mesh: Mesh
  workdir: Path
  writer: Any


class Evaluator(Protocol):
  def __init__(self, name: str, cfg: Any, setup: Setup): ...

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]: ...


BUILT_IN = {"loss": "evaluators.loss.Loss", "samples": "evaluators.samples.Samples"}


def make(name: str, cfg: Any, setup: Setup) -> Evaluator:
  """The evaluator `config.evals.<name>`.

  Raises:
    ConfigError: if its type is unknown or cannot be imported.
  """
  return load_class(cfg.type, f"evals.{name}.type", BUILT_IN)(name, cfg, setup)
