"""W&B, MLflow and clu, where they are installed: what they hold is what was logged, over a kill -9 too."""

import json
import os
import signal
import struct
import time

import pytest

from tests import tiny
from trainer.callbacks import Callback
from trainer.errors import ConfigError
from trainer.telemetry import loggers, trackers
from trainer.telemetry.writers import read_rows


class Kill(Callback):
  def __init__(self, after, seconds):
    self._after, self._seconds = after, seconds

  def on_optimizer_step(self, run):
    if run.step == self._after:
      run.settle()
      time.sleep(self._seconds)  # the loggers' threads have written, and the files that they write into are flushed
      os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def corpus(tmp_path):
  return tiny.write_corpus(tmp_path / "corpus")


KEY = "0123456789abcdef0123456789abcdef01234567"


def killed_and_continued(folder, corpus, section, seconds=1.0, **environment):
  """The workdir of a run that was killed after step 5, whose last checkpoint is of step 3, and went on to its end."""
  (folder / "logged.py").write_text(f"""
from pathlib import Path
from tests import tiny

def get_config(corpus):
  config = tiny.config(Path(corpus))
  config.loggers.mine = {section!r}
  config.callbacks.kill = dict(type="tests.trainer.telemetry.test_trackers.Kill", after=0, seconds={seconds})
  return config
""", encoding="utf-8")
  workdir = folder / "killed"
  for after, code in ((5, -signal.SIGKILL), (0, 0)):
    command = tiny.command(folder / "logged.py", corpus, workdir, f"--config.callbacks.kill.after={after}")
    done = tiny.run(command, WANDB_SILENT="true", **environment)
    assert done.returncode == code, done.stderr
  return workdir


def wandb_records(file):
  """The records of an offline run: a log in LevelDB's format after a header of 7 bytes."""
  from wandb.proto import wandb_internal_pb2
  data, place, part = file.read_bytes(), 7, b""
  while place + 7 <= len(data):
    if (room := 32768 - place % 32768) < 7:
      place += room
      continue
    _, size, kind = struct.unpack_from("<IHB", data, place)
    part, place = part + data[place + 7:place + 7 + size], place + 7 + size
    if kind in (1, 4):  # whole, or the last piece
      yield wandb_internal_pb2.Record.FromString(part)
      part = b""


def wandb_rows(file):
  return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
          for record in wandb_records(file) if record.WhichOneof("record_type") == "history"]


