"""The report of workdirs that no run has made: hostile, cut, huge, old; and several runs on one page."""

import importlib.metadata
import json
import math
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import docs_commands, tiny
from tests.trainer import report_pages
from tests.trainer.report_pages import write_run
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.report import compare, configs, history, page, pages, series, texts

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<!--\u2028\ud800{{7*7}}"
CONFIG = defaults().to_dict()


def rows(count=20, **more):
  return [{"step": step, "loss": 3 / step, "tokens_seen": 64 * step, "time/wall": 0.5 * step, **more}
          for step in range(1, count + 1)]


def made(folder):
  return report_pages.read(page.write(folder))


def start(**changed):
  return {"time": "2026-01-01T00:00:00+00:00", "command": ["python"], "from_step": 0, "total_steps": 20, "weft": "1",
          "devices": {"kind": "cpu", "count": 1, "platform": "cpu", "processes": 1}, "mesh": {"data": 2},
          "parameters": {"all": 10, "trained": 10}, "data": [{"source": "a", "documents": 3}], "end": {
              "how": "finished", "time": "2026-01-01T01:00:00+00:00", "step": 20, "goodput": 0.5, "tokens": 1280,
              "seconds": {"train": 100.0, "data": 10.0}, "data": {"a": {"rows": 3}}, "epoch": 0.5}} | changed


def test_nothing_in_a_workdir_acts_on_the_page(tmp_path):
  folder = write_run(
      tmp_path / "<b>&\"'", rows(**{EVIL: 1.0}) + [{"step": 21, EVIL: 2.0, "loss": "nan"}],
      config={**json.loads(json.dumps(CONFIG, default=list)), EVIL: {EVIL: EVIL}, "evals": {EVIL: {"type": EVIL}}},
      run={"starts": [start(command=[EVIL], host=EVIL, data=[{EVIL: EVIL}], end={"how": "error", "message": EVIL})]},
      **{"notes.jsonl": {"step": 3, "kind": "health", "name": EVIL, "text": EVIL, "advice": EVIL},
         "verify/results.json": [{"status": EVIL, "row": EVIL, "what": EVIL, "why": EVIL}]})
  (folder / "samples").mkdir()
  said = {"prompt": EVIL, "tokens": [EVIL, "\x1b[31m"], "logprobs": [-1.0, math.nan], "where": EVIL, "answer": EVIL,
          "reference": {"completion": EVIL}}
  for name, content in (("a_1.jsonl", json.dumps(said)), ("b-2.txt", EVIL + "\x1b"), ("<i>-3.txt", EVIL),
                        ("c-4.html", EVIL)):
    (folder / "samples" / name).write_bytes(content.encode("utf-8", "replace"))
  shown = made(folder)
  seen = EVIL.replace("\ud800", "?")
  assert set(shown.series()) == {"loss", seen, "tokens_seen"}
  for section in ("notes", "samples", "data", "verify", "config", "ran"):
    assert (pages.visible(EVIL) if section == "samples" else seen) in shown.texts[section], section
  assert "49" not in shown.texts["notes"] and "\\x1b[31m" in shown.texts["samples"]
  assert "\x1b" not in shown.texts["samples"]
  other = report_pages.read(compare.write([folder, write_run(tmp_path / "b", rows())], tmp_path / "c.html"))
  assert seen in other.series()


@pytest.mark.parametrize("seed", range(20))
def test_fewer_points_keep_what_stands_out(seed):
  rng = np.random.default_rng(seed)
  values = rng.normal(size=int(rng.integers(1, 5000)))
  values[rng.integers(len(values))] = 1e6
  values[rng.integers(len(values))] = -1e6
  most = int(rng.integers(4, 400))
  kept = series.kept_points(values, most)
  assert len(kept) <= max(most, 4) and np.all(np.diff(kept) > 0) and {0, len(values) - 1} <= set(kept)
  assert {int(values.argmin()), int(values.argmax())} <= set(kept)


def test_what_is_not_finite_breaks_the_line_and_is_marked():
  values = np.arange(5000.0)
  values[[100, 101, 102, 3000]] = np.nan, np.inf, -np.inf, np.nan
  steps, shown, bad = series.points(series.Column(np.arange(5000), values), 50)
  assert bad == 4 and [s for s, value in zip(steps, shown, strict=True) if value is None] == [100, 3000]
  assert steps == sorted(steps) and len(steps) < 60


