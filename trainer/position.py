"""Where in its data a run stands, as its checkpoint says: which rows its steps have taken, whatever their sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from input_pipeline.steps import Past, Piece, Steps, steps_of_batches, steps_of_rollouts
from trainer.checkpoints import checkpoint
from trainer.distributed import processes
from trainer.errors import CheckpointError, ConfigError, Damaged


def find(workdir: Path, resume: str | None) -> Past | None:
  """The past of the run that is gone on with: the workdir's own, else that of `resume`; None: one begins.

  Of the newest checkpoint that is whole as far as it says of itself; its arrays are read later. The first process looks
  for all.

  Raises:
    CheckpointError, ConfigError: it cannot be read, or is not there.
  """
  return _past(processes.from_first(_meta(workdir, resume)))


def _meta(workdir: Path, resume: str | None) -> dict[str, Any] | None:
  """What `_past` needs."""
  folder = workdir / "checkpoints"
  steps = checkpoint.listed(folder)
  for found in [*(folder / str(step) for step in reversed(steps)), *([] if steps or not resume else [
      checkpoint.find(resume)])]:
    try:
      return _needed(checkpoint.read_meta(found))
    except Damaged:  # told when its state is to be read
      if found.parent != folder:
        raise
  return None


def past_of(meta: Mapping[str, Any]) -> Past | None:
  """The past that a checkpoint holds; None: there is no checkpoint."""
  return _past(_needed(meta) if meta else None)


def steps_of(config: Any, past: Past | None) -> Steps:
  """The rows of each step of a run with that config and past."""
  c = config.rollout
  if c.num_prompts:
    return steps_of_rollouts(c.num_prompts, c.updates, c.epochs, past)
  stages = config.input.batch_size_stages
  return steps_of_batches(config.batch_size, config.grad_accum_steps, stages, config.seq_len, past)


def go_on(config: Any, data: Any, start: Any, found_here: bool) -> None:
  """Puts the data (trainer/data.py) where the checkpoint of a `state.Start` says.

  Args:
    found_here: the past that the data were made with is what `find` found.

  Raises:
    CheckpointError, ConfigError: the data are not those of the checkpoint.
  """
  if found_here:
    _check(config, data.taken, start.meta)
  _check_same_data(start.meta, data.past_fingerprint, config.allow_config_changes)
  data.restore(start.step, rest_of_rollout(start.meta), start.arrays)


def _check(config: Any, taken: Steps, meta: Mapping[str, Any]) -> None:
  """Refuses a state that is not the one whose past was believed: the arrays of the newest checkpoint were damaged, and
  the one before it is of a time with other sizes. Raises CheckpointError."""
  if steps_of(config, past_of(meta)).pieces != taken.pieces:
    raise CheckpointError(
        f"the newest checkpoint was damaged and is set aside; that of step {meta['step']} is before a change of the "
        "batch size, so that the run has another length. Run the same command again: it goes on from there.")


def _check_same_data(meta: Mapping, fingerprint: str, allow_changes: bool) -> None:
  """Refuses to continue a run whose rows are no longer the ones it was trained on. Raises ConfigError."""
  if meta and meta["data_fingerprint"] != fingerprint and not allow_changes:
    raise ConfigError(
        "the training data, the tokenizer or their order changed since the checkpoint was written, so the run would "
        "not continue as it was. Restore the files (of preferences on another kind of device also "
        "input.share_prompts, always or never), use a new --workdir, or --config.allow_config_changes=True.")


def rest_of_rollout(meta: Mapping[str, Any]) -> dict[str, Any] | None:
  """What a checkpoint says of the rollout that is trained on, and of the steps that it serves; None: there is none."""
  rest = meta.get("rest_of_rollout")
  if rest and "steps" not in rest:
    c = meta["config"]["rollout"]
    rest = rest | {"updates": c["updates"], "steps": c["updates"] * c["epochs"]}
  return rest or None


def _needed(meta: Mapping[str, Any]) -> dict[str, Any]:
  """The arguments of `Past`, JSON-able; of a checkpoint without them from the config that it was trained with."""
  step, rest = meta["step"], rest_of_rollout(meta)
  last = (rest.get("ahead") or [rest])[-1] if rest else None  # rollouts that wait are trained on as they were made
  begin = step if last is None or last.get("done") else last["first_step"] + last["steps"]
  found = {"step": step, "begin": begin}
  if "taken" in meta:
    return found | meta["taken"]
  c = meta["config"]
  if c["rollout"]["num_prompts"]:
    steps = steps_of_rollouts(*(c["rollout"][key] for key in ("num_prompts", "updates", "epochs")))
  else:
    steps = steps_of_batches(c["batch_size"], c["grad_accum_steps"], c["input"]["batch_size_stages"], c["seq_len"])
  return found | steps.saved(rest["tokens"] if rest else steps.tokens_before(step))


def _past(needed: Mapping[str, Any] | None) -> Past | None:
  if needed is None:
    return None
  return Past(needed["step"], needed["begin"], needed["of"], tuple(Piece(*piece) for piece in needed["pieces"]),
              needed["tokens"])
