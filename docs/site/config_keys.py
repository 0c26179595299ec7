"""docs/config_keys.md: every config key with its default and the comment above it in the source.

    python docs/site/config_keys.py

tests/test_config_page.py fails where the page is not what this would write.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
  sys.path.insert(0, str(ROOT))

from trainer.config.sections import DURATION_UNITS as UNITS  # noqa: E402
from trainer.explain import config_source  # noqa: E402
from trainer.explain.config_source import Group, Section  # noqa: E402

PAGE = ROOT / "docs" / "config_keys.md"

HEAD = """# Every config key

Each key with its default and the comment that stands above it in the source:
[trainer/config/keys.py](../trainer/config/keys.py), [models/config.py](../models/config.py),
[trainer/config/sections.py](../trainer/config/sections.py) and, for strategies, their files in
[trainer/strategies](../trainer/strategies), from which this page is made (`python docs/site/config_keys.py`).
How keys are set, and what is refused, is in [configuration.md](configuration.md).

`None` is "not given". `{steps,…}` stands for `steps`, `examples`, `tokens`, `epochs` and `percent`: a
[duration](configuration.md#durations) is five keys, of which one is set.
"""


def page() -> str:
  """The text of docs/config_keys.md.

  Raises:
    Undocumented: a key has no comment, or the source makes it in a way that is not understood.
  """
  defaults = {path: key.default for path, key in config_source.keys().items()}
  parts = [HEAD]
  for section, _ in config_source.sections():
    name = re.fullmatch(r"strategy\((\w+)\)\.", section.path)
    title = f"strategy: {name.group(1)}" if name else section.path.rstrip(".") or "Top level"
    parts += _tables(section, title, defaults)
  return "\n".join(parts)


def _tables(section: Section, title: str, defaults: Mapping[str, Any]) -> Iterator[str]:
  """The section's heading and table, then those within it."""
  about = [f"{_prose(section.about)}\n"] if section.about else []
  groups = [group for group in section.groups if isinstance(group, Group)]
  yield f"## {title.replace('<', '&lt;').replace('>', '&gt;')}\n"
  if section.path:
    yield from about
  rows = [f"| {_names(list(group.keys))} | {_defaults(list(group.keys), defaults)} | {_prose(group.comment)} |"
          for group in groups]
  yield "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"
  for inner in section.groups:
    if isinstance(inner, Section):
      yield from _tables(inner, inner.path.rstrip("."), defaults)


def _durations(keys: list[str]) -> list[list[str]]:
  """The keys, those of a duration together."""
  found: list[list[str]] = []
  for key in keys:
    prefix, _, unit = key.rpartition("_")
    if unit in UNITS and all(f"{prefix}_{other}" in keys for other in UNITS):
      if unit == UNITS[0]:
        found.append([f"{prefix}_{other}" for other in UNITS])
    else:
      found.append([key])
  return found


def _names(keys: list[str]) -> str:
  names = (some[0] if len(some) == 1 else f"{some[0].rpartition('_')[0]}_{{{UNITS[0]},…}}"
           for some in _durations(keys))
  return "<br>".join(f"`{re.sub(r'^strategy[(].*[)]', 'strategy', name)}`" for name in names)


def _defaults(keys: list[str], values: Mapping[str, Any]) -> str:
  shown = []
  for some in _durations(keys):
    if len(some) == 1:
      value = values[some[0]]
      shown.append(f'strategy("{value}")' if some == ["strategy"] else repr(value))
    else:
      given = [f"{values[key]:g} {key.rpartition('_')[2]}" for key in some if values[key] is not None]
      shown.append(f"{given[0] if given else 'None'}")
  return "<br>".join(f"`{_cell(text)}`" for text in shown)


def _cell(text: str) -> str:
  return text.replace("|", r"\|")


def _prose(text: str) -> str:
  """A comment as Markdown: what would be markup is escaped, files are links."""
  parts = re.split(r"(`[^`]*`)", text)
  for i in range(0, len(parts), 2):
    escaped = re.sub(r"([*\[\]<]|(?<!\w)_|_(?!\w))", r"\\\1", parts[i])
    escaped = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", escaped)
    parts[i] = re.sub(r"\b((?:trainer|models|evaluators|input_pipeline)/\w+\.py)", r"[\1](../\1)", escaped)
  return _cell("".join(parts))


def main() -> None:
  PAGE.write_text(page(), encoding="utf-8")
  print(f"Wrote {PAGE.relative_to(ROOT)}.")


if __name__ == "__main__":
  main()