def test_wandb_continues_its_run_and_has_every_row(corpus, tmp_path):
  pytest.importorskip("wandb")
  section = dict(type="wandb", project="tests", mode="offline", tags=("a", "b"))
  # Offline, W&B writes its file every 15 seconds.
  workdir = killed_and_continued(tmp_path, corpus, section, seconds=20.0, WANDB_API_KEY=KEY)
  files = sorted(workdir.glob("wandb/offline-run-*/run-*.wandb"))
  runs = [next(r.run for r in wandb_records(file) if r.WhichOneof("record_type") == "run") for file in files]
  known = json.loads((workdir / "loggers" / "mine.json").read_text())["id"]
  assert [run.run_id for run in runs] == [known, known]
  assert runs[0].project == "tests" and runs[0].display_name == "killed" and list(runs[0].tags) == ["a", "b"]
  given = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
  saved = json.loads((workdir / "config.json").read_text())
  assert given["optimizer"] == saved["optimizer"] and given["seq_len"] == 32
  # Steps 4 and 5 were taken twice; each time they are the same, and W&B's own count only grows.
  steps = [[row["step"] for row in wandb_rows(file) if "loss" in row] for file in files]
  assert steps == [[1, 2, 3, 4, 5], [4, 5, 6, 7, 8]]
  first, second = ({row["step"]: row["loss"] for row in wandb_rows(file) if "loss" in row} for file in files)
  assert first[4] == second[4] and first[5] == second[5]
  rows = read_rows(workdir / "metrics.jsonl")
  assert second == {row["step"]: row["loss"] for row in rows if "loss" in row and row["step"] > 3}
  globs = [r.metric for r in wandb_records(files[0]) if r.WhichOneof("record_type") == "metric"]
  assert any(metric.glob_name == "*" and metric.step_metric == "step" for metric in globs)
  assert not [path for path in workdir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_wandb_without_a_login_is_told_before_the_first_step(corpus, tmp_path):
  pytest.importorskip("wandb")
  with open(tmp_path / "config.py", "w", encoding="utf-8") as file:
    file.write("from pathlib import Path\nfrom tests import tiny\n\ndef get_config(corpus):\n"
               "  config = tiny.config(Path(corpus))\n  config.loggers.mine = dict(type='wandb')\n  return config\n")
  done = tiny.run(tiny.command(tmp_path / "config.py", corpus, tmp_path / "w"), HOME=str(tmp_path), WANDB_API_KEY="",
                  NETRC=str(tmp_path / "none"), WANDB_MODE="online")
  assert done.returncode == 1 and "Traceback" not in done.stderr
  assert "ConfigError: loggers.mine (wandb) cannot be started: UsageError" in done.stderr
  assert "wandb login, or WANDB_API_KEY" in done.stderr and read_rows(tmp_path / "w" / "metrics.jsonl") == []


def test_wandb_refuses_what_the_run_decides(tmp_path):
  pytest.importorskip("wandb")
  for key, words in (("resume", "loggers.mine.resume is set by the run"), ("projekt", "wandb.init does not take")):
    with pytest.raises(ConfigError, match=words):
      loggers.find({"mine": tiny.ConfigDict({"type": "wandb", key: "x"})}, tmp_path)


def test_mlflow_continues_its_run_and_has_every_row(corpus, tmp_path):
  mlflow = pytest.importorskip("mlflow")
  workdir = killed_and_continued(tmp_path, corpus, dict(type="mlflow", experiment="tests", tags=dict(team="x")))
  client = mlflow.MlflowClient(f"sqlite:///{workdir / 'mlflow' / 'mlflow.db'}")
  found = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
  assert [run.info.run_id for run in found] == [json.loads((workdir / "loggers" / "mine.json").read_text())["id"]]
  run = found[0]
  assert run.info.status == "FINISHED" and run.info.run_name == "killed" and run.data.tags["team"] == "x"
  assert run.data.params["optimizer.learning_rate"] == "0.01" and run.data.tags["changed/callbacks.kill.after"] == "0"
  assert max(map(len, run.data.params.values())) <= 500
  history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")]
  assert sorted(step for step, _ in history) == [1, 2, 3, 4, 4, 5, 5, 6, 7, 8]
  rows = read_rows(workdir / "metrics.jsonl")
  assert dict(history) == pytest.approx({row["step"]: row["loss"] for row in rows if "loss" in row}, rel=0)
  kept = client.download_artifacts(run.info.run_id, "config.json", str(tmp_path))
  with open(kept, encoding="utf-8") as file:
    assert json.load(file) == json.loads((workdir / "config.json").read_text())


def test_mlflow_writes_names_and_texts_that_it_would_refuse(tmp_path):
  mlflow = pytest.importorskip("mlflow")
  (planned,) = loggers.find({"mine": tiny.ConfigDict(dict(type="mlflow"))}, tmp_path)
  (guarded,) = loggers.start([planned], tmp_path, tiny.ConfigDict(dict(long="x" * 9000, odd=dict(a=None))))
  guarded.write_scalars(1, {"eval/vqa/pass@1": 0.5, "a/../b": 1.0, "bad": float("nan"), "n" * 400: 2.0})
  guarded.write_texts(1, {"eval/../../samples": "<b>text</b>"})
  guarded.close()
  assert guarded.lost == 0
  client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
  run = client.get_run(json.loads((tmp_path / "loggers" / "mine.json").read_text())["id"])
  assert run.data.metrics["eval/vqa/pass_1"] == 0.5 and run.data.metrics["a/_/b"] == 1.0
  assert len(run.data.params["long"]) == 500 and run.data.params["odd.a"] == "None"
  (text,) = (tmp_path / "mlflow" / "artifacts").rglob("1.txt")
  assert text.read_text() == "<b>text</b>" and text.parts[-6:] == ("texts", "eval", "_", "_", "samples", "1.txt")


def test_a_run_that_mlflow_no_longer_has_is_told(tmp_path):
  pytest.importorskip("mlflow")
  (tmp_path / "loggers").mkdir()
  (tmp_path / "loggers" / "mine.json").write_text('{"id": "abc", "tracking_uri": "http://other"}\n')
  (planned,) = loggers.find({"mine": tiny.ConfigDict(dict(type="mlflow"))}, tmp_path)
  with pytest.raises(ConfigError, match="the run abc .* begun at http://other. Use that tracking_uri, or delete .*"):
    loggers.start([planned], tmp_path, tiny.ConfigDict())


@pytest.mark.parametrize("damage", ["", "[1]", '{"id": 3}', "\x00"])
def test_a_damaged_identity_is_told(damage, tmp_path):
  identity = trackers.Identity(tmp_path, "mine")
  assert identity.read() == {}
  identity.write(id="abc")
  assert identity.read() == {"id": "abc"}
  identity.path.write_text(damage)
  with pytest.raises(ConfigError, match="mine.json is damaged.*Delete it"):
    identity.read()


def test_a_logger_of_clu_has_every_row(corpus, tmp_path):
  pytest.importorskip("tensorflow")
  pytest.importorskip("clu.metric_writers")
  (tmp_path / "logged.py").write_text(
      "from pathlib import Path\nfrom tests import tiny\n\ndef get_config(corpus):\n  c = tiny.config(Path(corpus))\n"
      "  c.loggers.a = dict(type='clu.metric_writers.LoggingWriter', collection='mine')\n"
      "  c.loggers.b = dict(type='clu.metric_writers.SummaryWriter', logdir='{workdir}/clu')\n  return c\n")
  done = tiny.run([*tiny.command(tmp_path / "logged.py", corpus, tmp_path / "w"), "--verbosity=0"])
  assert done.returncode == 0, done.stderr
  for step in range(1, 9):
    assert f"[{step}] collection=mine accuracy=" in done.stderr
  assert list((tmp_path / "w" / "clu").glob("events*"))
