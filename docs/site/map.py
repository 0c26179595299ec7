"""docs/map.md: every folder and file with what its docstring says of it.

    python docs/site/map.py

tests/test_map.py fails where the page is not what this would write.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "map.md"

HEAD = """# The map

Every folder with the beginning of its `__init__` docstring, and every file with its first sentence. This page is made
from them (`python docs/site/map.py`). [design.md](design.md) says how they work together.
"""
# Folders in the order in which one may want to read them, and what is said of those that are no packages.
FOLDERS = {
    "trainer": "",
    "models": "",
    "input_pipeline": "",
    "evaluators": "",
    "configs": "",
    "benchmarks": "What is timed, never tested; RESULTS.md has the figures with their commands.",
    "launch": "Scripts that start runs on clusters, and start them again after a preemption.",
    "docs": "These pages; docs/site makes the site and the pages that are generated.",
    "tests": "Tests mirror the files that they test; here are those of whole runs, processes and documents.",
}
# Folders that are not listed: tests mirror the others, and the site's scripts are no pages of the site.
LEFT_OUT = re.compile(r"tests/.+|docs/site")
SUFFIXES = (".py", ".sh", ".sbatch", ".yaml", ".md")


def page() -> str:
  """The text of docs/map.md."""
  return "\n".join([HEAD, *(line for folder in FOLDERS for line in _folder(ROOT / folder))])


def _folder(folder: Path) -> Iterator[str]:
  """A folder's heading, what it is for, its files; then the folders within it."""
  name = folder.relative_to(ROOT).as_posix()
  said = _docstring(folder / "__init__.py") or FOLDERS.get(name, "")
  files = [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES and path.name != "__init__.py"]
  within = [path for path in sorted(folder.iterdir())
            if path.is_dir() and any(path.glob("*.py")) and not LEFT_OUT.fullmatch(path.relative_to(ROOT).as_posix())]
  if files or within:
    yield f"## {name}\n"
    first, *_, last = said.split("\n\n") if "\n\n" in said else (said, "")
    yield from (f"{_prose(text)}\n" for text in (first, last if last.startswith("May import") else "") if text)
    yield "\n".join(f"- [`{path.name}`](../{name}/{path.name}){_about(path)}" for path in files) + "\n"
  for path in within:
    yield from _folder(path)


def _about(path: Path) -> str:
  """A colon and the first sentence of a file: of its docstring, a page's title, a script's first comment; or ""."""
  text = path.read_text(encoding="utf-8")
  if path.suffix == ".py":
    said = _docstring(path)
  elif path.suffix == ".md":
    said = text.partition("\n")[0].removeprefix("# ")
  else:
    said = " ".join(line[2:] for line in text.partition("\n#\n")[0].splitlines() if line.startswith("# "))
  sentence = re.match(r".+?\.(?=\s|$)|.+", said.partition("\n\n")[0], re.DOTALL)
  return f": {_prose(sentence.group()).rstrip('.:')}" if sentence else ""


def _docstring(path: Path) -> str:
  """A module's docstring, "" without one or without a file."""
  return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") if path.exists() else ""


def _prose(text: str) -> str:
  """A docstring's text on one line, in which nothing but code is markup."""
  parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
  parts[::2] = [re.sub(r"([*\[\]<]|(?<!\w)_|_(?!\w))", r"\\\1", part) for part in parts[::2]]
  return "".join(parts)


def main() -> None:
  PAGE.write_text(page(), encoding="utf-8")
  print(f"Wrote {PAGE.relative_to(ROOT)}.")


if __name__ == "__main__":
  main()