def test_a_large_run_stays_small_and_says_what_it_leaves_out(tmp_path):
  rng = random.Random(0)
  names = [f"metric_{i}" for i in range(300)]
  large = [{"step": step, **{name: rng.random() for name in names}} for step in range(0, 3000, 2)]
  large[700]["metric_7"] = 99.5
  folder = write_run(tmp_path / "large", large)
  (folder / "samples").mkdir()
  for step in range(100):
    row = {"prompt": "p" * 9000, "tokens": ["<<<<"] * 900, "logprobs": [-0.5] * 900}
    (folder / "samples" / f"s_{step}.jsonl").write_text((json.dumps(row) + "\n") * 40)
  notes = [{"step": i, "kind": "warning", "name": f"n{i % 500}", "text": f"text {i}"} for i in range(3000)]
  (folder / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
  shown = made(folder)
  assert len(shown.html) < 3.3e6
  drawn = shown.series()
  assert len(drawn) == series.MOST_CHARTS and max(v for v in drawn["metric_7"].values()) == 99.5
  assert "140 metrics without a chart" in shown.pairs("curves") and "Not every row is drawn" in shown.pairs("curves")
  assert "12 of 100 steps are shown" in shown.texts["samples"] and "The first 6 of 40." in shown.texts["samples"]
  assert "Not shown: 440 further names" in shown.texts["notes"] and "3,000 warnings." in shown.texts["notes"]


@pytest.mark.parametrize("left", ["metrics.jsonl", "config.json", "run.json"])
def test_any_one_file_makes_a_report(tmp_path, left):
  folder = write_run(tmp_path, rows(), config=CONFIG, run={"starts": [start()]})
  for path in list(folder.iterdir()):
    if path.name != left:
      path.unlink()
  shown = made(folder)
  assert ("finished" if left == "run.json" else "not known") in shown.texts[""]
  assert bool(shown.series()) == (left == "metrics.jsonl")
  assert "Not known: there is no notes.jsonl." in shown.texts["notes"]


@pytest.mark.parametrize("content", ["", "{\n", "null\n", "[1, 2]\n{}\n", '"x"\n', "\x00\xff\n",
                                     '{"step": "x"}\n{"step": 3}\n{"st'])
def test_files_that_hold_something_else_are_told(tmp_path, content):
  folder = write_run(tmp_path, rows())
  (folder / "verify").mkdir()
  for name in ("config.json", "run.json", "started", "notes.jsonl", "verify/results.json", "metrics.jsonl"):
    (folder / name).write_bytes(content.encode("latin1"))
  shown = made(folder)
  for name in ("config.json", "run.json", "started", "results.json"):
    assert any(f"{name} {what}" in shown.texts[""] for what in ("cannot be read", "holds a")), name
  assert ("metrics.jsonl has" in shown.texts[""]) == (content != "")


def test_a_last_row_that_was_cut_is_left_out_without_a_word(tmp_path):
  folder = write_run(tmp_path, rows())
  with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
    file.write('{"step": 21, "loss": 0.1')
  problems = []
  assert history.read_metrics(folder / "metrics.jsonl", problems)["loss"].steps[-1] == 20 and problems == []


ODD = (None, True, -1, 10**400, 1e308, math.nan, "", "x", [], [1], {}, {"x": 1}, [[]], [{}])


@pytest.mark.parametrize("seed", range(30))
def test_json_that_is_not_what_it_should_be_makes_a_page_all_the_same(tmp_path, seed):
  rng = random.Random(seed)

  def spoil(tree, chance=0.1):
    """The tree with odd values in the place of some of its parts; `chance`: for the whole."""
    if rng.random() < chance:
      return rng.choice(ODD)
    if isinstance(tree, dict):
      return {key: spoil(value) for key, value in tree.items()}
    return [spoil(value) for value in tree] if isinstance(tree, list) else tree

  folder = write_run(
      tmp_path / "a", [spoil(row, 0.02) for row in rows()], config=spoil(json.loads(json.dumps(CONFIG, default=list))),
      run={"starts": [spoil(start()), spoil(start(), 0)]},
      **{"notes.jsonl": {"step": 3, **spoil({"kind": "health", "name": "n", "text": "t", "time": "x"}, 0)},
         "verify/results.json": [spoil({"status": "PASS", "row": "T1", "measured": 1e-7, "allowed": 1e-6}, 0)]})
  (folder / "samples").mkdir()
  row = spoil({"prompt": "p", "tokens": ["a", "b"], "logprobs": [-1.0, -2.0], "rewards": {"r": 1.0}, "correct": True,
               "reference": {"tokens": ["a"], "logprobs": [0.0]}, "sample": 0, "where": "x"}, 0)
  (folder / "samples" / "a_1.jsonl").write_text(json.dumps(row) + "\n")
  made(folder)
  report_pages.read(compare.write([folder, write_run(tmp_path / "b", rows())], tmp_path / "c.html"))


def test_notes_stand_at_the_top_the_grave_ones_first(tmp_path):
  folder = write_run(tmp_path, rows())
  notes = [dict(step=5, kind="warning", name="w", text="a warning"),
           dict(step=6, kind="info", name="i", text="nothing"),
           dict(step=2, kind="health", name="h", text="first", advice="old"),
           dict(step=9, kind="health", name="h", text="second", advice="lower it", time="2026-01-31T12:00:00+00:00"),
           dict(step=9, kind="error", name="E", text="an error")]
  (folder / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes) + '{"step": 10, "ki')
  text = made(folder).pairs("notes")
  assert "1 error, 2 health notes, 1 warning." in text
  places = [text.index(part) for part in (
      "an error", "2 times, from step 2 to step 9; the last: 2026-01-31 12:00:00 UTC second What to do: lower it",
      "step 2: first", "a warning", "1 more for information", "step 6: nothing")]
  assert places == sorted(places)


