"""Reports as tests read them: a page taken apart, and workdirs that no run has made."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Page(HTMLParser):
  """A page taken apart.

  Attributes:
    tags: (name, attributes) of every element, in order.
    tables: {label: rows of cells}.
    charts: {title: what is drawn, see pages.chart}; runs: names.
    scripts: contents of those that run.
    texts: {id of a section: its text}; "": all of it.
    said: (texts of tokens, what the page knows of them) of each text in colours, see pages.tokens.
  """

  def __init__(self, html: str):
    super().__init__()
    self.html, self.tags, self.tables, self.scripts, self.charts, self.runs = html, [], {}, [], {}, []
    self.texts, self.said = {"": ""}, []
    self._open, self._sections, self._label, self._chart = [], [], "", None
    self.feed(html)
    self.close()
    assert self._open == [], "elements that are not closed"

  def handle_starttag(self, tag, attributes):
    attributes = dict(attributes)
    assert not any(name.startswith("on") for name in attributes), attributes
    self.tags.append((tag, attributes))
    if tag in VOID:
      return
    self._open.append((tag, attributes))
    if tag == "section":
      self._sections.append(attributes["id"])
      self.texts[attributes["id"]] = ""
    if tag == "div" and attributes.get("role") == "region":
      self._label = attributes["aria-label"]
      self.tables[self._label] = []
    if tag == "tr":
      self.tables[self._label].append([])
    if tag in ("td", "th"):
      self.tables[self._label][-1].append("")
    if "data-chart" in attributes:
      self._chart = json.loads(attributes["data-chart"])
    if "data-runs" in attributes:
      self.runs = [run["name"] for run in json.loads(attributes["data-runs"])]
    if "data-tokens" in attributes:
      self.said.append(([], json.loads(attributes["data-tokens"])))
    if tag == "i" and self._within("tokens"):
      self.said[-1][0].append("")

  def _within(self, kind):
    return any(of.get("class") == kind for _, of in self._open)

  def handle_endtag(self, tag):
    assert self._open and self._open[-1][0] == tag, f"</{tag}> within {self._open[-1:]}"
    self._open.pop()
    if tag == "section":
      self._sections.pop()

  def handle_data(self, data):
    tag = self._open[-1][0] if self._open else ""
    if tag == "script":
      self.scripts.append(data)
    if tag in ("script", "style"):
      return
    for name in ("", *self._sections[-1:]):
      self.texts[name] += data
    if any(name in ("td", "th") for name, _ in self._open):
      self.tables[self._label][-1][-1] += data
    if tag == "h4" and self._chart:
      self.charts[data] = self._chart
    if tag == "i" and self._within("tokens"):
      self.said[-1][0][-1] += data

  def series(self, run: int = 0) -> dict[str, dict[int, float | None]]:
    """{metric: {step: value}} of a run as drawn, of charts with one line; `metric label` of others."""
    return {f"{title} {line['label']}".strip(): dict(zip(line["x"], line["y"], strict=True))
            for title, chart in self.charts.items() for line in chart["lines"] if line["run"] == run}

  def pairs(self, section: str) -> str:
    """The text of a section with single spaces."""
    return re.sub(r"\s+", " ", self.texts[section])


def read(path: Path) -> Page:
  """The page in a file, which must be self-contained and have no script but ours."""
  page = Page(path.read_text(encoding="utf-8"))
  assert page.html.startswith("<!doctype html>")
  (script,) = page.scripts
  digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
  (policy,) = [of["content"] for tag, of in page.tags if tag == "meta" and "http-equiv" in of]
  assert policy == (
      f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'")
  assert not {tag for tag, _ in page.tags} & {"img", "link", "iframe", "object", "embed", "base"}
  for _, attributes in page.tags:
    assert "src" not in attributes
    assert re.match(r"#|samples/|$", attributes.get("href", "")), attributes
  style = page.html.split("<style>")[1].split("</style>")[0]
  assert "url(" not in style and "@import" not in style
  assert re.findall(r"https?://\S+", script) == ['http://www.w3.org/2000/svg",']  # a name, which nothing fetches
  return page


def write_run(folder: Path, rows: list[dict], **files: object) -> Path:
  """A workdir with these rows of metrics; `files`: JSON by the name of its file, `run` is run.json."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  for name, content in files.items():
    path = folder / (name if "." in name else f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
  return folder
