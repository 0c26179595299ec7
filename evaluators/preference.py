"""Held-out preferences by the strategy's own loss: accuracy, margin, rewards and losses, each pair exactly once."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from evaluators import common
from input_pipeline import loader
from input_pipeline.batches import check_ids
from trainer import strategies
from trainer.distributed import processes
from trainer.distributed.mesh import batch_sharding, check_batch, place_batch
from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.program import make_loss_fn, shares_prompts

CHOSEN, REJECTED, MARGINS = "rewards/chosen", "rewards/rejected", "rewards/margins"


class Preference:
  """Yields the metrics of the strategy on a split, by their names there: `rewards/accuracies` (the share of pairs whose
  chosen side has the higher reward, ties as half), `rewards/margins`, `rewards/chosen`, `rewards/rejected`, `logps/…`,
  `losses/…` and `loss`; with several sources each one's, as in `rewards/accuracies/<source>`.

  Without dropout. Sums over rows are taken on the device in float32, sums over the split on the host in float64, and
  divided once: the values do not depend on the batch size (EXACTNESS.md I6). So what is no sum over examples is left
  out: losses that put a batch in order (aot, and then `loss`), and KTO's loss, which subtracts a mean of the batch from
  its rewards (that mean itself, over the split, is `kl`).
  """

  wants_reference = True

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    config = setup.config
    strategy = strategies.of(config)
    if not strategy.takes_preferences:
      able = [name for name, other in strategies.STRATEGIES.items() if other.takes_preferences]
      raise ConfigError(f"evals.{name} is of type 'preference', which compares with the losses of "
                        f"{' or '.join(able)}; strategy.name is {config.strategy.name!r}.")
    self._needs_reference = strategies.needs_reference(config.strategy) and not strategies.precomputes(config.strategy)
    self._name = name
    sources, split = common.sources(name, cfg, config)
    self._data = loader.make_eval_data(
        config, setup.tokenizer, learns=strategies.learns(config), workdir=setup.workdir, sources=sources, split=split,
        max_documents=cfg.max_documents,
        share_prompts=shares_prompts(config, setup.model, setup.mesh), progress=jax.process_index() == 0)
    if strategies.precomputes(config.strategy):
      setup.datasets.append(self._data)
    self._batch_size = cfg.batch_size or config.batch_size // config.grad_accum_steps
    check_batch(setup.mesh, self._batch_size, f"evals.{name}.batch_size")
    self._sharding = batch_sharding(setup.mesh)
    self._vocab_size = setup.model.vocab_size
    no_sums = strategy.no_sums(config.strategy) if strategy.no_sums else frozenset()
    loss_fn = make_loss_fn(setup.model, config.strategy)
    self._row_sums = jax.jit(_make_row_sums(loss_fn, config.strategy, no_sums))

  def run(self, params: Any, step: int, reference: Any = None) -> Iterator[tuple[str, float]]:
    if self._needs_reference and reference is None:
      raise ValueError(f"evals.{self._name}: the strategy compares the policy with a reference, and none was given.")
    reference = reference if self._needs_reference else None
    names = self._data.source_names
    sums: dict[str, np.ndarray] = {}
    for index in range(self._data.num_batches(self._batch_size)):
      batch = place_batch(lambda rows, index=index: self._rows(index, rows), self._batch_size, self._sharding)
      found, source_ids_B = processes.on_every_host((self._row_sums(params, reference, batch), batch["source_ids"]))
      real = source_ids_B >= 0
      for name, columns in found.items():
        total = sums.setdefault(name, np.zeros((len(names), 2)))
        np.add.at(total, source_ids_B[real], np.stack(columns, axis=1).astype(np.float64)[real])
    yield from _values("", {name: total.sum(axis=0) for name, total in sums.items()})
    if len(names) > 1:
      for number, source in enumerate(names):
        yield from _values(f"/{source}", {name: total[number] for name, total in sums.items()})

  def _rows(self, index: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    return check_ids(self._data.batch(index, self._batch_size, rows), self._vocab_size)


def _make_row_sums(loss_fn: Callable, cfg: Any, left_out: frozenset[str]):
  def row_sums(params: Any, reference: Any, batch: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    """{name: (sum [B], weight [B])} of the strategy's terms and metrics."""
    given = (reference,) if strategies.needs_reference(cfg) else ()
    terms, metrics = loss_fn(params, batch, None, *given)
    return {name: (mean.sum, mean.weight) for name, mean in {**terms, **metrics}.items()
            if isinstance(mean, Mean) and mean.sum.ndim == 1 and name not in left_out}

  return row_sums


def _values(suffix: str, sums: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
  values = {name: float(total / weight) for name, (total, weight) in sums.items() if weight}
  if MARGINS not in sums and {CHOSEN, REJECTED} <= values.keys():  # of examples that are no pairs
    values[MARGINS] = values[CHOSEN] - values[REJECTED]
  for name, value in values.items():
    yield f"{name}{suffix}", value
