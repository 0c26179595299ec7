"""Loggers: none can stop a run or make it wait. W&B, MLflow and clu are in test_trackers.py."""

import subprocess
import sys
import threading
import time

import pytest

from tests import tiny
from trainer import train
from trainer.errors import ConfigError
from trainer.telemetry import loggers, writers
from trainer.telemetry.writers import TensorBoardWriter, read_rows


class Memory:
  """Keeps what it is given; `made` are all of them."""

  made = []

  def __init__(self, fails: int = 0, label: str = ""):
    self.rows, self.tries, self.closed, self.fails, self.label = [], 0, False, fails, label
    self.made.append(self)

  def write_scalars(self, step, scalars):
    self.tries += 1
    if self.tries <= self.fails:
      raise ConnectionError("no route\x1b[31m")
    self.rows.append((step, scalars))

  def close(self):
    self.closed = True


class Texts(Memory):
  """As several of clu's writers."""

  def write_texts(self, step, texts):
    self.tries += 1
    raise NotImplementedError("no texts")


class Unwilling(Memory):
  def __init__(self):
    raise ConnectionError("no such host")


@pytest.fixture
def told(monkeypatch):
  said = []
  monkeypatch.setattr(loggers.logging, "warning", lambda text, *args: said.append(text % args))
  Memory.made.clear()
  return said


@pytest.fixture
def corpus(tmp_path):
  return tiny.write_corpus(tmp_path / "corpus")


# ---------------------------------------------------------------------------------------------- the guard


def test_rows_come_in_order_and_what_a_writer_lacks_is_left_out(told):
  guarded = loggers.Guarded("mine", Memory())
  for step in range(100):
    guarded.write_scalars(step, {"loss": 1.0 / (step + 1)})
    guarded.write_texts(step, {"sample": "text"})
    guarded.flush()
  guarded.close()
  assert guarded.writer.rows == [(step, {"loss": 1.0 / (step + 1)}) for step in range(100)] and guarded.writer.closed
  assert guarded.lost == 0 and not told


def test_a_row_is_the_one_that_was_given_whatever_becomes_of_it_later(told):
  hold, row = threading.Event(), {"loss": 1.0}

  class Late(Memory):
    def write_scalars(self, step, scalars):
      hold.wait(10)
      super().write_scalars(step, scalars)

  guarded = loggers.Guarded("mine", Late())
  guarded.write_scalars(1, row)
  row["loss"] = 2.0
  hold.set()
  guarded.close()
  assert guarded.writer.rows == [(1, {"loss": 1.0})]


def test_a_method_that_is_not_implemented_is_asked_for_once(told):
  guarded = loggers.Guarded("mine", Texts())
  for step in range(3):
    guarded.write_texts(step, {"sample": "text"})
  guarded.close()
  assert guarded.writer.tries == 1 and guarded.lost == 0 and not told


def test_lost_rows_are_counted_and_told_and_a_logger_that_recovers_goes_on(told):
  guarded = loggers.Guarded("mine", Memory(fails=5))
  for step in range(1, 8):
    guarded.write_scalars(step, {"loss": 1.0})
  guarded.close()
  assert [step for step, _ in guarded.writer.rows] == [6, 7] and guarded.lost == 5
  assert "'mine' did not take a row (step 1: ConnectionError: 'no route\\x1b[31m'). 1 lost so far" in told[0]
  assert [line.split(" lost so far")[0][-1] for line in told[:3]] == ["1", "2", "4"]  # not a line a row
  assert "has lost 5 of 7 rows" in told[3] and len(told) == 4


def test_a_logger_that_hangs_makes_nobody_wait(told, monkeypatch):
  monkeypatch.setattr(loggers, "WAITING", 10)
  monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.3)
  hold, begun = threading.Event(), threading.Event()

  class Hanging(Memory):
    def write_scalars(self, step, scalars):
      begun.set()
      hold.wait(30)

  guarded = loggers.Guarded("mine", Hanging())
  start = time.monotonic()
  guarded.write_scalars(0, {"loss": 1.0})
  assert begun.wait(10)  # it holds this row, ten more wait
  for step in range(1, 26):
    guarded.write_scalars(step, {"loss": 1.0})
  guarded.close()
  assert time.monotonic() - start < 10 and guarded.lost == 15
  assert "(10 rows wait for it already). 1 lost" in told[0] and "has not ended within 0.3 s and is left" in told[-1]
  hold.set()


