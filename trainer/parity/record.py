"""Weft's side of a comparison: a callback that writes what the peer needs, and stops the run after so many steps."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from models import hf, lora
from models.hf import convert
from trainer import tree
from trainer.callbacks import Callback
from trainer.errors import ConfigError
from trainer.export.command import export_at_end
from trainer.parity.command import OPTIONS


class Record(Callback):
  """Writes the initial parameters, batches.npz, settings.json and, at the end, weft.json into a folder.

  Args:
    folder: see trainer/parity/peer.py.
    steps: after how many the run stops; fewer where it has fewer.
  """

  def __init__(self, folder: str, steps: int):
    self._folder, self._steps, self._rows = Path(folder), steps, []

  def on_train_begin(self, run):
    self._steps = min(self._steps, run.total_steps)
    batches = {}
    for step in range(self._steps):
      batch = run.data.batch(step)
      batches |= {f"{step}/{name}": batch[name] for name in ("tokens", "positions", "segment_ids", "loss_weights")}
    self._folder.mkdir(parents=True, exist_ok=True)
    np.savez(self._folder / "batches.npz", **batches)
    config, adapter = run.config, None
    model = str(Path(config.model.hf).expanduser().absolute()) if config.model.lora.rank else "model"
    if config.model.lora.rank:
      adapter = "adapter"
      export_at_end(run, self._folder / adapter, adapter="peft", dtype="float32", overwrite=True)
    else:
      export_at_end(run, self._folder / model, dtype="float32", overwrite=True)
    o = config.optimizer
    groups, frozen = _groups(run, self._folder / model, self._steps)
    options = {key: config.strategy[key] for key in OPTIONS[config.strategy.name]}
    if "loss" in options:
      options["loss"] = options["loss"].to_dict()
    settings = dict(strategy=config.strategy.name, options=options, steps=self._steps, model=model, adapter=adapter,
                    groups=groups, frozen=frozen, clip_norm=o.clip_norm, b1=0.9, b2=0.95, eps=1e-8)
    if o.name == "adamw":
      settings |= dict(b1=o.b1, b2=o.b2, eps=o.eps)
    (self._folder / "settings.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")

  def on_optimizer_step(self, run):
    if run.step == self._steps:
      run.stop_requested = run.stop_requested or "trainer.parity"

  def on_step_end(self, run, step, metrics):
    # With several terms, the sum of them all.
    self._rows.append({"loss": metrics.get("objective", metrics["loss"]), "grad_norm": metrics["grad_norm"]})

  def on_train_end(self, run):
    (self._folder / "weft.json").write_text(json.dumps(self._rows), encoding="utf-8")


def _groups(run, folder: Path, steps: int) -> tuple[list[dict], list[str]]:
  """([{lr: of each step, weight_decay, tensors: names, None for adapters}], names of frozen tensors)."""
  optimizer = run.program.optimizer
  paths_of_rules = defaultdict(set)
  for path, rules in optimizer.rules.items():
    paths_of_rules[rules].add(path)
  shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(run.program.abstract_state["params"]).items()}
  adapters = any(map(lora.is_adapter, shapes))
  if adapters and len(paths_of_rules) > 1:
    raise ConfigError("the peer trains adapters alone, all by the same rules. Leave out optimizer.lr_mults, "
                      "group_warmup and wd_mults.")
  tensors = {} if adapters else _tensors(folder, shapes)
  split = sorted(name for name, paths in tensors.items() if len({optimizer.rules.get(path) for path in paths}) > 1)
  if split:
    raise ConfigError(f"{split[0]} holds {', '.join(sorted(tensors[split[0]]))}, which the optimizer treats "
                      "differently; PyTorch cannot. Give them equal factors.")
  groups = []
  for rules, paths in paths_of_rules.items():
    rates = [float(optimizer.learning_rate * optimizer.schedule(step, rules.warmup_steps)) * rules.lr_mult
             for step in range(steps)]
    groups.append(dict(lr=rates, weight_decay=optimizer.weight_decay * rules.wd_mult,
                       tensors=None if adapters else sorted(name for name, of in tensors.items() if of <= paths)))
  return groups, sorted(name for name, of in tensors.items() if not of & optimizer.rules.keys())


def _tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, set[str]]:
  """{tensor of the exported folder: our leaves that it holds, whole or a layer of them}."""
  family, keys, _ = hf.architecture(folder)
  return {name: set(entry.paths) for name, (entry, _) in convert.layout(family, keys, shapes).items()}
