"""One optimizer step: gradients of sums, one division, clipping, the optimizer, and the guard of what is not finite.

The gradient is that of  Σ sum / Σ weight,  added over the objective's terms, where the sums run over every micro-batch
and device of the step (EXACTNESS.md T1, T4): micro-batches add up un-normalised sums in float32, and one division by
W_1, the first term's total weight, normalises all, since the sum of term i is multiplied by W_1 / W_i before.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from models.experts.moe import evened
from trainer import tree
from trainer.metrics import Mean
from trainer.optim import offload
from trainer.optim import optimizer as optim
from trainer.strategies.reference import mix, overlay

State = dict[str, Any]  # see trainer/state.py


@dataclasses.dataclass(frozen=True)
class Options:
  """What an update needs besides its loss and its optimizer.

  Attributes:
    seed: dropout of step s is a function of (seed, s, micro-batch) alone.
    micro_batch_size: rows computed at a time; the batch holds a multiple of it.
    source_names: names for `batch["source_ids"]`; with several, per-row metrics are reported for each as well.
    clip_norm: bound on the gradient's global norm; 0: none.
    ema_decay: decay of the trained parameters' moving average; 0: none kept.
    reference_mix: (share, every): see `reference.mix`; share 0: the reference stays as it is.
    offloaded: the optimizer's state is in the host's memory (trainer/optim/offload.py); the jit's shardings return it
      there.
    choice_bias_rate: step of the biases by which experts are chosen, see `models.experts.moe.evened`; 0: they stay.
  """

  seed: int
  micro_batch_size: int
  source_names: Sequence[str]
  clip_norm: float = 0.0
  ema_decay: float = 0.0
  reference_mix: tuple[float, int] = (0.0, 1)
  offloaded: bool = False
  choice_bias_rate: float = 0.0


def make_update_fn(loss_fn: Callable, optimizer: optim.Optimizer, options: Options) -> Callable:
  """Returns `update(state, batch) -> (state, metrics)`, to be jitted with the state donated.

  Args:
    loss_fn: `(params, batch, rng) -> (terms, metrics)`, a strategy bound to its model and config; where the state has a
      `reference`, it is given the reference's parameters as a fourth argument.

  `metrics` holds device scalars and sums: the strategy's terms and metrics, `objective` (the sum of the terms, if there
  are several), `trained_tokens` (the sum of the batch's loss weights), `grad_norm` (before clipping), `param_norm`,
  `update_norm`, `params_changed` (with parameters in bfloat16: the share of their entries that changed), and the finite
  guard's `nonfinite`, `nonfinite_in_a_row`, `nonfinite_leaf` (index into `gradient_paths`, -1: none).
  """

  def update(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, Any]]:
    step, batch = state["step"], dict(batch)
    stop_requests = batch.pop("stop_requests", None)
    trainable, frozen = optimizer.split(state["params"])
    batch = with_whole(loss_fn, state["params"], batch, step, options.seed, options.micro_batch_size)
    loss_sum_fn = make_loss_sum_fn(loss_fn, optimizer, options, state["params"], batch, step, state.get("reference"))

    (loss_sum, (weight, metrics)), grads = value_and_grad(loss_sum_fn, trainable, batch, options.micro_batch_size)
    divide = make_divide(weight)
    divided = jax.tree.map(divide, grads)
    clip, grad_norm = optim.clipping(divided, options.clip_norm)

    # The finite guard: a step whose loss or gradient is not finite changes nothing but the step number and
    # the counters, so that the data move on.
    finite = jnp.isfinite(loss_sum) & jnp.isfinite(grad_norm)
    # Nor does a step that trains nothing, by weight decay, momentum or a term of the model's own.
    taken = finite & (weight > 0)

    # Gradients are divided and clipped where they are used, so that they need not be there in float32.
    def advance(trainable, opt, taken=None):
      return optimizer.advance(grads, opt, trainable, step, taken, prepare=lambda g: clip(divide(g)))

    if options.offloaded:
      trainable, opt, did = offload.with_state_on_device(taken, advance, trainable, state["opt"])
    else:
      trainable, opt, did = advance(trainable, state["opt"], taken)
    if options.choice_bias_rate:
      trainable = evened(trainable, metrics["moe"].counts, options.choice_bias_rate, taken)
    new_state = {
        "step": step + 1,
        "params": optimizer.merge(trainable, frozen),
        "opt": opt,
        "nonfinite": state["nonfinite"] + ~finite,
        "nonfinite_in_a_row": jnp.where(finite, 0, state["nonfinite_in_a_row"] + 1),
    }
    new_state |= _followers(state, new_state["params"], trainable, taken, options)
    metrics |= {
        "trained_tokens": jnp.sum(batch["loss_weights"]),
        "grad_norm": grad_norm,
        "param_norm": optim.global_norm(trainable),
        "update_norm": did.norm,
        "nonfinite": new_state["nonfinite"],
        "nonfinite_in_a_row": new_state["nonfinite_in_a_row"],
        "nonfinite_leaf": _first_nonfinite(divided),
    }
    if did.changed:
      sizes = [p.size for path, p in tree.flatten(trainable).items() if path in did.changed]
      metrics["params_changed"] = Mean(sum(did.changed.values()), jnp.where(taken, jnp.float32(sum(sizes)), 0.0))
    if stop_requests is not None:
      metrics["stop_requests"] = jnp.sum(stop_requests)
    return new_state, metrics

  return update


def make_gradient_fn(loss_fn: Callable, optimizer: optim.Optimizer, options: Options) -> Callable:
  """Returns `gradients(params, batch, step, reference) -> (grads, loss_sum, metrics)`, the first part of an update.

  `grads` are those of the parameters that are trained, float32, divided; `loss_sum` is Σ sum, before the division;
  `reference`: the reference policy's own leaves, None: there is none. The arguments are those of `make_update_fn`.
  """

  def gradients(params: Any, batch: dict[str, jax.Array], step: Any, reference: Any) -> tuple[Any, jax.Array, dict]:
    trainable, _ = optimizer.split(params)
    batch = with_whole(loss_fn, params, batch, step, options.seed, options.micro_batch_size)
    loss_sum_fn = make_loss_sum_fn(loss_fn, optimizer, options, params, batch, step, reference)
    (loss_sum, (weight, metrics)), grads = value_and_grad(loss_sum_fn, trainable, batch, options.micro_batch_size)
    return jax.tree.map(make_divide(weight), grads), loss_sum, metrics

  return gradients


def make_loss_sum_fn(loss_fn: Callable, optimizer: optim.Optimizer, options: Options, params: Any,
                     batch: dict[str, jax.Array], step: Any, reference: Any) -> Callable:
  """Returns `loss_sum(trainable, micro-batch, its index) -> (sum, (weight, metrics))`.

  Its gradient, added up over the micro-batches of `batch` and divided by their weight, is that of the step. Where
  nothing is trained the weight is 0. The arguments are those of `make_gradient_fn` and of what it returns.
  """
  _, frozen = optimizer.split(params)
  given = () if reference is None else (overlay(params, reference),)

  def loss_of(params, micro, index):
    return loss_fn(params, micro, step_key(options.seed, step, index), *given)

  scales = None
  if batch["tokens"].shape[0] > options.micro_batch_size:
    # Weights depend on the batch alone, so that the compiler removes everything else from this call.
    scales = _scales(loss_of(params, batch, 0)[0])

  def loss_sum(trainable, micro, index):
    terms, metrics = loss_of(optimizer.merge(trainable, frozen), micro, index)
    scale, first = scales or _scales(terms), next(iter(terms.values()))
    total, weight = sum(jnp.sum(t.sum) * scale[name] for name, t in terms.items()), jnp.sum(first.weight)
    if len(terms) > 1:
      metrics = metrics | {"objective": Mean(total, weight)}
    return total, (weight, _by_source(terms | metrics, micro["source_ids"], options.source_names))

  return loss_sum


def value_and_grad(loss_sum: Callable, trainable: Any, batch: dict[str, jax.Array], micro_batch_size: int) -> Any:
  """`jax.value_and_grad(loss_sum, has_aux=True)` added up over micro-batches; of several, gradients are in float32.

  Returns:
    ((Σ sum, (Σ weight, metrics)), gradients).
  """
  micros, count = micro_batches(batch, micro_batch_size)
  of_micro = jax.value_and_grad(loss_sum, has_aux=True)
  if count == 1:
    return of_micro(trainable, batch, 0)

  def one(micro, index):
    value, grads = of_micro(trainable, micro, index)
    return value, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype),
                       jax.eval_shape(one, jax.tree.map(lambda x: x[0], micros), 0))

  def add(total, micro_and_index):
    (loss_sum, (weight, metrics)), grads = total
    (more_sum, (more_weight, more_metrics)), more_grads = one(*micro_and_index)
    metrics = {name: metrics[name] + metric for name, metric in more_metrics.items()}
    value = loss_sum + more_sum, (weight + more_weight, metrics)
    return (value, jax.tree.map(jnp.add, grads, more_grads)), None

  total, _ = jax.lax.scan(add, zeros, (micros, jnp.arange(count)))
  return total


def make_divide(weight: jax.Array) -> Callable[[jax.Array], jax.Array]:
  """Returns what makes of a gradient of sums, or of a part of one, the gradient of the mean, in float32."""
  divisor = _divisor(weight)
  return lambda g: g.astype(jnp.float32) / divisor


def step_key(seed: int, step: Any, index: Any) -> jax.Array:
  """The random key of a micro-batch of the update that follows `step` others."""
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), index)


def micro_batches(batch: dict[str, jax.Array], micro_batch_size: int) -> tuple[dict[str, jax.Array], int]:
  """The batch [B, …] as micro-batches [count, micro_batch_size, …], and their count.

  Micro-batch j has rows j, count + j, 2 * count + j, …: every device keeps the rows that it has.
  """
  count = batch["tokens"].shape[0] // micro_batch_size
  return jax.tree.map(lambda x: x.reshape(micro_batch_size, count, *x.shape[1:]).swapaxes(0, 1), batch), count


def of_micro_batches(fn: Callable, batch: dict[str, jax.Array], micro_batch_size: int) -> Any:
  """What `fn(micro-batch, index)` makes of rows, for each micro-batch as the update takes them, in the batch's order.

  `fn` returns arrays [micro_batch_size, …]; the result has [B, …].
  """
  micros, count = micro_batches(batch, micro_batch_size)
  if count == 1:
    return fn(batch, 0)
  found = jax.lax.map(lambda micro_and_index: fn(*micro_and_index), (micros, jnp.arange(count)))
  return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), found)


def with_whole(loss_fn: Callable, params: Any, batch: dict[str, jax.Array], step: Any, seed: int,
               micro_batch_size: int) -> dict[str, Any]:
  """The batch with what several micro-batches are told of it as a whole, if the loss compares its rows
  (`strategies.record.Objective`)."""
  whole = getattr(loss_fn, "whole", None)
  if whole is None or len(batch["tokens"]) == micro_batch_size:
    return batch

  def in_micro_batches(fn: Callable) -> Any:
    return of_micro_batches(lambda micro, index: fn(micro, step_key(seed, step, index)), batch, micro_batch_size)

  return {**batch, "whole": whole(params, batch, in_micro_batches)}


def gradient_paths(optimizer: optim.Optimizer, abstract_params: Any) -> list[str]:
  """Paths of the trained parameters, in the order that `nonfinite_leaf` counts them."""
  return list(tree.flatten(optimizer.split(abstract_params)[0]))


def _followers(state: State, params: Any, trainable: Any, taken: jax.Array, options: Options) -> State:
  """What follows the parameters: the reference, which moves towards them or stays, and their moving average."""
  followers = {}
  if "reference" in state:
    followers["reference"] = state["reference"]
    if options.reference_mix[0]:
      share, every = options.reference_mix
      followers["reference"] = mix(state["reference"], params, share, taken & ((state["step"] + 1) % every == 0))
  if "ema" in state:
    followers["ema"] = optim.choose(taken, optim.ema_update(state["ema"], trainable, options.ema_decay), state["ema"])
  return followers


def _scales(terms: dict[str, Mean]) -> dict[str, Any]:
  """Factors on the terms' sums, after which dividing by the first term's whole weight divides each by its own."""
  first, *others = terms
  totals = {name: _divisor(jnp.sum(term.weight)) for name, term in terms.items()}
  return {first: 1.0} | {name: totals[first] / totals[name] for name in others}


def _divisor(weight: jax.Array) -> jax.Array:
  """A step with nothing to train has a zero gradient, not NaN."""
  return jax.lax.stop_gradient(jnp.where(weight > 0, weight, 1.0))


def _by_source(metrics: dict[str, Any], source_ids_B: jax.Array, names: Sequence[str]) -> dict[str, Any]:
  """Sums per-row metrics over rows, and with several sources over each source's rows as well."""
  summed = {}
  for name, metric in metrics.items():
    if not isinstance(metric, Mean):
      summed[name] = metric
      continue
    summed[name] = Mean(jnp.sum(metric.sum), jnp.sum(metric.weight))
    if jnp.ndim(metric.sum) == 1 and len(names) > 1:
      for index, source in enumerate(names):
        mine = source_ids_B == index
        summed[f"{name}/{source}"] = Mean(jnp.sum(jnp.where(mine, metric.sum, 0)),
                                          jnp.sum(jnp.where(mine, metric.weight, 0)))
  return summed


def _first_nonfinite(grads: Any) -> jax.Array:
  leaves = tree.flatten(grads)
  bad = jnp.stack([~jnp.isfinite(jnp.sum(jnp.square(leaf))) for leaf in leaves.values()])
  return jnp.where(jnp.any(bad), jnp.argmax(bad), -1)
