"""Optimizers with per-parameter rules: freezing, learning-rate and weight-decay multipliers, warm-up.

Every optimizer here is made of `Direction`s (trainer/optim/transforms.py): from gradients to a direction of descent of
about the same size as Adam's. The rest is common to all: with the global step k and a parameter p,

  lr = learning_rate * schedule(k) * lr_mult[p]
  update[p] = -lr * (direction[p] + weight_decay * wd_mult[p] * p)

which is decoupled weight decay (Loshchilov & Hutter 2019, arXiv 1711.05101, with the learning rate inside
as in PyTorch). States are nested dicts of arrays, in float32 whatever the parameters' dtype, unless moments are to be
kept in less (trainer/optim/moments.py); those as large as a parameter lie under its path
(`adam/mu/blocks/attn/q/kernel`), so that they can be sharded like it.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer import tree as tree_lib
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.optim import mup
from trainer.optim.moments import Moments, rounding_bits, to_bfloat16
from trainer.optim.schedules import Schedule, Step, ToSteps, make_schedule
from trainer.optim.transforms import Direction, adafactor, adam, lion, muon, sgd

Tree = dict[str, Any]

NAMES = ("adamw", "adafactor", "muon", "lion", "sgd")

# Arrays of so many entries go layer by layer where they are kept in less than float32.
LARGE = 2**24


class Advance(NamedTuple):
  """What `Optimizer.advance` did; float32, 0 where it changed nothing (EXACTNESS.md T33)."""

  # The norm of all updates together.
  norm: jax.Array
  # {path: how many entries changed}, of parameters in bfloat16.
  changed: dict[str, jax.Array]


class _Advanced(NamedTuple):
  """Some parameters after a step: nested dicts by path."""

  params: Tree
  state: Tree
  # The sum of the squares of each array's update, and how many entries of each array in bfloat16 changed.
  squares: Tree
  changed: Tree


class Rules(NamedTuple):
  """The rules of one trained parameter."""

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
    flat = tree_lib.flatten(params)
    frozen = {path: leaf for path, leaf in flat.items() if path not in self.rules}
    return _only(flat, self.rules), tree_lib.unflatten(frozen)

  def merge(self, trainable: Tree, frozen: Tree) -> Tree:
    """The parameters that `split` took apart."""
    return tree_lib.unflatten(dict(sorted((tree_lib.flatten(trainable) | tree_lib.flatten(frozen)).items())))

  def init(self, trainable: Tree) -> Tree:
    """The state before the first update: `{part: state}`."""
    flat = tree_lib.flatten(trainable)
    return {name: self.moments.encode(direction.init(_only(flat, paths)), 0)
            for name, (paths, direction) in self.parts.items()}

  def update(self, grads: Tree, opt_state: Tree, trainable: Tree, step: Step, layer: Any = None) -> tuple[Tree, Tree]:
    """One update.

    Args:
      grads: gradients of the trained parameters.
      opt_state: from `init` or the last update.
      trainable: the trained parameters.
      step: updates done before this one, which sets the learning rate.
      layer: that these are parts of arrays, see `moments.rounding_bits`; None: they are whole.

    Returns:
      (updates, state): float32 updates to be added to the parameters, and the next state.
    """
    flat_grads = {path: g.astype(jnp.float32) for path, g in tree_lib.flatten(grads).items()}
    directions: dict[str, jax.Array] = {}
    new_state = {}
    for name, (paths, direction) in self.parts.items():
      directed, new = direction.update(_only(flat_grads, paths), self.moments.decode(opt_state[name]))
      new_state[name] = self.moments.encode(new, step, layer)
      directions |= tree_lib.flatten(directed)
    warmups = {rules.warmup_steps for rules in self.rules.values()}
    peak_lr = {warm: self.learning_rate * self.schedule(step, warm) for warm in warmups}
    updates = {}
    for path, p in tree_lib.flatten(trainable).items():
      rules = self.rules[path]
      decay = self.weight_decay * rules.wd_mult
      descent = directions[path] + decay * p.astype(jnp.float32) if decay else directions[path]
      updates[path] = -(peak_lr[rules.warmup_steps] * rules.lr_mult) * descent
    return tree_lib.unflatten(updates), new_state

  def apply(self, updates: Tree, trainable: Tree, step: Step, layer: Any = None) -> Tree:
    """The parameters after the updates, in their dtype; the arguments are those of `update`."""
    def applied(path: str, p: jax.Array, u: jax.Array) -> jax.Array:
      if self.stochastic_rounding and p.dtype == jnp.bfloat16:
        return to_bfloat16(p + u, rounding_bits(self.moments.seed, step, f"params/{path}", p.shape, layer))
      return (p + u).astype(p.dtype)

    flat = tree_lib.flatten(updates)
    return tree_lib.unflatten({path: applied(path, p, flat[path]) for path, p in tree_lib.flatten(trainable).items()})

  def advance(self, grads: Tree, opt_state: Tree, trainable: Tree, step: Step, finite: jax.Array | None = None,
              prepare: Callable[[jax.Array], jax.Array] = lambda g: g) -> tuple[Tree, Tree, Advance]:
    """(parameters, state, what was done) after `update` and `apply`.

    Large arrays are advanced layer by layer if they, or their moments, are kept in less than float32. Otherwise
    compilers for GPUs keep whole arrays of updates and of decoded moments in float32, and copies of arrays that they no
    longer update in place: for 8 billion parameters on one GPU, more than moments in int8 save.

    Args:
      grads, opt_state, trainable, step: see `update`.
      finite: where it is False, parameters and state stay as they are; None: they always change.
      prepare: makes the float32 gradient, divided and clipped, of a gradient or a part of one.
    """
    flat = tree_lib.flatten(trainable)
    large = [path for path, p in flat.items() if p.ndim > 2 and p.size >= LARGE
             and (self.moments.reduced or p.dtype == jnp.bfloat16)]
    small = flat.keys() - set(large)
    advance = functools.partial(self._advance, step, finite, prepare)
    advanced = [advance(*_of_paths(small, grads, opt_state, trainable))]
    advanced += [_layer_by_layer(advance, *_of_paths({path}, grads, opt_state, trainable)) for path in large]
    params, states, squares, changed = (_merged(trees) for trees in zip(*advanced, strict=True))
    return params, states, Advance(jnp.sqrt(sum(jax.tree.leaves(squares))), tree_lib.flatten(changed))

  def _advance(self, step: Step, finite: jax.Array | None, prepare: Callable, grads: Tree, opt_state: Tree,
               trainable: Tree, layer: Any = None) -> _Advanced:
    """`advance` of some parameters, or of one layer of them."""
    grads = jax.tree.map(prepare, grads)
    updates, new_state = self.update(grads, opt_state, trainable, step, layer)
    new = self.apply(updates, trainable, step, layer), new_state
    squares = jax.tree.map(lambda u: jnp.sum(jnp.square(u)), updates)
    if finite is not None:
      new = choose(finite, new, (trainable, opt_state))
      squares = jax.tree.map(lambda x: jnp.where(finite, x, 0.0), squares)
    flat = tree_lib.flatten(new[0])
    changed = {path: jnp.sum(flat[path] != p, dtype=jnp.float32) for path, p in tree_lib.flatten(trainable).items()
               if p.dtype == jnp.bfloat16}
    return _Advanced(*new, squares, tree_lib.unflatten(changed))

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
    precision: Any = None, seed: int = 0, width: float = 1.0
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
    width: m of trainer/optim/mup.py.

  Raises:
    ConfigError: rules out of range or without effect, or nothing left to train.
  """
  shapes = tree_lib.flatten(abstract_params)
  rules = _rules(cfg, shapes, total_steps, only)
  trained = {path: shapes[path] for path in rules}
  schedule = make_schedule(cfg_schedule, total_steps=total_steps, to_steps=to_steps)
  parts = _parts(cfg, trained, shapes)
  if width != 1:
    rules |= _of_width(rules, parts, width)
  notes = [f"{name}: {_count(paths, shapes)}" for name, (paths, _) in parts.items()]
  if len(trained) < len(shapes):
    notes.append(f"frozen: {_count(shapes.keys() - trained.keys(), shapes)}")
  moments = Moments()
  if precision is not None:
    moments = Moments(precision.moments, precision.second_moments or precision.moments, seed)
  if moments.reduced:
    notes.append(f"moments: first in {moments.first}, second in {moments.second}")
  return Optimizer(cfg.name, cfg.learning_rate, cfg.weight_decay, schedule, rules, parts, tuple(notes), moments,
                   precision is not None and precision.stochastic_rounding)


