"""Splits, limits, empty documents and the fingerprint of a source."""

import json

import pytest

from input_pipeline.sources import DataError, open_source
from trainer.config import ConfigError, source


def write_files(folder, names):
  for name in names:
    (folder / name).write_text(f"text of {name}\n")
  return str(folder)


def read(cfg, **more):
  return list(open_source(cfg, "mine", **more).documents())


def splits(path, **cfg):
  return {s: read(source(path=path, split=s, validation_fraction=0.3, **cfg)) for s in ("all", "train", "validation")}


def test_the_parts_are_disjoint_and_make_up_the_whole(tmp_path):
  parts = splits(write_files(tmp_path, [f"{i}.txt" for i in range(100)]))
  assert sorted(parts["train"] + parts["validation"]) == sorted(parts["all"])
  assert 15 <= len(parts["validation"]) <= 45
  # In the order of the whole.
  assert parts["train"] == [d for d in parts["all"] if d in parts["train"]]


def test_files_keep_their_part_when_others_are_added_and_when_all_move(tmp_path):
  (tmp_path / "a").mkdir()
  before = splits(write_files(tmp_path / "a", [f"{i}.txt" for i in range(50)]))
  write_files(tmp_path / "a", [f"new{i}.txt" for i in range(50)])
  (tmp_path / "a").rename(tmp_path / "b")
  after = splits(str(tmp_path / "b"))
  for part in ("train", "validation"):
    assert set(before[part]) < set(after[part])


def test_equal_rows_stay_on_one_side(tmp_path):
  lines = [f"row {i % 40}" for i in range(200)]
  (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in lines))
  parts = splits(str(tmp_path), type="jsonl")
  train, validation = ({d.text for d in parts[s]} for s in ("train", "validation"))
  assert not train & validation and train | validation == set(lines)


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_a_single_document_is_cut_at_a_line_end(tmp_path, fraction):
  text = "".join(f"line {i} é\n" * (i % 3 + 1) for i in range(40))
  (tmp_path / "x.txt").write_text(text, encoding="utf-8")
  cfg = dict(path=str(tmp_path / "x.txt"), validation_fraction=fraction)
  (train,), (validation,) = (read(source(split=s, **cfg)) for s in ("train", "validation"))
  assert train.text + validation.text == text and train.text.endswith("\n")
  size, cut = len(text.encode()), len(train.text.encode())
  ends = [i + 1 for i, b in enumerate(text.encode()) if b == 10][:-1]
  assert abs(cut - (1 - fraction) * size) == pytest.approx(min(abs(e - (1 - fraction) * size) for e in ends), abs=1)


def test_a_single_line_cannot_be_split(tmp_path):
  (tmp_path / "x.txt").write_text("one line only\n")
  with pytest.raises(DataError, match=r"one document of one line \(x.txt\).*split='all'"):
    read(source(path=str(tmp_path), split="train"))


def test_an_empty_part_says_what_to_change(tmp_path):
  path = write_files(tmp_path, ["a.txt", "b.txt"])
  with pytest.raises(DataError, match=r"none of its documents falls into split 'validation'.*validation_fraction"):
    read(source(path=path, split="validation", validation_fraction=1e-9))


def test_empty_documents_are_skipped_and_counted(tmp_path):
  path = write_files(tmp_path, ["a.txt", "b.txt"])
  (tmp_path / "empty.txt").write_text("")
  mine = open_source(source(path=path), "mine")
  assert [d.name for d in mine.documents()] == ["a.txt", "b.txt"]
  assert (mine.tally.documents, mine.tally.empty) == (2, 1)
  assert mine.tally.bytes_read == mine.total_bytes()


def test_no_text_at_all(tmp_path):
  (tmp_path / "x.txt").write_text("")
  with pytest.raises(DataError, match=r"has no text: .*x.txt, 0 bytes"):
    read(source(path=str(tmp_path / "x.txt")))
  with pytest.raises(DataError, match="has no text"):
    read(source(path=str(tmp_path / "x.txt"), split="train"))


def test_max_documents_are_evenly_spaced_after_the_split(tmp_path):
  (tmp_path / "x.txt").write_text("".join(f"{i}\n" for i in range(100)))
  cfg = source(path=str(tmp_path), documents="line", max_documents=10)
  numbers = [int(d.text) for d in read(cfg)]
  assert len(numbers) == 10 and {b - a for a, b in zip(numbers, numbers[1:], strict=False)} == {10}
  assert len(read(cfg, max_documents=3)) == 3 and len(read(cfg, max_documents=20)) == 10
  cfg.update(split="train", max_documents=7)
  assert len(read(cfg)) == 7
  cfg.max_documents = 1000
  assert len(read(cfg)) == len(read(source(path=str(tmp_path), documents="line", split="train")))


@pytest.mark.parametrize("changed, said", [
    (dict(type="csv"), "type='csv'; allowed: 'text', 'jsonl'"),
    (dict(split="test"), "split 'test'; allowed: 'all', 'train', 'validation'"),
    (dict(split="train", validation_fraction=1.5), "validation_fraction=1.5 must lie between 0 and 1"),
    (dict(max_documents=0), "max_documents=0 must be at least 1"),
])
def test_bad_config(changed, said):
  with pytest.raises(ConfigError) as error:
    open_source(source(path="x", **changed), "mine")
  assert said in str(error.value)


def test_fingerprint_follows_content_names_split_and_options(tmp_path):
  path = write_files(tmp_path, ["a.txt", "b.txt"])

  def fingerprint(**cfg):
    return open_source(source(**{"path": path, **cfg}), "mine").fingerprint()

  first = fingerprint()
  assert first == fingerprint(weight=3.0) == open_source(source(path=path), "other").fingerprint()
  seen = {first, fingerprint(split="train"), fingerprint(split="validation"), fingerprint(documents="line"),
          fingerprint(split="train", validation_fraction=0.2), fingerprint(max_documents=1)}
  (tmp_path / "a.txt").write_text("other a\n")
  seen.add(fingerprint())
  (tmp_path / "b.txt").rename(tmp_path / "c.txt")
  seen.add(fingerprint())
  (tmp_path / "d.txt").write_text("")
  seen.add(fingerprint())
  assert len(seen) == 9
