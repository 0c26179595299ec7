"""Held-out preferences by the strategy's own loss: accuracy, margin, rewards and losses, each pair exactly once."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from evaluators import common
from trainer import strategies
from trainer.distributed import processes
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
    self._examples = common.Examples(name, cfg, setup, share_prompts=shares_prompts(config, setup.model, setup.mesh))
    if strategies.precomputes(config.strategy):
      setup.datasets.append(self._examples.data)
    no_sums = strategy.no_sums(config.strategy) if strategy.no_sums else frozenset()
    loss_fn = make_loss_fn(setup.model, config.strategy)
    self._row_sums = jax.jit(functools.partial(_row_sums, loss_fn, config.strategy, no_sums))

  def run(self, params: Any, step: int, reference: Any = None) -> Iterator[tuple[str, float]]:
    if self._needs_reference and reference is None:
      raise ValueError(f"evals.{self._name}: the strategy compares the policy with a reference, and none was given.")
    reference = reference if self._needs_reference else None
    names = self._examples.data.source_names
    sums: dict[str, np.ndarray] = {}
    for batch in self._examples:
      found, source_ids_B = processes.on_every_host((self._row_sums(params, reference, batch), batch["source_ids"]))
      for name, columns in found.items():
        common.add_by_source(sums.setdefault(name, np.zeros((len(names), 2))), source_ids_B, np.stack(columns, axis=1))
    yield from _values("", {name: total.sum(axis=0) for name, total in sums.items()})
    if len(names) > 1:
      for number, source in enumerate(names):
        yield from _values(f"/{source}", {name: total[number] for name, total in sums.items()})


def _row_sums(loss_fn: Callable, cfg: Any, left_out: frozenset[str], params: Any, reference: Any,
              batch: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
  """{name: (sum [B], weight [B])} of the strategy's terms and metrics."""
  given = (reference,) if strategies.needs_reference(cfg) else ()
  terms, metrics = loss_fn(params, batch, None, *given)
  return {name: (mean.sum, mean.weight) for name, mean in {**terms, **metrics}.items()
          if isinstance(mean, Mean) and mean.sum.ndim == 1 and name not in left_out}


def _values(suffix: str, sums: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
  values = {name: float(total / weight) for name, (total, weight) in sums.items() if weight}
  if MARGINS not in sums and {CHOSEN, REJECTED} <= values.keys():  # of examples that are no pairs
    values[MARGINS] = values[CHOSEN] - values[REJECTED]
  for name, value in values.items():
    yield f"{name}{suffix}", value
