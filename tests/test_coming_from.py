"""docs/coming_from.md says of every option of TRL's trainers what there is in its place."""

import json
import re

import pytest

from tests.make_trl_options import FILE
from tests.tiny import ROOT


@pytest.mark.parametrize("trainer, options", json.loads(FILE.read_text(encoding="utf-8")).items())
def test_every_option_of_a_trainer_is_on_the_page(trainer, options):
  page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
  section = re.search(r"\n## From TRL\n(.*?)\n## ", page, re.DOTALL)[1]
  named = set(re.findall(r"`([a-z_0-9]+)(?:=[^`]*)?`", section))
  named |= {name for call in re.findall(r"`LoraConfig\(([^)]*)\)`", section) for name in call.split(", ")}
  assert sorted(set(options) - named) == []
  assert len(options) > 5
