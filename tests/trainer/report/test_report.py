"""The report of real runs: finished, stopped, failed, gone on with; and that it never ends one."""

import json
import logging
import os
import shutil
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import programs, tiny
from tests.trainer import report_pages
from trainer import train
from trainer.callbacks import Callback
from trainer.config import checks as config_checks
from trainer.config import evaluator, source
from trainer.report import configs, page, pages, record
from trainer.telemetry.writers import read_rows

EVIL = "<script>alert(1)</script>"


class End(Callback):
  """Ends the run after an update, in a way."""

  def __init__(self, after: int, how: str):
    self._after, self._how = after, how

  def on_optimizer_step(self, run):
    if run.step == self._after and self._how == "error":
      raise RuntimeError(f"{EVIL} & so on")
    if run.step == self._after:
      signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpora")
  return tiny.write_corpus(folder / "a", 40), tiny.write_corpus(folder / "b", 30, seed=3)


def config(corpora, **changed):
  c = tiny.config(corpora[0], total_steps=12, **changed)
  c.input.sources.other = source(type="text", path=str(corpora[1]), split="train", validation_fraction=0.3)
  c.evals.val = evaluator(type="loss", eval_steps=4, baselines=("gzip",))
  c.evals.text = evaluator(type="samples", eval_steps=6, prompts=(EVIL, "the quick"), max_new_tokens=12)
  return c


