"""The training state: what it holds, its shapes, and where its first values come from.

A state is a plain dict: `step` (updates done, int32), `params` (nested dict of arrays), `opt` (the optimizer's), `ema`
(if kept: the moving average of the trained parameters, float32), `reference` (the reference policy's own leaves, if
there is one), `nonfinite` and `nonfinite_in_a_row` (the finite
guard's counters, int32).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from clu import parameter_overview

from trainer import tree
from trainer.checkpoints import checkpoint, init_from
from trainer.checkpoints.fingerprint import fingerprint
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.optim import optimizer as optim
from trainer.strategies import critic
from trainer.strategies import reference as reference_lib


@dataclass(frozen=True)
class Start:
  """What a process starts from."""

  state: dict[str, Any]
  # Of the checkpoint; {} if there is none.
  meta: dict[str, Any]
  # A sentence on where it comes from.
  origin: str
  # Fingerprints of what checkpoints leave out and what must not change: `base` (the frozen parameters under adapters),
  # `base of the critic`, `reference`; those that the run has.
  pinned: dict[str, str]
  # Further arrays of the checkpoint (what is left of a rollout); None if there are none.
  arrays: dict[str, Any] | None = None

  @property
  def step(self) -> int:
    """Updates done."""
    return int(self.state["step"])


def make_fresh(optimizer: optim.Optimizer, *, ema: bool, reference: Any = None) -> Callable[[Any], dict[str, Any]]:
  """Returns `fresh(params) -> state` before the first update, for `jax.eval_shape`.

  Args:
    reference: the abstract leaves of a reference policy (trainer/strategies/reference.py), None: there is none.
  """
  rest = make_rest(optimizer, ema=ema)

  def fresh(params: Any) -> dict[str, Any]:
    state = {**rest(params), "params": params}
    if reference is not None:
      state["reference"] = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), reference)
    return state

  return fresh


def make_rest(optimizer: optim.Optimizer, *, ema: bool) -> Callable[[Any], dict[str, Any]]:
  """Returns `rest(params) -> counters, optimizer state and averages`, before the first update."""

  def rest(params: Any) -> dict[str, Any]:
    trainable, _ = optimizer.split(params)
    # Every leaf has a buffer of its own, since the update donates them all.
    state = {"step": jnp.zeros((), jnp.int32), "opt": optimizer.init(trainable),
             "nonfinite": jnp.zeros((), jnp.int32), "nonfinite_in_a_row": jnp.zeros((), jnp.int32)}
    if ema:
      state["ema"] = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), trainable)
    return state

  return rest


def describe(start: Start) -> None:
  """Prints where a start comes from, and a table of its parameters; in the first process."""
  if jax.process_index() == 0:
    processes.say(start.origin, parameter_overview.get_parameter_overview(start.state["params"], include_stats=False))


def left_out(program: Any, strategy: Any) -> dict[str, Any]:
  """{part of the state: paths} that checkpoints leave out: the base of adapters, and a reference that does not move."""
  parts, abstract = {}, program.abstract_state
  if program.model.trained_only:
    parts["params"] = tree.flatten(abstract["params"]).keys() - program.optimizer.trainable
  if "reference" in abstract and ("teacher" in abstract["reference"] or not strategy.reference_ema):
    parts["reference"] = set(tree.flatten(abstract["reference"]))
  return parts


def averaged(state: dict[str, Any]) -> Any:
  """The parameters to evaluate and to publish: the moving averages where they are kept, else the parameters."""
  if "ema" not in state:
    return state["params"]
  return tree.unflatten(dict(sorted((tree.flatten(state["params"]) | tree.flatten(state["ema"])).items())))


def initialise(config: Any, origin: init_from.Origin, program: Any, checkpoints: checkpoint.Checkpoints) -> Start:
  """The first state of this process.

  The order matters:
    1. the workdir's own newest readable checkpoint: an interrupted run goes on;
    2. `config.resume`: another run's parameters, optimizer, step and data position;
    3. `config.init_from`, `config.model.hf`: parameters only, by name, the rest fresh;
    4. scratch.

  What a checkpoint leaves out (the base under adapters, a reference policy that stays as it is) is made as in 3 or 4
  again, and must be the same to the bit.

  Args:
    origin: where parameters come from.

  Raises:
    ConfigError: if a checkpoint or folder is of another model, or what it left out has changed.
  """
  abstract, model = program.abstract_state, program.model
  stored, left_out = checkpoints.split(abstract)
  restored = checkpoints.restore_newest(stored)
  verb = "continuing"
  if restored is None and origin.resume:
    restored, verb = checkpoint.restore_from(origin.resume, stored), "resuming"
  if restored is None:
    params, where = critic.first_params(config, origin, model, abstract["params"])
    rest = jax.tree.map(lambda leaf: leaf.sharding, {
        name: part for name, part in abstract.items() if name not in ("params", "reference")})
    make_others = make_rest(program.optimizer, ema="ema" in abstract)
    state = jax.jit(make_others, out_shardings=rest)(params) | {"params": params}
    if "reference" in abstract:
      state["reference"] = reference_lib.first_reference(config, model, params, abstract["reference"])
    return Start(state, {}, where, _pinned(state, checkpoints))

  state, meta = restored.state, restored.meta
  where = f"{verb} {restored.path} after step {int(state['step'])}"
  if left_out:
    state = _complete(state, left_out, config, model, origin, checkpoints)
  start = Start(state, meta, where, _pinned(state, checkpoints), restored.arrays)
  was = meta.get("pinned", {})
  for what, name in start.pinned.items():
    if was.get(what) != name:
      raise ConfigError(
          f"{restored.path} was trained with another {what}: its fingerprint is {was.get(what)}, that of the one here "
          f"is {name}. Give the model.hf ({config.model.hf} here), init_from, strategy.reference or "
          "strategy.teacher, seed and precision.frozen that it was trained with, and the files as they were.")
  return start


def _complete(state: Any, left_out: Any, config: Any, model: Any, origin: init_from.Origin,
              checkpoints: checkpoint.Checkpoints) -> dict[str, Any]:
  """The restored state with what its checkpoint left out, made from where the run began."""
  base, again = left_out.get("params", {}), left_out.get("reference")
  from_start = again is not None and reference_lib.from_start(config)
  wanted = tree.flatten(base) | (tree.flatten(again) if from_start else {})
  params, _ = critic.first_params(config, origin, model, tree.unflatten(wanted), partial=True)
  added = {}
  if base:
    flat = tree.flatten(params)
    added["params"] = tree.unflatten({path: flat[path] for path in tree.flatten(base)})
  if again is not None:
    added["reference"] = reference_lib.first_reference(config, model, params, again)
  return checkpoints.merge(state, added)


def _pinned(state: dict[str, Any], checkpoints: checkpoint.Checkpoints) -> dict[str, str]:
  _, left_out = checkpoints.split(state)
  base = left_out.get("params", {})
  parts = {"base": critic.policy_params(base), "base of the critic": base.get(critic.NAME),
           "reference": left_out.get("reference")}
  return {what: fingerprint(part) for what, part in parts.items() if part}
