"""The speedrun: stages build on one another, what is done is not done again, and the tables say what was measured."""

import importlib
import json
import re
import signal
import subprocess
import sys
import time
import types

import pytest

from tests import tiny
from trainer.config.checks import resolve
from trainer.errors import ConfigError
from trainer.speedrun import command as speedrun
from trainer.telemetry import terminal
from trainer.telemetry.writers import read_rows

CONFIG = """
from pathlib import Path
from tests import tiny

STAGES = {"first": {"loss": "eval/val/loss"}, "second": {"loss": "eval/val/loss", "accuracy": "eval/val/accuracy"}}
QUESTIONS = ("the quick",)

def get_config(arg):
  stage, _, folder = arg.partition(":")
  c = tiny.config(Path(CORPUS), total_steps=4, log_steps=2, ckpt_steps=2)
  if stage == "second":
    c.init_from.path = f"{folder}/first"
    c.tokenizer.update(type="hf", path=f"{folder}/first/tokenizer.json")
  return c
"""


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
  return tiny.hf_folder(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  folder = tmp_path_factory.mktemp("speedrun")
  corpus = tiny.write_corpus(folder / "corpus")
  path = folder / "stages.py"
  path.write_text(CONFIG.replace("CORPUS", repr(str(corpus))))
  return path


def run(file, workdir, *more):
  return tiny.run([sys.executable, "-m", "trainer.speedrun", f"--config={file}", f"--workdir={workdir}", *more])


def test_a_whole_speedrun_and_the_same_command_again(file, tmp_path):
  more = ["--set=seed=1", "--set=second.total_steps=6"]
  done = run(file, tmp_path / "w", *more, "--nochat")
  assert done.returncode == 0, done.stdout + done.stderr
  stages = json.loads((tmp_path / "w" / "speedrun.json").read_text())["stages"]
  assert [(stage, made["steps"]) for stage, made in stages.items()] == [("first", 4), ("second", 6)]
  # The second stage begins with what the first has left: its loss at step 0 is the first's last one.
  rows = [json.loads(line) for line in (tmp_path / "w/second/metrics.jsonl").read_text().splitlines()]
  assert [row["eval/val/loss"] for row in rows if row["step"] == 0 and "eval/val/loss" in row] == [
      pytest.approx(stages["first"]["scores"]["loss"], rel=1e-6)]
  assert json.loads((tmp_path / "w/second/config.json").read_text())["seed"] == 1
  shown = f"{stages['second']['scores']['accuracy']:.4f}"
  assert re.search(rf"^second .* {re.escape(shown)}$", done.stdout, re.MULTILINE)

  again = run(file, tmp_path / "w", *more)
  assert again.returncode == 0, again.stdout + again.stderr
  assert again.stdout.count("done before") == 2
  # Not on a terminal: the last model is asked by itself; after so few steps it may say spaces alone.
  said = again.stdout.split("prompt 0: the quick\n")[1].split("Talk to it:")[0]
  assert said.strip("\n") and "Error" not in again.stderr and "python -m trainer.generate --workdir=" in again.stdout


def test_stopped_it_goes_on_where_it_was(file, tmp_path):
  argv = [sys.executable, "-m", "trainer.speedrun", f"--config={file}", f"--workdir={tmp_path}", "--nochat",
          "--set=first.total_steps=100000"]
  process = subprocess.Popen(argv, cwd=tiny.ROOT, env=tiny.environment(1), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
  deadline = time.monotonic() + 120
  while not read_rows(tmp_path / "first" / "metrics.jsonl") and time.monotonic() < deadline:
    time.sleep(0.2)
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=120)
  assert process.returncode == 1 and "'first' is not finished" in err, out + err
  assert "SIGTERM: stopping after this step" in out
  assert list((tmp_path / "first" / "checkpoints").iterdir())
  assert json.loads((tmp_path / "first" / "speedrun.json").read_text()).keys() == {"seconds"}


def test_what_is_set_for_a_stage_or_for_all():
  given = ["seq.total_steps=5", "optimizer.b2=0.9", "sft.evals.sums.max_documents=3"]
  assert speedrun.overrides_of("seq", ["seq", "sft"], given) == ["--config.total_steps=5", "--config.optimizer.b2=0.9"]
  assert speedrun.overrides_of("sft", ["seq", "sft"], given) == [
      "--config.optimizer.b2=0.9", "--config.evals.sums.max_documents=3"]
  for bad in ("total_steps", "=3"):
    with pytest.raises(ConfigError, match=f"--set={bad}; it is written KEY=VALUE"):
      speedrun.overrides_of("seq", ["seq"], [bad])


def test_a_file_that_is_no_speedrun_is_told(tmp_path):
  with pytest.raises(ConfigError, match="is no file; give a Python file"):
    speedrun.Stages(str(tmp_path / "none.py"))
  (tmp_path / "a.py").write_text("def get_config(arg):\n  return None\n")
  with pytest.raises(ConfigError, match="a.py has no STAGES; a speedrun's file has"):
    speedrun.Stages(str(tmp_path / "a.py"))


def test_what_a_later_stage_would_refuse_is_told_before_the_first(file, tmp_path):
  stages = speedrun.Stages(str(file))
  speedrun.check(stages, tmp_path, ["second.total_steps=3"])
  with pytest.raises(ConfigError, match="stage 'second': .*total_stepps.*total_steps"):
    speedrun.check(stages, tmp_path, ["second.total_stepps=3"])
  stages.columns["second"]["other"] = "eval/other/loss"
  with pytest.raises(ConfigError, match="names the metric 'eval/other/loss' for 'second'; .* eval/NAME/METRIC: val"):
    speedrun.check(stages, tmp_path, [])


def test_a_metric_that_was_not_measured_is_told():
  with pytest.raises(ConfigError, match="names the metric 'eval/a/b' for 'seq', of which"):
    speedrun._metric({"eval/val/loss": 1.0, "loss": 2.0}, "eval/a/b", "seq")


class Stages:
  path, names = "configs/a.py", ["seq", "sft"]
  columns = {"seq": {"bpb": "x"}, "sft": {"bpb": "x", "em": "y"}}


def test_the_table():
  made = dict(seconds=90.0, steps=1000, tokens=2_000_000)
  scores = {"seq": {"bpb": 1.5}, "sft": {"bpb": 1.6, "em": 0.5}}
  rows = speedrun.table(Stages, {stage: made | {"scores": found} for stage, found in scores.items()})
  assert rows == [["stage", "minutes", "steps", "tokens", "bpb", "em"],
                  ["seq", "1.5", "1,000", "2,000,000", "1.5000", ""],
                  ["sft", "1.5", "1,000", "2,000,000", "1.6000", "0.5000"]]
  head, seq, sft = terminal.table(rows).splitlines()
  assert len(head) == len(sft) == 48 and head.index("bpb") + 3 == len(seq)  # numbers end below their headings


def test_a_score_that_is_not_of_the_end_names_its_step(file, tmp_path, monkeypatch):
  stages = speedrun.Stages(str(file))
  (tmp_path / "first").mkdir()
  (tmp_path / "first" / "metrics.jsonl").write_text(
      '{"step": 3, "eval/val/loss": 1.5}\n{"step": 5, "loss": 1.0}\n')
  monkeypatch.setattr(speedrun, "call", lambda command: 0)
  monkeypatch.setattr(speedrun, "last_end", lambda workdir: {"how": "finished", "tokens": 7})
  stages.names, stages.columns = ["first"], {"first": {"loss": "eval/val/loss"}}
  made = speedrun.run_stage(stages, "first", tmp_path, [])
  assert speedrun.table(stages, {"first": made})[1][2:] == ["5", "7", "1.5000 at step 3"]


@pytest.mark.parametrize("module", ["speedrun", "speedrun_llama"])
def test_every_stage_of_the_configs_is_accepted(module, hf_folder):
  """Each is resolved, and names what its evaluators give."""
  stages = speedrun.Stages(str(tiny.ROOT / "configs" / f"{module}.py"))
  get_config = importlib.import_module(f"configs.{module}").get_config
  for stage, columns in stages.columns.items():
    config = get_config(f"{stage}:runs/speedrun")
    if config.model.hf:
      config.model.hf = str(hf_folder)
    config = resolve(config)
    assert {metric.split("/")[1] for metric in columns.values()} <= set(config.evals)
    assert (config.init_from.path is None) == (stage == stages.names[0])


# ----------------------------------------------------------------------------------------------
# The command, without a stage that runs.


class Child:
  """A process that ends with a code; what is sent to it."""

  def __init__(self, command, code=0):
    self.command, self.sent = command, []
    Child.last = self

  def wait(self):
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.getsignal(number)(number, None)
    return 7

  def send_signal(self, number):
    self.sent.append(number)


def test_a_stop_is_handed_on_and_an_interrupt_reaches_both(monkeypatch):
  before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  monkeypatch.setattr(speedrun.subprocess, "Popen", Child)
  assert speedrun.call(["a", "b"]) == 7
  assert Child.last.command == ["a", "b"] and Child.last.sent == [signal.SIGTERM]
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("terminal_there, questions, strategy, called", [
    (True, ("q",), "sft", [["--temperature=0"]]), (False, (), "sft", []),
    (False, ("q", "r"), "sft", [["--chat", "--temperature=0", "--max_new_tokens=64", "--prompt=q", "--prompt=r"]]),
    (False, ("q",), "seq", [["--temperature=0", "--max_new_tokens=64", "--prompt=q"]])])
def test_the_last_model_is_asked(monkeypatch, tmp_path, capsys, terminal_there, questions, strategy, called):
  asked = []
  (tmp_path / "config.json").write_text(json.dumps({"strategy": {"name": strategy}}))
  monkeypatch.setattr(speedrun.subprocess, "call", asked.append)
  for stream in ("stdin", "stdout"):
    monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: terminal_there, raising=False)
  speedrun.chat(types.SimpleNamespace(questions=questions), tmp_path)
  first = [sys.executable, "-m", "trainer.generate", f"--workdir={tmp_path}"]
  assert asked == [[*first, *more] for more in called]
  said = capsys.readouterr().out
  assert ("Talk to it" in said) == bool(called) and all(f"prompt {i}: {q}" in said for i, q in enumerate(
      () if terminal_there else questions))