@pytest.fixture(scope="module")
def finished(corpora, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("finished")
  with programs.devices(2):
    run = train(config(corpora), workdir)
  return run, workdir, report_pages.read(workdir / "report.html")


def test_the_curves_are_the_rows_of_metrics(finished):
  _, workdir, shown = finished
  values = {}
  for row in read_rows(workdir / "metrics.jsonl"):
    for name, value in row.items():
      values.setdefault(name, {})[row["step"]] = value
  drawn, compared = shown.series(), 0
  for name, column in values.items():
    owner, _, part = name.rpartition("/")
    if part in ("main", "other"):
      name = f"{owner} {part}"
    elif name.startswith("data/"):
      name = f"data/{part} {name.split('/')[1]}"
    elif f"{name}/main" in values:
      name = f"{name} all"
    if name in ("step", "time/wall") or name.startswith("time/split/"):
      continue
    if len(set(column.values())) == 1:  # in words
      assert (f"{owner or name}" in shown.texts["curves"]) and name not in drawn
      continue
    assert drawn[name].keys() == column.keys(), name
    np.testing.assert_allclose(list(drawn[name].values()), list(column.values()), rtol=1e-5, err_msg=name)
    compared += 1
  assert compared > 25 and {"loss all", "loss other", "eval/val/loss main", "grad_norm", "mfu"} <= drawn.keys()
  gzip = values["eval/val/bits_per_byte_gzip"][12]
  assert shown.charts["eval/val/bits_per_byte"]["levels"] == [["gzip", pytest.approx(gzip, rel=1e-5)]]


def test_the_table_of_evaluations(finished):
  _, workdir, shown = finished
  rows = {cells[0]: cells[1:] for cells in shown.tables["Evaluations"][1:]}
  logged = read_rows(workdir / "metrics.jsonl")
  for name, better in (("val/loss", min), ("val/accuracy/main", max)):
    column = {row["step"]: row[f"eval/{name}"] for row in logged if f"eval/{name}" in row}
    first, last, best, word, times = rows[name]
    found = [float(cell.split(" at ")[0]) for cell in (first, last, best)]
    assert found == pytest.approx([column[0], column[12], better(column.values())], rel=1e-4)
    assert [cell.split(" at ")[1] for cell in (first, last)] == ["0", "12"] and times == "4"
    assert word == {min: "lower", max: "higher"}[better]


def test_what_ran_and_on_what(finished):
  run, workdir, shown = finished
  (start,) = json.loads((workdir / "run.json").read_text())["starts"]
  assert start["from_step"] == 0 and start["total_steps"] == 12 and start["devices"]["count"] == 2
  assert start["parameters"]["all"] == start["parameters"]["trained"] == sum(
      leaf.size for leaf in jax.tree.leaves(run.state["params"]))
  assert start["data"] == json.loads(json.dumps(run.data.stats(), default=float))
  end = start["end"]
  assert (end["how"], end["step"], end["tokens"]) == ("finished", 12, run.tokens_seen(12))
  assert 0 < end["goodput"] < 1 and end["seconds"] == run.chrono.state() and end["host_memory"] > 2**26
  text = shown.pairs("ran")
  for part in ("finished", f"jax {jax.__version__}", "2 × cpu", "data=2", "params float32"):
    assert part in text, part
  assert shown.tables["The data, by source"][1][0] == "main"
  audit = dict(zip(shown.tables["The data, by source"][0], shown.tables["The data, by source"][1], strict=True))
  main = start["data"][0]
  assert audit["documents"] == str(main["documents"]) and audit["tokens"] == f"{main['tokens']:,}"
  assert "finished" in shown.texts[""] and "No health notes, no warnings and no errors." in shown.texts["notes"]


def test_the_config_is_there_with_what_was_changed(finished):
  run, _, shown = finished
  rows = {key: (here, default) for key, here, default in shown.tables["Keys that differ from their defaults"][1:]}
  assert rows["optimizer.learning_rate"] == ("0.01", "0.0003") and rows["evals.text.type"] == ('"samples"', '"loss"')
  assert "optimizer.b2" not in rows and not any(key.startswith("input.sources.main.weight") for key in rows)
  assert EVIL in rows["evals.text.prompts"][0]
  whole = dict(shown.tables["The whole config"][1:])
  assert whole.keys() == config_checks.flatten(run.config_json).keys() and whole["optimizer.b2"] == "0.95"


def test_tokens_have_the_colour_of_their_probability(finished):
  _, workdir, shown = finished
  lines = [json.loads(line) for step in (0, 6, 12)
           for line in (workdir / "samples" / f"text_{step:08d}.jsonl").read_text().splitlines()]
  assert len(shown.said) == len(lines) == 6
  for row, (tokens, data) in zip(lines, shown.said, strict=True):
    assert tokens == [pages.visible(text) or "·" for text in row["tokens"]]
    assert data["values"]["logprobs"] == row["logprobs"]
  assert EVIL in shown.texts["samples"]


def test_where_the_time_went_adds_up(finished):
  run, workdir, shown = finished
  rows = read_rows(workdir / "metrics.jsonl")
  kinds = {name: sum(row.get(name, 0.0) for row in rows)
           for name in {name for row in rows for name in row if name.startswith("time/split/")}}
  assert {"time/split/train", "time/split/eval", "time/split/compile", "time/split/checkpoint"} <= kinds.keys()
  walls = [row["time/wall"] for row in rows if "time/wall" in row]
  # Between the first and the last row of metrics every moment is in a window, but for those between two windows.
  first = next(row for row in rows if "time/wall" in row)
  between = sum(kinds.values()) - sum(value for name, value in first.items() if name in kinds)
  assert walls[-1] - walls[0] == pytest.approx(between, rel=0.1, abs=0.1)
  totals = {kind: share for kind, _, share in shown.tables["Time by kind"][1:]}
  assert sum(float(share.rstrip("%")) for share in totals.values()) == pytest.approx(100, abs=1)
  assert "everything else" in totals and "steps" in totals


def test_a_run_that_fails_and_goes_on_has_a_report_of_both(corpora, tmp_path, capsys):
  c = config(corpora)
  c.callbacks.end = dict(type=f"{__name__}.End", after=5, how="error")
  with pytest.raises(RuntimeError, match="so on"):
    train(c, tmp_path)
  assert f"The run until then: {tmp_path / 'report.html'}" in capsys.readouterr().out
  shown = report_pages.read(tmp_path / "report.html")
  assert f"Ended after step 5 of 12 with RuntimeError: {EVIL} & so on" in shown.texts[""]
  assert max(shown.series()["grad_norm"]) == 4 and "1 error" in shown.texts["notes"]
  c.callbacks = {}
  train(c, tmp_path)
  shown = report_pages.read(tmp_path / "report.html")
  assert "All 12 steps were taken." in shown.texts[""] and "Start 2" in shown.texts["ran"]
  first, second = json.loads((tmp_path / "run.json").read_text())["starts"]
  assert (first["end"]["how"], first["end"]["step"], second["from_step"]) == ("error", 5, 3)


def test_a_run_that_is_stopped_has_a_report(corpora, tmp_path):
  c = config(corpora)
  c.callbacks.end = dict(type=f"{__name__}.End", after=7, how="SIGTERM")
  train(c, tmp_path)
  shown = report_pages.read(tmp_path / "report.html")
  assert "Stopped by SIGTERM after step 7 of 12, and saved; the same command continues." in shown.texts[""]
  assert max(shown.series()["grad_norm"]) == 7 and "stopped by SIGTERM" in shown.texts["ran"]
  # As if the process had been killed.
  starts = json.loads((tmp_path / "run.json").read_text())
  starts["starts"][-1]["end"] = None
  (tmp_path / "run.json").write_text(json.dumps(starts))
  page.write(tmp_path)
  shown = report_pages.read(tmp_path / "report.html")
  assert "It is running, or was killed" in shown.texts[""] and "step that is written is 7 of 12" in shown.texts[""]


def test_without_it_there_is_no_page_but_what_ran_is_written(corpora, tmp_path):
  train(config(corpora, report=False, evals={}), tmp_path)
  assert not (tmp_path / "report.html").exists() and (tmp_path / "run.json").exists()


@pytest.mark.parametrize("broken", ["make", "describe"])
@pytest.mark.host_patches
def test_what_goes_wrong_with_it_is_a_warning_and_in_tests_an_error(corpora, tmp_path, monkeypatch, caplog, broken):
  def fail(*_):
    raise ZeroDivisionError("of the report")

  monkeypatch.setattr(page if broken == "make" else record, broken, fail)
  assert os.environ[record.STRICT]
  with pytest.raises(ZeroDivisionError):
    train(config(corpora, evals={}), tmp_path / "strict")
  monkeypatch.delenv(record.STRICT)
  with caplog.at_level(logging.WARNING):
    run = train(config(corpora, evals={}), tmp_path / "run")
  assert run.step == 12 and (tmp_path / "run" / "checkpoints" / "12").exists()
  file = "report.html" if broken == "make" else "run.json"
  assert f"{file} was not written: ZeroDivisionError: of the report" in caplog.text
  assert not (tmp_path / "run" / file).exists()


def test_a_disk_that_is_full_is_a_warning_everywhere(tmp_path, caplog):
  with record.harmless("it"), open("/dev/full", "w") as file:
    file.write("x" * 100_000)
  assert "it was not written: [Errno 28]" in caplog.text


def test_run_json_that_cannot_be_read_is_set_aside(tmp_path):
  for content in ("{", "[]", '{"starts": [1]}', "\x00", '{"starts": ' * 100_000):
    (tmp_path / "run.json").write_text(content)
    assert record.read(tmp_path / "run.json") == []
    assert (tmp_path / "run.json.unreadable").read_text() == content and not (tmp_path / "run.json").exists()
  record.write(tmp_path / "run.json", [{"a": np.float32(0.5), "b": np.int64(3), "c": Path("x")}])
  assert record.read(tmp_path / "run.json") == [{"a": 0.5, "b": 3, "c": "x"}]


def test_the_commit_is_that_of_the_code_and_nothing_around_it(tmp_path):
  git = shutil.which("git")
  if git is None:
    pytest.skip("git is not installed")
  assert record.git(tmp_path) is None
  (tmp_path / "code.py").write_text("1")
  (tmp_path / "other.py").write_text("1")
  for arguments in (["init", "-q"], ["add", "code.py"],
                    ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"]):
    subprocess.run([git, "-C", str(tmp_path), *arguments], check=True)
  found = record.git(tmp_path, "code.py")
  assert len(found["commit"]) == 40 and found["root"] == str(tmp_path.resolve()) and found["dirty"] is False
  assert record.git(tmp_path, "other.py") is None  # installed into somebody's project
  (tmp_path / "code.py").write_text("2")
  assert record.git(tmp_path)["dirty"] is True


def test_secrets_are_not_shown():
  given = {"loggers": {"a": {"api_key": "S", "token": "S", "client_secret": "S", "project": "p", "max_tokens": 3}}}
  assert set(configs.flat(given).values()) == {configs.HIDDEN, "p", 3}
  command = ["x.py", "--config.loggers.a.api_key=S", "--config.seed=3", "--password=S"]
  assert configs.without_secrets(command) == [
      "x.py", "--config.loggers.a.api_key=(hidden)", "--config.seed=3", "--password=(hidden)"]
