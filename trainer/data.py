"""What a run asks of its data: rows of datasets and completions that are sampled look the same to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from input_pipeline import loader, prompt_data
from input_pipeline.steps import Past, Steps
from input_pipeline.tokenizer.tokenizer import Tokenizer, make_tokenizer
from trainer import program as program_lib
from trainer import strategies
from trainer.distributed import mesh as mesh_lib
from trainer.rollouts import rollout
from trainer.strategies import critic, teachers


class Batches(Protocol):
  """The batches of a run on their devices, one after another; a context manager.

  It ends where no more are to be trained on: at the run's last step, or where a stop was asked for while a batch was
  sampled.

  Attributes:
    wait_seconds: that its consumer has waited for data.
    metrics: of how the latest batch was made.
  """

  @property
  def wait_seconds(self) -> float: ...

  @property
  def metrics(self) -> dict[str, float]: ...

  def __next__(self) -> dict[str, jax.Array]: ...

  def __enter__(self) -> "Batches": ...

  def __exit__(self, kind: Any, error: Any, trace: Any) -> Any: ...


class Data(Protocol):
  """Training data of a run: `input_pipeline.loader.TrainData` or `trainer.rollouts.rollout.Rollouts`.

  A step is counted by the updates done before it. What `batch_range` and `rows_per_epoch` count are rows, or prompts.

  Attributes:
    source_names: of the sources that `batch["source_ids"]` counts.
    fingerprint: equal if and only if the data are.
    past_fingerprint: what it was to the run that is gone on with, if its data are these.
    taken: what each step takes; checkpoints hold it (trainer/position.py).
    rows_per_epoch: of all sources together; None: not known before they are read.
    row_tokens: places of each row; None: they are not known before.
    num_steps: steps after which the data end, as far as is known now; None: never.
    images_per_row: that a row has places for; 0: none, or not known before.
    shapes_known: whether `example` is of the shapes that the first batch will have.
  """

  @property
  def source_names(self) -> Sequence[str]: ...

  @property
  def fingerprint(self) -> str: ...

  @property
  def past_fingerprint(self) -> str: ...

  @property
  def taken(self) -> Steps: ...

  @property
  def rows_per_epoch(self) -> int | None: ...

  @property
  def row_tokens(self) -> int | None: ...

  @property
  def num_steps(self) -> int | None: ...

  @property
  def images_per_row(self) -> int: ...

  @property
  def shapes_known(self) -> bool: ...

  def stats(self) -> list[dict[str, Any]]:
    """One row a source for the start-up table."""

  def batch_range(self, step: int) -> tuple[int, int]:
    """(first row that `step` takes, how many it takes)."""

  def tokens_seen(self, step: int) -> int:
    """Row positions that the steps before `step` took."""

  def epoch(self, step: int) -> float:
    """Epochs taken before `step`."""

  def counters(self, step: int) -> dict[str, dict[str, float]]:
    """For each source, what was taken of it before `step`."""

  def example(self, step: int, program: program_lib.Program) -> dict[str, Any]:
    """A batch such as that of `step`, for its names, dtypes and, with `shapes_known`, shapes."""

  def batches(self, run: Any) -> Batches:
    """The batches of the run (trainer/run.py) from its step on."""

  def take(self, run: Any) -> dict[str, np.ndarray] | None:
    """The batch of update `run.step + 1` on the host; None: the run was asked to stop while it was sampled."""

  def saved(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray] | None]:
    """(JSON-able, arrays) that a checkpoint after `step` updates must hold besides the step and `taken`."""

  def restore(self, step: int, meta: dict[str, Any] | None, arrays: dict[str, np.ndarray] | None) -> None:
    """Goes on after `step` updates from what `saved` gave; None: there is no checkpoint, or one of other data."""


def make_data(config: Any, mesh: Any, workdir: Path, past: Past | None) -> tuple[Tokenizer, Any, Data]:
  """The tokenizer, the model without its parameters, and the data of a config.

  Args:
    workdir: holds the tokenizer, caches and samples.
    past: of the run that is gone on with; None: it begins.

  Raises:
    ConfigError, DataError: what was found, what is allowed, what to do.
  """
  show, rolls_out = jax.process_index() == 0, config.rollout.num_prompts > 0
  learns = strategies.learns(config)
  texts = prompt_data.prompt_texts(config) if rolls_out else loader.train_texts(config, learns)
  tokenizer = make_tokenizer(config.tokenizer, texts, workdir / "tokenizer.json", show)
  if strategies.of(config).teacher:
    teachers.check(config, tokenizer)
  if strategies.of(config).critic:
    critic.check(config, tokenizer)
  model = program_lib.make_model(config, tokenizer.vocab_size)
  share_prompts = program_lib.shares_prompts(config, model, mesh)
  if not rolls_out:
    return tokenizer, model, loader.make_train_data(config, tokenizer, learns=learns, workdir=workdir,
                                                    share_prompts=share_prompts, progress=show, past=past)
  prompts = prompt_data.make_prompt_data(config, tokenizer, show)
  policy = rollout.Policy(critic.policy_of(model), tokenizer, mesh_lib.sampling_mesh(config, mesh))
  return tokenizer, model, rollout.Rollouts(config, prompts, policy, share_prompts=share_prompts, workdir=workdir,
                                            past=past)
