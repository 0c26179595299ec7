"""What the backward pass keeps and what a step multiplies, read off the traced program itself, whatever the model.

Nothing is compiled and nothing allocated: the loss is traced with shapes, and its residuals and matrix products are
counted. Both grow with the rows of the batch, so that two traces tell what a row costs from what the parameters cost.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from models.attention import blocked
from trainer import program as program_lib
from trainer.strategies.reference import overlay

# How often rows are doubled until twice as many make a program of the same form.
MOST_DOUBLINGS = 4


class Trace(NamedTuple):
  """Of one row of the batch, on whatever mesh, all devices together.

  Attributes:
    kept: bytes that the forward pass keeps for the backward pass.
    host: bytes that it keeps in the host's memory.
    largest: bytes of the largest array among them, of one layer.
    copies: bytes kept that do not grow with the rows: of parameters, in the dtype of products.
    flops: operations in matrix products, forward and backward, with what is recomputed, and with what a loss that
      compares the rows of a batch computes of them before it goes through micro-batches.
  """

  kept: float
  host: float
  largest: float
  copies: float
  flops: float


def trace(config: Any, program: program_lib.Program, rows: int = 2) -> Trace:
  """Traces the loss of `program` and its gradient.

  Args:
    program: its mesh plays no part.
    rows: of the smaller of the two traces; about as many as a device has, and of a mixture of experts so many that its
      blocks of tokens are no longer larger where there are more.
  """
  # Parameters that are kept as they are cost nothing more; a loop over layers may keep them one layer at a time.
  given = Counter(_key(leaf) for leaf in jax.tree.leaves(program.abstract_state))
  few, many = (_residuals_and_flops(config, program, count) for count in (rows, 2 * rows))
  for _ in range(MOST_DOUBLINGS):
    if [leaf.ndim for leaf in few[0]] == [leaf.ndim for leaf in many[0]]:
      break
    # So few tokens make a program of another form: of one part, say, where more have a loop over parts.
    rows, few, many = 2 * rows, many, _residuals_and_flops(config, program, 4 * rows)
  # Numbers of layers that are one loop, whose residuals are one array.
  layers, spec = program.model.num_layers, getattr(program.model, "spec", None)
  runs = {layers} if spec is None else {layers, *(stop - start for start, stop in spec.runs)} - {1}
  kept = host = largest = copies = 0.0
  for leaf, more in zip(few[0], many[0], strict=True):
    key, size, grown = _key(leaf), _bytes(leaf), _bytes(more) - _bytes(leaf)
    if grown and leaf.memory_space == jax.memory.Space.Host:
      host += grown / rows
    elif grown:
      stacked = leaf.ndim > 2 and leaf.shape[0] in runs
      kept += grown / rows
      if leaf.shape[-1] != program.model.vocab_size:  # logits are no part of a layer
        largest = max(largest, grown / rows / (leaf.shape[0] if stacked else 1))
    elif given[key]:
      given[key] -= 1
    else:
      copies += size
  return Trace(kept, host, largest, copies, (many[1] - few[1]) / rows)


def _residuals_and_flops(config: Any, program: program_lib.Program, rows: int) -> tuple[list[Any], float]:
  """(shapes of what the forward pass keeps; operations in products) for so many rows."""
  optimizer, state = program.optimizer, program.abstract_state
  trainable, frozen = optimizer.split(state["params"])
  batch = program_lib.abstract_batch(config, program.model, rows, precompute=program.precompute,
                                     share_prompts=program.share_prompts)

  def loss(trainable, frozen, reference, batch):
    params = optimizer.merge(trainable, frozen)
    others = () if reference is None else (overlay(params, reference),)
    terms, _ = program.loss_fn(params, batch, jax.random.key(0), *others)
    return sum(jnp.sum(term.sum) for term in terms.values())

  def kept_and_gradients(trainable, *rest):
    _, backward = jax.vjp(lambda trainable: loss(trainable, *rest), trainable)
    return backward, backward(jnp.float32(1.0))

  # Traced once for both: a trace of a large model takes seconds.
  given = (trainable, frozen, state.get("reference"), batch)
  closed, (kept, _) = jax.make_jaxpr(kept_and_gradients, return_shape=True)(*given)
  count = len(jax.tree.leaves(kept))
  flops, whole = _flops(closed, count), getattr(program.loss_fn, "whole", None)
  if whole is not None and config.grad_accum_steps > 1:
    # What is told of the whole batch, the embeddings, is made by a pass of its own before (`update.with_whole`).
    flops += _flops(jax.make_jaxpr(lambda params, batch: whole(
        params, batch, lambda fn: fn(batch, jax.random.key(0))))(state["params"], batch))
  return closed.out_avals[:count], flops


def _key(leaf: Any) -> tuple[tuple[int, ...], Any]:
  """Shape without dimensions of 1, and dtype."""
  return tuple(n for n in leaf.shape if n > 1), leaf.dtype


def _bytes(leaf: Any) -> float:
  return float(np.prod(leaf.shape, dtype=float)) * leaf.dtype.itemsize


def _flops(closed: Any, but: int = 0) -> float:
  """Operations in the products of a traced program that its results need, the first ones left out (`but` so many)."""
  jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [i >= but for i in range(len(closed.jaxpr.outvars))])
  return _count(jaxpr)


def _count(jaxpr: Any) -> float:
  return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> float:
  name, params = equation.primitive.name, equation.params
  if name == "dot_general":
    (contract, _), _ = params["dimension_numbers"]
    inner = np.prod([equation.invars[0].aval.shape[axis] for axis in contract], dtype=float)
    return float(2.0 * np.prod(equation.outvars[0].aval.shape, dtype=float) * inner)
  if name in ("ragged_dot", "ragged_dot_general"):
    # Each row is multiplied by one group's matrix, or by its transpose; or by a row of as many numbers as have results.
    rows = equation.invars[0].aval.shape
    return 2.0 * float(np.prod(rows, dtype=float)) * equation.outvars[0].aval.shape[-1]
  inner = [_count(part) for part in _inside(params.values())]
  if name == "cond":  # branches for other platforms among them
    return max(inner, default=0.0)
  times = params["length"] if name == "scan" else params["mesh"].size if name == "shard_map" else 1.0
  if name == "while" and (said := re.findall(rf"{blocked.TIMES}([\d.]+)", str(equation.source_info.name_stack))):
    times = float(said[-1])
  return times * sum(inner)


def _inside(values: Iterable[Any]) -> list[Any]:
  """The programs among an equation's parameters."""
  found = []
  for value in values:
    if isinstance(value, (tuple, list)):
      found += _inside(value)
    elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
      found.append(value.jaxpr)
    elif hasattr(value, "eqns"):
      found.append(value)
  return found
