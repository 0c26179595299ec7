"""docs/map.md lists every module, and is what its script writes."""

import importlib.util

from tests import tiny


def test_the_page_is_what_its_script_writes():
  spec = importlib.util.spec_from_file_location("map", tiny.ROOT / "docs" / "site" / "map.py")
  script = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(script)
  page = script.PAGE.read_text(encoding="utf-8")
  assert page == script.page(), "write it: python docs/site/map.py"
  for folder in ("trainer", "models", "input_pipeline", "evaluators", "configs"):
    for path in (tiny.ROOT / folder).rglob("*.py"):
      assert path.name == "__init__.py" or f"](../{path.relative_to(tiny.ROOT).as_posix()})" in page, path
