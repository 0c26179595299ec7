"""Pages in a real browser, without a driver: headless Chromium shows a page within another of a given width.

    python -m tests.browser PAGE FOLDER        pictures of a page: 390 and 1280 pixels wide, light and dark
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = (390, 1280)
SECONDS = 120
# A busy machine may end a page before it is drawn.
TRIES = 3

# What a page looks like from outside: asked in the page that holds it, once everything is laid out.
_MEASURE = """
const inside = document.querySelector("iframe").contentDocument, found = {};
const root = inside.documentElement, width = root.clientWidth;
found.width = width;
found.scroll = root.scrollWidth;
found.height = root.scrollHeight;
found.charts = [...inside.querySelectorAll("figure[data-chart]")].map(figure => [
  figure.querySelector("h4").textContent,
  [...figure.querySelectorAll("path.line")].map(path => (path.getAttribute("d").match(/[ML]/g) || []).length)]);
// Elements that stick out, unless something around them scrolls.
const styleOf = element => inside.defaultView.getComputedStyle(element);
const scrolls = element => element && (["auto", "scroll"].includes(styleOf(element).overflowX)
                                       || scrolls(element.parentElement));
found.wide = [...inside.body.querySelectorAll("*")]
  .filter(element => element.getBoundingClientRect().right > width + 1 && !scrolls(element.parentElement))
  .map(element => `${element.tagName}.${element.className} ${element.textContent.slice(0, 40)}`);
// Texts with less contrast to what is behind them than WCAG 2 wants (4.5).
const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
const channel = value => value <= 10.31475 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const behind = element => {
  if (!element) return [255, 255, 255];
  const colour = numbers(styleOf(element).backgroundColor);
  return colour.length === 4 && colour[3] === 0 ? behind(element.parentElement) : colour;
};
found.pale = new Set();
for (const element of inside.body.querySelectorAll("*")) {
  if (["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName) || !element.checkVisibility()) continue;
  if (![...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
  const style = styleOf(element), svg = element.namespaceURI.endsWith("svg");
  const [a, b] = [light(numbers(svg ? style.fill : style.color)), light(behind(element))].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < 4.5) found.pale.add(`${element.tagName}.${element.getAttribute("class")} ${contrast.toFixed(2)}`);
}
found.pale = [...found.pale];
"""


def find() -> str | None:
  """The browser's command; None: there is none."""
  return next((path for name in NAMES if (path := shutil.which(name))), None)


def measure(page: str, width: int, dark: bool = False, act: str = "") -> dict[str, Any]:
  """What the browser makes of a page.

  Args:
    page: HTML.
    width: of the window that the page sees, in pixels.
    dark: whether the reader prefers dark pages.
    act: a script that runs before, with `inside`, the page's document; what it puts into `found` is in the result.

  Returns:
    width, scroll (how wide the page would have to be), height; charts [[title, points of each line]]; wide (what
    sticks out); pale (text without contrast); console (what was logged).
  """
  frame = f'<iframe width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>'
  # Some frames later everything that is drawn on a change of size is there.
  script = f"""
    addEventListener("load", () => setTimeout(() => {{
      try {{
        {_MEASURE}
        {act}
        document.body.textContent = JSON.stringify(found);
      }} catch (error) {{ document.body.textContent = JSON.stringify({{failed: String(error)}}); }}
      document.body.id = "measured";
    }}, 300))"""
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "outside.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{frame}<script>{script}</script>", encoding="utf-8")
    for _ in range(TRIES):
      done = _run(folder, dark, max(width + 100, 600), 1000, "--virtual-time-budget=10000", "--enable-logging=stderr",
                  "--dump-dom", file.as_uri())
      body = re.search(r'<body id="measured">(.*?)</body>', done.stdout, re.DOTALL)
      if body is not None:
        break
    else:
      raise RuntimeError(f"the browser gave no page: {done.stderr[-2000:]}")
  found = json.loads(html.unescape(body[1]))
  found["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
  return found


def picture(page: Path, out: Path, width: int, dark: bool, height: int = 0) -> None:
  """A PNG of a page as it looks in a window of that width; height 0: the whole page."""
  with tempfile.TemporaryDirectory() as folder:
    height = height or min(measure(page.read_text(encoding="utf-8"), width, dark)["height"] + 20, 16000)
    file = Path(folder) / "outside.html"
    file.write_text(f'<!doctype html><body style="margin:0"><iframe style="border:0" width="{width}" height="{height}" '
                    f'src="{page.absolute().as_uri()}"></iframe>', encoding="utf-8")
    _run(folder, dark, max(width, 500), height, "--hide-scrollbars", "--virtual-time-budget=5000",
         f"--screenshot={out.absolute()}", file.as_uri())


def _run(folder: str, dark: bool, width: int, height: int, *arguments: str) -> subprocess.CompletedProcess:
  return subprocess.run(
      [find(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
       "--disable-component-update", "--disable-sync", f"--user-data-dir={folder}/profile",
       f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},{height}", *arguments],
      capture_output=True, text=True, timeout=SECONDS, check=False)


if __name__ == "__main__":
  for pixels in WIDTHS:
    for scheme in ("light", "dark"):
      to = Path(sys.argv[2]) / f"{Path(sys.argv[1]).stem}-{pixels}-{scheme}.png"
      picture(Path(sys.argv[1]), to, pixels, scheme == "dark")
      print(to)
