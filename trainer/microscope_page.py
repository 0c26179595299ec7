"""The page of the token microscope: coloured text, with the numbers of the token that is pointed at.

One file with its own style and script, which asks no network for anything (its policy forbids it to). Texts come from
data and models: they are escaped where they are HTML, and are never made into HTML by the script.
"""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any, NamedTuple

import numpy as np

from trainer import pages

# Colours are full from this quantile of the page's values on, so that one odd token does not pale the others.
_FULL = 0.98


class Column(NamedTuple):
  """What can be coloured.

  Attributes:
    key: of the values.
    label: on the switch.
    kind: high: the more the stronger; low: the lower below 0; signed: around 0; ratio: around 1; rank: above 1.
    says: the two ends of the scale, in words.
  """

  key: str
  label: str
  kind: str
  says: tuple[str, str]


COLUMNS = (
    Column("weights", "weight", "high", ("not trained", "most")),
    Column("logprobs", "log p", "low", ("certain", "unlikely")),
    Column("ref_logprobs", "log p, reference", "low", ("certain", "unlikely")),
    Column("ref_log_ratios", "log p/p_ref", "signed", ("less likely", "more likely")),
    Column("behavior_logprobs", "log p, sampled", "low", ("certain", "unlikely")),
    Column("old_logprobs", "log p, old", "low", ("certain", "unlikely")),
    Column("ratios", "ratio p/p_old", "ratio", ("less likely", "more likely")),
    Column("advantages", "advantage", "signed", ("worse", "better")),
    Column("clipped", "bounded", "high", ("no", "yes")),
    Column("entropies", "entropy", "high", ("certain", "open")),
    Column("ranks", "rank", "rank", ("most likely", "far down")),
)
# Log-probs of one page share a scale, to be compared; the largest value of these, however rare, has the full colour.
_SHARED = ("logprobs", "ref_logprobs", "behavior_logprobs", "old_logprobs")
_WHOLE = ("weights", "advantages", "clipped")
# Scales end no earlier: rounding is not to look like a difference.
_LEAST = {"logprobs": 1.0, "entropies": 0.1, "ranks": math.log(2), "ratios": 0.02, "ref_log_ratios": 0.02}


class Segment(NamedTuple):
  """A segment of a row; all lists have one entry a token.

  Attributes:
    number: from 1.
    label: what it is, or "".
    sums: (what, value) of all of it.
    texts, ids, positions: of the tokens that are shown.
    values: of these by column; None: it has none.
    instead: the texts of the likeliest tokens in their places.
    images: the number of the image that a token is part of, 0: of none.
    pictures: pixels of these images, uint8 [S, S, 3].
    left_out: tokens behind those shown.
  """

  number: int
  label: str
  sums: list[tuple[str, str]]
  texts: list[str]
  ids: list[int]
  positions: list[int]
  values: dict[str, list[Any]]
  instead: list[str]
  images: list[int]
  pictures: Mapping[int, np.ndarray]
  left_out: int


class Row(NamedTuple):
  """A row: its number, source and loss, and its segments, in groups that stand side by side."""

  number: int
  source: str | None
  loss: float
  groups: list[list[Segment]]


def listed(values: np.ndarray) -> list[Any]:
  """Numbers of five digits, None where masked, texts for those that JSON does not have."""
  def told(x: Any) -> Any:
    if x is None or isinstance(x, int):
      return x
    return float(f"{x:.5g}") if math.isfinite(x) else str(x)

  return [told(x) for x in np.ma.asarray(values).tolist()]


def visible(text: str) -> str:
  """Line breaks marked where they are, other characters that cannot be seen as escapes; a dot for no text."""
  shown = "".join(c if c.isprintable() or c in "\n " else repr(c)[1:-1] for c in text)
  return shown.replace("\n", "⏎\n") or "·"