def global_norm(tree: Tree) -> jax.Array:
  """The Euclidean norm of all leaves together, in float32."""
  return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def clipping(grads: Tree, max_norm: float) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
  """(a function that scales each gradient, so that the global norm is at most `max_norm`; the norm before).

  Norms are computed in float32. Gradients within the bound stay unchanged, bit by bit; `max_norm` 0 means no bound. A
  norm that is not finite makes the gradients so, too.
  """
  norm = global_norm(grads)
  if not max_norm:
    return lambda g: g, norm
  scale = jnp.where(norm <= max_norm, 1.0, max_norm / norm)
  return lambda g: (g * scale).astype(g.dtype), norm


def choose(condition: jax.Array, yes: Any, no: Any) -> Any:
  """One of two trees."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def ema_update(ema: Tree, params: Tree, decay: float) -> Tree:
  """decay * ema + (1 - decay) * params, in the dtype of `ema`; equal ones stay equal exactly."""
  return jax.tree.map(lambda e, p: e + (1 - decay) * (p.astype(e.dtype) - e), ema, params)


def _rules(cfg: Any, paths: Mapping[str, Any], total_steps: int, only: str | None) -> dict[str, Rules]:
  """The rules of each trained parameter."""
  frozen = tree_lib.select(cfg.freeze, paths, "optimizer.freeze")
  if only is not None:
    frozen |= {path for path in paths if not re.search(only, path)}
  if len(frozen) == len(paths):
    raise ConfigError(
        f"optimizer.freeze = {tuple(cfg.freeze)!r} freezes all {len(paths)} parameters, so there is nothing"
        " to train; remove a pattern, or freeze all but one kind with a negative look-ahead: '^(?!.*mlp)'"
    )
  lr_mults = tree_lib.match(cfg.lr_mults, paths, "optimizer.lr_mults", default=1.0)
  # The default rules describe usual models; an unusual one may have no such parameters.
  usual = {pattern for pattern, _ in defaults().optimizer.wd_mults}
  wd_mults = tree_lib.match(cfg.wd_mults, paths, "optimizer.wd_mults", default=1.0, optional=usual)
  warmups = tree_lib.match(cfg.group_warmup, paths, "optimizer.group_warmup")
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


def _of_width(rules: Mapping[str, Rules], parts: Mapping[str, tuple[frozenset[str], Direction]], width: float
              ) -> dict[str, Rules]:
  """The rules of hidden matrices at so many times the width at which rates were found."""
  by_muon = parts["muon"][0] if "muon" in parts else frozenset()
  changed = {}
  for path in rules:
    if re.search(mup.HIDDEN, path):
      factor = mup.lr_mult(width, path in by_muon)
      changed[path] = rules[path]._replace(lr_mult=rules[path].lr_mult * factor, wd_mult=rules[path].wd_mult / factor)
  return changed


def _hidden_matrices(exclude: Sequence[str], trained: Mapping[str, Any], every: Iterable[str]) -> frozenset[str]:
  """The parameters that Muon serves: kernels whose last two dims are a matrix, but for those that `exclude` names."""
  # The default patterns describe usual models; many have no images and no experts.
  excluded = tree_lib.select(exclude, every, "optimizer.muon_exclude", optional=defaults().optimizer.muon_exclude)
  return frozenset(path for path, leaf in trained.items() if path.endswith("kernel") and path not in excluded
                   and len(leaf.shape) >= 2 and min(leaf.shape[-2:]) > 1)


def _parts(cfg: Any, trained: Mapping[str, Any], every: Iterable[str]
           ) -> dict[str, tuple[frozenset[str], Direction]]:
  """The chosen optimizer's parts: which paths each serves, and how; `every` path, also of what is frozen."""
  everything = frozenset(trained)
  if cfg.name == "adamw":
    return {"adam": (everything, adam(cfg.b1, cfg.b2, cfg.eps))}
  if cfg.name == "adafactor":
    return {"adafactor": (everything, adafactor(cfg.decay_exponent, cfg.min_dim_size_to_factor))}
  if cfg.name == "lion":
    return {"lion": (everything, lion(cfg.b1, cfg.b2))}
  if cfg.name == "sgd":
    return {"sgd": (everything, sgd(cfg.momentum, cfg.nesterov))}
  matrices = _hidden_matrices(cfg.muon_exclude, trained, every)
  if not matrices:
    raise ConfigError(
        "optimizer.name = 'muon' is for hidden matrices, but none is trained (adapters are factors of one); use"
        f" --config.optimizer.name=adamw for {', '.join(sorted(trained)[:4])}{' …' if len(trained) > 4 else ''}"
    )
  parts = {"muon": (matrices, muon(cfg.momentum, cfg.nesterov, cfg.muon_steps))}
  others = (everything - matrices, adam(cfg.b1, cfg.b2, cfg.eps))
  return parts | {"adam": others} if others[0] else parts


