"""What a run, and --mode=verify on its config, has found out about itself. Only what was measured is said."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainer.report.history import History, at, integer
from trainer.report.pages import counted, number, table, tag, when


def shown(history: History) -> list[Markup]:
  """What was found out, and the table of --mode=verify."""
  marks = {"pass": "✓ ", "fail": "✗ ", "skip": "– "}
  lines = [tag("li", tag("span", marks[mark], class_=mark), text) for mark, text in found(history)]
  more = _verified(history.verified, history.workdir / "verify" / "results.json") if history.verified else []
  return [tag("ul", *lines), *more]


def found(history: History) -> list[tuple[str, str]]:
  """[(pass | fail | skip, a sentence)]; skip: it was not measured."""
  return [*_steps(history), *_checkpoints(history), *_starts(history), *_metrics(history), _verify(history)]


def _steps(history: History) -> list[tuple[str, str]]:
  if (count := history.last("nonfinite_steps")) is None:
    return [("skip", "Whether every step was finite is not written.")]
  files = len(list((history.workdir / "nonfinite").glob("*.jsonl")))
  more = f" What was in the batch of {files} is in nonfinite/." if files else ""
  lines = [("fail", f"{counted(int(count), 'step')} not finite, which changed nothing.{more}") if count else
           ("pass", "Loss and gradient of every step up to the last row of metrics were finite.")]
  if (spikes := history.last("spikes/found")) is not None:
    back = history.last("spikes/rollbacks") or 0
    lines.append(("fail", f"{counted(int(spikes), 'loss spike')}, of which {int(back)} made the run go back."))
  elif at(history.config, "spikes", "action", default="none") != "none":
    lines.append(("pass", f"No spike of {at(history.config, 'spikes', 'metric', default='the loss')} was found."))
  return lines


def _checkpoints(history: History) -> list[tuple[str, str]]:
  read = [step for start in history.starts if (step := integer(at(start, "from_step"))) is not None and step > 0]
  lines = []
  if read:
    steps = ", ".join(map(number, read[:8])) + (" …" if len(read) > 8 else "")
    lines.append(("pass", f"{counted(len(read), 'checkpoint')} read, of step {steps}: the seal and the checksum of "
                          "every array were those of when it was saved."))
  else:
    lines.append(("skip", "No checkpoint had to be read, so that no seal was looked at."))
  if damaged := sorted(path.name for path in (history.workdir / "checkpoints").glob("*.unreadable*")):
    lines.append(("fail", f"{counted(len(damaged), 'checkpoint')} set aside, which could not be read or was not what "
                          f"had been saved: {', '.join(damaged[:8])}."))
  return lines


def _starts(history: History) -> list[tuple[str, str]]:
  names = {str(name) for start in history.starts if (name := at(start, "data_fingerprint")) is not None}
  if len(history.starts) < 2:
    return []
  count = len(history.starts)
  lines = [("pass", f"The data, the tokenizer and their order had the same fingerprint at all {count} starts.")
           if len(names) == 1 else ("fail", f"The data had {len(names)} fingerprints over {count} starts.")]
  killed = sum(start.get("end") is None for start in history.starts[:-1])
  if killed:
    lines.append(("skip", f"{killed} of {count} starts ended without a word: the process was killed. The steps after "
                          "its last checkpoint were taken again by the next."))
  return lines


def _metrics(history: History) -> list[tuple[str, str]]:
  """Whether the rows of metrics are the ones that the run was to write."""
  if "loss" not in history.metrics and "objective" not in history.metrics:
    return []
  column = history.metrics.get("loss", history.metrics.get("objective"))
  bad = int((~(abs(column.values) < float("inf"))).sum())
  count = len(column.steps)
  return [("fail", f"The loss is not finite in {bad:,} of {count:,} rows of metrics.") if bad else
          ("pass", f"The loss is finite in all {count:,} rows of metrics, from step {int(column.steps[0]):,} to step "
                   f"{int(column.steps[-1]):,}.")]


def _verify(history: History) -> tuple[str, str]:
  if history.verified is None:
    return "skip", "--mode=verify, which measures on this config what must be equal, was not run in this workdir."
  counts = {status: sum(row.get("status") == status for row in history.verified) for status in ("PASS", "FAIL", "SKIP")}
  return ("fail" if counts["FAIL"] or not counts["PASS"] else "pass",
          "--mode=verify: " + ", ".join(f"{count} {status}" for status, count in counts.items()) + ".")


def _verified(rows: Sequence[dict[str, Any]], file: Path) -> list[Markup]:
  """The table of --mode=verify."""
  def figure(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, (int, float)) else ""

  cells = [[str(row.get("status", "")), str(row.get("row", "")), str(row.get("what", "")), figure(row.get("measured")),
            figure(row.get("allowed")), str(row.get("why", ""))] for row in rows]
  date = when(file.stat().st_mtime) if file.exists() else ""
  return [tag("h3", "--mode=verify"), tag("p", f"Measured {date} on a slice of the config as it was then; "
                                          "docs/exactness.md says what each row is."),
          table(["", "row", "what must be equal", "measured", "allowed", ""], cells, "Equalities", "words")]
