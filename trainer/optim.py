"""Optimizers with per-parameter rules: freezing, learning-rate and weight-decay multipliers, warm-up.

Every optimizer here is a `Direction`: from gradients to a direction of descent of about the same size as
Adam's. The rest is common to all: with the global step k and a parameter p,

  lr = learning_rate * schedule(k) * lr_mult[p]
  update[p] = -lr * (direction[p] + weight_decay * wd_mult[p] * p)

which is decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, with the learning rate inside
as in PyTorch). States are nested dicts of float32 arrays, whatever the parameters' dtype; those as large as
a parameter lie under its path (`adam/mu/blocks/attn/q/kernel`), so that they can be sharded like it.

Dims: L layers (or any leading dims), M rows, N columns of a matrix.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer import patterns
from trainer.config import ConfigError, defaults
from trainer.schedules import Schedule, Step, ToSteps, make_schedule

Tree = dict[str, Any]

NAMES = ("adamw", "adafactor", "muon", "lion", "sgd")

# Muon is for hidden matrices: embeddings and the output head behave like tables of vectors.
_MATRIX = re.compile(r"^(?!(.*/)?(embed|unembed|pos_embed)/).*kernel$")
# Leaves whose last dim alone is a unit, whatever is stacked before it.
_VECTOR = re.compile(r"(bias|scale)$")
# Coefficients of the quintic iteration: https://kellerjordan.github.io/posts/muon
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# RMS of AdamW's updates in practice, which Muon's are scaled to (arXiv 2502.16982, section 2.2).
_ADAM_RMS = 0.2


class Direction(NamedTuple):
  """How gradients become a direction of descent, for a nested dict of parameters."""

  # parameters -> state, a nested dict of arrays.
  init: Callable[[Tree], Tree]
  # (float32 gradients, state) -> (float32 directions, state)
  update: Callable[[Tree, Tree], tuple[Tree, Tree]]


class Rules(NamedTuple):
  """What a trained parameter has of its own."""

  lr_mult: float
  wd_mult: float
  # None: the schedule's.
  warmup_steps: int | None


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """Pure functions on nested dicts of parameters; made by `make_optimizer`."""

  name: str
  learning_rate: float
  weight_decay: float
  schedule: Schedule
  # By path; frozen parameters are absent.
  rules: Mapping[str, Rules]
  # The parts of the optimizer, each with the paths it serves.
  parts: Mapping[str, tuple[frozenset[str], Direction]]
  # Lines that say what was decided.
  notes: tuple[str, ...]

  @property
  def trainable(self) -> frozenset[str]:
    """Paths of the parameters that are trained."""
    return frozenset(self.rules)

  def split(self, params: Tree) -> tuple[Tree, Tree]:
    """(trained, frozen) parameters; each leaf is in exactly one of the two."""
    flat = patterns.flatten(params)
    frozen = {path: leaf for path, leaf in flat.items() if path not in self.rules}
    return _only(flat, self.rules), patterns.unflatten(frozen)

  def merge(self, trainable: Tree, frozen: Tree) -> Tree:
    """The parameters that `split` took apart."""
    return patterns.unflatten(dict(sorted((patterns.flatten(trainable) | patterns.flatten(frozen)).items())))

  def init(self, trainable: Tree) -> Tree:
    """The state before the first update: `{part: state}`."""
    flat = patterns.flatten(trainable)
    return {name: direction.init(_only(flat, paths)) for name, (paths, direction) in self.parts.items()}

  def update(self, grads: Tree, opt_state: Tree, trainable: Tree, step: Step) -> tuple[Tree, Tree]:
    """One update.

    Args:
      grads: gradients of the trained parameters.
      opt_state: from `init` or the last update.
      trainable: the trained parameters.
      step: updates done before this one, which sets the learning rate.

    Returns:
      (updates, state): float32 updates to be added to the parameters, and the next state.
    """
    flat_grads = {path: g.astype(jnp.float32) for path, g in patterns.flatten(grads).items()}
    directions: dict[str, jax.Array] = {}
    new_state = {}
    for name, (paths, direction) in self.parts.items():
      directed, new_state[name] = direction.update(_only(flat_grads, paths), opt_state[name])
      directions |= patterns.flatten(directed)
    warmups = {rules.warmup_steps for rules in self.rules.values()}
    peak_lr = {warm: self.learning_rate * self.schedule(step, warm) for warm in warmups}
    updates = {}
    for path, p in patterns.flatten(trainable).items():
      rules = self.rules[path]
      decay = self.weight_decay * rules.wd_mult
      descent = directions[path] + decay * p.astype(jnp.float32) if decay else directions[path]
      updates[path] = -(peak_lr[rules.warmup_steps] * rules.lr_mult) * descent
    return patterns.unflatten(updates), new_state

  def learning_rates(self, step: Step) -> dict[str, Any]:
    """`learning_rate`, and one more for each other combination of multiplier and warm-up in use."""
    rates = {"learning_rate": self.learning_rate * self.schedule(step)}
    for rules in self.rules.values():
      name = "learning_rate"
      if rules.lr_mult != 1:
        name += f"_x{rules.lr_mult:g}"
      if rules.warmup_steps is not None:
        name += f"_warmup{rules.warmup_steps}"
      rates[name] = self.learning_rate * self.schedule(step, rules.warmup_steps) * rules.lr_mult
    return {name: float(rate) for name, rate in rates.items()} if isinstance(step, int) else rates


def make_optimizer(
    cfg: Any, cfg_schedule: Any, abstract_params: Tree, *, total_steps: int, to_steps: ToSteps, only: str | None = None
) -> Optimizer:
  """The optimizer of the config sections `optimizer` and `schedule`.

  Args:
    cfg: section `optimizer`; only keys of the chosen optimizer are read.
    cfg_schedule: section `schedule`.
    abstract_params: nested dict of anything with `shape` (and `size`).
    total_steps: updates in the whole run.
    to_steps: resolves durations, see `make_schedule`.
    only: a regex; parameters whose path it does not match are frozen, besides those of `cfg.freeze`.

  Raises:
    ConfigError: unknown name, values out of range, rules without effect, or nothing left to train.
  """
  if cfg.name not in NAMES:
    raise ConfigError(f"optimizer.name = {cfg.name!r}; it is one of {', '.join(NAMES)}")
  for key, value in (("learning_rate", cfg.learning_rate), ("weight_decay", cfg.weight_decay)):
    if not 0 <= value < float("inf"):
      raise ConfigError(f"optimizer.{key} = {value}; it must be a number of at least 0")
  shapes = patterns.flatten(abstract_params)
  rules = _rules(cfg, shapes, total_steps, only)
  trained = {path: shapes[path] for path in rules}
  schedule = make_schedule(cfg_schedule, total_steps=total_steps, to_steps=to_steps)
  parts = _parts(cfg, trained)
  notes = [f"{name}: {_count(paths, shapes)}" for name, (paths, _) in parts.items()]
  if len(trained) < len(shapes):
    notes.append(f"frozen: {_count(shapes.keys() - trained.keys(), shapes)}")
  return Optimizer(cfg.name, cfg.learning_rate, cfg.weight_decay, schedule, rules, parts, tuple(notes))


def global_norm(tree: Tree) -> jax.Array:
  """The Euclidean norm of all leaves together, in float32."""
  return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def clip_by_global_norm(grads: Tree, max_norm: float) -> tuple[Tree, jax.Array]:
  """(gradients scaled to a global norm of at most `max_norm`, their norm before).

  Norms are computed in float32. Gradients within the bound are returned unchanged, bit by bit;
  `max_norm` 0 means no bound. A norm that is not finite makes the gradients so, too.
  """
  norm = global_norm(grads)
  if not max_norm:
    return grads, norm
  scale = jnp.where(norm <= max_norm, 1.0, max_norm / norm)
  return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), norm


def ema_update(ema: Tree, params: Tree, decay: float) -> Tree:
  """decay * ema + (1 - decay) * params, in the dtype of `ema`; equal ones stay equal exactly."""
  return jax.tree.map(lambda e, p: e + (1 - decay) * (p.astype(e.dtype) - e), ema, params)


def _rules(cfg: Any, paths: Mapping[str, Any], total_steps: int, only: str | None) -> dict[str, Rules]:
  """The rules of each trained parameter."""
  frozen = patterns.select(cfg.freeze, paths, "optimizer.freeze")
  if only is not None:
    frozen |= {path for path in paths if not re.search(only, path)}
  if len(frozen) == len(paths):
    raise ConfigError(
        f"optimizer.freeze = {tuple(cfg.freeze)!r} freezes all {len(paths)} parameters, so there is nothing"
        " to train; remove a pattern, or freeze all but one kind with a negative look-ahead: '^(?!.*mlp)'"
    )
  lr_mults = patterns.match(cfg.lr_mults, paths, "optimizer.lr_mults", default=1.0)
  # The default rules describe usual models; an unusual one may have no such parameters.
  usual = {pattern for pattern, _ in defaults().optimizer.wd_mults}
  wd_mults = patterns.match(cfg.wd_mults, paths, "optimizer.wd_mults", default=1.0, optional=usual)
  warmups = patterns.match(cfg.group_warmup, paths, "optimizer.group_warmup")
  for path, value in lr_mults.items():
    if not value > 0:
      raise ConfigError(
          f"optimizer.lr_mults gives {value} for {path}; factors are above 0. To keep a parameter fixed, use"
          f" optimizer.freeze, which also saves memory: ('^{path}$',)"
      )
  for path, value in wd_mults.items():
    if not value >= 0:
      raise ConfigError(f"optimizer.wd_mults gives {value} for {path}; factors are 0 or above")
  for path, value in warmups.items():
    if value is not None and not (isinstance(value, int) and 0 <= value <= total_steps):
      raise ConfigError(
          f"optimizer.group_warmup gives {value!r} for {path}; it is a whole number of steps, at most the"
          f" run's {total_steps:,}"
      )
  return {
      path: Rules(float(lr_mults[path]), float(wd_mults[path]), warmups[path])
      for path in paths if path not in frozen
  }


def _parts(cfg: Any, trained: Mapping[str, Any]) -> dict[str, tuple[frozenset[str], Direction]]:
  """The chosen optimizer's parts: which paths each serves, and how."""
  everything = frozenset(trained)
  if cfg.name == "adamw":
    return {"adam": (everything, _adam(cfg.b1, cfg.b2, cfg.eps))}
  if cfg.name == "adafactor":
    return {"adafactor": (everything, adafactor(cfg.decay_exponent, cfg.min_dim_size_to_factor))}
  if cfg.name == "lion":
    return {"lion": (everything, _from_optax(optax.scale_by_lion(cfg.b1, cfg.b2), optax.ScaleByLionState))}
  if cfg.name == "sgd":
    return {"sgd": (everything, _momentum(cfg.momentum, cfg.nesterov))}
  matrices = frozenset(path for path, leaf in trained.items() if len(leaf.shape) >= 2 and _MATRIX.match(path))
  if not matrices:
    raise ConfigError(
        "optimizer.name = 'muon' is for matrices, but none is trained; use --config.optimizer.name=adamw"
        f" for {', '.join(sorted(trained)[:4])}{' …' if len(trained) > 4 else ''}"
    )
  parts = {"muon": (matrices, _muon(cfg.momentum, cfg.nesterov, cfg.muon_steps))}
  others = (everything - matrices, _adam(cfg.b1, cfg.b2, cfg.eps))
  return parts | {"adam": others} if others[0] else parts


