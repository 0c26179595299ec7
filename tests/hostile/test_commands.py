"""The whole command line on bad input: one message, no traceback, nothing left behind."""

import json
import sys

import pytest

from tests import tiny
from tests.hostile.common import named, write

CONFIG = """
from tests.hostile.common import config_of

def get_config(path):
  config = config_of(path, "{kind}", "{strategy}", split="all")
  config.chat.template = {template!r}
  return config
"""

TABLE = [
    ("json", "jsonl", "seq", None, b'{"text": "a"}\n{"text"', ["{data}:2", "not valid JSON"]),
    ("json nested deep", "jsonl", "seq", None, b"[" * 100_000, ["{data}:1", "nested too deeply"]),
    ("chat", "jsonl", "sft", "plain", json.dumps({"messages": [{"role": "x"}]}).encode(), ["messages[0].role is 'x'"]),
    ("template", "jsonl", "sft", "{folder}/t.jinja", b'{"messages": [{"role": "user", "content": "a"}]}',
     ["t.jinja:1", "none of its business"]),
    ("parquet", "parquet", "seq", None, b"PAR1", ["not a readable Parquet file"]),
    ("source named by a path", "jsonl", "seq", None, b'{"text": "a"}', ["has the name 'a/b'"],
     "c.input.sources = {'a/b': {'type': 'text'}}"),
    ("number that is none", "jsonl", "seq", None, b'{"text": "a"}', ["config.optimizer.learning_rate is nan"],
     "--config.optimizer.learning_rate=nan"),
    ("override of a key with code", "jsonl", "seq", None, b'{"text": "a"}', ["unknown key config.__class__"],
     "--config.__class__=1"),
]


@pytest.mark.parametrize("kind, strategy, template, data, expected, more", named(
    [(name, kind, strategy, template, data, expected, more)
     for name, kind, strategy, template, data, expected, *more in TABLE]))
def test_the_command_ends_with_one_message(kind, strategy, template, data, expected, more, tmp_path, asleep):
  file = write(tmp_path / f"a.{kind}", data)
  write(tmp_path / "t.jinja", "{{ ''.__class__.__mro__ }}")
  source = CONFIG.format(kind=kind, strategy=strategy, template=template and template.format(folder=tmp_path))
  overrides = [part for part in more if part.startswith("--")]
  for line in (part for part in more if not part.startswith("--")):
    source = source.replace("  return config", f"  c = config\n  {line}\n  return config")
  config = write(tmp_path / "config.py", source)
  done = tiny.run([sys.executable, "-m", "trainer", f"--config={config}:{file}", f"--workdir={tmp_path}/work",
                   *overrides])
  assert done.returncode not in (0, None), done.stdout
  assert "Traceback" not in done.stderr, done.stderr
  for part in expected:
    assert part.format(data=file) in done.stderr, done.stderr