def test_what_waits_is_written_when_the_process_ends_by_an_error(tmp_path):
  program = """
import time
from trainer.telemetry import loggers

class Slow:
  def write_scalars(self, step, scalars):
    time.sleep(0.05)
    print("row", step, flush=True)
  def close(self):
    print("closed", flush=True)
  def abandon(self):
    print("abandoned", flush=True)

guarded = loggers.Guarded("slow", Slow())
for step in range(5):
  guarded.write_scalars(step, {})
raise RuntimeError("the run fails")
"""
  done = subprocess.run([sys.executable, "-c", program], cwd=tiny.ROOT, capture_output=True, text=True, timeout=120,
                        check=False)
  assert done.stdout.split("\n") == [*(f"row {step}" for step in range(5)), "abandoned", ""]
  assert done.returncode == 1 and "the run fails" in done.stderr


# ---------------------------------------------------------------------------------------------- from the config


HERE = "tests.trainer.telemetry.test_loggers"


@pytest.mark.parametrize("section, words", [
    (dict(type="no.such.Thing"), "loggers.mine.type: found 'no.such.Thing'.*Allowed: wandb, mlflow, or the dotted"),
    (dict(type="pathlib.Path"), "has no write_scalars"),
    (dict(type=f"{HERE}.Memory", color=3), r"Memory does not take {'color': 3}.*It takes: fails, label"),
    (dict(type=f"{HERE}.Memory", api_key="abc"), "loggers.mine.api_key looks like a password"),
    (dict(type="wandb", settings=dict(api_key="abc")), "loggers.mine.settings.api_key looks like a password"),
    (dict(type="mlflow", tracking_uri="https://me:pass@host"), "loggers.mine.tracking_uri looks like a password"),
    (dict(project="x"), r"config.loggers.mine has no `type` \(wandb, mlflow or the dotted path"),
])
def test_what_cannot_be_is_refused_before_anything_is_made(section, words, corpus, tmp_path):
  config = tiny.config(corpus)
  config.loggers.mine = section
  with pytest.raises(ConfigError, match=f"(?s){words}"):
    train(config, tmp_path / "w")
  assert not (tmp_path / "w" / "metrics.jsonl").exists() and not (tmp_path / "w" / "config.json").exists()


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(kind, monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, kind, None)
  with pytest.raises(ConfigError, match=rf"loggers.mine: the package {kind} .*pip install 'weft\[{kind}\]'"):
    loggers.find({"mine": tiny.ConfigDict(dict(type=kind))}, tmp_path)


def test_the_writers_of_clu_say_what_they_need(monkeypatch, tmp_path):
  for name in [name for name in sys.modules if name.startswith("clu.metric_writers")]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setitem(sys.modules, "tensorflow", None)
  with pytest.raises(ConfigError, match=r"clu's writers need TensorFlow .*pip install 'weft\[clu\]'"):
    loggers.find({"mine": tiny.ConfigDict(dict(type="clu.metric_writers.LoggingWriter"))}, tmp_path)


def test_a_logger_that_cannot_be_started_ends_the_run_before_its_first_step(corpus, tmp_path, told):
  config = tiny.config(corpus)
  config.loggers = dict(first=dict(type=f"{HERE}.Memory"), second=dict(type=f"{HERE}.Unwilling"))
  with pytest.raises(ConfigError, match=r"loggers.second .* cannot be started: ConnectionError: 'no such host'"):
    train(config, tmp_path / "w")
  assert Memory.made[0].closed and read_rows(tmp_path / "w" / "metrics.jsonl") == []


def test_the_first_process_alone_writes(monkeypatch, tmp_path):
  monkeypatch.setattr("jax.process_index", lambda: 1)
  assert loggers.find({"mine": tiny.ConfigDict(dict(type="no.such.Thing"))}, tmp_path) == []


def test_a_run_whose_logger_fails_goes_on_and_another_logger_has_every_row(corpus, tmp_path, told):
  config = tiny.config(corpus)
  config.loggers.bad = dict(type=f"{HERE}.Memory", fails=10**6)
  config.loggers.good = dict(type=f"{HERE}.Memory", label="{workdir}")
  run = train(config, tmp_path / "w")
  bad, good = Memory.made
  assert run.step == 8 and not bad.rows and good.label == str(tmp_path / "w") and good.closed and bad.closed
  rows = read_rows(tmp_path / "w" / "metrics.jsonl")
  assert [{"step": step, **row} for step, row in good.rows] == rows and len(rows) > 10
  assert any(f"Logger 'bad' has lost {len(rows)} of {len(rows)} rows" in line for line in told)


