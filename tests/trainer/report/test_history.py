"""How a run stands, by what its workdir says of its last start."""

import json

import pytest

from trainer.report import history

STOPPED = dict(how="stopped", by="SIGTERM", step=4, time="2026-01-31T12:00:00+00:00")
FAILED = dict(how="error", type="ValueError", message="no", step=7)
FINISHED = dict(how="finished", step=9)


@pytest.mark.parametrize("ends, kind, step, sentence", [
    ([STOPPED], "stopped", 4, "Stopped by SIGTERM after step 4 of 9, and saved; the same command continues."),
    ([STOPPED, FAILED], "error", 7, "Ended after step 7 of 9 with ValueError: no"),
    ([STOPPED, FAILED, FINISHED], "finished", 9, "All 9 steps were taken."),
    ([FINISHED, None], "open", 5, "The last step that is written is 5 of 9.")])
def test_a_run_stands_as_its_last_start_has_left_it(tmp_path, ends, kind, step, sentence):
  """Where that has not said how it ended, the metrics say how far it is."""
  starts = [dict(total_steps=total, end=end) for total, end in zip((3, 5, 9)[-len(ends):], ends, strict=True)]
  (tmp_path / history.RUN).write_text(json.dumps({"starts": starts}))
  (tmp_path / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n{"step": 6, "eval/a/loss": 2.0}\n')
  found = history.status(history.load(tmp_path))
  assert (found.kind, found.step, found.total) == (kind, step, 9) and found.sentence.endswith(sentence)
  assert history.last_end(tmp_path) == (ends[-1] or {})
