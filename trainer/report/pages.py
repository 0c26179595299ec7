"""One HTML file without any other, of sections, tables, charts, bars, pictures and coloured tokens.

The report, the token microscope, the plan, `--mode=inspect` and samples are made of these elements. What comes from
data, models and configs is escaped, and the page forbids itself to load anything or to run any script but its own
(templates/page.js, which draws charts and colours tokens from the `data-` attributes of their elements).
"""

import base64
import hashlib
import io
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from trainer import atomic

_FOLDER = Path(__file__).parent / "templates"
# Cards of a page of samples, so that a browser can open it.
MOST_CARDS = 96


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
  """An element. Children that are no Markup are escaped; `class_` is class, `data_x` is data-x; None and "" are left
  out, and so is False."""
  given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items()
                  if value is not None and value is not False and value != "")
  return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Markup:
  """Elements one after another."""
  return Markup("").join(children)


def page(title: str, *parts: Any, columns: Sequence[Mapping[str, Any]] = ()) -> str:
  """The page.

  Args:
    title: of the window; the parts have a heading of their own.
    columns: what colours tokens: {key, label, kind, says, scale}, see `tokens`; the first is shown at first.
  """
  script = (_FOLDER / "page.js").read_text(encoding="utf-8")
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
  return "<!doctype html>\n" + str(tag(
      "html", tag("head", Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, '
                                 f'initial-scale=1"><meta http-equiv="Content-Security-Policy" content="{policy}">'),
                  tag("title", title), tag("style", Markup((_FOLDER / "style.css").read_text(encoding="utf-8")))),
      tag("body", _switch(columns) if columns else "", *parts, _panel() if columns else "",
          tag("script", Markup(script))), lang="en"))


def save(path: Path, html: str) -> Path:
  """Writes a page, which is whole or not there. What UTF-8 cannot hold becomes a question mark."""
  atomic.write(path, html.encode("utf-8", errors="replace"))
  return path


# ----------------------------------------------------------------------------------------------
# Elements.


def section(name: str, title: str, *parts: Any) -> Markup:
  return tag("section", tag("h2", title), *parts, id=name)


def details(summary: Any, *parts: Any, open_: bool = False, **attributes: Any) -> Markup:
  return tag("details", tag("summary", summary), *parts, open="open" if open_ else None, **attributes)


def dim(*lines: Any) -> Markup:
  """Sentences in small print."""
  return join(tag("p", line, class_="dim") for line in lines)


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], label: str, kind: str = "") -> Markup:
  """A table that scrolls by itself. `kind`: words, where cells are texts that may be broken."""
  body = [tag("tr", *(cell if isinstance(cell, Markup) and cell.startswith("<td") else tag("td", cell)
                      for cell in row)) for row in rows]
  return tag("div", tag("table", tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
                        tag("tbody", *body), class_=kind),
             class_="wide", tabindex="0", role="region", aria_label=label)


def pairs(rows: Iterable[tuple[Any, Any]], kind: str = "pairs") -> Markup:
  """Names with their values. `kind`: pairs, in two columns; facts, in running lines; tiles."""
  return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows), class_=kind)


def bars(rows: Sequence[tuple[str, float, str]], label: str) -> Markup:
  """Horizontal bars: (name, length, text behind it)."""
  most = max([length for _, length, _ in rows], default=0.0) or 1.0
  return tag("figure", tag("figcaption", tag("h4", label)), tag("dl", *(
      tag("div", tag("dt", name), tag("dd", tag("i", style=f"width:{100 * max(length, 0) / most:.1f}%"),
                                      tag("span", text))) for name, length, text in rows), class_="bars"))


def chart(title: str, lines: Sequence[Mapping[str, Any]], levels: Sequence[tuple[str, float]], summary: str) -> Markup:
  """Curves over steps.

  Args:
    lines: {label, run, x: steps, y: values, None where not finite} of each.
    levels: (label, value) of horizontal lines.
    summary: in figures; it is all that there is where scripts do not run.
  """
  legend = [tag("li", swatch(i), line["label"]) for i, line in enumerate(lines) if line["label"]]
  data = {"lines": lines, "levels": levels}
  return tag("figure", tag("figcaption", tag("h4", title)), tag("ul", *legend, class_="legend") if legend else "",
             tag("div", class_="plot"), tag("p", summary, class_="summary"), data_chart=_json(data))


