"""The training state: what it holds, its shapes, and where its first values come from.

A state is a plain dict: `step` (updates done, int32), `params` and `ema` (nested dicts of arrays), `opt` (the
optimizer's), `nonfinite` and `nonfinite_in_a_row` (the finite guard's counters, int32).
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from trainer import checkpoint, optim, patterns
from trainer.config import ConfigError


def make_init(model: Any, optimizer: optim.Optimizer, *, ema: bool):
  """Returns `init(rng) -> state`, for `jax.eval_shape` and, jitted with shardings, for the real thing."""

  def init(rng: jax.Array) -> dict[str, Any]:
    params = model.init(rng)
    trainable, _ = optimizer.split(params)
    # Every leaf has a buffer of its own, since the update donates them all.
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt": optimizer.init(trainable),
             "nonfinite": jnp.zeros((), jnp.int32), "nonfinite_in_a_row": jnp.zeros((), jnp.int32)}
    if ema:
      state["ema"] = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return state

  return init


def initialise(config: Any, init: Any, abstract: Any, shardings: Any,
               checkpoints: checkpoint.Checkpoints) -> tuple[dict[str, Any], dict[str, Any], str]:
  """The first state of this process, its checkpoint's metadata ({} if none), and where it came from.

  The order matters:
    1. the workdir's own newest readable checkpoint: an interrupted run goes on;
    2. `config.resume`: another run's parameters, optimizer, step and data position;
    3. `config.init_from`: parameters only, by name, the rest fresh;
    4. scratch.

  Args:
    abstract: the state as ShapeDtypeStructs; shardings: the same tree of NamedShardings.
  """
  target = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), abstract, shardings)
  restored = checkpoints.restore_newest(target)
  if restored is not None:
    return restored.state, restored.meta, f"continuing {restored.path} after step {int(restored.state['step'])}"

  if config.resume:
    restored = checkpoint.restore_from(config.resume, target)
    return restored.state, restored.meta, f"resuming {restored.path} after step {int(restored.state['step'])}"

  state = jax.jit(init, out_shardings=shardings)(jax.random.key(config.seed))
  if config.init_from.path:
    params, notes = _partial_restore(config.init_from, target["params"], state["params"])
    for note in notes:
      logging.info("%s", note)
    state["params"] = params
    if "ema" in state:
      state["ema"] = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
    return state, {}, f"fresh optimizer, parameters from {config.init_from.path}"
  return state, {}, "fresh parameters"


def _partial_restore(cfg: Any, target: Any, fresh: Any) -> tuple[Any, list[str]]:
  """Parameters from another checkpoint, matched by name after `remap`; `ignore`d ones stay fresh.

  Raises:
    ConfigError: listing both sides, if names or shapes do not match up.
  """
  path = checkpoint.find(cfg.path)
  saved = checkpoint.param_shapes(path)
  ours = patterns.flatten(target)
  ignored = patterns.select(cfg.ignore, ours, "init_from.ignore")
  patterns.select([pattern for pattern, _ in cfg.remap], saved, "init_from.remap")
  renamed, dropped = {}, []
  for name in saved:
    new = name
    for pattern, replacement in cfg.remap:
      new = re.sub(pattern, replacement, new)
    if not new:
      dropped.append(name)
      continue
    if new in renamed:
      raise ConfigError(f"init_from.remap maps both {renamed[new]} and {name} of {path} to {new}.")
    renamed[new] = name

  problems = patterns.compare({p: leaf for p, leaf in ours.items() if p not in ignored},
                              {new: saved[old] for new, old in renamed.items() if new not in ignored})
  if problems:
    listed = "\n  ".join(problems[:40])
    raise ConfigError(
        f"init_from {path} does not fit this model ({len(problems)} in all; -: only here, +: only there, "
        f"!: other shape):\n  {listed}\nMap names with init_from.remap=((regex, replacement),), keep fresh values "
        "with init_from.ignore=(regex,); a checkpoint's extra parameters are dropped by remapping them onto '': "
        "((regex, ''),).")
  wanted = {renamed[p]: ours[p] for p in ours if p in renamed and p not in ignored}
  loaded = checkpoint.restore_params(path, wanted)
  flat = patterns.flatten(fresh)
  for ours_path in flat:
    if ours_path in renamed and ours_path not in ignored:
      flat[ours_path] = loaded[renamed[ours_path]]
  notes = [f"init_from: {len(wanted)} parameters loaded from {path}, {len(ignored)} kept fresh, "
           f"{len(dropped)} of the checkpoint dropped"]
  return patterns.unflatten(flat), notes
