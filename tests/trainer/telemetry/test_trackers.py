"""W&B, MLflow and clu, where they are installed: what they hold is what was logged, over a kill -9 too."""

import json
import os
import signal
import struct
import sys
import time
import types

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


# ----------------------------------------------------------------------------------------------
# Stand-ins for both packages, with what of them is used.


class Called:
  """An object whose methods note what they are called with, and give what `gives` has of their name."""

  def __init__(self, **gives):
    self.gives, self.calls = gives, []

  def __getattr__(self, name):
    def called(*given, **named):
      self.calls.append((name, given, named))
      found = self.gives.get(name)
      if isinstance(found, Exception):
        raise found
      return found
    return called

  def of(self, name):
    return [(given, named) for called, given, named in self.calls if called == name]


@pytest.fixture
def wandb(monkeypatch):
  run = Called()

  def init(project=None, name=None, dir=None, id=None, mode=None, settings=None, tags=None, config=None, resume=None,
           reinit=None, allow_val_change=None):
    given = {key: value for key, value in locals().items() if key not in ("run", "asked") and value is not None}
    asked.append(given)
    return run

  asked = []
  package = types.ModuleType("wandb")
  package.init, package.Html = init, lambda text, inject: ("html", text, inject)
  monkeypatch.setitem(sys.modules, "wandb", package)
  return asked, run


def test_a_run_of_wandb_is_begun_and_continued_under_its_id(wandb, tmp_path):
  asked, run = wandb
  (tmp_path / "w").mkdir()
  writer = trackers.WandbWriter(tmp_path / "w", "mine", {"seed": 3}, project="p", settings={"x": 1})
  known = json.loads((tmp_path / "w" / "loggers" / "mine.json").read_text())
  given = asked[0]
  assert known == {"id": given["id"]} and len(given["id"]) == 12
  assert given == dict(project="p", name="w", dir=str(tmp_path / "w"), allow_val_change=True, id=given["id"],
                       resume="allow", reinit="create_new", config={"seed": 3},
                       settings=dict(finish_timeout=loggers.CLOSE_SECONDS, x=1))
  writer.write_scalars(7, {"loss": 0.5})
  writer.write_texts(8, {"sample": "a<b"})
  writer.close()
  assert run.calls[:2] == [("define_metric", ("step",), dict(hidden=True)),
                           ("define_metric", ("*",), dict(step_metric="step"))]
  assert run.of("log") == [(({"loss": 0.5, "step": 7},), {}),
                           (({"sample": ("html", "<pre>a&lt;b</pre>", False), "step": 8},), {})]
  assert run.calls[-1] == ("finish", (), {})
  trackers.WandbWriter(tmp_path / "w", "mine", {})
  trackers.WandbWriter(tmp_path / "w", "mine", {}, id=given["id"])
  assert [again["id"] for again in asked[1:]] == [given["id"]] * 2 and asked[1]["project"] == "weft"
  with pytest.raises(ConfigError, match=f"^loggers.mine.id is 'other', but this workdir's run is '{given['id']}' there"
                                        ". Leave id out to continue it, or delete .*loggers/mine.json to begin"):
    trackers.WandbWriter(tmp_path / "w", "mine", {}, id="other")
  trackers.WandbWriter(tmp_path / "w", "two", {}, id="of mine")
  assert asked[-1]["id"] == "of mine" and trackers.Identity(tmp_path / "w", "two").read() == {"id": "of mine"}


def test_arguments_of_wandb_that_cannot_be(wandb):
  trackers.WandbWriter.check("loggers.a", dict(project="p"))
  for key in ("resume", "config"):
    with pytest.raises(ConfigError, match=f"^loggers.a.{key} is set by the run itself; leave it out.$"):
      trackers.WandbWriter.check("loggers.a", {key: 1, "project": "p"})
  with pytest.raises(ConfigError, match="^loggers.a: wandb.init does not take {'projct': 'p'}: .* It takes: project,"):
    trackers.WandbWriter.check("loggers.a", dict(projct="p"))


@pytest.fixture
def mlflow(monkeypatch):
  """(client, URIs that it was made for)."""
  run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"), data=types.SimpleNamespace(params={}))
  client, made = Called(create_experiment="7", create_run=run, get_run=run), []
  package, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
  package.MlflowClient = lambda uri: made.append(uri) or client
  entities.Metric, entities.Param, entities.RunTag = (lambda *given, kind=kind: (kind, *given) for kind in (
      "metric", "param", "tag"))
  package.entities = entities
  monkeypatch.setitem(sys.modules, "mlflow", package)
  monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
  monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
  monkeypatch.setattr(trackers, "time", types.SimpleNamespace(time=lambda: 12.3456))
  return client, made