def _from_optax(tx: optax.GradientTransformation, state_type: type) -> Direction:
  """An optax transformation with its state as a plain dict."""

  def init(params: Tree) -> Tree:
    return tx.init(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))._asdict()

  def update(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    directions, new = tx.update(grads, state_type(**state))
    return directions, new._asdict()

  return Direction(init, update)


def _adam(b1: float, b2: float, eps: float) -> Direction:
  return _from_optax(optax.scale_by_adam(b1, b2, eps), optax.ScaleByAdamState)


def _momentum(momentum: float, nesterov: bool) -> Direction:
  return _from_optax(optax.trace(momentum, nesterov), optax.TraceState)


def _muon(momentum: float, nesterov: bool, iterations: int) -> Direction:
  """Momentum, orthogonalised matrix by matrix (Jordan et al. 2024), at the RMS of Adam's updates.

  An orthogonal M×N matrix has the RMS 1 / sqrt(max(M, N)), so it is multiplied by 0.2 * sqrt(max(M, N))
  (Liu et al. 2025, arXiv 2502.16982, equation 4): one learning rate and weight decay serve both parts.
  """
  trace = _momentum(momentum, nesterov)

  def update(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    directions, state = trace.update(grads, state)
    return jax.tree.map(scaled, directions), state

  def scaled(x: jax.Array) -> jax.Array:
    return orthogonalise(x, iterations) * (_ADAM_RMS * max(x.shape[-2:]) ** 0.5)

  return Direction(trace.init, update)


def orthogonalise(x_LxMxN: jax.Array, iterations: int = 5) -> jax.Array:
  """About U Vᵀ of each matrix U S Vᵀ, by Newton–Schulz iteration; any number of leading dims.

  The quintic with these coefficients grows small singular values fast instead of converging: after five
  iterations, those that were above 0.0015 of the Frobenius norm lie between 0.68 and 1.21. Matrix products
  are in float32 on CPU and bfloat16 elsewhere.
  """
  def in_dtype(dtype):
    return lambda x: _newton_schulz(x.astype(dtype), iterations).astype(jnp.float32)

  # Of the two sides the smaller one is squared.
  tall = x_LxMxN.shape[-2] > x_LxMxN.shape[-1]
  x = x_LxMxN.swapaxes(-1, -2) if tall else x_LxMxN
  x = x.astype(jnp.float32)
  # By the largest entry first, so that squares of tiny gradients do not vanish; a zero matrix stays zero.
  largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
  x = x / jnp.where(largest > 0, largest, 1)
  # The Frobenius norm, now at least 1, bounds the largest singular value.
  x = x / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)), 1)
  x = jax.lax.platform_dependent(x, cpu=in_dtype(jnp.float32), default=in_dtype(jnp.bfloat16))
  return x.swapaxes(-1, -2) if tall else x


