"""Writers of metrics: `metrics.jsonl`, TensorBoard's event files, and what is read back from them."""

import contextlib
import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from trainer import atomic


class MetricWriter(Protocol):
  """The part of clu's MetricWriter that Weft calls, so that any clu writer can be passed in its place."""

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None: ...

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None: ...

  def flush(self) -> None: ...

  def close(self) -> None: ...


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
  """Errors in here name the file, and say what to do."""
  try:
    yield
  except OSError as e:
    raise OSError(e.errno, f"{e.strerror}. Free space, then run the same command: it continues from its last "
                  "checkpoint. Not written", str(path)) from e


class JsonlWriter:
  """`metrics.jsonl`: one JSON object a row, `step` and scalars.

  When a run resumes, rows of steps later than `resume_step` are dropped, since they will be written again.
  """

  def __init__(self, path: Path, resume_step: int):
    self._path = path
    kept = [row for row in read_rows(path) if row["step"] <= resume_step]
    atomic.write(path, "".join(json.dumps(row) + "\n" for row in kept))
    self._file = open(path, "a", encoding="utf-8")

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    # JSON has no NaN or infinity: they are written as strings, which every reader accepts.
    row = {k: v if math.isfinite(v) else str(v) for k, v in scalars.items()}
    with errors_naming(self._path):
      self._file.write(json.dumps({"step": step, **row}) + "\n")
      self._file.flush()

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Texts go to files of their own (`samples/`) and to TensorBoard."""

  def flush(self) -> None:
    self._file.flush()

  def close(self) -> None:
    self._file.close()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
  """The rows of a metrics.jsonl; a last row cut short by a crash is left out.

  Raises:
    ValueError: naming file and line, if any other row is not a JSON object with a step.
  """
  path = Path(path)
  if not path.exists():
    return []
  rows = []
  lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      row["step"] = int(row["step"])
    except (ValueError, KeyError, TypeError) as e:
      if number == len(lines):  # no newline after it: the write was cut
        break
      raise ValueError(f"{path}:{number} is not a metrics row ({e}): {line[:80]!r}. Repair or remove that line.") from e
    rows.append(row)
  return rows


def last_evaluation(workdir: Path, step: int) -> tuple[int, dict[str, float]]:
  """(step, metrics) of the last evaluation up to `step` that is written there; (-1, {}) if there is none."""
  rows = [row for row in read_rows(workdir / "metrics.jsonl")
          if row["step"] <= step and any(key.startswith("eval/") for key in row)]
  return (rows[-1]["step"], {k: v for k, v in rows[-1].items() if k != "step"}) if rows else (-1, {})


def evaluations(workdir: Path, step: int) -> dict[str, tuple[int, float]]:
  """Of each metric of an evaluator that is written up to `step`: (the step it was last measured after, its value)."""
  found: dict[str, tuple[int, float]] = {}
  for row in read_rows(workdir / "metrics.jsonl"):
    if row["step"] <= step:
      found |= {name: (row["step"], float(value)) for name, value in row.items() if name.startswith("eval/")}
  return found


class TensorBoardWriter:
  """A TensorBoard event file: summaries made by tensorboardX (no TensorFlow), written here and now.

  tensorboardX's own writer has a thread and a bounded queue: if the disk is full the thread ends, and what is put into
  the queue next waits for ever. Here the error is raised where it happens, as for metrics.jsonl.

  A record of the file is the length of an event, uint64, its masked CRC-32C, the event, its masked CRC-32C
  (TFRecord).
  """

  def __init__(self, directory: Path, resume_step: int):
    from tensorboardX import record_writer, summary  # imported here: it takes half a second
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    self._summary, self._event, self._checksum = summary, Event, record_writer.masked_crc32c
    directory.mkdir(parents=True, exist_ok=True)
    # As TensorBoard looks for them, and in the order of their names; no two are the same.
    self._path = directory / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
    self._file = open(self._path, "ab")
    purge = max(resume_step + 1, 0)  # what earlier files say of later steps no longer holds
    self._add(step=purge, file_version="brain.Event:2")
    self._add(step=purge, session_log=SessionLog(status=SessionLog.START))

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    for name, value in scalars.items():
      self._add(step=step, summary=self._summary.scalar(name, value))
    self.flush()

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
      self._add(step=step, summary=self._summary.text(name, text))
    self.flush()

  def _add(self, **event: Any) -> None:
    data = self._event(wall_time=time.time(), **event).SerializeToString()
    length = struct.pack("<Q", len(data))
    self._write(length + struct.pack("<I", self._checksum(length)) + data + struct.pack("<I", self._checksum(data)))

  def _write(self, data: bytes) -> None:
    with errors_naming(self._path):
      self._file.write(data)

  def flush(self) -> None:
    with errors_naming(self._path):
      self._file.flush()

  def close(self) -> None:
    with errors_naming(self._path):
      self._file.close()


class MultiWriter:
  """Several writers as one; with none (a process that is not the first) nothing is written."""

  def __init__(self, writers: Sequence[MetricWriter] = ()):
    self.writers = tuple(writers)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    for writer in self.writers:
      writer.write_scalars(step, scalars)

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    for writer in self.writers:
      writer.write_texts(step, texts)

  def flush(self) -> None:
    for writer in self.writers:
      writer.flush()

  def close(self) -> None:
    for writer in self.writers:
      writer.close()


def make_writers(workdir: Path, resume_step: int) -> tuple[MetricWriter, ...]:
  """The writers of this process: the first process writes, the others do not.

  Args:
    resume_step: rows of later steps are dropped, since they will be written again; -1: a fresh run.
  """
  if jax.process_index() != 0:
    return ()
  return (JsonlWriter(workdir / "metrics.jsonl", resume_step), TensorBoardWriter(workdir / "tensorboard", resume_step))