def test_a_run_of_mlflow_lies_in_the_workdir_unless_told_otherwise(mlflow, tmp_path, monkeypatch):
  client, made = mlflow
  for name in ("w", "x", "y"):
    (tmp_path / name).mkdir()
  trackers.MlflowWriter(tmp_path / "w", "mine", {})
  assert made == [f"sqlite:///{tmp_path / 'w' / 'mlflow' / 'mlflow.db'}"]
  assert client.of("create_experiment") == [(("weft", (tmp_path / "w" / "mlflow" / "artifacts").as_uri()), {})]
  assert client.of("create_run") == [(("7",), dict(run_name="w", tags={}))]
  assert trackers.Identity(tmp_path / "w", "mine").read() == {"id": "r1", "tracking_uri": made[0]}
  monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
  client.gives["get_experiment_by_name"] = types.SimpleNamespace(experiment_id="9")
  trackers.MlflowWriter(tmp_path / "x", "mine", {}, experiment="e", run_name="n", tags={"a": "b"})
  assert made[1:] == ["http://server"] and client.of("create_run")[1] == (("9",), dict(run_name="n", tags={"a": "b"}))
  assert client.of("get_experiment_by_name")[1] == (("e",), {}) and len(client.of("create_experiment")) == 1
  trackers.MlflowWriter(tmp_path / "y", "mine", {}, tracking_uri="http://other")
  assert made[2:] == ["http://other"]
  # It goes on in the workdir's own run.
  trackers.MlflowWriter(tmp_path / "y", "mine", {}, tracking_uri="http://other")
  assert client.of("update_run") == [(("r1",), dict(status="RUNNING"))] and len(client.of("create_run")) == 3
  client.gives["get_run"] = ValueError("no such run")
  with pytest.raises(ConfigError, match="^the run r1 of this workdir cannot be continued at http://third: 'no such run'"
                                        ". It was begun at http://other. Use that tracking_uri, or delete .*mine.json"):
    trackers.MlflowWriter(tmp_path / "y", "mine", {}, tracking_uri="http://third")


def test_what_mlflow_is_told_fits_its_requests(mlflow, tmp_path):
  client, _ = mlflow
  run = client.gives["get_run"]
  run.data.params = {"seed": "3", "kept": "1"}
  config = {"seed": 4, "kept": 1, "long": "x" * 501, "exact": "y" * 500, "sec/ti*n": {"a.b": 1.5}}
  writer = trackers.MlflowWriter(tmp_path, "mine", config | {f"k{i}": i for i in range(150)})
  batches = client.of("log_batch")
  assert [(given, len(named["params"]), len(named["tags"])) for given, named in batches] == [
      (("r1",), 100, 1), (("r1",), 53, 0)]
  params = dict(part[1:] for _, named in batches for part in named["params"])
  assert params["long"] == "x" * 499 + "…" and params["exact"] == "y" * 500 and params["sec/ti_n.a.b"] == "1.5"
  assert "seed" not in params and "kept" not in params
  assert batches[0][1]["tags"] == [("tag", "changed/seed", "4")]
  assert client.of("log_dict")[0][0][0] == "r1" and client.of("log_dict")[0][0][2] == "config.json"
  client.calls.clear()
  writer.write_scalars(5, {"a/b@c": 1} | {f"m{i}": i for i in range(1000)})
  batches = client.of("log_batch")
  assert [len(named["metrics"]) for _, named in batches] == [1000, 1]
  assert batches[0][1]["metrics"][0] == ("metric", "a/b_c", 1.0, 12345, 5)
  writer.write_texts(6, {"eval/../x": "text"})
  assert client.of("log_text") == [(("r1", "text", "texts/eval/_/x/6.txt"), {})]
  writer.close()
  writer.abandon()
  assert client.of("set_terminated") == [(("r1", "FINISHED"), {}), (("r1", "FAILED"), {})]


def test_arguments_of_mlflow_that_cannot_be(mlflow):
  trackers.MlflowWriter.check("loggers.a", dict(experiment="e"))
  with pytest.raises(ConfigError, match="^loggers.a has the key 'experimnt'; mlflow takes: tracking_uri, experiment,"):
    trackers.MlflowWriter.check("loggers.a", dict(experimnt="e"))


@pytest.mark.parametrize("name, clean", [
    ("loss", "loss"), ("eval/a b.c-d_e:f", "eval/a b.c-d_e:f"), ("ä*?", "ä__"), ("../a", "_/a"), ("a//b", "a/_/b"),
    ("a/.", "a/_"), ("x" * 300, "x" * 250)])
def test_names_that_mlflow_takes(name, clean):
  assert trackers._clean(name) == clean
