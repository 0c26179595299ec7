"""Metrics as sums with weights.

A metric is a `Mean(sum, weight)` until the last moment, so that adding micro-batches, devices or evaluation
batches never averages averages (EXACTNESS.md T40). What is no mean (a count per expert, a maximum) is another pytree
with `+` and a method `to_floats(name) -> {name: float}` for its values once everything is added up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
  """A weighted mean kept as its sum and its weight; the value is sum / weight."""

  sum: Any
  weight: Any

  def __add__(self, other: "Mean") -> "Mean":
    return Mean(self.sum + other.sum, self.weight + other.weight)

  @staticmethod
  def of(values_BxN: jax.Array, weights_BxN: jax.Array) -> "Mean":
    """The weighted mean of values, as sums and weights [B]."""
    return Mean(jnp.sum(values_BxN * weights_BxN, axis=1), jnp.sum(weights_BxN, axis=1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Max:
  """The largest of values, 0-dimensional; where `weight` is 0 there is none. `sign` -1: of negated ones, a minimum."""

  value: Any
  weight: Any
  sign: int = field(default=1, metadata=dict(static=True))

  def __add__(self, other: "Max") -> "Max":
    mine, theirs = (jnp.where(m.weight > 0, m.value, -jnp.inf) for m in (self, other))
    return Max(jnp.maximum(mine, theirs), self.weight + other.weight, self.sign)

  def to_floats(self, name: str) -> dict[str, float]:
    """{name: value}; nothing if there is no value."""
    return {name: self.sign * float(self.value)} if float(self.weight) > 0 else {}


def to_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Host values of fetched metrics; a Mean of weight zero has no value and is left out."""
  values: dict[str, float] = {}
  for name, metric in metrics.items():
    if hasattr(metric, "to_floats"):
      values |= metric.to_floats(name)
    elif not isinstance(metric, Mean):
      values[name] = float(metric)
    elif float(metric.weight) != 0.0:
      values[name] = float(metric.sum) / float(metric.weight)
  return values