def page(title: str, notes: Sequence[str], rows: Sequence[Row], columns: Sequence[Column]) -> str:
  """The page."""
  segments = [segment for row in rows for group in row.groups for segment in group]
  scales = {column.key: _scale(column, segments) for column in columns}
  shared = max((scales[key] for key in _SHARED if key in scales), default=1.0)
  scales |= {key: shared for key in _SHARED if key in scales}
  told = [dict(key=c.key, label=c.label, kind=c.kind, says=c.says, scale=scales[c.key]) for c in columns]
  parts: list[dict[str, Any]] = []
  body = "".join(_row(row, parts) for row in rows)
  switch = "".join(
      f'<label><input type="radio" name="column" value="{i}"{" checked" if column.key == "logprobs" else ""}>'
      f"<span>{_told(column.label)}</span></label>" for i, column in enumerate(columns))
  data = json.dumps(dict(columns=told, parts=parts), separators=(",", ":")).replace("<", "\\u003c")
  # One pass: nothing that comes from data is looked at again.
  told_notes = "".join(f"<p>{_told(note)}</p>" for note in notes)
  return Template(_PAGE).substitute(title=_told(title), notes=told_notes, switch=switch, rows=body, data=data)


def _told(text: str) -> str:
  return escape(visible(text))


def _scale(column: Column, segments: Sequence[Segment]) -> float:
  """Where the colour is full: of the value itself, or of its logarithm for ratios and ranks."""
  values = [x for s in segments for x in s.values.get(column.key, ()) if isinstance(x, int | float)]
  if column.kind in ("ratio", "rank"):
    values = [math.log(max(x, 1e-30)) for x in values]
  sizes = np.abs(np.array(values or [0.0], np.float64))
  most = sizes.max() if column.key in _WHOLE else np.quantile(sizes, _FULL)
  return float(f"{max(most, _LEAST.get(column.key, 1e-6)):.4g}")


def _row(row: Row, parts: list[dict[str, Any]]) -> str:
  source = f" · {_told(row.source)}" if row.source else ""
  groups = ("".join(_segment(segment, row, parts) for segment in group) for group in row.groups)
  return (f"<section><h2>row {row.number}{source} · loss {row.loss:.4f}</h2>"
          + "".join(f'<div class="group">{group}</div>' for group in groups) + "</section>\n")


def _segment(segment: Segment, row: Row, parts: list[dict[str, Any]]) -> str:
  """The HTML of a segment; its numbers, a list for each column, are added to `parts` in the order of its elements."""
  shown, spans, image = [], [], 0
  for i, text in enumerate(segment.texts):
    if segment.images[i] and segment.images[i] == image:
      continue  # an image is one element
    image, trained = segment.images[i], ' class="trained"' if segment.values["weights"][i] else ""
    shown.append(i)
    if image:
      picture = pages.picture(segment.pictures[image]) if image in segment.pictures else ""
      spans.append(f'<i class="image">{picture}⟨image: {segment.images.count(image)} tokens⟩</i>')
    else:
      spans.append(f"<i{trained}>{_told(text)}</i>")
  parts.append(dict(
      row=row.number, segment=segment.number, ids=[segment.ids[i] for i in shown],
      positions=[segment.positions[i] for i in shown], instead=[visible(segment.instead[i]) for i in shown],
      values={key: [values[i] for i in shown] for key, values in segment.values.items()}))
  label = f" · {_told(segment.label)}" if segment.label else ""
  sums = "".join(f"<span><b>{_told(what)}</b> {_told(value)}</span>" for what, value in segment.sums)
  more = f'<p class="more">… {segment.left_out:,} more token(s) of this segment</p>' if segment.left_out else ""
  return (f'<article><h3>segment {segment.number}{label}</h3><p class="sums">{sums}</p>'
          f'<div class="tokens" tabindex="0" role="group" aria-label="tokens of row {row.number}, segment '
          f'{segment.number}; arrow keys move">{"".join(spans)}</div>{more}</article>')


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<title>$title</title>
<style>
:root { color-scheme: light dark; --page: #fff; --ink: #1c1e21; --line: #8885; --bar: #f4f5f7;
  --trained: 120 125 135;
  --strong: 214 120 0; --more: 25 118 210; --less: 205 60 40; }
