"""Loggers besides metrics.jsonl and TensorBoard: Weights & Biases, MLflow, any clu writer or a class of your own.

    config.loggers.wandb = dict(type="wandb", project="my-project")
    config.loggers.mlflow = dict(type="mlflow", tracking_uri="http://localhost:5000")
    config.loggers.text = dict(type="clu.metric_writers.LoggingWriter", collection="train")

`type` is `wandb`, `mlflow` or the dotted path of a class; the other keys are its arguments, in which `{workdir}` stands
for the run's folder. A class needs `write_scalars(step, {name: number})`; `write_texts`, `flush` and `close` are called
where it has them (docs/observability.md).

Such loggers talk to programs and machines that may fail while the run need not: each is called in a thread of its own,
which the run never waits for (`Guarded`). Only what cannot be started at all ends the run, before its first step.
"""

import atexit
import contextlib
import inspect
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging
from ml_collections import ConfigDict

from trainer.config.checks import flatten, to_json
from trainer.dotted import load_class
from trainer.errors import ConfigError

BUILT_IN = {"wandb": "trainer.telemetry.trackers.WandbWriter", "mlflow": "trainer.telemetry.trackers.MlflowWriter"}
# Rows that may wait for a logger; where so many do, a new one is lost.
WAITING = 1000
# Seconds that the end of a run waits for a logger, and the end of a run that failed.
CLOSE_SECONDS, EXIT_SECONDS = 60.0, 10.0
# Arguments that would end up in config.json, which is shown around; and passwords in an address.
_SECRET = re.compile(r"(.*_)?(api_?key|(secret|access|private)_key|secret|password|passwd|"
                     r"(access|auth|api|bearer|refresh)_token)|token", re.IGNORECASE)
_PASSWORD = re.compile(r"\w+://[^/\s]*:[^/\s]*@")


class Planned(NamedTuple):
  """A logger that can be started as far as is known: its name in the config, what it is, its arguments."""

  name: str
  type: str
  cls: type
  arguments: dict[str, Any]


def find(cfg: Any, workdir: Path) -> list[Planned]:
  """The loggers that `config.loggers` names, not started yet; none in processes that are not the first.

  Raises:
    ConfigError: a class that cannot be imported, a package that is missing, arguments that it does not take or that
      would publish a secret.
  """
  found = []
  for name, given in cfg.items():
    where, kind = f"loggers.{name}", given.type
    arguments = {key: _plain(given[key], workdir) for key in given if key != "type"}
    _refuse_secrets(name, arguments)
    if jax.process_index() != 0:
      continue
    cls = _class(where, kind)
    if kind in BUILT_IN:
      cls.check(where, arguments)
    elif callable(getattr(cls, "write_scalars", None)):
      check_arguments(where, kind, cls, arguments)
    else:
      raise ConfigError(f"{where}.type is {kind!r}, which has no write_scalars(step, scalars). Give a clu "
                        f"MetricWriter or a class with that method, or {', '.join(BUILT_IN)}.")
    found.append(Planned(name, kind, cls, arguments))
  return found


def start(planned: list[Planned], workdir: Path, config: ConfigDict) -> tuple["Guarded", ...]:
  """Starts them, each behind a guard.

  Args:
    config: the resolved config, for loggers that keep it.

  Raises:
    ConfigError: naming the first that cannot be started; those before it are closed again.
  """
  started: list[Guarded] = []
  for name, kind, cls, arguments in planned:
    about = dict(workdir=workdir, name=name, config=json.loads(to_json(config))) if kind in BUILT_IN else {}
    try:
      started.append(Guarded(name, cls(**about, **arguments)))
    except Exception as e:
      for other in started:
        other.close()
      if isinstance(e, ConfigError):
        raise
      remedy = getattr(cls, "remedy", "Correct its arguments")
      raise ConfigError(f"loggers.{name} ({kind}) cannot be started: {type(e).__name__}: {str(e)[:500]!r}. {remedy}, "
                        f"or leave out config.loggers.{name}.") from e
  return tuple(started)


def _class(where: str, kind: str) -> type:
  try:
    cls = load_class(kind, f"{where}.type", BUILT_IN)
    if kind.startswith("clu."):
      import tensorflow
      tensorflow.config.set_visible_devices([], "GPU")  # else it would take the memory that JAX trains in
    return cls
  except ConfigError as e:
    if kind.startswith("clu.") and re.search(r"\b(tensorflow|tensorboard)\b", str(e)):
      raise ConfigError(f"{where}.type is {kind!r}: clu's writers need TensorFlow and TensorBoard, which are not there "
                        f"({e.__cause__}). Install them: pip install 'weft[clu]'.") from e
    raise