def test_what_verify_found_is_shown(tmp_path):
  found = [{"status": "PASS", "row": "I1", "what": "micro-batches", "measured": 1.25e-7, "allowed": 1e-6, "why": ""},
           {"status": "FAIL", "row": "I2", "what": "meshes", "measured": 0.5, "allowed": 1e-6, "why": ""},
           {"status": "SKIP", "row": "I3", "what": "packing", "measured": None, "allowed": 1e-6, "why": "no packing"}]
  shown = made(write_run(tmp_path, rows(), **{"verify/results.json": found}))
  assert shown.tables["Equalities"][1:] == [["PASS", "I1", "micro-batches", "1.2e-07", "1e-06", ""],
                                            ["FAIL", "I2", "meshes", "0.5", "1e-06", ""],
                                            ["SKIP", "I3", "packing", "", "1e-06", "no packing"]]
  other = made(write_run(tmp_path / "other", rows()))
  assert "It was not run in this workdir." in other.texts["verify"] and "Equalities" not in other.tables


def test_the_last_loss_is_the_last_that_is_finite(tmp_path):
  shown = made(write_run(tmp_path, rows() + [{"step": 21, "loss": "inf"}]))
  assert "0.15 at step 20, the last written" in shown.pairs("")


# ----------------------------------------------------------------------------------------------
# Several runs.


def test_several_runs_side_by_side(tmp_path):
  first = json.loads(json.dumps(CONFIG, default=list))
  second = json.loads(json.dumps(CONFIG, default=list))
  second["optimizer"]["learning_rate"], second["log_steps"] = 1e-5, 7
  second["evals"] = {"val": {"type": "loss", "eval_steps": 5}}
  a = write_run(tmp_path / "x" / "run", rows() + [{"step": 20, "eval/val/loss": 0.5}], config=first)
  b = write_run(tmp_path / "y" / "run", rows(30) + [{"step": 10, "eval/val/loss": 0.25},
                                                  {"step": 30, "eval/val/loss": 0.75}], config=second,
                run={"starts": [start()]})
  shown = report_pages.read(compare.write([a, b], tmp_path / "both.html"))
  assert shown.runs == ["x/run", "y/run"]
  assert max(shown.series(0)["loss"]) == 20 and max(shown.series(1)["loss"]) == 30
  assert shown.tables["Keys that differ"] == [
      ["key", "x/run", "y/run"], ["optimizer.learning_rate", "0.0003", "1e-05"], ["evals.val.eval_steps", "—", "5"],
      ["evals.val.type", "—", '"loss"'], ["log_steps", "10", "7"]]
  assert shown.tables["Evaluations"][1] == ["val/loss", "0.5 (0.5)", "0.75 (0.25)"]
  (best,) = [of for tag, of in shown.tags if tag == "td" and of.get("class") == "best"]
  assert best and shown.tables["Runs"][2][1:3] == ["finished", "20 of 20"]
  runs = [dict(zip(shown.tables["Runs"][0], row, strict=True)) for row in shown.tables["Runs"][1:]]
  assert runs[0]["devices"] == "" and runs[1]["devices"] == "1 × cpu (cpu) in 1 process(es)" and runs[1]["Weft"] == "1"
  c = write_run(tmp_path / "c", [{"step": 0, "eval/val/loss": 6.5}, *rows()])
  shown_c = report_pages.read(compare.write([a, c], tmp_path / "old.html"))
  assert shown_c.tables["Evaluations"][1] == ["val/loss", "0.5 (0.5)", "6.5 at step 0 (6.5)"]
  (a / "config.json").unlink()
  without = report_pages.read(compare.write([a, b], tmp_path / "without.html"))
  assert without.tables["Evaluations"][0] == ["metric", "x/run", "y/run"]
  again = report_pages.read(compare.write([a, b], tmp_path / "again.html"))
  assert again.charts == shown.charts