@media (prefers-color-scheme: dark) { :root { --page: #17191c; --ink: #e4e6e9; --bar: #24272c;
  --trained: 150 155 165;
  --strong: 225 140 30; --more: 70 150 245; --less: 230 90 65; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; background: var(--page); color: var(--ink); }
header, main { max-width: 76rem; margin: 0 auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 1rem 0 .3rem; } header p { margin: 0 0 .3rem; overflow-wrap: anywhere; }
#bar { position: sticky; top: 0; z-index: 2; background: var(--bar); border-block: 1px solid var(--line); }
#bar > div { max-width: 76rem; margin: 0 auto; padding: .4rem 1rem; }
#switch { display: flex; flex-wrap: wrap; gap: .3rem; }
#switch label span { display: block; padding: .1rem .55rem; border: 1px solid var(--line); border-radius: 1rem;
  font-size: .85rem; cursor: pointer; }
#switch input { position: absolute; opacity: 0; }
#switch input:checked + span { background: var(--ink); color: var(--page); }
#switch input:focus-visible + span { outline: 2px solid rgb(var(--more)); outline-offset: 2px; }
#legend { display: flex; align-items: center; gap: .5rem; font-size: .8rem; margin-top: .35rem; }
#legend i { flex: 0 1 9rem; height: .8rem; border: 1px solid var(--line); border-radius: .2rem; }
section { border-top: 1px solid var(--line); margin-top: 1.2rem; } section:first-child { border: 0; margin: 0; }
h2 { font-size: 1rem; margin: .7rem 0 .2rem; } h3 { font-size: .85rem; margin: .5rem 0 0; font-weight: 600; }
.group { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 1.2rem; }
.group article { min-width: 0; }
.sums { margin: 0 0 .2rem; font-size: .8rem; display: flex; flex-wrap: wrap; gap: 0 .9rem; opacity: .85; }
.sums b, dt { font-weight: 400; opacity: .75; }
.tokens { font: 14px/1.75 ui-monospace, monospace; white-space: break-spaces; overflow-wrap: anywhere; }
.tokens:focus-visible { outline: 2px solid rgb(var(--more)); outline-offset: 3px; }
.tokens i { font-style: normal; border-radius: .15rem; cursor: pointer; padding: .08rem 0; }
.tokens i:hover, .tokens i.chosen { outline: 2px solid var(--ink); position: relative; }
.tokens i.trained { box-shadow: inset 0 -2px rgb(var(--trained)); }
.tokens i.none { opacity: .65; } .tokens i.odd { outline: 2px dotted rgb(var(--less)); }
.tokens .image { display: inline-block; border: 1px solid var(--line); padding: .2rem .4rem; margin: .1rem .2rem; }
img { max-width: 9rem; display: block; } img.small { width: 5rem; image-rendering: pixelated; }
.more { margin: .2rem 0; font-size: .85rem; opacity: .8; }
main { padding-bottom: 15rem; }
#told { position: fixed; inset: auto 0 0 0; z-index: 3; background: var(--bar); border-top: 1px solid var(--line);
  max-height: 42vh; overflow: auto; }
#told > div { max-width: 76rem; margin: 0 auto; padding: .5rem 1rem .7rem; }
#text { font: 14px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
#where { font-size: .8rem; opacity: .8; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .1rem 1rem; margin: .3rem 0 0; }
dl div { display: flex; justify-content: space-between; gap: .5rem; font-size: .85rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; white-space: nowrap; }
</style></head><body>
<header><h1>$title</h1>$notes<noscript><p>Colours and numbers need scripts; the numbers are in the file beside this
one, too.</p></noscript></header>
<div id="bar"><div><div id="switch" role="radiogroup" aria-label="what the colour shows">$switch</div>
<div id="legend"><span></span><i></i><span></span></div></div></div>
<main>$rows</main>
<aside id="told" aria-live="polite"><div>
<span id="text">Point at a token, tap it, or reach it with the arrow keys.</span>
<div id="where"></div><dl></dl></div></aside>
<script type="application/json" id="data">$data</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const boxes = [...document.querySelectorAll(".tokens")];
const tokens = boxes.map(box => [...box.children]);
const place = new Map();
tokens.forEach((list, b) => list.forEach((element, t) => place.set(element, [b, t])));
let chosen = null;

