"""Several runs on one page: their curves in the same charts, and where their configs and results differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.report import configs, page, pages, series
from trainer.report.history import History, load, sources_of, status
from trainer.report.pages import counted, dim, number, section, table, tag

MOST_RUNS = 32


def write(workdirs: Sequence[str | Path], out: str | Path) -> Path:
  """Writes the page of several runs; returns its path.

  Raises:
    ConfigError: a folder holds no run, the same folder is given twice, or there are too many.
    OSError: the page cannot be written.
  """
  if len(workdirs) > MOST_RUNS:
    raise ConfigError(f"found {len(workdirs)} runs; at most {MOST_RUNS} can be told apart on one page. Give fewer.")
  histories = [load(workdir) for workdir in workdirs]
  resolved = [history.workdir.resolve() for history in histories]
  twice = [path for path in resolved if resolved.count(path) > 1]
  if twice:
    raise ConfigError(f"{twice[0]} is given twice. Give each run once.")
  return pages.save(Path(out), make(histories))


def make(histories: Sequence[History]) -> str:
  """The page."""
  names = short_names([history.workdir for history in histories])
  found = series.charts([history.metrics for history in histories])
  groups = series.drawn(found, names)
  differences = configs.differences([history.config for history in histories if history.config])
  configured = [name for history, name in zip(histories, names, strict=True) if history.config]
  evaluated = evaluations(histories)
  facts = list(map(facts_of, histories))
  head = list(dict.fromkeys(what for one in facts for what in one))
  rows = [[pages.join([pages.swatch(i), name]), *(one.get(what, "") for what in head)]
          for i, (one, name) in enumerate(zip(facts, names, strict=True))]
  tools = pages.chart_tools([(name, series.places(history.metrics))
                             for history, name in zip(histories, names, strict=True)])
  title = f"{len(names)} runs: {', '.join(names)}"
  return pages.page(
      title, tag("h1", title), tag(
          "main", section("runs", "Runs", table(["run", *head], rows, "Runs"), pages.pairs(
              [(name, str(history.workdir)) for history, name in zip(histories, names, strict=True)])),
          section("evaluations", "Evaluations", dim("The last value, and in brackets the best where it is known which "
                                                    "way is better; the best of all runs is bold."),
                  table(["metric", *names], evaluated, "Evaluations") if evaluated else tag("p", "None were made.")),
          section("config", "Where the configs differ", table(
              ["key", *configured], differences[:configs.MOST_KEYS], "Keys that differ", "words")
              if differences else tag("p", "Nowhere."),
              dim("Of the other runs there is no config.json.") if len(configured) < len(names) else "",
              dim(f"{counted(len(differences) - configs.MOST_KEYS, 'key')} more.")
              if len(differences) > configs.MOST_KEYS else ""),
          section("curves", "Curves", tools, *page.curves(groups, found)),
          section("throughput", "Throughput", *[charts for name, charts in groups if name == series.THROUGHPUT]
                  or [tag("p", "Nothing was measured.")]),
          dim(*(f"{name}: {problem}" for history, name in zip(histories, names, strict=True)
                for problem in history.problems))), page.written())


def short_names(workdirs: Sequence[Path]) -> list[str]:
  """The folders' names, with as many of their parents as tell them apart."""
  for depth in range(1, max(len(path.parts) for path in workdirs) + 1):
    names = ["/".join(path.parts[-depth:]).replace("//", "/") for path in workdirs]
    if len(set(names)) == len(names):
      return names
  return [str(path) for path in workdirs]


def facts_of(history: History) -> dict[str, Any]:
  """A run in figures: what stands at the top of its page, its devices and Weft's version."""
  state = status(history)
  ran = dict(page.start_rows(history.starts[-1])) if history.starts else {}
  return {"": tag("span", state.word, class_=f"status {state.kind}"), **dict(page.tiles(history, state)),
          **{what: ran[what] for what in ("devices", "Weft") if what in ran}}


def evaluations(histories: Sequence[History]) -> list[list[Any]]:
  """A row for each metric of an evaluator: of each run its last value, with the step if it trained on, and its best."""
  names = dict.fromkeys(name for history in histories for name in history.metrics
                        if series.group_of(name) == "Evaluations")
  steps = [status(history).step for history in histories]
  rows, sources = [], [source for history in histories for source in sources_of(history.config)]
  for name in names:
    found = [series.figures(name, history.metrics[name], sources) if name in history.metrics else None
             for history in histories]
    lasts = [one.last[1] for one in found if one is not None]
    which = next(({"lower": min, "higher": max}.get(one.better) for one in found if one is not None), None)
    best = which(lasts) if which is not None and len(lasts) > 1 else None
    cells = []
    for one, step in zip(found, steps, strict=True):
      older = one is not None and one.last[0] < step
      text = "" if one is None else number(one.last[1]) + (f" at step {one.last[0]:,}" if older else "") + (
          "" if one.best is None else f" ({number(one.best[1])})")
      is_best = one is not None and best is not None and one.last[1] == best
      cells.append(tag("td", text, class_="best" if is_best else ""))
    if lasts:
      rows.append([name.removeprefix("eval/"), *cells])
  return rows