def check_arguments(where: str, kind: str, function: Any, arguments: dict[str, Any]) -> None:
  """Refuses arguments that the function does not take. Raises ConfigError, naming them, and those that it takes."""
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):
    return  # nothing is known of it; starting it will show
  try:
    signature.bind(**arguments)
  except TypeError as e:
    raise ConfigError(f"{where}: {kind} does not take {arguments}: {e}. It takes: "
                      f"{', '.join(signature.parameters) or 'none'}.") from e


def _plain(value: Any, workdir: Path) -> Any:
  """Without views of the config, and with the workdir's path in place of its name."""
  if isinstance(value, str):
    return value.replace("{workdir}", str(workdir))
  if isinstance(value, Mapping):
    return {key: _plain(value[key], workdir) for key in value}
  if isinstance(value, (list, tuple)):
    return type(value)(_plain(part, workdir) for part in value)
  return value


def _refuse_secrets(name: str, arguments: dict[str, Any]) -> None:
  for path, value in flatten(arguments).items():
    if _SECRET.fullmatch(path.rpartition(".")[2]) or isinstance(value, str) and _PASSWORD.search(value):
      raise ConfigError(f"loggers.{name}.{path} looks like a password or key; it would be written into config.json, "
                        "which goes wherever results go. Leave it out, and give it in the environment: WANDB_API_KEY "
                        "(or wandb login), MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN.")


class Guarded:
  """A logger that can neither stop the run nor make it wait: what it is given is handed to a thread that writes.

  A row whose writing fails is lost: W&B and MLflow themselves try again. So is a new one where WAITING wait. Losses
  are counted and told by warnings: the 1st, 2nd, 4th, 8th, … and the sum at the end. `close` waits CLOSE_SECONDS at
  most.
  """

  def __init__(self, name: str, writer: Any):
    self.name, self.writer, self.rows, self.lost = name, writer, 0, 0
    self._unknown: set[str] = set()
    self._queue: queue.Queue = queue.Queue(WAITING)
    self._lock = threading.Lock()
    self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
    self._thread.start()
    # For runs that end by an error. Registered after the logger has started, and so called before its own such hooks.
    atexit.register(self._end, "abandon", EXIT_SECONDS)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    self._put("write_scalars", step, dict(scalars))

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    self._put("write_texts", step, dict(texts))

  def flush(self) -> None:
    """Asks for it; nothing waits."""
    with contextlib.suppress(queue.Full):
      self._queue.put_nowait(("flush", ()))

  def close(self) -> None:
    """Ends the logger, once what waits is written or CLOSE_SECONDS are over."""
    self._end("close", CLOSE_SECONDS)

  def _end(self, how: str, seconds: float) -> None:
    atexit.unregister(self._end)
    until = time.monotonic() + seconds
    with contextlib.suppress(queue.Full):
      self._queue.put((how, ()), timeout=seconds)
      self._thread.join(max(until - time.monotonic(), 0))
    if self._thread.is_alive():
      logging.warning("Logger %r has not ended within %g s and is left behind, with %d rows that it was not given; "
                      "metrics.jsonl has them all.", self.name, seconds, self._queue.qsize())
    elif self.lost:
      logging.warning("Logger %r has lost %d of %d rows; metrics.jsonl has them all.", self.name, self.lost, self.rows)

  def _put(self, method: str, *args: Any) -> None:
    self.rows += 1
    try:
      self._queue.put_nowait((method, args))
    except queue.Full:
      self._lose(f"{WAITING} rows wait for it already")

  def _work(self) -> None:
    method = ""
    while method not in ("close", "abandon"):
      method, args = self._queue.get()
      if method not in self._unknown and (function := getattr(self.writer, method, None)) is not None:
        self._call(method, function, args)

  def _call(self, method: str, function: Callable, args: tuple) -> None:
    try:
      function(*args)
    except NotImplementedError:  # as several writers of clu say of texts
      self._unknown.add(method)
      logging.info("Logger %r has no %s.", self.name, method)
    except Exception as e:
      why = f"{type(e).__name__}: {str(e)[:300]!r}"
      if method.startswith("write"):
        self._lose(f"step {args[0]}: {why}")
      else:
        logging.warning("Logger %r: %s failed: %s", self.name, method, why)

  def _lose(self, why: str) -> None:
    with self._lock:
      self.lost += 1
      lost = self.lost
    if lost & (lost - 1) == 0:
      logging.warning("Logger %r did not take a row (%s). %d lost so far; the run goes on, and metrics.jsonl has them "
                      "all.", self.name, why, lost)