def test_folders_without_a_run_are_named(tmp_path, monkeypatch):
  folder = write_run(tmp_path / "run", rows())
  (tmp_path / "empty").mkdir()
  for given, expected in (([tmp_path / "no"], "no does not exist"), ([tmp_path / "empty"], "empty holds no run"),
                          ([folder / "metrics.jsonl"], "is a file"), ([folder, folder], "given twice"),
                          ([folder] * 40, "found 40 runs; at most 32")):
    with pytest.raises(ConfigError, match=expected):
      (compare.write if len(given) > 1 else page.write)(*([given, tmp_path / "o"] if len(given) > 1 else given))


def test_the_command(tmp_path, monkeypatch, capsys):
  """Of several runs in a process of its own, which needs no device; the rest in this one."""
  a, b = (write_run(tmp_path / name, rows()) for name in "ab")
  done = subprocess.run([sys.executable, "-m", "trainer.report", str(a), str(b)], cwd=tmp_path, text=True,
                        capture_output=True, timeout=120, check=False,
                        env={**os.environ, "PYTHONPATH": str(tiny.ROOT), "JAX_PLATFORMS": "absent"})
  assert done.returncode == 0 and done.stdout == "comparison.html\n", done.stderr
  assert (tmp_path / "comparison.html").exists()

  def code(*arguments):
    return docs_commands.exit_code(["trainer.report", *map(str, arguments)], monkeypatch)

  monkeypatch.chdir(tmp_path)
  assert not code(a) and capsys.readouterr().out.splitlines()[-1] == str(a / "report.html")
  assert not code(f"--workdir={a}", "--out=one.html") and report_pages.read(tmp_path / "one.html").series()
  failed = code(a, tmp_path / "nothing")
  assert "nothing does not exist. Give the --workdir of a run." in failed and "Traceback" not in failed
  assert "is a folder" in code(a, f"--out={b}") and code() == 1


# ----------------------------------------------------------------------------------------------
# Parts.


@pytest.mark.parametrize("name, group", [
    ("loss", "Loss"), ("loss/main", "Loss"), ("policy_loss", "Loss"), ("losses/sft", "Loss"),
    ("moe/z_loss", "Mixture of experts"), ("reward", "Rewards"), ("rewards/chosen", "Rewards"),
    ("frac_reward_zero_std", "Rewards"), ("kl", "Policy and reference"),
    ("clip_ratio/low_mean", "Policy and reference"), ("logps_ref/chosen", "Policy and reference"),
    ("completions/mean_length", "Completions"),
    ("grad_norm", "Gradients and parameters"), ("nonfinite_steps", "Gradients and parameters"),
    ("learning_rate", "Learning rate"), ("learning_rate/embed", "Learning rate"), ("tokens_seen", "Data"),
    ("data/main/rows", "Data"), ("eval/val/loss", "Evaluations"), ("mfu", "Throughput"), ("time/step", "Throughput"),
    ("my_metric", "Other"), ("lossless", "Other"), ("klaxon", "Other")])
def test_metrics_stand_with_their_like(name, group):
  assert series.group_of(name) == group and group in series.ORDER


