"""The site's pages as docs/site/prepare.py makes them: what Markdown of GitHub and of MkDocs understand differently."""

import importlib.util
import posixpath
import re

import pytest

from tests import tiny


@pytest.fixture(scope="module")
def prepare():
  spec = importlib.util.spec_from_file_location("prepare", tiny.ROOT / "docs" / "site" / "prepare.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def without_math(prepare, monkeypatch):
  """Equations are the business of a package of the extra `docs`."""
  monkeypatch.setattr(prepare, "mathml", lambda tex, display: f"<math>{display}: {tex}</math>")


def test_links_to_files_of_the_checkout_become_links_to_pages(prepare, without_math):
  page = "[a](../trainer/main.py) [`b`](data.md#packing) [c](../models/hf/families) [d](https://x.y/z.py) `[e](f.md)`\n"
  assert prepare.rewritten(page, "docs/index.md") == (
      "[a](source/trainer/main.py.md) [`b`](data.md#packing) [c](source/models/hf/families/index.md) "
      "[d](https://x.y/z.py) `[e](f.md)`\n")
  assert prepare.rewritten("[a](../docs/index.md) [b](RESULTS.md#x)", "benchmarks/RESULTS.md") == (
      "[a](../../index.md) [b](RESULTS.md#x)")
  assert prepare.rewritten("[nowhere](../trainer/none.py)", "docs/index.md") == "[nowhere](../trainer/none.py)"


def test_equations_marks_and_pipes_in_code(prepare, without_math):
  assert prepare.rewritten("$$\na_b\n$$\n\nof $`x`$\n", "docs/a.md") == (
      '<div class="equation"><math>block: a_b</math></div>\n\nof <span><math>inline: x</math></span>\n')
  assert prepare.rewritten("<!-- needs: a <GPU> -->\n```bash\nx $$ [a](b.md)\n```\n", "docs/a.md") == (
      '<p class="needs">Needs a &lt;GPU&gt;:</p>\n\n```bash\nx $$ [a](b.md)\n```\n')
  assert prepare.rewritten("| `a\\|b` | c \\| d |\n", "docs/a.md") == "| `a|b` | c \\| d |\n"


def test_code_and_notebooks_are_pages(prepare):
  page = prepare._text("docs/site/prepare.py")
  assert page.startswith("# docs/site/prepare.py\n\n````python\n") and page.endswith("\n````\n")
  notebook = prepare._text("notebooks/first_run.ipynb")
  assert notebook.startswith("# A first run") and "```python\n" in notebook


def test_all_that_is_linked_to_is_there(prepare, without_math, monkeypatch, tmp_path):
  """The pages are written, the navigation names what exists, and every link leads to a page or picture."""
  for path in tiny.ROOT.iterdir():
    if path.name != "build":
      (tmp_path / path.name).symlink_to(path)
  monkeypatch.setattr(prepare, "ROOT", tmp_path)
  prepare.main()
  out = tmp_path / "build" / "docs"
  pages = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
  assert {path.name for path in (tiny.ROOT / "docs").glob("*.md")} <= pages
  assert "source/trainer/main.py.md" in pages and "source/CONTRIBUTING.md" in pages
  for page in pages:
    if page.endswith(".md"):
      for link in prepare.links((out / page).read_text(encoding="utf-8")):
        if target := link.partition("#")[0]:
          at = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
          assert re.match(r"[a-z]+:", target) or at in pages, (page, link)
  named = re.findall(r": (\S+\.md)$", (tmp_path / "build" / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
  assert set(named) <= pages and len(named) == len(set(named)) > 25


def test_every_page_is_in_the_navigation():
  nav = (tiny.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
  pages = {path.name for path in (tiny.ROOT / "docs").glob("*.md")}
  assert pages <= set(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))

