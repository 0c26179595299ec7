"""run.json says of each start what ran, and how it ended; what is told of a run: test_report.py."""

import json
from types import SimpleNamespace

from trainer.report import record


def test_each_start_adds_to_those_before_and_ends_as_it_does(tmp_path, monkeypatch):
  monkeypatch.setattr(record, "describe", lambda run, trained: {"from_step": run.step, "end": None})
  chrono = SimpleNamespace(goodput=lambda: 0.5, state=lambda: {"train": 2.0})
  data = SimpleNamespace(counters=lambda step: {"main": {"rows": step}}, epoch=lambda step: step / 8)
  for step, last in ((0, 3), (3, 6), (5, 8)):
    run = SimpleNamespace(workdir=tmp_path, step=step, total_steps=8, stop_requested="SIGTERM", chrono=chrono,
                          data=data, tokens_seen=lambda step: 64 * step)
    of_start = record.Record(["a"])
    of_start.on_train_begin(run)
    starts = json.loads((tmp_path / record.RUN).read_text())["starts"]
    assert starts[-1] == {"from_step": step, "end": None}
    run.step = last
    if last == 6:
      of_start.on_error(run, ValueError("no"))
    else:
      of_start.on_train_end(run)
  starts = json.loads((tmp_path / record.RUN).read_text())["starts"]
  assert [(start["from_step"], *(start["end"][key] for key in ("how", "step", "tokens", "epoch")))
          for start in starts] == [
              (0, "stopped", 3, 192, 0.375), (3, "error", 6, 384, 0.75), (5, "finished", 8, 512, 1)]
  assert starts[0]["end"]["by"] == "SIGTERM" and (starts[1]["end"]["type"], starts[1]["end"]["message"]) == (
      "ValueError", "no")
