"""Readers by dotted path: a user's own class in place of a built-in type."""

import json
import sys

import pytest

from input_pipeline.sources.sources import open_source
from tests import tiny
from trainer import train
from trainer.config import checks as config_checks
from trainer.config import defaults, source
from trainer.errors import ConfigError, DataError
from trainer.telemetry.writers import read_rows

CODE = '''
import json
from input_pipeline.files import find_files, read_lines
from input_pipeline.sources.readers import Record


class Lines:
  """JSON lines whose rows begin behind a prefix."""

  by_name = False

  def __init__(self, cfg, source):
    self._path, self._source, self.text_key = cfg.path, source, cfg.text_key
    self._prefix = cfg.get("prefix", "")
    self.identity = ["lines", self._prefix]

  def files(self):
    return find_files(self._path, self._source, lambda name: True, "a file")

  def read(self, tally):
    for name, path in self.files():
      for number, _, raw in read_lines(path, tally):
        yield Record(f"{name}:{number}", f"{path}:{number}", json.loads(raw.decode().removeprefix(self._prefix)))


class Same(Lines):
  pass


class Less:
  def __init__(self, cfg, source):
    self.text_key = "text"

  def read(self, tally):
    return ()


class Alone:
  def __init__(self, cfg):
    pass


class Odd(Lines):
  def __init__(self, cfg, source):
    super().__init__(cfg, source)
    self.identity = [{1, 2}]


class Dicts(Lines):
  def read(self, tally):
    yield {"text": "a"}


def function(cfg, source):
  return Lines(cfg, source)
'''
ROWS = [{"text": " ".join(tiny.WORDS[: 3 + i % 9]) + f" {i}"} for i in range(40)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
  (tmp_path / "own_readers.py").write_text(CODE)
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  (tmp_path / "b.rows").write_text("".join("row " + json.dumps(row) + "\n" for row in ROWS))
  monkeypatch.syspath_prepend(tmp_path)
  yield tmp_path
  sys.modules.pop("own_readers", None)


def own(folder, name="Lines", **changed):
  return source(type=f"own_readers.{name}", path=str(folder / "b.rows"), **changed)


def test_its_records_and_splits_are_those_of_the_same_rows_in_a_jsonl(folder):
  for split in ("all", "train", "validation"):
    changed = dict(split=split, validation_fraction=0.3)
    mine = list(open_source(own(folder, prefix="row ", **changed), "main").records())
    theirs = list(open_source(source(type="jsonl", path=str(folder / "a.jsonl"), **changed), "main").records())
    assert len(mine) > 5 and [r.fields for r in mine] == [r.fields for r in theirs]
  assert [r.fields for r in open_source(own(folder, prefix="row "), "main").records()] == ROWS


def test_a_run_trains_on_it_as_on_the_jsonl_and_keys_of_its_own_are_kept(folder):
  losses = []
  for number, made in enumerate((own(folder, prefix="row "), source(type="jsonl", path=str(folder / "a.jsonl")))):
    config = tiny.config(folder, total_steps=2)
    config.evals = {}
    config.input.sources.main = made
    train(config, folder / str(number))
    losses.append([row["loss"] for row in read_rows(folder / str(number) / "metrics.jsonl") if "loss" in row])
  assert len(losses[0]) == 2 and losses[0] == losses[1]
  saved = json.loads((folder / "0" / "config.json").read_text())["input"]["sources"]["main"]
  assert saved["type"] == "own_readers.Lines" and saved["prefix"] == "row "


def test_a_key_that_it_does_not_read_is_refused(folder):
  config = tiny.config(folder, total_steps=2)
  config.evals = {}
  config.input.sources.main = own(folder, prefix="row ", prefiks="row ")
  with pytest.raises(ConfigError, match=r"nothing in this configuration uses them:\n  - config.input.*main.prefiks"):
    train(config, folder / "w")


def test_readers_of_the_same_identity_share_no_tokens(folder):
  one, other = (open_source(own(folder, name), "main").fingerprint() for name in ("Lines", "Same"))
  assert one != other and one == open_source(own(folder), "main").fingerprint()


@pytest.mark.parametrize("kind, told", [
    ("own_readers.Missing", r"input.sources.main.type: found 'own_readers.Missing', which could not be imported "
                            r"\(module 'own_readers' has no attribute 'Missing'\). Allowed: 'text', .*or the dotted "
                            r"path of a reader"),
    ("no_such_package.Reader", r"could not be imported \(No module named 'no_such_package'\)"),
    ("own_readers.function", "is of type function; a reader is a class with __init__.cfg, source."),
    ("own_readers.Alone", r"is made as Alone\(cfg, source\), which its __init__ does not take: too many"),
    ("own_readers.Less", "has no files, by_name, identity: a reader has files, read, by_name, text_key, identity"),
    ("own_readers.Odd", "has the identity .*, which is not JSON"),
    ("parkuet", "type='parkuet'; did you mean 'parquet'.; allowed: 'text', "),
])
def test_what_is_no_reader_is_refused(folder, kind, told):
  with pytest.raises(ConfigError, match=told):
    open_source(source(type=kind, path=str(folder / "b.rows")), "main")


def test_what_is_no_record_is_refused(folder):
  with pytest.raises(DataError, match="source 'main': Dicts.read gives a dict, where "
                                        "input_pipeline.sources.readers.Record"):
    list(open_source(own(folder, "Dicts"), "main").records())


def test_its_keys_pass_the_checks_of_the_config():
  given = defaults()
  given.input.sources.main = dict(type="my_package.Reader", path="x", prefix="row ")
  resolved = config_checks.resolve(given).input.sources.main
  assert resolved.prefix == "row " and resolved.validation_fraction == 0.05
