"""Metrics as charts: which belong together, few enough points with nothing that stands out left out, and in figures."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.report.history import Column

# Points of a line, of all lines of a page, and charts of a page, which is to stay below 3 MB.
MOST_POINTS, ALL_POINTS, MOST_CHARTS = 1000, 60_000, 160
# Points that are not finite, of a line, which are marked.
MOST_BAD = 100
# Bars of the time split.
MOST_BARS = 60
# Rows of a metric from which on it may have a smoothed line, and the share of them that one mean is over.
SMOOTH_FROM, SMOOTH_SHARE = 30, 40
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


def noisy(column: Column) -> bool:
  """Whether a mean of several rows shows more than the values do: from row to row they differ not much less than over
  the run."""
  values = column.finite.values
  if len(values) < SMOOTH_FROM:
    return False
  low, high = np.quantile(values, [0.05, 0.95])
  return bool(high > low and np.median(np.abs(np.diff(values))) > 0.04 * (high - low))


def smoothed(column: Column, most: int) -> Column | None:
  """The mean of the rows around each row, as many at most as a fortieth of all, at so many steps at most; None: there
  are too few rows."""
  steps, values = column.finite
  count = len(values)
  if count < SMOOTH_FROM:
    return None
  half = max(2, count // SMOOTH_SHARE // 2)
  sums = np.concatenate([[0.0], np.cumsum(values)])
  place = np.arange(count)
  # Near the ends of fewer rows, as many on either side as there are: the ends are not drawn towards the middle.
  reach = np.clip(np.minimum(place, count - 1 - place), half // 4, half)
  begin, end = np.maximum(place - reach, 0), np.minimum(place + reach, count - 1) + 1
  means = (sums[end] - sums[begin]) / (end - begin)
  if not np.all(np.isfinite(means)):
    return None
  shown = np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
  return Column(steps[shown], means[shown])


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
# For the page's script.


def payload(groups: Sequence[tuple[str, list[Chart]]], runs: Sequence[tuple[str, Mapping[str, Column]]],
            numbers: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
  """(what charts.js draws, whether points were left out).

  Args:
    groups: of `charts`.
    runs: (name, metrics) of each run.
    numbers: {title of a chart: its number on the page}.
  """
  drawn = [chart for _, some in groups for chart in some]
  lines = sum(len(chart.lines) for chart in drawn)
  most = max(40, min(MOST_POINTS, ALL_POINTS // max(lines, 1)))
  pool: dict[tuple, int] = {}
  fewer, made = False, {}
  for chart in drawn:
    parts, means = [], any(noisy(line.column) for line in chart.lines)
    for line in chart.lines:
      steps, values, bad = points(line.column, most)
      fewer |= len(line.column.values) > most
      part = {"label": line.label, "run": line.run, "x": pool.setdefault(tuple(steps), len(pool)), "y": values,
              "bad": bad}
      smooth = smoothed(line.column, max(most // 3, 30)) if means else None
      if smooth is not None:
        part |= {"sx": pool.setdefault(tuple(smooth.steps.tolist()), len(pool)),
                 "sy": [rounded(value) for value in smooth.values.tolist()]}
      parts.append(part)
    made[str(numbers[chart.title])] = {
        "title": chart.title, "lines": parts,
        "levels": [{"label": label, "y": rounded(value)} for label, value in chart.levels]}
  return {"runs": [{"name": name, **_axes(metrics)} for name, metrics in runs],
          "steps": [list(steps) for steps in pool], "charts": made}, fewer


def _axes(metrics: Mapping[str, Column]) -> dict[str, Any]:
  """Other things than steps that may be on the x axis: {tokens, seconds: [steps, values]}."""
  found = {}
  for axis, name in (("tokens", "tokens_seen"), ("seconds", "time/wall")):
    if name in metrics and len(column := metrics[name].finite) and len(column.steps) > 1:
      shown = np.unique(np.linspace(0, len(column.steps) - 1, min(len(column.steps), 400)).astype(int))
      found[axis] = [column.steps[shown].tolist(), [round(value, 1) for value in column.values[shown].tolist()]]
  return found


def time_split(metrics: Mapping[str, Column]) -> dict[str, Any] | None:
  """{edges: steps [N + 1], kinds: {kind: seconds [N]}} of at most MOST_BARS parts of the run; None: it is not known."""
  prefix = "time/split/"
  kinds = {name.removeprefix(prefix): column.finite for name, column in metrics.items() if name.startswith(prefix)}
  if "train" not in kinds or not len(kinds["train"].steps):
    return None
  steps = kinds["train"].steps
  count = min(len(steps), MOST_BARS)
  ends = steps[np.ceil(np.linspace(0, len(steps), count + 1)[1:]).astype(int) - 1]
  bars = {}
  for kind, column in kinds.items():
    sums = np.zeros(count)
    place = np.searchsorted(ends, column.steps)
    np.add.at(sums, place[place < count], column.values[place < count])
    bars[kind] = [rounded(value) for value in sums.tolist()]
  first = int(steps[0]) - (int(steps[1] - steps[0]) if len(steps) > 1 else 1)
  return {"edges": [max(first, 0), *ends.tolist()], "kinds": bars}


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
