"""The site's pages, made from docs/ and from what they link to, for any generator that reads Markdown as MkDocs does.

    python docs/site/prepare.py && mkdocs build --config-file=build/mkdocs.yml

Nothing on the site needs a network, nor the address of a repository:

- Files of the checkout that a page links to become pages, so that a link to a file that is not there fails the build.
- Equations become MathML, which browsers show by themselves.
- What a command needs (`<!-- needs: a GPU -->`, see CONTRIBUTING.md) is shown above it.
- Entries of the navigation whose page does not exist are left out.
"""

import html
import json
import os
import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Where the pages made of files of the checkout are.
SOURCE = "source"
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml",
             ".jinja": "jinja", ".json": "json"}
_FENCE = re.compile(r"^(```+|~~~+).*?^\1[ ]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_MATH = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.DOTALL | re.MULTILINE)
_INLINE_MATH = re.compile(r"\$`(.+?)`\$")
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_NEEDS = re.compile(r"^<!-- needs: (.+?) -->\n", re.MULTILINE)


def main() -> None:
  """Writes build/docs (pages and pictures) and build/mkdocs.yml."""
  out = ROOT / "build" / "docs"
  shutil.rmtree(out, ignore_errors=True)
  nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
  nav = "".join(line for line in nav.splitlines(keepends=True) if _there(line))
  out.mkdir(parents=True)
  (ROOT / "build" / "mkdocs.yml").write_text(nav, encoding="utf-8")
  pictures = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".svg", ".png", ".css")]
  for path in pictures:
    _write(out / path.relative_to(ROOT / "docs"), path.read_bytes())
  todo = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
  todo += [_file_of(page) for page in re.findall(rf": ({SOURCE}/\S+)$", nav, re.MULTILINE)]
  done = set()
  while todo:
    path = todo.pop()
    if path in done or not (ROOT / path).exists():
      continue
    done.add(path)
    text = _text(path)
    if path.endswith(".md") or (ROOT / path).is_dir():
      todo += [target for target in (resolve(path, link) for link in links(text))
               if target and not target.startswith("docs/")]
    if path == "docs/config_keys.md":  # of which the tables are stacked where there is no room (style.css)
      text = _TABLE.sub(lambda m: f'<div class="keys" markdown="1">\n\n{m[0]}\n</div>\n', text)
    front = "" if path.startswith("docs/") else "---\nsearch:\n  exclude: true\n---\n"
    _write(out / page_of(path), (front + rewritten(text, path)).encode())


def _write(path: Path, content: bytes) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content)


def _there(line: str) -> bool:
  """Whether the page that a line of `nav` names exists, or the line names none."""
  page = re.fullmatch(r"\s+- .+: (\S+\.md)\n", line)
  return not page or (ROOT / _file_of(page[1])).exists()


def _file_of(page: str) -> str:
  """The file of the checkout that a page is made of; the reverse of `page_of`."""
  if not page.startswith(f"{SOURCE}/"):
    return f"docs/{page}"
  path = page.removeprefix(f"{SOURCE}/")
  return path if (ROOT / path).exists() else path.removesuffix(".md")


def links(text: str) -> list[str]:
  """The targets of a page's links, without what is in code."""
  return [target for _, target, _ in _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))]


def resolve(path: str, link: str) -> str | None:
  """The path in the checkout that a link of the file `path` leads to; None: it leads elsewhere."""
  target = link.partition("#")[0]
  if not target or re.match(r"[a-z]+:", target):
    return None
  folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
  return posixpath.normpath(posixpath.join(folder, target))


def page_of(path: str) -> str:
  """The page of a file or folder of the checkout."""
  if path.startswith("docs/"):
    return path.removeprefix("docs/")
  return f"{SOURCE}/{path}/index.md" if (ROOT / path).is_dir() else f"{SOURCE}/{path.removesuffix('.md')}.md"


def _text(path: str) -> str:
  """A file of the checkout as Markdown: as it is, as a block of code, or a folder as a list."""
  if (ROOT / path).is_dir():
    names = sorted(name for name in os.listdir(ROOT / path) if not name.startswith((".", "__pycache__")))
    return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
  text = (ROOT / path).read_text(encoding="utf-8")
  if path.endswith(".md"):
    return text
  if path.endswith(".ipynb"):
    return "".join(_cell(cell) for cell in json.loads(text)["cells"])
  fence = "`" * max(4, 1 + max(map(len, re.findall("`+", text)), default=0))
  title = path.replace("_", r"\_")
  return f"# {title}\n\n{fence}{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _cell(cell: dict) -> str:
  """A notebook's cell: its text, or its code with what it printed and drew."""
  source = "".join(cell["source"])
  if cell["cell_type"] == "markdown":
    return source + "\n\n"
  parts = [f"```python\n{source}\n```\n\n"]
  for output in cell["outputs"]:
    if "text" in output:
      parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```\n\n")
    elif png := output.get("data", {}).get("image/png"):
      parts.append(f'<img alt="what the cell drew" src="data:image/png;base64,{"".join(png.split())}">\n\n')
  return "".join(parts)


# ----------------------------------------------------------------------------------------------
# Markdown of GitHub as that of MkDocs.


def rewritten(markdown: str, path: str) -> str:
  """The page of the file `path`: what is outside of blocks of code, changed."""
  parts, end = [], 0
  for fence in _FENCE.finditer(markdown):
    parts += [_outside(markdown[end:fence.start()], path), fence.group()]
    end = fence.end()
  return "".join([*parts, _outside(markdown[end:], path)])


def _outside(text: str, path: str) -> str:
  text = _NEEDS.sub(lambda m: f"<p class=\"needs\">Needs {html.escape(m[1])}:</p>\n\n", text)
  text = _MATH.sub(lambda m: f'<div class="equation">{mathml(m[1], "block")}</div>', text)
  # Python-Markdown would take <math> for a paragraph of its own.
  text = _INLINE_MATH.sub(lambda m: f"<span>{mathml(m[1], 'inline')}</span>", text)
  lines = [_table_row(line) if line.startswith("|") else line for line in text.split("\n")]
  # Links in code stay: each is put aside and back.
  kept: list[str] = []

  def aside(match: re.Match) -> str:
    kept.append(match.group())
    return f"\0{len(kept) - 1}\0"

  text = _CODE.sub(aside, "\n".join(lines))
  # The text of a link may be code.
  text = _LINK.sub(lambda m: m[1] + _moved(m[2], path) + m[3], text)
  return re.sub("\0(\\d+)\0", lambda m: kept[int(m[1])], text)


def _table_row(line: str) -> str:
  """In a cell GitHub needs `\\|` also in code; Python-Markdown shows the backslash there."""
  return _CODE.sub(lambda m: m.group().replace(r"\|", "|"), line)


def _moved(link: str, path: str) -> str:
  target = resolve(path, link)
  if target is None or not (ROOT / target).exists():
    return link  # MkDocs says what is wrong with it
  anchor = "#" + link.partition("#")[2] if "#" in link else ""
  if target.startswith("docs/") and not target.endswith(".md"):
    page = target.removeprefix("docs/")
  else:
    page = page_of(target)
  return posixpath.relpath(page, posixpath.dirname(page_of(path)) or ".") + anchor


def mathml(tex: str, display: str) -> str:
  """An equation in TeX as MathML, on one line, so that Markdown leaves it alone."""
  from latex2mathml import converter  # of the extra `docs`; what else is here needs nothing

  if display == "block":
    tex = tex.replace(r"\sum_", r"\sum\limits_")
  return converter.convert(tex, display=display).replace("\n", " ")


if __name__ == "__main__":
  main()