@pytest.mark.parametrize("name, sources, owner", [
    ("loss", ["a"], ("loss", "all")), ("loss/a", ["a"], ("loss", "a")), ("kl/a", ["a"], ("kl/a", "")),
    ("kl/a", ["a", "b"], ("kl", "a")), ("kl/c", ["a", "b"], ("kl/c", "")), ("data/a/rows", ["a"], ("data/rows", "a")),
    ("data/c/rows", ["a"], ("data/c/rows", "")), ("grad_norm", ["a"], ("grad_norm", ""))])
def test_which_chart_a_metric_by_source_is_in(name, sources, owner):
  assert series._owner(name, ["loss", "loss/a", "kl/a", "kl/b", "grad_norm"], sources) == owner


@pytest.mark.parametrize("count, more", [(8, ""), (9, "and 1 more; "), (12, "and 4 more; ")])
def test_a_chart_says_how_many_lines_its_words_leave_out(count, more):
  column = series.Column(np.arange(3), np.array([1.0, 0.5, 0.25]))
  drawn = str(series._drawn(series.Chart("kl", [series.Line(f"s{i}", 0, column) for i in range(count)], []), ["r"], 50))
  assert f"; {more}3 rows" in drawn and "s7: " in drawn and "s8: " not in drawn and (" more; " in drawn) == bool(more)


@pytest.mark.parametrize("value, expected", [
    (0, "0"), (12, "12"), (1234567, "1,234,567"), (0.00012345678, "0.00012346"), (3.14159265, "3.1416"),
    (21496.4, "21,496"), (1e20, "1e+20"), (math.nan, "nan"), (-2.0, "-2"), (True, "True"), ("x", "x")])
def test_numbers_for_people(value, expected):
  assert pages.number(value) == expected


@pytest.mark.parametrize("seconds, expected", [
    (0.0123, "12.3 ms"), (1.5, "1.5 s"), (75, "1 min 15 s"), (3700, "1 h 1 min"), (90000, "1 d 1 h")])
def test_times_for_people(seconds, expected):
  assert pages.span(seconds) == expected


def test_rows_of_samples_are_counted_without_empty_lines(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"a": 1}\n\n[2]\n  \n{"a": 3}\n{\n' + '{"a": 4}\n' * texts.MOST_TEXTS)
  rows, total = texts._rows(path)
  assert total == 4 + texts.MOST_TEXTS and len(rows) == texts.MOST_TEXTS and [row["a"] for row in rows[:3]] == [1, 3, 4]
  assert texts._rows(tmp_path / "none") == ([], 0)


def test_a_completion_that_is_cut_says_so_and_no_other():
  row = {"tokens": ["ab", "c"], "logprobs": [-0.5, math.inf]}
  assert "…" not in texts.said(row, 10**6) and "&#34;logprobs&#34;:[-0.5,null]" in texts.said(row, 10**6)
  assert texts.said(row, 1).count("…") == 1 and ">c<" not in texts.said(row, 1)
  assert texts.said({"completion": "x" * 40}, 10) == texts.cut("x" * 40, 10) != "x" * 40


def test_the_steps_of_samples_are_spread_and_the_last_is_there(tmp_path):
  for step in range(0, 1000, 10):
    (tmp_path / f"a-b_{step:08d}.txt").write_text(f"text {step}.")
  (tmp_path / "no_step.txt").write_text("x")
  steps = texts.shown_steps(range(0, 1000, 10))
  assert len(steps) == 12 and steps[0] == 0 and steps[-1] == 990 and max(np.diff(steps)) <= 100
  stream, _ = texts.streams(tmp_path)
  assert "a-b" in stream and all(f"text {step}." in stream for step in steps) and stream.count("<details") == 12
  assert texts.shown_steps([3]) == [3]


def test_the_defaults_of_an_unknown_strategy_are_not_known():
  found, why = configs.changed({"strategy": {"name": "newer"}})
  assert found == [] and "of another version of Weft" in why


def test_a_source_tree_that_is_not_installed_has_a_page_with_its_version(tmp_path, monkeypatch):
  def version(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, "version", version)
  own = re.search(r'^version = "(.*)"$', (tiny.ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
  assert configs.weft_version() == f"{own}, not installed"
  page.write(write_run(tmp_path / "run", rows()))
  assert f"{own}, not installed" in (tmp_path / "run" / "report.html").read_text()
