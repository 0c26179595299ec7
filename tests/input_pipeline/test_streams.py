"""Sources in parts: every document once an epoch, rows that follow from the step alone, and no file read before its
time."""

import hashlib
import itertools
import json
import shutil
import threading

import numpy as np
import pytest
from ml_collections import ConfigDict

from input_pipeline import loader
from input_pipeline.parts import groups_of
from input_pipeline.sources.sources import open_source
from input_pipeline.steps import ROWS, Past
from input_pipeline.tokenizer.tokenizer import BytesTokenizer
from tests import tiny
from tests.input_pipeline.http_store import serving
from trainer import train
from trainer.config import source
from trainer.errors import ConfigError, DataError
from trainer.telemetry.writers import read_rows

FILES, DOCUMENTS = 7, 5


def text(file: int, document: int) -> str:
  return f"{file}{document}" * (3 + (file * document) % 4)


def contents() -> dict[str, bytes]:
  return {f"/d/{f}.jsonl": "".join(json.dumps({"text": text(f, d)}) + "\n" for d in range(DOCUMENTS)).encode()
          for f in range(FILES)}


def config(path, copies=None, **changed):
  c = tiny.config(path)
  c.input.sources.main = source(type="jsonl", path=str(path), stream_files=2, copies=copies, **changed)
  c.input.packing, c.seq_len, c.batch_size, c.evals = "none", 32, 3, ConfigDict()
  return c


@pytest.fixture
def folder(tmp_path):
  for name, content in contents().items():
    (tmp_path / name[1:]).parent.mkdir(exist_ok=True)
    (tmp_path / name[1:]).write_bytes(content)
  return tmp_path / "d"


def data_of(c, workdir):
  return loader.make_train_data(c, BytesTokenizer(), learns="texts", workdir=workdir)


