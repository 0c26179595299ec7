"""Weights & Biases and MLflow as loggers (trainer/telemetry/loggers.py): the same run there whenever the run here goes
on.

Both packages are optional, and imported only where a config names them.
"""

import html
import inspect
import json
import logging
import os
import posixpath
import re
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import atomic
from trainer.config.checks import flatten
from trainer.errors import ConfigError
from trainer.telemetry.loggers import CLOSE_SECONDS, check_arguments


class Identity:
  """What a logger must remember to continue its run: a few strings in `<workdir>/loggers/<name>.json`."""

  def __init__(self, workdir: Path, name: str):
    self.path = workdir / "loggers" / f"{name}.json"

  def read(self) -> dict[str, str]:
    """{} if nothing is remembered.

    Raises:
      ConfigError: if the file is damaged.
    """
    if not self.path.exists():
      return {}
    try:
      known = json.loads(self.path.read_text(encoding="utf-8"))
    except ValueError:
      known = None
    if isinstance(known, dict) and all(isinstance(value, str) for value in known.values()):
      return known
    raise ConfigError(f"{self.path} is damaged: it should be a JSON object of strings. Delete it, and the logger "
                      "begins a new run.")

  def write(self, **known: str) -> None:
    self.path.parent.mkdir(exist_ok=True)
    atomic.write(self.path, json.dumps(known) + "\n")


def _package(where: str, name: str) -> Any:
  """An optional package.

  Raises:
    ConfigError: it cannot be imported.
  """
  try:
    return __import__(name)
  except ImportError as e:
    raise ConfigError(f"{where}: the package {name} cannot be imported ({e}). Install it: pip install 'weft[{name}]', "
                      f"or leave out config.{where}.") from e


# ----------------------------------------------------------------------------------------------
# Weights & Biases.


class WandbWriter:
  """A run of Weights & Biases, continued by every process that continues the training run.

  Rows have the x axis `step`, by `define_metric`. W&B's own count of rows only grows, so that a run that went on from
  an earlier checkpoint has the steps after it twice (docs/observability.md).

  Args:
    arguments: those of `wandb.init`, but the ones that are set here. Defaults: project "weft", name and folder of the
      workdir. Without a network: mode="offline", or WANDB_MODE=offline in the environment.
  """

  remedy = "Log in (wandb login, or WANDB_API_KEY), look at the network, or work without it: WANDB_MODE=offline"
  # What continuing a run needs to be as it is.
  ours = ("config", "resume", "resume_from", "fork_from", "reinit", "anonymous")

  @classmethod
  def check(cls, where: str, arguments: dict[str, Any]) -> None:
    wandb = _package(where, "wandb")
    if taken := sorted(arguments.keys() & set(cls.ours)):
      raise ConfigError(f"{where}.{taken[0]} is set by the run itself; leave it out.")
    check_arguments(where, "wandb.init", wandb.init, arguments)

  def __init__(self, workdir: Path, name: str, config: Mapping[str, Any], **arguments: Any):
    import wandb
    identity = Identity(workdir, name)
    known = identity.read().get("id")
    if known and arguments.get("id", known) != known:
      raise ConfigError(f"loggers.{name}.id is {arguments['id']!r}, but this workdir's run is {known!r} there. Leave "
                        f"id out to continue it, or delete {identity.path} to begin another.")
    run_id = arguments.pop("id", None) or known or uuid.uuid4().hex[:12]
    identity.write(id=run_id)  # before W&B knows of it: a process that is killed right here is continued too
    settings = dict(finish_timeout=CLOSE_SECONDS) | arguments.pop("settings", {})
    defaults: dict[str, Any] = dict(
        project="weft", name=workdir.name, dir=str(workdir),
        allow_val_change=True)  # config.json may differ in keys that change nothing
    self._html = wandb.Html
    # create_new: a run that the caller (a notebook, say) has open is left alone.
    self._run = wandb.init(**(defaults | arguments), id=run_id, resume="allow",
                           reinit="create_new", config=dict(config), settings=settings)
    self._run.define_metric("step", hidden=True)
    self._run.define_metric("*", step_metric="step")

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    self._run.log({**scalars, "step": step})

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    shown = {name: self._html(f"<pre>{html.escape(text)}</pre>", inject=False) for name, text in texts.items()}
    self._run.log({**shown, "step": step})

  def close(self) -> None:
    self._run.finish()


