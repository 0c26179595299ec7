"""docs/config_keys.md has every key, with its default and the comment above it, and is what its script writes."""

import ast
import importlib.util
import re

import pytest

from tests import tiny
from trainer.config import defaults, evaluator, reward, source, strategy
from trainer.config import sections as config_sections
from trainer.explain import config_source
from trainer.strategies import STRATEGIES

PAGE = tiny.ROOT / "docs" / "config_keys.md"


@pytest.fixture(scope="module")
def script():
  spec = importlib.util.spec_from_file_location("config_keys", tiny.ROOT / "docs" / "site" / "config_keys.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def rows():
  """{key: (default, meaning)} of the page."""
  found = {}
  for line in PAGE.read_text(encoding="utf-8").splitlines():
    if not line.startswith("| `"):
      continue
    keys, values, meaning = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
    for key, value in zip(keys.split("<br>"), values.split("<br>"), strict=True):
      key, value = key.strip("`"), value[1:-1].replace(r"\|", "|")
      if units := re.fullmatch(r"(.*_)\{(.*)\}", key):
        assert units[2] == "steps,…"
        number, _, unit = value.partition(" ")
        found |= {units[1] + other: (number if other == unit else "None", meaning)
                  for other in config_sections.DURATION_UNITS}
      else:
        found[key] = value, meaning
  return found


def test_the_page_is_what_its_script_writes(script):
  assert PAGE.read_text(encoding="utf-8") == script.page(), "run: python docs/site/config_keys.py"


def flat(values, prefix):
  return {prefix + key: value for key, value in values.items() if not hasattr(value, "items")} | {
      path: leaf for key, value in values.items() if hasattr(value, "items")
      for path, leaf in flat(value, f"{prefix}{key}.").items()}


@pytest.mark.parametrize(("values", "prefix"), [
    (defaults(), ""), (source(), "input.sources.<name>."), (evaluator(), "evals.<name>."),
    (reward(), "rollout.rewards.<name>.")], ids=["defaults", "source", "evaluator", "reward"])
def test_every_key_is_on_it_with_its_default_and_a_meaning(rows, values, prefix):
  leaves = {key: value for key, value in flat(values, prefix).items() if not key.startswith("strategy.")}
  assert leaves and leaves.keys() <= rows.keys()
  for key, value in leaves.items():
    shown, meaning = rows[key]
    assert len(meaning) > 3, key
    try:
      assert float(shown) == value, key
    except ValueError:
      assert shown == repr(value), key


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_of_a_strategy_is_in_its_section(name):
  text = PAGE.read_text(encoding="utf-8").partition(f"\n## strategy: {name}\n")[2].partition("\n## ")[0]
  assert set(re.findall(r"`strategy\.(\w+)`", text)) == set(strategy(name).keys()) - {"name"}


def test_comments_are_those_of_the_source(rows):
  """A few, word for word: beside a key, above it, above several, of several lines, of a section's function."""
  assert rows["log_steps"] == ("10", "rows of metrics")
  assert rows["seq_len"][1] == "Tokens per row."
  assert rows["batch_size"][1] == rows["grad_accum_steps"][1]
  assert rows["optimizer.clip_norm"][1] == "Clip the gradient's global norm; 0: no clipping."
  assert rows["spikes.action"][1].endswith("old enough, and on with later data.")
  assert rows["model.lora.dropout"][1] == "On the adapters' input; training only."


def test_a_key_without_a_comment_is_refused():
  """Neither a comment above nor a line before that has one."""
  section, file = config_source.Section("at.", ""), config_source.FILES[0]
  made = config_source._Source(file)
  made.lines = ["c.first = 1", "", "# said", "c.second = 2", "c.third = 3", "", "c.fourth = 4"]
  tree = ast.parse("\n".join(made.lines)).body
  config_source._add(made, tree[1], section, ["second"])
  config_source._add(made, tree[2], section, ["third"])
  assert section.groups == [config_source.Group("said", {"at.second": 4, "at.third": 5}, file)]
  for statement, where in ((tree[0], config_source.Section("", "")), (tree[3], section)):
    with pytest.raises(config_source.Undocumented, match=f"{file}:[17]: .*other has no comment above it"):
      config_source._add(made, statement, where, ["other"])
