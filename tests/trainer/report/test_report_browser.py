"""The report in a real browser, at the width of a phone and of a desk, light and dark."""

import json
import math
import random

import pytest

from tests import browser
from tests.trainer.report_pages import write_run
from trainer.report import compare, page

pytestmark = pytest.mark.skipif(browser.find() is None, reason="no Chromium or Chrome is installed")

LONG = "a_metric_of_the_users_own/with_a_name_that_does_not_fit_into_a_phone_at_all/and_more"
SCREENS = [(width, dark) for width in browser.WIDTHS for dark in (False, True)]


def workdir(folder, seed):
  rng = random.Random(seed)
  rows = []
  for step in range(1, 301):
    row = {"step": step, "loss": 5 * math.exp(-step / 80) + 1 + rng.gauss(0, 0.1),
           "grad_norm": rng.lognormvariate(0, 1), LONG: rng.random(), "tokens_seen": 512 * step,
           "time/wall": 1.5 * step, "tokens_per_second": 1e4 + step, "time/split/train": 1.0, "time/split/data": 0.2}
    if step % 50 == 0:
      row |= {"eval/val/loss": row["loss"], "time/split/eval": 3.0}
    if step == 120:
      row |= {"loss": "nan", "grad_norm": "inf"}
    rows.append(row)
  write_run(folder, rows, config={"strategy": {"name": "seq"}, LONG: "/a/long/path" * 20}, **{"notes.jsonl": {
      "step": 9, "kind": "health", "name": "n" * 60, "text": "w" * 300, "advice": "Lower " + "optimizer." * 40}})
  (folder / "samples").mkdir()
  for step in (0, 150, 300):
    row = {"prompt": "<b>Once</b> ", "tokens": ["x" * 5] * 120, "logprobs": [-rng.expovariate(0.5) for _ in range(120)],
           "finish_reason": "length"}
    (folder / "samples" / f"text_{step}.jsonl").write_text((json.dumps(row) + "\n") * 3)
  return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  return page.write(workdir(tmp_path_factory.mktemp("runs") / "one", 0)).read_text(encoding="utf-8")


def check(found, width):
  """Nothing sticks out, nothing is pale, nothing went wrong."""
  assert "failed" not in found, found
  assert width - 20 <= found["width"] <= width and found["scroll"] <= found["width"] and found["wide"] == []
  assert found["pale"] == [] and found["console"] == []


@pytest.mark.parametrize("width, dark", SCREENS)
def test_one_run_fits_the_screen_and_can_be_read(one, width, dark):
  found = browser.measure(one, width, dark)
  check(found, width)
  charts = dict(found["charts"])
  assert charts["loss"] == charts["grad_norm"] == [299] and charts["eval/val/loss"] == [6]


@pytest.mark.parametrize("width, dark", SCREENS[::3])
def test_several_runs_fit_the_screen(tmp_path, width, dark):
  folders = [workdir(tmp_path / f"a_run_with_a_long_name_{i}", i) for i in range(10)]
  both = compare.write(folders, tmp_path / "c.html").read_text(encoding="utf-8")
  found = browser.measure(both, width, dark)
  check(found, width)
  assert len(dict(found["charts"])["loss"]) >= 10


def test_axes_scales_means_and_steps_can_be_chosen(one):
  found = browser.measure(one, 1280, act="""
    const at = selector => inside.querySelector(selector);
    const chart = () => [...inside.querySelectorAll("figure[data-chart]")].find(
      figure => figure.querySelector("h4").textContent === "loss");
    const ticks = () => [...chart().querySelectorAll("text")].map(text => text.textContent);
    found.before = ticks();
    at("input[value=seconds]").click();
    found.time = ticks();
    at("input[value=tokens]").click();
    found.tokens = ticks();
    at("input[name=log]").click();
    found.log = ticks();
    const path = () => chart().querySelector("path.line").getAttribute("d");
    const before = path();
    at("input[name=smooth]").click();
    found.smooth = path() !== before;
    const small = chart().querySelector("svg").getBoundingClientRect().width;
    chart().querySelector("h4").click();
    found.large = chart().querySelector("svg").getBoundingClientRect().width / small;
    for (const key of ["ArrowRight", "ArrowRight", "ArrowRight"])
      chart().querySelector("svg").dispatchEvent(new inside.defaultView.KeyboardEvent("keydown", {key, bubbles: true}));
    found.tip = chart().querySelector(".tip").textContent;""")
  assert "failed" not in found and found["console"] == [], found
  assert "300" in found["before"] and any(tick.endswith(" min") for tick in found["time"])
  assert any(tick.endswith("k") for tick in found["tokens"]) and found["log"] != found["tokens"]
  assert found["smooth"] and found["large"] > 2 and found["tip"].startswith("tokens 1536")


def test_hostile_text_does_nothing_in_a_browser(tmp_path):
  evil = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
  folder = write_run(tmp_path / "e", [{"step": step, evil: float(step)} for step in range(1, 5)],
                     **{"notes.jsonl": {"step": 1, "kind": "health", "name": evil, "text": evil, "advice": evil}})
  found = browser.measure(page.write(folder).read_text(encoding="utf-8"), 390, act="found.title = inside.title")
  check(found, 390)
  assert found["title"] == "e: not known" and found["charts"] == [[evil, [4]]]