// From -1 to 1: how strong the colour is, and which.
function strength(column, x) {
  if (column.kind === "ratio" || column.kind === "rank") x = Math.log(Math.max(x, 1e-30));
  if (column.kind === "low") x = -x;
  return Math.max(-1, Math.min(1, x / column.scale));
}
const twoSided = column => column.kind === "signed" || column.kind === "ratio";
function colour(column, s) {
  const name = twoSided(column) ? (s < 0 ? "--less" : "--more") : "--strong";
  return Math.abs(s) < 0.004 ? "" : "rgb(var(" + name + ") / " + (0.08 + 0.52 * Math.abs(s)).toFixed(3) + ")";
}
function number(x) {
  if (x === null || x === undefined) return "–";
  return typeof x === "string" ? x : String(x).replace("-", "−");
}
function paint() {
  const column = data.columns[document.querySelector("#switch input:checked").value];
  tokens.forEach((list, b) => {
    const values = data.parts[b].values[column.key];
    list.forEach((element, t) => {
      const x = values ? values[t] : null;
      element.classList.toggle("none", x === null);
      element.classList.toggle("odd", typeof x === "string");
      element.style.backgroundColor = typeof x === "number" ? colour(column, strength(column, x)) : "";
    });
  });
  const [left, bar, right] = document.getElementById("legend").children;
  const end = column.kind === "ratio" || column.kind === "rank" ? Math.exp(column.scale) : column.scale;
  const short = x => String(Number(x.toPrecision(3))).replace("-", "−");
  const low = column.kind === "signed" ? -end : column.kind === "ratio" ? 1 / end : column.kind === "rank" ? 1 : 0;
  left.textContent = column.says[0] + " " + short(low);
  right.textContent = short(column.kind === "low" ? -end : end) + " " + column.says[1];
  const stops = (twoSided(column) ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1]).map(s => colour(column, s) || "transparent");
  bar.style.background = "linear-gradient(to right, " + stops.join(", ") + ")";
}
function tell(element) {
  const [b, t] = place.get(element), part = data.parts[b];
  document.getElementById("text").textContent = "“" + element.textContent.replaceAll(" ", "␣") + "”";
  document.getElementById("where").textContent = "id " + part.ids[t] + " · position " + part.positions[t] +
    " · segment " + part.segment + " · row " + part.row;
  const list = document.querySelector("#told dl"), lines = [];
  for (const column of data.columns) {
    const x = part.values[column.key] ? part.values[column.key][t] : null;
    lines.push([column.label, number(x)]);
    if (column.key === "logprobs" && typeof x === "number") lines.push(["p", Math.exp(x).toPrecision(3)]);
    if (column.key === "ranks" && x > 1) lines.push(["most likely", "“" + part.instead[t].replaceAll(" ", "␣") + "”"]);
  }
  list.replaceChildren(...lines.map(([what, value]) => {
    const line = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = what; dd.textContent = value; line.append(dt, dd);
    return line;
  }));
}
function choose(element) {
  if (chosen) chosen.classList.remove("chosen");
  chosen = element;
  element.classList.add("chosen");
  tell(element);
}
const token = event => event.target.closest(".tokens > i");
const main = document.querySelector("main");
main.addEventListener("click", event => { if (token(event)) choose(token(event)); });
if (matchMedia("(hover: hover)").matches) {
  main.addEventListener("mouseover", event => { if (token(event)) tell(token(event)); });
  main.addEventListener("mouseleave", () => { if (chosen) tell(chosen); });
}
boxes.forEach((box, b) => {
  box.addEventListener("focus", () => {
    if (box.matches(":focus-visible") && !(chosen && box.contains(chosen)) && tokens[b].length) choose(tokens[b][0]);
  });
  box.addEventListener("keydown", event => {
    const list = tokens[b], last = list.length - 1;
    const now = chosen && box.contains(chosen) ? place.get(chosen)[1] : -1;
    const to = {ArrowRight: Math.min(now + 1, last), ArrowLeft: Math.max(now - 1, 0), Home: 0, End: last}[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    choose(list[to]);
    list[to].scrollIntoView({block: "nearest"});
  });
});
document.getElementById("switch").addEventListener("change", paint);
paint();
</script></body></html>
"""
