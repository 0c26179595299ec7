"""Metrics as charts: which belong together, few enough points with nothing that stands out left out, and in figures."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from trainer.report import pages
from trainer.report.history import Column
from trainer.report.pages import counted, number

# Points of a line, of all lines of a page, and charts of a page, which is to stay below 3 MB.
MOST_POINTS, ALL_POINTS, MOST_CHARTS = 1000, 60_000, 160
# Points that are not finite, of a line, which are marked.
MOST_BAD = 100
THROUGHPUT = "Throughput"
# Titles in their order, and the metrics that belong there; the first that matches.
GROUPS = (
    ("Evaluations", r"eval/"),
    (THROUGHPUT, r"(tokens_per_second|mfu|goodput)$|time/"),
    ("Mixture of experts", r"moe/|.*expert"),
    ("Loss", r"(.*_)?loss(es)?(/|$)|(nll|objective|perplexity|accuracy)(/|$)"),
    ("Rewards", r"reward|frac_reward|advantage"),
    ("Policy and reference", r"(kl|entropy|policy|clip_ratio|cispo\w*|sampling|logps\w*|wpo_weight)(/|$)"),
    ("Completions", r"(completions|rollout)/"),
    ("Gradients and parameters", r"(grad|param|update)_norm|params_changed|nonfinite|spikes/"),
    ("Learning rate", r"learning_rate|lr(/|$)"),
    ("Data", r"(tokens_seen|trained_tokens|epoch)$|data/"),
    ("Other", r""),
)
ORDER = ("Loss", "Rewards", "Policy and reference", "Completions", "Evaluations", "Gradients and parameters",
         "Learning rate", "Mixture of experts", "Data", "Other", THROUGHPUT)
# Whether a larger value is better, by the last parts of a metric's name; None of these: nobody knows.
BETTER = ((r"(loss|perplexity|bits_per_byte|nll|kl|failures)$", min),
          (r"(accuracy|accuracies|pass@\d+|exact_match|reward|margins?|f1)(/mean)?$", max))
# What the x axis and the time split show.
_ELSEWHERE = re.compile(r"time/(wall$|split/)")
# What stands beside a metric as a line of its own: it does not change.
_BASELINE = re.compile(r"(eval/.*bits_per_byte)_(\w+)")


class Line(NamedTuple):
  """A metric of a run. `label`: "" where the title of its chart says all."""

  label: str
  run: int
  column: Column


class Chart(NamedTuple):
  """Lines that share their axes; `levels`: (label, value) of what stays as it is."""

  title: str
  lines: list[Line]
  levels: list[tuple[str, float]]


class Charts(NamedTuple):
  """`groups`: [(title, charts)]; `constant`: {metric: its only value, of all rows}; `left_out`: without a chart."""

  groups: list[tuple[str, list[Chart]]]
  constant: dict[str, float]
  left_out: list[str]


def group_of(name: str) -> str:
  """The title that a metric stands under."""
  return next(title for title, pattern in GROUPS if re.match(pattern, name))


def charts(runs: Sequence[Mapping[str, Column]], sources: Sequence[str] = ()) -> Charts:
  """The metrics of runs as charts, each metric of all runs in one.

  Args:
    runs: metrics by name, of each run.
    sources: of the data: a metric and its parts by source (`loss`, `loss/<source>`) share a chart. Of one run.
  """
  names = list(dict.fromkeys(name for run in runs for name in run if not _ELSEWHERE.match(name)))
  found: dict[str, Chart] = {}
  constant, levels = {}, {}
  for name in names:
    columns = [(number, run[name]) for number, run in enumerate(runs) if name in run]
    values = np.unique(np.concatenate([column.values for _, column in columns]))
    if len(values) == 1 and np.isfinite(values[0]):
      constant[name] = float(values[0])
      if (baseline := _BASELINE.fullmatch(name)) and baseline[1] in names:
        levels.setdefault(baseline[1], []).append((baseline[2], constant.pop(name)))
      continue
    owner, label = _owner(name, names, sources) if len(runs) == 1 else (name, "")
    chart = found.setdefault(owner, Chart(owner, [], []))
    chart.lines.extend(Line(label, number, column) for number, column in columns)
  for owner, values in levels.items():
    if owner in found:
      found[owner].levels.extend(values)
  groups: dict[str, list[Chart]] = {title: [] for title in ORDER}
  for owner, chart in found.items():
    groups[group_of(owner)].append(chart)
  left_out, room = [], MOST_CHARTS
  for title in sorted(groups, key=lambda title: title != THROUGHPUT):  # which is to be there in any case
    groups[title].sort(key=lambda chart: not chart.title.endswith("loss"))
    kept = groups[title][:room]
    left_out += [chart.title for chart in groups[title][room:]]
    groups[title], room = kept, room - len(kept)
  return Charts([(title, groups[title]) for title in ORDER if groups[title]], constant, left_out)


def _owner(name: str, names: Sequence[str], sources: Sequence[str]) -> tuple[str, str]:
  """(the metric whose chart a metric is in, its label there)."""
  parts = name.split("/")
  if parts[0] == "data" and len(parts) == 3 and parts[1] in sources:
    return f"data/{parts[2]}", parts[1]
  whole = "/".join(parts[:-1])
  if parts[-1] in sources and (whole in names or len(sources) > 1):
    return whole, parts[-1]
  return name, "all" if any(f"{name}/{source}" in names for source in sources) else ""


# ----------------------------------------------------------------------------------------------
# Fewer points.


def kept_points(values: np.ndarray, most: int) -> np.ndarray:
  """Indices, in order, of at most so many of finite values: the first, the last, and of each of equal parts the least
  and the greatest."""
  count = len(values)
  if count <= most:
    return np.arange(count)
  edges = np.linspace(0, count, (most - 2) // 2 + 1).astype(int)
  found = {0, count - 1}
  for begin, end in zip(edges, edges[1:], strict=False):
    part = values[begin:end]
    found |= {begin + int(part.argmin()), begin + int(part.argmax())}
  return np.array(sorted(found))


def points(column: Column, most: int) -> tuple[list[int], list[float | None], int]:
  """(steps, values, how many values are not finite): at most so many points and a few more; None: not finite there."""
  good = np.isfinite(column.values)
  chosen = np.flatnonzero(good)[kept_points(column.values[good], most)]
  bad = np.flatnonzero(~good)
  begins = bad[np.append(True, np.diff(bad) > 1)] if len(bad) else bad  # one of each stretch
  marked = begins[np.unique(np.linspace(0, len(begins) - 1, min(len(begins), MOST_BAD)).astype(int))]
  both = np.sort(np.concatenate([chosen, marked]))
  return (column.steps[both].tolist(),
          [rounded(value) if np.isfinite(value) else None for value in column.values[both].tolist()], len(bad))


def rounded(value: float) -> float:
  """Six digits."""
  return float(f"{value:.6g}")


# ----------------------------------------------------------------------------------------------
# For the page.


def drawn(found: Charts, runs: Sequence[str]) -> list[tuple[str, Markup]]:
  """[(title, charts)] of `charts`. `runs`: their names."""
  lines = sum(len(chart.lines) for _, some in found.groups for chart in some)
  most = max(40, min(MOST_POINTS, ALL_POINTS // max(lines, 1)))
  return [(title, pages.tag("div", *(_drawn(chart, runs, most) for chart in some), class_="charts"))
          for title, some in found.groups]


def _drawn(chart: Chart, runs: Sequence[str], most: int) -> Markup:
  lines, texts = [], []
  for line in chart.lines:
    steps, values, _ = points(line.column, most)
    lines.append({"label": line.label, "run": line.run, "x": steps, "y": values})
    found, label = figures(chart.title, line.column), runs[line.run] if len(runs) > 1 else line.label
    texts.append(f"{label}: {_in_figures(found)}" if label else _in_figures(found))
  more = [f"and {len(texts) - 8} more"] if len(texts) > 8 else []
  rows = counted(max((len(line.column.values) for line in chart.lines), default=0), "row")
  return pages.chart(chart.title, lines, [(label, rounded(value)) for label, value in chart.levels],
                     "; ".join([*texts[:8], *more, rows]))


def _in_figures(values: "Figures | None") -> str:
  if values is None:
    return "no finite value"
  return f"last {at_step(values.last)}, between {number(values.least)} and {number(values.greatest)}"


def at_step(pair: tuple[int, float] | None) -> str:
  """A value and its step."""
  return "" if pair is None else f"{number(pair[1])} at {pair[0]:,}"


def left_out(found: Charts) -> list[str]:
  """What the page does not show, in sentences."""
  lines = []
  if any(len(line.column.values) > MOST_POINTS for _, some in found.groups for chart in some for line in chart.lines):
    lines.append("Not every row is drawn: of equal parts of each curve the page has the least and the greatest value, "
                 "so that nothing that stands out is missing. metrics.jsonl has them all.")
  if found.left_out:
    names = ", ".join(found.left_out[:40])
    lines.append(f"{counted(len(found.left_out), 'metric')} without a chart: {names}"
                 f"{' …' if len(found.left_out) > 40 else ''}")
  return lines


def places(metrics: Mapping[str, Column]) -> dict[str, Any]:
  """Other things than steps that may be on the x axis: {tokens, seconds: [steps, values]}."""
  found = {}
  for axis, name in (("tokens", "tokens_seen"), ("seconds", "time/wall")):
    if name in metrics and len(column := metrics[name].finite) and len(column.steps) > 1:
      shown = np.unique(np.linspace(0, len(column.steps) - 1, min(len(column.steps), 400)).astype(int))
      found[axis] = [column.steps[shown].tolist(), [round(value, 1) for value in column.values[shown].tolist()]]
  return found


# ----------------------------------------------------------------------------------------------
# In figures.


class Figures(NamedTuple):
  """Of a metric's finite values: the first, the last, and the best, each with its step. `better`: "" where nobody knows
  which way is better, and `best` is None."""

  name: str
  count: int
  first: tuple[int, float]
  last: tuple[int, float]
  best: tuple[int, float] | None
  better: str
  least: float
  greatest: float


def better(name: str) -> Any:
  """min, max or None: which values of a metric are better."""
  return next((best for pattern, best in BETTER if re.search(pattern, name)), None)


def figures(name: str, column: Column, sources: Sequence[str] = ()) -> Figures | None:
  """None where no value is finite."""
  steps, values = column.finite
  if not len(values):
    return None
  whole, _, part = name.rpartition("/")
  which = better(whole if part in sources else name)
  place = None if which is None else int(values.argmin() if which is min else values.argmax())
  ends = [(int(steps[i]), float(values[i])) for i in (0, -1)]
  return Figures(name, len(values), *ends, None if place is None else (int(steps[place]), float(values[place])),
                 "" if which is None else "lower" if which is min else "higher", float(values.min()),
                 float(values.max()))