@pytest.mark.parametrize("talk", [True, False])
def test_the_command_runs_writes_and_asks(monkeypatch, tmp_path, capsys, talk):
  called, stages, root = [], types.SimpleNamespace(path="p.py", names=("a", "b")), tmp_path / "w"
  flags = types.SimpleNamespace(config="c", workdir=str(root), set=["x=1", "b.y=2"], chat=talk)

  def note(name, gives=None):
    monkeypatch.setattr(speedrun, name, lambda *given: called.append((name, *given)) or gives)

  note("Stages", stages)
  note("check")
  note("run_stage", "record")
  note("table", "rows")
  note("chat")
  monkeypatch.setattr(speedrun.terminal, "table", lambda rows: f"the table of {rows}")
  monkeypatch.setattr(speedrun, "flags", types.SimpleNamespace(FLAGS=flags))
  speedrun.main(["prog"])
  x, y = "--config.x=1", "--config.y=2"
  assert called == [("Stages", "c"), ("check", stages, root, ["x=1", "b.y=2"]), ("run_stage", stages, "a", root, [x]),
                    ("run_stage", stages, "b", root, [x, y]), ("table", stages, {"a": "record", "b": "record"}),
                    *([("chat", stages, root / "b")] if talk else [])]
  assert json.loads((root / "speedrun.json").read_text()) == {
      "config": "p.py", "stages": {"a": "record", "b": "record"}}
  assert "the table of rows" in capsys.readouterr().out
  with pytest.raises(speedrun.app.UsageError, match="^unexpected arguments .'y'.; keys are set by --set=KEY=VALUE$"):
    speedrun.main(["prog", "y"])

  def refuse(*given):
    raise ConfigError("no such stage")

  monkeypatch.setattr(speedrun, "check", refuse)
  with pytest.raises(SystemExit) as ended:
    speedrun.main(["prog"])
  assert ended.value.code == "\nConfigError: no such stage"


