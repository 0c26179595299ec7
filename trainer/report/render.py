"""From what is to be shown to a page: the templates, and numbers for people."""

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from trainer import whole_files
from trainer.report.configs import weft_version
from trainer.report.series import Chart, Charts, Figures, figures

_FOLDER = Path(__file__).parent / "templates"


def page(template: str, payload: dict[str, Any], **context: Any) -> str:
  """A page by its template, with `payload` for charts.js."""
  environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, trim_blocks=True,
                                   lstrip_blocks=True, undefined=jinja2.StrictUndefined)
  script = (_FOLDER / "charts.js").read_text(encoding="utf-8")
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  return environment.get_template(template).render(
      style=Markup((_FOLDER / "style.css").read_text(encoding="utf-8")), script=Markup(script),
      script_hash=f"sha256-{digest}", data=script_json(payload), weft=weft_version(),
      written=when(time.time()), **context)


def script_json(content: Any) -> Markup:
  """JSON that can stand in a <script>: nothing in it ends that, or begins a comment."""
  text = json.dumps(content, separators=(",", ":"), allow_nan=False)
  for character in "<>&\u2028\u2029":
    text = text.replace(character, f"\\u{ord(character):04x}")
  return Markup(text)


def save(path: Path, html: str) -> Path:
  """Writes a page, which is whole or not there. What UTF-8 cannot hold becomes a question mark."""
  whole_files.write(path, html.encode("utf-8", errors="replace"))
  return path


# ----------------------------------------------------------------------------------------------
# Numbers for people.


def number(value: Any) -> str:
  """Five digits of a number; whole ones in full."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return str(value)
  if isinstance(value, int) or (abs(value) < 1e15 and value == int(value)):
    return f"{int(value):,}"
  return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.5g}"


def in_short(value: float) -> str:
  """A large number with its unit."""
  for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
    if abs(value) >= factor:
      return f"{value / factor:.3g} {unit}"
  return number(value)


def span(seconds: float) -> str:
  """A time in its two largest units."""
  if seconds < 1:
    return f"{seconds * 1e3:.3g} ms"
  if seconds < 60:
    return f"{seconds:.3g} s"
  units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
  (large, length), (small, part) = next(pair for pair in zip(units, units[1:], strict=False) if seconds >= pair[0][1])
  return f"{int(seconds // length)} {large} {int(seconds % length // part)} {small}"


def size(count: float) -> str:
  """Bytes."""
  for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= factor:
      return f"{count / factor:,.1f} {unit}"
  return f"{count:,.0f} B"


def when(seconds: float | None) -> str:
  """A time since 1970, in UTC; "" for None."""
  try:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
  except (ValueError, OverflowError, OSError):
    return ""


def at_step(pair: tuple[int, float] | None) -> str:
  """A value and its step."""
  return "" if pair is None else f"{number(pair[1])} at {pair[0]:,}"


def counted(count: int, what: str) -> str:
  """1 note, 2 notes."""
  return f"{count:,} {what}{'' if count == 1 else 's'}"


def shown(chart: Chart, place: int, runs: list[str]) -> dict[str, Any]:
  """A chart for the template: its number, title, legend and figures."""
  found = [(runs[line.run] if len(runs) > 1 else line.label, figures(chart.title, line.column)) for line in chart.lines]
  legend = [label for label, _ in found] if len(runs) == 1 and len(found) > 1 else []
  parts = [f"{label}: {_figures(values)}" if label else _figures(values) for label, values in found[:8]]
  if len(found) > 8:
    parts.append(f"and {len(found) - 8} more")
  parts.append(counted(max((values.count for _, values in found if values is not None), default=0), "row"))
  return {"number": place, "title": chart.title, "legend": legend, "summary": "; ".join(parts)}


def _figures(values: Figures | None) -> str:
  if values is None:
    return "no finite value"
  if values.count == 1:
    return at_step(values.last)
  return f"last {at_step(values.last)}, between {number(values.least)} and {number(values.greatest)}"


def left_out(charts: Charts, fewer: bool) -> list[str]:
  """What the page does not show, in sentences."""
  lines = []
  if fewer:
    lines.append("Not every row is drawn: of equal parts of each curve the page has the least and the greatest value, "
                 "so that nothing that stands out is missing. metrics.jsonl has them all.")
  if charts.left_out:
    names = ", ".join(charts.left_out[:40])
    lines.append(f"{counted(len(charts.left_out), 'metric')} without a chart: {names}"
                 f"{' …' if len(charts.left_out) > 40 else ''}")
  return lines