# ----------------------------------------------------------------------------------------------
# MLflow.


class MlflowWriter:
  """A run of MLflow, continued by every process that continues the training run.

  The config's keys are its params, and config.json an artifact; texts are artifacts `texts/<name>/<step>.txt`. Rows of
  steps that are taken again after a checkpoint are there twice.

  Args:
    tracking_uri: of the server or store; default: MLFLOW_TRACKING_URI if it is set, else `<workdir>/mlflow/mlflow.db`.
    experiment: its name, made if there is none.
    run_name: default: the workdir's.
    tags: {name: value}.
  """

  remedy = "Look at tracking_uri, at the server there, and at MLFLOW_TRACKING_USERNAME and _PASSWORD"

  @classmethod
  def check(cls, where: str, arguments: dict[str, Any]) -> None:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A call then fails after one minute instead of four; trainer/telemetry/loggers.py tells what is lost.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # else a line for each retry
    _package(where, "mlflow")
    allowed = [key for key in inspect.signature(cls).parameters if key not in ("workdir", "name", "config")]
    if unknown := sorted(arguments.keys() - set(allowed)):
      raise ConfigError(f"{where} has the key {unknown[0]!r}; mlflow takes: {', '.join(allowed)}.")

  def __init__(self, workdir: Path, name: str, config: Mapping[str, Any], tracking_uri: str | None = None,
               experiment: str = "weft", run_name: str | None = None, tags: Mapping[str, str] | None = None):
    from mlflow import MlflowClient, entities
    uri, artifacts = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), None
    if not uri:
      folder = workdir / "mlflow"
      folder.mkdir(exist_ok=True)
      uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
    self._entities, self._client = entities, MlflowClient(uri)
    self._run = self._continue(Identity(workdir, name), uri)
    if self._run is None:
      found = self._client.get_experiment_by_name(experiment)
      number = found.experiment_id if found else self._client.create_experiment(experiment, artifacts)
      self._run = self._client.create_run(number, run_name=run_name or workdir.name, tags=dict(tags or {})).info.run_id
      Identity(workdir, name).write(id=self._run, tracking_uri=uri)
    self._describe(config)

  def _continue(self, identity: Identity, uri: str) -> str | None:
    """The id of the workdir's run, which runs again; None if it has none."""
    known = identity.read()
    if not known:
      return None
    try:
      self._client.get_run(known["id"])
    except Exception as e:
      raise ConfigError(f"the run {known.get('id')} of this workdir cannot be continued at {uri}: {str(e)[:300]!r}. "
                        f"It was begun at {known.get('tracking_uri')}. Use that tracking_uri, or delete "
                        f"{identity.path} to begin another run.") from e
    self._client.update_run(known["id"], status="RUNNING")
    return known["id"]

  def _describe(self, config: Mapping[str, Any]) -> None:
    """Params, which MLflow does not allow to be changed: a key with another value than before becomes a tag."""
    before, entities = self._client.get_run(self._run).data.params, self._entities
    params = {_clean(key): (text := str(value))[:500 - (len(text) > 500)] + "…" * (len(text) > 500)
              for key, value in flatten(config).items()}
    new = [entities.Param(key, value) for key, value in params.items() if key not in before]
    changed = [entities.RunTag(f"changed/{key}"[:250], value) for key, value in params.items()
               if before.get(key, value) != value]
    for begin in range(0, max(len(new), len(changed)), 100):  # as many as a request may have
      self._client.log_batch(self._run, params=new[begin:begin + 100], tags=changed[begin:begin + 100])
    self._client.log_dict(self._run, dict(config), "config.json")

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    now = int(time.time() * 1000)
    metrics = [self._entities.Metric(_clean(name), float(value), now, step) for name, value in scalars.items()]
    for begin in range(0, len(metrics), 1000):
      self._client.log_batch(self._run, metrics=metrics[begin:begin + 1000])

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
      self._client.log_text(self._run, text, f"texts/{_clean(name)}/{step}.txt")

  def close(self) -> None:
    self._client.set_terminated(self._run, "FINISHED")

  def abandon(self) -> None:
    self._client.set_terminated(self._run, "FAILED")


def _clean(name: str) -> str:
  """A name that MLflow takes: other characters, and parts of a path that are none, become `_`."""
  parts = re.sub(r"[^\w.\- :/]", "_", name).split("/")
  return posixpath.normpath("/".join(part if part.strip(".") else "_" for part in parts))[:250]