def texts_of(data, begin: int, rows: int) -> list[str]:
  """Of rows `begin` and so on of the run, one document each."""
  found = []
  for step in range(begin // 3, -(-(begin + rows) // 3)):
    batch = data.batch(step)
    found += [bytes(t for t in row[ids > 0].tolist() if t < 256).decode()
              for row, ids in zip(batch["tokens"], batch["segment_ids"], strict=True)]
  return found[begin % 3:][:rows]


def test_each_epoch_has_every_document_once_part_by_part_in_another_order(folder, tmp_path):
  data, whole = data_of(config(folder), tmp_path / "w"), FILES * DOCUMENTS
  wanted = sorted(text(f, d) for f in range(FILES) for d in range(DOCUMENTS))
  epochs = [texts_of(data, epoch * whole, whole) for epoch in range(3)]
  assert [sorted(found) for found in epochs] == [wanted] * 3
  assert epochs[0] != epochs[1] != epochs[2]
  # Whole parts of two files, the last of one: not mixed with one another, but in themselves.
  opened = open_source(config(folder).input.sources.main, "main", streams=True)
  parts = groups_of(opened, config(folder).input.sources.main, config(folder).seed)
  part_of = {file.name[0]: number for number, part in enumerate(parts) for file in part}
  runs = [[number for number, _ in itertools.groupby(part_of[found[0]] for found in epoch)] for epoch in epochs]
  assert runs[0] == [0, 1, 2, 3] and all(sorted(run) == runs[0] for run in runs) and runs[0] != runs[1] != runs[2]
  assert len({found[0] for found in epochs[0][:7]}) == 2
  of_parts = {tuple(found for found in epoch if part_of[found[0]] == 0) for epoch in epochs}
  assert len(of_parts) == 3 and len({tuple(sorted(rows)) for rows in of_parts}) == 1
  assert data.epoch(0) == 0 and data.epoch(5) == pytest.approx(1.5 / 4)  # 15 of the rows: half of the second of 4 parts
  assert data.counters(5)["main"] == {"rows": 15, "epoch": pytest.approx(1.5 / 4)}


def test_files_and_parts_come_in_an_order_that_follows_from_the_seed_and_names_for_years(folder, tmp_path):
  def drawn(said: str) -> bytes:
    return hashlib.blake2b(said.encode(), digest_size=16).digest()

  c, first = config(folder), set()
  for c.seed in (3, 8):
    files = sorted((f"{f}.jsonl" for f in range(FILES)), key=lambda name: drawn(f'[{c.seed}, "{name}"]'))
    part_of = {name[0]: at // 2 for at, name in enumerate(files)}
    data, whole = data_of(c, tmp_path / str(c.seed)), FILES * DOCUMENTS
    for epoch in range(3):
      texts = texts_of(data, epoch * whole, whole)
      wanted = sorted(range(4), key=lambda part: drawn(f"[{c.seed}, {epoch}, {part}]")) if epoch else [0, 1, 2, 3]
      assert [part for part, _ in itertools.groupby(part_of[text[0]] for text in texts)] == wanted
    first.add(tuple(files))
  assert len(first) == 2 and sorted(files) != files


def test_rows_do_not_depend_on_what_was_read_before(folder, tmp_path):
  c = config(folder)
  one, other = data_of(c, tmp_path / "one"), data_of(c, tmp_path / "other")
  late = other.batch(20)  # of the second epoch, at once
  for step in range(20):
    one.batch(step)
  assert one.fingerprint == other.fingerprint
  for name, rows in one.batch(20).items():
    np.testing.assert_array_equal(late[name], rows)


def test_the_first_step_waits_for_one_part_and_a_run_that_goes_on_for_that_it_is_in(tmp_path):
  with serving(contents()) as store:
    c = config(f"{store.url}/d/", copies=str(tmp_path / "copies"))
    data = data_of(c, tmp_path / "w")
    data.batch(0)
    data._packed[0]._part(data._packed[0]._at(1)[1]).result()  # the one that is made meanwhile
    assert len({path for path, _ in store.asked}) == 4  # of 7
    texts = texts_of(data, 0, 35)
    # Another process on a machine without copies and token caches; the workdir says how many rows the parts have.
    shutil.rmtree(tmp_path / "copies")
    shutil.rmtree(tmp_path / "w" / "cache")
    store.asked.clear()
    past = Past(8, 8, ROWS, tuple(data.taken.pieces), data.tokens_seen(8))
    again = loader.make_train_data(c, BytesTokenizer(), learns="texts", workdir=tmp_path / "w", past=past)
    assert texts_of(again, 24, 3) == texts[24:27]
    # The third part, of two files, and the last, of one.
    assert len({path for path, _ in store.asked}) <= 3


def test_a_run_that_ends_waits_for_no_file(tmp_path):
  with serving(contents()) as store:
    c = config(f"{store.url}/d/", copies=str(tmp_path / "copies"))
    data, release = data_of(c, tmp_path / "w"), threading.Event()
    order = [file.name for part in data._packed[0]._parts.groups for file in part]
    store.fault = lambda path, at: None if path[3:] in order[:2] or at is None else release.wait(60) and None
    batch = data.batch(0)
    ahead = data._packed[0]._made[1, 0]
    data._close()
    release.set()
    with pytest.raises(DataError, match="Stopped"):
      ahead.result(30)
    assert not [path for path, _ in store.asked if path[3:] in order[4:]]
    store.fault = lambda path, at: None
    np.testing.assert_array_equal(data.batch(0)["tokens"], batch["tokens"])  # it can still be asked
    assert len(texts_of(data, 0, 35)) == 35


def test_a_file_that_is_not_what_was_read_of_it_is_refused(folder, tmp_path):
  c = config(folder)
  data = data_of(c, tmp_path / "w")
  texts_of(data, 0, 35)
  for f in range(FILES):
    (folder / f"{f}.jsonl").write_bytes((folder / f"{f}.jsonl").read_bytes().replace(b"1", b"8"))
  again = data_of(c, tmp_path / "w")
  with pytest.raises(DataError, match="is not what this run has read of it before"):
    again.batch(0)
  # Before anything was read of them, other contents are other data like any.
  assert texts_of(data_of(c, tmp_path / "new"), 0, 35)


@pytest.mark.parametrize("size", [0, 60])
def test_what_is_known_of_parts_is_not_taken_for_that_of_another_layout_source_or_encoder(folder, tmp_path, size):
  c, fingerprints = config(folder, stream_bytes=size), set()

  def longer():
    with open(folder / "3.jsonl", "a") as file:
      file.write(json.dumps({"text": "one more"}) + "\n")

  changes = (lambda: None, lambda: c.update(seq_len=16), lambda: c.input.update(packing="best_fit"),
             lambda: c.tokenizer.update(add_eos=False), lambda: c.input.sources.main.update(validation_fraction=0.4,
             split="train"), longer, *[lambda: c.input.sources.main.update(stream_bytes=90)] * bool(size))
  for number, change in enumerate(changes):
    change()
    again, new = (data_of(c, tmp_path / name) for name in ("same", f"new {number}"))
    for step in range(5 if size else 12):
      np.testing.assert_array_equal(again.batch(step)["tokens"], new.batch(step)["tokens"])
    fingerprints.add(again._packed[0].tokens.fingerprint)
  assert len(fingerprints) == len(changes)


@pytest.mark.parametrize("size", [0, 60])
def test_bad_rows_of_parts_are_dropped_or_refused_as_the_config_says_also_by_a_run_that_goes_on(folder, tmp_path, size):
  for f in (1, 4):
    (folder / f"{f}.jsonl").write_text((folder / f"{f}.jsonl").read_text() + "{bad\n")
  c, whole = config(folder, stream_bytes=size), FILES * DOCUMENTS
  c.input.update(on_bad_row="drop", max_bad_rows=0.5)  # of a part, of which a piece may be two rows
  wanted = sorted(text(f, d) for f in range(FILES) for d in range(DOCUMENTS))
  for _ in range(2):
    assert sorted(texts_of(data_of(c, tmp_path / "w"), 0, whole)) == wanted
  c.input.on_bad_row = "error"
  for workdir in ("w", "new"):
    with pytest.raises(DataError, match=r"[14]\.jsonl(\[\d+:\])?:\d: not valid JSON"):
      texts_of(data_of(c, tmp_path / workdir), 0, whole)


def test_of_two_streams_each_knows_what_was_read_of_its_own_parts(folder, tmp_path):
  (other := tmp_path / "e").mkdir()
  for f in range(2):
    (other / f"{f}.jsonl").write_text("".join(json.dumps({"text": f"b{f}{d}"}) + "\n" for d in range(DOCUMENTS)))
  c = config(folder)
  c.input.sources.other = source(type="jsonl", path=str(other), stream_files=1)
  data = data_of(c, tmp_path / "w")
  batches = [data.batch(step) for step in range(8)]
  for batch in batches:
    assert [chr(row[1]) == "b" for row in batch["tokens"]] == (batch["source_ids"] == 1).tolist()
  for changed, name in ((folder, "main"), (other, "other")):
    path = changed / "0.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"0", b"9"))
    with pytest.raises(DataError, match=f"source '{name}': the content of .*0.jsonl.* is not what this run has read"):
      again = data_of(c, tmp_path / "w")
      for step in range(8):
        again.batch(step)
    path.write_bytes(before)


def test_parts_without_a_document_of_the_split_are_passed_over(folder, tmp_path):
  c = config(folder, split="validation", validation_fraction=0.06)
  c.input.sources.main.stream_files = 1
  wanted = sorted(r.fields["text"] for r in open_source(
      source(type="jsonl", path=str(folder), split="validation", validation_fraction=0.06), "main").records())
  assert 0 < len(wanted) < FILES
  assert sorted(texts_of(data_of(c, tmp_path / "w"), 0, len(wanted))) == wanted


@pytest.mark.parametrize("changed, said", [
    (dict(stop="first"), "needs input.stop='never'"),
    (dict(max_documents=3), "max_documents exclude each other"),
    (dict(stream_files=-1), "is -1; allowed: 0, which reads the source whole"),
    (dict(learns="pairs"), "learns from groups of them"),
    (dict(type="arithmetic"), "type 'arithmetic' has no files")])
def test_what_needs_the_whole_source_is_refused(folder, tmp_path, changed, said):
  c, learns = config(folder), changed.pop("learns", "texts")
  if "stop" in changed:
    c.input.stop = changed.pop("stop")
  c.input.sources.main.update(changed)
  with pytest.raises(ConfigError, match=said):
    loader.make_train_data(c, BytesTokenizer(), learns=learns, workdir=tmp_path)


def test_evaluations_and_epochs_name_what_they_need(folder, tmp_path):
  with pytest.raises(ConfigError, match="what evaluations read are read whole"):
    open_source(config(folder).input.sources.main, "main")
  c = config(folder)
  c.keep_epochs = 1.0
  with pytest.raises(ConfigError, match="the length of an epoch is not known"):
    train(c, tmp_path / "w")


def test_a_bpe_is_trained_on_the_first_part(folder):
  c = config(folder)
  opened = open_source(c.input.sources.main, "main", streams=True)
  names = {file.name[0] for file in groups_of(opened, c.input.sources.main, c.seed)[0]}
  assert {found[0] for found in loader.train_texts(c, "texts")()} == names


@pytest.mark.parametrize("size", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_stopped_and_continued_equals_straight(folder, tmp_path, size):
  def losses(workdir):
    return [row["loss"] for row in read_rows(workdir / "metrics.jsonl") if "loss" in row]

  c = config(folder)
  c.total_steps, c.ckpt_steps, c.input.sources.main.stream_bytes = 14, 5, size
  train(c, tmp_path / "straight")
  broken = c.copy_and_resolve_references()
  broken.callbacks.crash = dict(type="tests.trainer.test_main.Crash", after=7)
  with pytest.raises(KeyboardInterrupt):
    train(broken, tmp_path / "w")
  shutil.rmtree(tmp_path / "w" / "cache")
  train(c, tmp_path / "w")
  assert losses(tmp_path / "w") == losses(tmp_path / "straight") and len(losses(tmp_path / "straight")) == 14