def _newton_schulz(x_LxMxN: jax.Array, iterations: int) -> jax.Array:
  a, b, c = _NEWTON_SCHULZ
  for _ in range(iterations):
    gram_LxMxM = x_LxMxN @ x_LxMxN.swapaxes(-1, -2)
    x_LxMxN = a * x_LxMxN + (b * gram_LxMxM + c * (gram_LxMxM @ gram_LxMxM)) @ x_LxMxN
  return x_LxMxN


def adafactor(decay_exponent: float, min_dim_size_to_factor: int) -> Direction:
  """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235) without momentum and without parameter scaling.

  The last two dims of a parameter are its matrix (the last one its vector, of biases and scales), so layers
  stacked on leading dims do not mix. Where both are at least `min_dim_size_to_factor`, the second moment is
  kept as means over rows and over columns (algorithm 4), else in full. Each matrix's or vector's update is
  divided by max(1, its RMS). Since it is not scaled by the parameter's RMS, the learning rate means what it
  means for Adam (as in Zhai et al. 2021, arXiv 2106.04560, section 3.4).
  """
  tiny = 1e-30  # added to squared gradients, as in the paper

  def rank(path: str, p: Any) -> int:
    return min(len(p.shape), 1 if _VECTOR.search(path) else 2)

  def factored(path: str, p: Any) -> bool:
    return rank(path, p) == 2 and min(p.shape[-2:]) >= min_dim_size_to_factor

  def init(params: Tree) -> Tree:
    flat = patterns.flatten(params)
    shapes: dict[str, dict[str, tuple[int, ...]]] = {"v_row": {}, "v_col": {}, "v": {}}
    for path, p in flat.items():
      if factored(path, p):
        shapes["v_row"][path], shapes["v_col"][path] = p.shape[:-1], (*p.shape[:-2], p.shape[-1])
      else:
        shapes["v"][path] = p.shape
    moments = {name: {path: jnp.zeros(shape, jnp.float32) for path, shape in of.items()}
               for name, of in shapes.items() if of}
    return {"count": jnp.zeros((), jnp.int32)} | {k: patterns.unflatten(v) for k, v in moments.items()}

  def update(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    count = state["count"] + 1
    decay = 1 - count.astype(jnp.float32) ** -decay_exponent
    old = {name: patterns.flatten(tree) for name, tree in state.items() if name != "count"}
    new: dict[str, dict[str, jax.Array]] = {name: {} for name in old}

    def average(name, path, value):
      new[name][path] = decay * old[name][path] + (1 - decay) * value
      return new[name][path]

    directions = {}
    for path, g in patterns.flatten(grads).items():
      squared = jnp.square(g) + tiny
      if factored(path, g):
        row_LxMx1 = average("v_row", path, jnp.mean(squared, axis=-1))[..., :, None]
        col_Lx1xN = average("v_col", path, jnp.mean(squared, axis=-2))[..., None, :]
        row_LxMx1 = row_LxMx1 / jnp.mean(row_LxMx1, axis=-2, keepdims=True)
        u = g * jax.lax.rsqrt(row_LxMx1) * jax.lax.rsqrt(col_Lx1xN)
      else:
        u = g * jax.lax.rsqrt(average("v", path, squared))
      rms = jnp.sqrt(jnp.mean(jnp.square(u), axis=tuple(range(-rank(path, u), 0)), keepdims=True))
      directions[path] = u / jnp.maximum(1.0, rms)
    state = {"count": count} | {name: patterns.unflatten(flat) for name, flat in new.items()}
    return patterns.unflatten(directions), state

  return Direction(init, update)


def _only(flat: Mapping[str, Any], paths: Any) -> Tree:
  """The nested dict of those leaves whose path is among `paths`."""
  return patterns.unflatten({path: leaf for path, leaf in flat.items() if path in paths})


def _count(paths: Any, shapes: Mapping[str, Any]) -> str:
  size = sum(shapes[path].size for path in paths)
  return f"{size:,} parameters in {len(paths)} array{'' if len(paths) == 1 else 's'}"