@pytest.mark.parametrize("code, how, ends", [(3, "finished", 3), (-15, "finished", 1), (0, "stopped", 1)])
def test_a_stage_that_is_not_finished_ends_it_and_its_time_is_kept(monkeypatch, tmp_path, capsys, code, how, ends):
  (tmp_path / "a").mkdir()
  file = tmp_path / "a" / "speedrun.json"
  file.write_text(json.dumps({"seconds": 5.0}))
  clock = iter([100.0, 107.0])
  monkeypatch.setattr(speedrun, "time", types.SimpleNamespace(time=lambda: next(clock)))
  monkeypatch.setattr(speedrun, "call", lambda command: code)
  monkeypatch.setattr(speedrun, "last_end", lambda workdir: {"how": how})
  with pytest.raises(SystemExit) as ended:
    speedrun.run_stage(types.SimpleNamespace(path="p.py"), "a", tmp_path, ["--x=1"])
  assert ended.value.code == ends and json.loads(file.read_text()) == {"seconds": 12.0}
  said = capsys.readouterr()
  assert said.err == "\nStage 'a' is not finished. The same command goes on where it was.\n"
  assert said.out == f"\na: python -m trainer --config=p.py:a:{tmp_path} --workdir={tmp_path}/a --x=1\n\n"
  command = ["-m", "trainer", f"--config=p.py:a:{tmp_path}", f"--workdir={tmp_path}/a", "--x=1"]
  file.write_text(json.dumps({"command": command, "scores": {"loss": 1.0}}))
  assert speedrun.run_stage(types.SimpleNamespace(path="p.py"), "a", tmp_path, ["--x=1"])["scores"] == {"loss": 1.0}
  assert capsys.readouterr().out == f"\na: done before, in {tmp_path}/a\n"