def chart_tools(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Markup:
  """The switches of all charts. `runs`: (name, {axis: [steps, where they are on that axis]}) of each run."""
  axes = [tag("label", Markup(f'<input type="radio" name="axis" value="{axis}"{" checked" * (axis == "step")}> '), text)
          for axis, text in (("step", "steps"), ("tokens", "tokens"), ("seconds", "time since the first start"))]
  boxes = [tag("label", Markup(f'<input type="checkbox" name="{name}"> '), text)
           for name, text in (("log", "logarithmic"), ("smooth", "means of 1/40 of the rows"))]
  shown = [tag("label", Markup(f'<input type="checkbox" name="run" value="{i}" checked> '), swatch(i), name)
           for i, (name, _) in enumerate(runs)] if len(runs) > 1 else []
  return tag("form", *axes, *boxes, *shown, class_="tools", data_runs=_json(
      [{"name": name, **places} for name, places in runs]), aria_label="All charts")


def swatch(number: int) -> Markup:
  """The colour of a line."""
  return tag("span", class_=f"swatch l{number % 8}")


def picture(image: Any) -> Markup:
  """An image, uint8 [S, S, 3], within the page; small ones are enlarged without smoothing. Of squares [K, S, S, 3] the
  last, which is all of the image; of a video all frames from left to right."""
  from PIL import Image  # only where there are images
  held, image = io.BytesIO(), np.asarray(image.picture() if hasattr(image, "picture") else image)
  image = image[-1] if image.ndim == 4 else image
  Image.fromarray(image).save(held, format="PNG", optimize=True)
  url = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
  kind = ' class="small"' if image.shape[0] < 64 else ""
  return Markup(f'<img{kind} alt="{image.shape[1]} × {image.shape[0]} pixels" src="{url}">')


# ----------------------------------------------------------------------------------------------
# Tokens in colours.


def tokens(shown: Iterable[Markup], values: Mapping[str, Sequence[Any]], label: str, **more: Any) -> Markup:
  """Tokens that can be pointed at, and have the colour of one of their numbers.

  Args:
    shown: an element a token, of `token`.
    values: of each token by the key of a column; None: it has none.
    label: what they are, for readers that cannot see.
    more: `where`: a text, and lists with an entry a token: `ids`, `positions`, `instead` (the likeliest).
  """
  return tag("div", *shown, class_="tokens", tabindex="0", role="group", aria_label=f"{label}; arrow keys move",
             data_tokens=_json({"values": values, **more}))


def token(text: str, trained: bool = False) -> Markup:
  return tag("i", visible(text) or "·", class_="trained" if trained else "")


def listed(values: np.ndarray) -> list[Any]:
  """Numbers of five digits, None where masked, texts for those that JSON does not have."""
  return [x if x is None or isinstance(x, int) else float(f"{x:.5g}") if math.isfinite(x) else str(x)
          for x in np.ma.asarray(values).tolist()]


def visible(text: str) -> str:
  """Line breaks marked where they are, other characters that cannot be seen as escapes."""
  shown = "".join(c if c.isprintable() or c in "\n " else repr(c)[1:-1] for c in text)
  return shown.replace("\n", "⏎\n")


def _switch(columns: Sequence[Mapping[str, Any]]) -> Markup:
  """What the colour shows, and its scale."""
  choices = [tag("label", Markup(f'<input type="radio" name="column" value="{i}"{" checked" * (i == 0)}>'),
                 tag("span", column["label"])) for i, column in enumerate(columns)]
  legend = tag("div", tag("span"), tag("i"), tag("span"), id="legend")
  return tag("div", tag("div", *choices, id="switch", role="radiogroup", aria_label="what the colour shows",
                        data_columns=_json(columns)), legend, id="bar")


def _panel() -> Markup:
  """The numbers of the token that is pointed at."""
  return tag("aside", tag("span", "Point at a token, tap it, or reach it with the arrow keys.", id="text"),
             tag("div", id="where"), tag("dl", class_="facts"), id="told", aria_live="polite")


def _json(content: Any) -> str:
  return json.dumps(content, separators=(",", ":"), allow_nan=False)


# ----------------------------------------------------------------------------------------------
# Cards: samples of generate, classify and rollouts.


class Card(NamedTuple):
  """One example.

  Attributes:
    title: a line above it.
    images: see `picture`.
    lines: (what it is, its text).
    right: whether it is right; None: nobody says.
  """

  title: str
  images: Sequence[Any] = ()
  lines: Sequence[tuple[str, Any]] = ()
  right: bool | None = None

  def __html__(self) -> Markup:
    kind, mark = {None: ("", ""), True: (" right", "right: "), False: (" wrong", "wrong: ")}[self.right]
    return tag("article", tag("h3", f"{mark}{self.title}") if mark or self.title else "", *map(picture, self.images),
               pairs([(what, text or tag("i", "nothing")) for what, text in self.lines], "lines"), class_=f"card{kind}")


def cards_page(title: str, cards: Sequence[Card], total: int, notes: str = "") -> str:
  """The page of the first of `total` examples: `notes` with their line breaks, and a grid of cards."""
  count = f"{total} examples" if len(cards) == total else f"the first {len(cards)} of {total} examples"
  return page(title, tag("h1", title), tag("pre", notes), tag("p", count), tag("div", *cards, class_="cards"))


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
  if seconds < 60:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
  units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
  (large, length), (small, part) = next(pair for pair in zip(units, units[1:], strict=False) if seconds >= pair[0][1])
  return f"{int(seconds // length)} {large} {int(seconds % length // part)} {small}"


def size(count: float, digits: int = 1) -> str:
  """Bytes."""
  for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= factor:
      return f"{count / factor:,.{digits}f} {unit}"
  return f"{count:,.0f} B"


def when(seconds: float | None) -> str:
  """A time since 1970, in UTC; "" for None."""
  try:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
  except (ValueError, OverflowError, OSError):
    return ""


def counted(count: int, what: str) -> str:
  """1 note, 2 notes."""
  return f"{count:,} {what}{'' if count == 1 else 's'}"