def _only(flat: Mapping[str, Any], paths: Any) -> Tree:
  """The nested dict of those leaves whose path is among `paths`."""
  return tree_lib.unflatten({path: leaf for path, leaf in flat.items() if path in paths})


def _of_paths(paths: Collection[str], grads: Tree, opt_state: Tree, trainable: Tree) -> tuple[Tree, Tree, Tree]:
  """The (gradients, state, parameters) of these paths; the state's counters belong to all."""
  state = {part: {name: _only(tree_lib.flatten(x), paths) if isinstance(x, dict) else x for name, x in states.items()}
           for part, states in opt_state.items()}
  return _only(tree_lib.flatten(grads), paths), state, _only(tree_lib.flatten(trainable), paths)


def _layer_by_layer(advance: Callable, grads: Tree, opt_state: Tree, trainable: Tree) -> _Advanced:
  """`advance(grads, opt_state, trainable, layer)` of each layer; all arrays have the same number of layers."""
  layers = len(jax.tree.leaves(trainable)[0])

  def part(tree: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1) if x.ndim else x, tree)

  def put(tree: Any, new: Any, i: Any) -> Any:
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i, 0) if x.ndim else y, tree, new)

  def advance_layer(i: jax.Array, carry: tuple) -> tuple:
    state, params, sums = carry
    # The counters, which belong to no layer, are those before the first layer.
    before = jax.tree.map(lambda now, old: now if now.ndim else old, state, opt_state)
    new = advance(part(grads, i), part(before, i), part(params, i), i)
    sums = jax.tree.map(jnp.add, sums, (new.squares, new.changed))
    return put(state, new.state, i), put(params, new.params, i), sums

  first = jax.eval_shape(lambda: advance(part(grads, 0), part(opt_state, 0), part(trainable, 0), 0))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (first.squares, first.changed))
  state, params, sums = jax.lax.fori_loop(0, layers, advance_layer, (opt_state, trainable, zeros))
  return _Advanced(params, state, *sums)


def _merged(trees: Iterable[Tree]) -> Tree:
  """The nested dict of all leaves of these; of those with the same path, the first."""
  leaves: dict[str, Any] = {}
  for tree in trees:
    leaves = tree_lib.flatten(tree) | leaves
  return tree_lib.unflatten(dict(sorted(leaves.items())))


def _count(paths: Any, shapes: Mapping[str, Any]) -> str:
  size = sum(shapes[path].size for path in paths)
  return f"{size:,} parameters in {len(paths)} array{'' if len(paths) == 1 else 's'}"
