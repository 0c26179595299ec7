"""The rows of one update: the loss of each, which of them make it not finite, and all of them as a file to read.

B rows, T tokens.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from trainer import tree, update
from trainer.distributed import mesh as mesh_lib
from trainer.strategies.reference import overlay

# What a row is told by; images and what belongs to them stay out.
_TOLD = ("tokens", "segment_ids", "loss_weights", "source_ids")


class Rows:
  """Looks at batches as the strategy of a run does, in its micro-batches and with its dropout.

  Args:
    run: the run (trainer/run.py); its parameters at the time of each call are those that are used.
    paths: of the parameters that are trained, whose gradients `offending` looks at.
  """

  def __init__(self, run: Any, paths: Collection[str] = ()):
    self._loss_fn, self._seed = run.program.loss_fn, run.program.options.seed
    self._run, self._paths, self._micro = run, frozenset(paths), run.program.options.micro_batch_size
    everywhere = NamedSharding(run.mesh, PartitionSpec())
    self._losses = jax.jit(self._losses_of, out_shardings=everywhere)
    self._finite = jax.jit(self._is_finite, out_shardings=everywhere)
    self._fetch = jax.jit(lambda batch: batch, out_shardings=everywhere)

  def _losses_of(self, params, batch, step, *reference):
    def of_micro(micro_and_index):
      micro, index = micro_and_index
      terms, shown = self._loss_fn(params, micro, update.step_key(self._seed, step, index), *reference)
      loss = shown.get("loss", terms["loss"])  # where the term is one number, the rows' losses are a metric
      return loss.sum, loss.weight

    batch = update.with_whole(self._loss_fn, params, batch, step, self._seed, self._micro)
    micros, count = update.micro_batches(batch, self._micro)
    sums, weights = jax.lax.map(of_micro, (micros, jnp.arange(count)))
    return tuple(part.swapaxes(0, 1).reshape(-1) for part in (sums, weights))

  def _is_finite(self, params, batch, step, kept_B, *reference):
    batch = {key: jnp.where(kept_B.reshape(-1, *[1] * (part.ndim - 1)), part, 0) for key, part in batch.items()}

    def of_micro(micro_and_index):
      micro, index = micro_and_index

      def objective(trained):
        key = update.step_key(self._seed, step, index)
        terms, _ = self._loss_fn(tree.unflatten(flat | trained), micro, key, *reference)
        return sum(jnp.sum(term.sum) for term in terms.values())

      value, grads = jax.value_and_grad(objective)({path: flat[path] for path in flat if path in self._paths})
      return jnp.isfinite(value) & jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in grads.values()]).all()

    flat = tree.flatten(params)
    batch = update.with_whole(self._loss_fn, params, batch, step, self._seed, self._micro)
    micros, count = update.micro_batches(batch, self._micro)
    return jnp.all(jax.lax.map(of_micro, (micros, jnp.arange(count))))

  def call(self, fn: Callable, batch: dict[str, Any], step: int, *more: Any) -> Any:
    """`fn(params, batch, step before, *more, *reference)` with what the run has now, on its mesh; `fn` is jitted."""
    params, batch = self._run.state["params"], {k: v for k, v in batch.items() if k != "stop_requests"}
    held = self._run.state.get("reference")
    reference = () if held is None else (overlay(params, held),)
    with mesh_lib.activation_rules(self._run.mesh, self._run.config.activation_rules):
      return fn(params, batch, np.int32(step - 1), *more, *reference)

  def losses(self, batch: dict[str, Any], step: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums and weights [B] of the loss, with the dropout of update `step`."""
    sums_B, weights_B = self.call(self._losses, batch, step)
    return np.asarray(sums_B, np.float64), np.asarray(weights_B, np.float64)

  def offending(self, batch: dict[str, Any], step: int, sums_B: np.ndarray) -> list[int]:
    """Rows whose loss (`sums_B`, of `losses`) is not finite; if there are none, those without which the gradient is.

    The latter are found by halves: rows are left out, and the gradient of the others is taken. None: no row alone.
    """
    bad = np.flatnonzero(~np.isfinite(sums_B)).tolist()
    return bad or self._without_finite_gradient(batch, step, list(range(len(sums_B))))

  def _without_finite_gradient(self, batch: dict[str, Any], step: int, rows: list[int]) -> list[int]:
    kept_B = np.zeros(len(batch["tokens"]), bool)
    kept_B[rows] = True
    if bool(self.call(self._finite, batch, step, kept_B)):
      return []
    if len(rows) == 1:
      return rows
    half = len(rows) // 2
    return [row for part in (rows[:half], rows[half:]) for row in self._without_finite_gradient(batch, step, part)]

  def fetch(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """The whole batch on the host of every process, without images."""
    return {key: np.asarray(part) for key, part in self._fetch({key: batch[key] for key in _TOLD}).items()}

  def source(self, batch: dict[str, np.ndarray], row: int) -> str | None:
    """The name of the source that a row begins with; None for a row of padding."""
    number = int(batch["source_ids"][row])
    return self._run.data.source_names[number] if number >= 0 else None

  def write(self, path: Path, batch: dict[str, np.ndarray], sums_B: np.ndarray, weights_B: np.ndarray,
            only: list[int] | None = None, of_tokens: dict[str, np.ma.MaskedArray] | None = None) -> None:
    """One JSON object a row: number, source, loss, weight, tokens, their loss weights, text. `batch`: of `fetch`;
    `of_tokens`: more numbers of each token [B, T], null where they are masked."""
    losses_B = mean_losses(sums_B, weights_B)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
      for row in range(len(losses_B)) if only is None else only:
        real = batch["segment_ids"][row] > 0
        ids = batch["tokens"][row][real]
        file.write(json.dumps(dict(
            row=row, source=self.source(batch, row), loss=float(losses_B[row]), weight=float(weights_B[row]),
            tokens=ids.tolist(), loss_weights=batch["loss_weights"][row][real].tolist(),
            **{name: _shortest(values[row][real]) for name, values in (of_tokens or {}).items()},
            text=self._run.tokenizer.decode(ids, skip_special=False)), ensure_ascii=False) + "\n")


def _shortest(values: np.ma.MaskedArray) -> list[Any]:
  """The numbers with as many digits as tell them apart, None where they are masked."""
  masked, data = np.ma.getmaskarray(values).tolist(), values.data
  numbers = [float(str(x)) for x in data] if data.dtype == np.float32 else data.tolist()
  return [None if absent else number for absent, number in zip(masked, numbers, strict=True)]


def mean_losses(sums_B: np.ndarray, weights_B: np.ndarray) -> np.ndarray:
  """The loss of each row; 0 for rows that nothing is trained in, unless theirs is not finite."""
  with np.errstate(divide="ignore", invalid="ignore"):
    return np.where((weights_B > 0) | ~np.isfinite(sums_B), sums_B / weights_B, 0.0)
