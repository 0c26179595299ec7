"""Optimizers with per-parameter rules: freezing, learning-rate and weight-decay multipliers, warm-up.

Every optimizer here is made of `Direction`s (trainer/directions.py): from gradients to a direction of descent of about
the same size as Adam's. The rest is common to all: with the global step k and a parameter p,

  lr = learning_rate * schedule(k) * lr_mult[p]
  update[p] = -lr * (direction[p] + weight_decay * wd_mult[p] * p)

which is decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, with the learning rate inside
as in PyTorch). States are nested dicts of arrays, in float32 whatever the parameters' dtype, unless moments are to be
kept in less (trainer/moments.py); those as large as a parameter lie under its path (`adam/mu/blocks/attn/q/kernel`),
so that they can be sharded like it.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer import patterns
from trainer.config import ConfigError, defaults
from trainer.directions import Direction, adafactor, adam, lion, muon, sgd
from trainer.moments import Moments, make_moments, rounding_bits, to_bfloat16
from trainer.schedules import Schedule, Step, ToSteps, make_schedule

Tree = dict[str, Any]

NAMES = ("adamw", "adafactor", "muon", "lion", "sgd")

# Muon is for hidden matrices: embeddings and the output head behave like tables of vectors.
_MATRIX = re.compile(r"^(?!(.*/)?(embed|unembed|pos_embed)/).*kernel$")


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
  # How moments are kept.
  moments: Moments = Moments()
  # Parameters in bfloat16 are rounded up or down at random, so that updates count on average however small they are.
  stochastic_rounding: bool = False

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
    return {name: self.moments.encode(direction.init(_only(flat, paths)), 0)
            for name, (paths, direction) in self.parts.items()}

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
      directed, new = direction.update(_only(flat_grads, paths), self.moments.decode(opt_state[name]))
      new_state[name] = self.moments.encode(new, step)
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

  def apply(self, updates: Tree, trainable: Tree, step: Step) -> Tree:
    """The parameters after the updates, in their dtype; `updates` and `step` are those of `update`."""
    def applied(path: str, p: jax.Array, u: jax.Array) -> jax.Array:
      if self.stochastic_rounding and p.dtype == jnp.bfloat16:
        return to_bfloat16(p + u, rounding_bits(self.moments.seed, step, f"params/{path}", p.shape))
      return (p + u).astype(p.dtype)

    flat = patterns.flatten(updates)
    return patterns.unflatten({path: applied(path, p, flat[path]) for path, p in patterns.flatten(trainable).items()})

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
    cfg: Any, cfg_schedule: Any, abstract_params: Tree, *, total_steps: int, to_steps: ToSteps, only: str | None = None,
    precision: Any = None, seed: int = 0
) -> Optimizer:
  """The optimizer of the config sections `optimizer` and `schedule`.

  Args:
    cfg: section `optimizer`; only keys of the chosen optimizer are read.
    cfg_schedule: section `schedule`.
    abstract_params: nested dict of anything with `shape` (and `size`).
    total_steps: updates in the whole run.
    to_steps: resolves durations, see `make_schedule`.
    only: a regex; parameters whose path it does not match are frozen, besides those of `cfg.freeze`.
    precision: section `precision`, which says how moments are kept and parameters rounded; None: in float32.
    seed: of the bits that decide which way numbers are rounded.

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
  moments = make_moments(precision, seed)
  if (moments.first, moments.second) != ("float32", "float32"):
    notes.append(f"moments: first in {moments.first}, second in {moments.second}")
  return Optimizer(cfg.name, cfg.learning_rate, cfg.weight_decay, schedule, rules, parts, tuple(notes), moments,
                   precision is not None and precision.stochastic_rounding)


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
    return {"adam": (everything, adam(cfg.b1, cfg.b2, cfg.eps))}
  if cfg.name == "adafactor":
    return {"adafactor": (everything, adafactor(cfg.decay_exponent, cfg.min_dim_size_to_factor))}
  if cfg.name == "lion":
    return {"lion": (everything, lion(cfg.b1, cfg.b2))}
  if cfg.name == "sgd":
    return {"sgd": (everything, sgd(cfg.momentum, cfg.nesterov))}
  matrices = frozenset(path for path, leaf in trained.items() if len(leaf.shape) >= 2 and _MATRIX.match(path))
  if not matrices:
    raise ConfigError(
        "optimizer.name = 'muon' is for matrices, but none is trained; use --config.optimizer.name=adamw"
        f" for {', '.join(sorted(trained)[:4])}{' …' if len(trained) > 4 else ''}"
    )
  parts = {"muon": (matrices, muon(cfg.momentum, cfg.nesterov, cfg.muon_steps))}
  others = (everything - matrices, adam(cfg.b1, cfg.b2, cfg.eps))
  return parts | {"adam": others} if others[0] else parts


def _only(flat: Mapping[str, Any], paths: Any) -> Tree:
  """The nested dict of those leaves whose path is among `paths`."""
  return patterns.unflatten({path: leaf for path, leaf in flat.items() if path in paths})


def _count(paths: Any, shapes: Mapping[str, Any]) -> str:
  size = sum(shapes[path].size for path in paths)
  return f"{size:,} parameters in {len(paths)} array{'' if len(paths) == 1 else 's'}"