def test_loggers_may_change_when_a_run_goes_on(corpus, tmp_path):
  train(tiny.config(corpus), tmp_path / "w")
  Memory.made.clear()
  config = tiny.config(corpus)
  config.loggers.mine = dict(type=f"{HERE}.Memory")
  train(config, tmp_path / "w")
  assert Memory.made[0].closed


# ---------------------------------------------------------------------------------------------- TensorBoard


def test_a_full_disk_is_an_error_and_nothing_hangs(tmp_path, monkeypatch):
  class Full:
    def write(self, data):
      raise OSError(28, "No space left on device")

  writer = TensorBoardWriter(tmp_path, -1)
  monkeypatch.setattr(writer, "_file", Full())
  for _ in range(20):  # more than the queue of tensorboardX holds
    with pytest.raises(OSError, match=r"No space left on device. Free space, .* Not written: '.*tfevents"):
      writer.write_scalars(1, {"loss": 1.0})


def test_tensorboard_reads_what_is_written_and_forgets_what_is_taken_again(tmp_path):
  accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
  for resume_step, steps in ((-1, (1, 2, 3)), (2, (3, 4))):
    writer = TensorBoardWriter(tmp_path, resume_step)
    for step in steps:
      writer.write_scalars(step, {"loss/main": step + 10.0 * (resume_step + 1)})
      writer.write_texts(step, {"sample": f"text {step}"})
    writer.close()
  found = accumulators.EventAccumulator(str(tmp_path))
  found.Reload()
  assert [(e.step, e.value) for e in found.Scalars("loss/main")] == [(1, 1), (2, 2), (3, 33), (4, 34)]
  texts = [e.tensor_proto.string_val[0] for e in found.Tensors("sample/text_summary")]
  assert texts == [b"text 1", b"text 2", b"text 3", b"text 3", b"text 4"]  # of texts TensorBoard forgets nothing


def test_event_files_of_one_second_are_not_one_file(tmp_path):
  for _ in range(3):
    TensorBoardWriter(tmp_path, -1).close()
  assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 3 and writers.TensorBoardWriter is TensorBoardWriter


class Started:
  """A logger; `remedy` is what helps where it cannot be started."""

  remedy = "Look at the network"
  closed: list = []

  def __init__(self, fails=None, **given):
    self.given = given
    if fails:
      raise fails

  def write_scalars(self, step, scalars):
    pass

  def close(self):
    Started.closed.append(self.given)


@pytest.mark.parametrize("error, said", [
    (OSError("no route"), "loggers.second (mine) cannot be started: OSError: 'no route'. Look at the network, or leave "
                          "out config.loggers.second."),
    (ValueError("x" * 600), "loggers.second (mine) cannot be started: ValueError: '" + "x" * 500 + "'. Look at"),
    (ConfigError("its own words"), "its own words")])
def test_those_that_were_started_are_closed_again(tmp_path, error, said):
  Started.closed = []
  planned = [loggers.Planned(name, "mine", Started, given) for name, given in (
      ("first", {"a": 1}), ("second", {"fails": error}))]
  with pytest.raises(ConfigError) as told:
    loggers.start(planned, tmp_path, tiny.ConfigDict())
  assert str(told.value).startswith(said) and Started.closed == [{"a": 1}]


def test_arguments_are_plain_and_know_the_workdir(tmp_path):
  section = dict(a="{workdir}/x", b=("{workdir}", 1), c=dict(d=["{workdir}"]), e=None)
  assert loggers._plain(section, tmp_path) == {
      "a": f"{tmp_path}/x", "b": (str(tmp_path), 1), "c": {"d": [str(tmp_path)]}, "e": None}


def test_of_what_cannot_be_known_nothing_is_refused():
  loggers.check_arguments("loggers.a", "max", max, {"anything": 1})  # written in C


def test_a_logger_that_cannot_be_closed_is_told(caplog):
  class Stuck(Started):
    def close(self):
      raise OSError("disk full")

  guarded = loggers.Guarded("mine", Stuck())
  guarded.close()
  assert "Logger 'mine': close failed: OSError: 'disk full'" in caplog.text
