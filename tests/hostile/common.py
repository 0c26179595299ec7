"""What the tables of hostile input share: how a case is run, and what an error of ours is."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from input_pipeline import loader, prompt_data
from input_pipeline.tokenizer.tokenizer import make_tokenizer
from tests import tiny
from trainer import program, strategies
from trainer.config import defaults, source
from trainer.config import strategy as strategy_section
from trainer.errors import ConfigError, DataError

# What trainer/__main__.py prints as one message, without a traceback.
OURS = (ConfigError, DataError, OSError)
# A message is for people: so long at most, and of characters that a terminal shows.
LONGEST = 6000


def refused(run: Callable[[], Any], *expected: str) -> str:
  """The one message with which `run` is refused, which has all the expected parts.

  An error of a library, ours as it may be in kind (json's is a ValueError too), is no message; an error of the system
  must name the file. What cannot be printed may not be in it: it would be obeyed by a terminal.
  """
  with pytest.raises(Exception) as caught:
    run()
  error, message = caught.value, str(caught.value)
  assert isinstance(error, OURS), f"{type(error).__name__}: {error}"
  if isinstance(error, OSError) and type(error).__module__ == "builtins":
    assert error.filename, f"{type(error).__name__} without a file: {message}"
  assert len(message) <= LONGEST, f"{len(message)} characters: {message[:300]}"
  assert "NoneType" not in message and "object has no attribute" not in message, message
  odd = [c for c in message if not c.isprintable() and c != "\n"]
  assert not odd, f"has {odd[0]!r}: {message[:300]!r}"
  for part in expected:
    assert part in message, f"no {part!r} in: {message}"
  return message


def config_of(path: Path | str, kind: str = "jsonl", strategy: str = "sft", **changed):
  """A config on that data whose model is tiny; `changed` are keys of the source."""
  c = defaults()
  c.strategy = strategy_section(strategy)
  c.input.sources.main = source(type=kind, path=str(path), **changed)
  c.update(batch_size=8, seq_len=64, total_steps=2)
  c.model.update(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, vocab_multiple=8)
  return c


def prepare(config, workdir: Path):
  """Everything that a run does with its data before it has a model: (tokenizer, data)."""
  resolved, _ = program.resolve(config)
  strategies.check(resolved)
  samples = resolved.rollout.num_prompts > 0
  learns = strategies.learns(resolved)
  texts = prompt_data.prompt_texts(resolved) if samples else loader.train_texts(resolved, learns)
  workdir.mkdir(parents=True, exist_ok=True)
  tokenizer = make_tokenizer(resolved.tokenizer, texts, workdir / "tokenizer.json")
  if samples:
    return tokenizer, prompt_data.make_prompt_data(resolved, tokenizer)
  return tokenizer, loader.make_train_data(resolved, tokenizer, learns=learns, workdir=workdir)


def write(path: Path, *rows: Any) -> Path:
  """A file of rows: bytes as they are, strings as lines, anything else as JSON."""
  parts = [row if isinstance(row, bytes) else
           (row if isinstance(row, str) else json.dumps(row)).encode("utf-8", "surrogatepass") + b"\n" for row in rows]
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(b"".join(parts))
  return path


def named(table: list[tuple]) -> list:
  """The rows of a table as pytest's parameters, each with its name, which is unique."""
  names = [row[0] for row in table]
  assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
  assert all(re.fullmatch(r"[\w. -]+", name) for name in names)
  return [pytest.param(*row[1:], id=row[0].replace(" ", "-")) for row in table]


def command(*arguments: str):
  """The command line in a process of its own, to its end."""
  import sys
  return tiny.run([sys.executable, "-m", "trainer", *arguments])
