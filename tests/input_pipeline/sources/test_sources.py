"""Splits, limits, empty documents and the fingerprint of a source."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from input_pipeline.sources import sources
from input_pipeline.sources.sources import open_source
from trainer.config import source
from trainer.errors import ConfigError, DataError


def write_files(folder, names):
  for name in names:
    (folder / name).write_text(f"text of {name}\n")
  return str(folder)


def read(cfg, **more):
  return list(open_source(cfg, "mine", **more).records())


def splits(path, texts=True, **cfg):
  return {s: read(source(path=path, split=s, validation_fraction=0.3, **cfg), texts=texts)
          for s in ("all", "train", "validation")}


def text(record):
  return record.fields["text"]


def test_the_parts_are_disjoint_and_make_up_the_whole(tmp_path):
  parts = splits(write_files(tmp_path, [f"{i}.txt" for i in range(100)]))
  assert sorted(parts["train"] + parts["validation"], key=lambda r: r.name) == sorted(
      parts["all"], key=lambda r: r.name)
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
    assert {r.name for r in before[part]} < {r.name for r in after[part]}


def test_equal_rows_stay_on_one_side(tmp_path):
  lines = [f"row {i % 40}" for i in range(200)]
  (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in lines))
  parts = splits(str(tmp_path), type="jsonl")
  train, validation = ({text(d) for d in parts[s]} for s in ("train", "validation"))
  assert not train & validation and train | validation == set(lines)


def test_rows_count_for_their_text_or_for_all_fields(tmp_path):
  rows = [{"text": f"t{i % 20}", "id": i} for i in range(200)]
  (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
  parts = splits(str(tmp_path), type="jsonl")
  assert not {text(r) for r in parts["train"]} & {text(r) for r in parts["validation"]}
  parts = splits(str(tmp_path), texts=False, type="jsonl")
  assert {text(r) for r in parts["train"]} & {text(r) for r in parts["validation"]}  # each row is another one
  assert len(parts["train"]) + len(parts["validation"]) == 200


def test_equal_rows_without_a_text_stay_on_one_side_whatever_the_order_of_keys_and_the_format(tmp_path):
  rows = [{"messages": [{"role": "user", "content": f"é{i % 40}"}], "id": i % 40} for i in range(200)]
  flipped = [dict(reversed(row.items())) if i % 3 else row for i, row in enumerate(rows)]
  (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, flipped)))
  pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
  ids = []
  for kind in ("jsonl", "parquet"):
    for texts in (True, False):
      parts = splits(str(tmp_path / f"x.{kind}"), texts, type=kind)
      train, validation = ({r.fields["id"] for r in parts[s]} for s in ("train", "validation"))
      assert not train & validation and train | validation == set(range(40))
      ids.append(validation)
  assert ids[0] and ids.count(ids[0]) == 4


def test_a_row_of_one_text_is_split_alike_by_all_strategies(tmp_path):
  (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": f"t{i}"}) for i in range(50)))
  assert splits(str(tmp_path), True, type="jsonl") == splits(str(tmp_path), False, type="jsonl")


def test_empty_rows_are_those_without_text_or_without_fields(tmp_path):
  rows = [{"text": "", "id": 1}, {"text": ""}, {}, {"text": "x"}, {"messages": []}]
  (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
  cfg = source(type="jsonl", path=str(tmp_path))
  assert [r.fields for r in read(cfg)] == rows[3:]
  assert [r.fields for r in read(cfg, texts=False)] == [rows[0], *rows[3:]]


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_a_single_document_is_cut_at_a_line_end(tmp_path, fraction):
  whole = "".join(f"line {i} é\n" * (i % 3 + 1) for i in range(40))
  (tmp_path / "x.txt").write_text(whole, encoding="utf-8")
  cfg = dict(path=str(tmp_path / "x.txt"), validation_fraction=fraction)
  (train,), (validation,) = (read(source(split=s, **cfg)) for s in ("train", "validation"))
  assert text(train) + text(validation) == whole and text(train).endswith("\n")
  size, cut = len(whole.encode()), len(text(train).encode())
  ends = [i + 1 for i, b in enumerate(whole.encode()) if b == 10][:-1]
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
  assert [r.name for r in mine.records()] == ["a.txt", "b.txt"]
  assert (mine.tally.documents, mine.tally.empty) == (2, 1)
  assert mine.tally.bytes_read == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_no_text_at_all(tmp_path):
  (tmp_path / "x.txt").write_text("")
  with pytest.raises(DataError, match=r"has no text: .*x.txt, 0 bytes"):
    read(source(path=str(tmp_path / "x.txt")))
  with pytest.raises(DataError, match="has no text"):
    read(source(path=str(tmp_path / "x.txt"), split="train"))


def test_max_documents_are_evenly_spaced_after_the_split(tmp_path):
  (tmp_path / "x.txt").write_text("".join(f"{i}\n" for i in range(100)))
  cfg = source(path=str(tmp_path), documents="line", max_documents=10)
  numbers = [int(text(d)) for d in read(cfg)]
  assert len(numbers) == 10 and {b - a for a, b in zip(numbers, numbers[1:], strict=False)} == {10}
  assert len(read(cfg, max_documents=3)) == 3 and len(read(cfg, max_documents=20)) == 10
  cfg.update(split="train", max_documents=7)
  assert len(read(cfg)) == 7
  cfg.max_documents = 1000
  assert len(read(cfg)) == len(read(source(path=str(tmp_path), documents="line", split="train")))


@pytest.mark.parametrize("changed, said", [
    (dict(type="xml"), "type='xml'; allowed: 'text', 'jsonl'"),
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

  def fingerprint(texts=True, **cfg):
    return open_source(source(**{"path": path, **cfg}), "mine", texts=texts).fingerprint()

  first = fingerprint()
  assert first == fingerprint(weight=3.0) == open_source(source(path=path), "other").fingerprint()
  seen = {first, fingerprint(split="train"), fingerprint(split="validation"), fingerprint(documents="line"),
          fingerprint(split="train", validation_fraction=0.2), fingerprint(max_documents=1), fingerprint(texts=False)}
  (tmp_path / "a.txt").write_text("other a\n")
  seen.add(fingerprint())
  (tmp_path / "b.txt").rename(tmp_path / "c.txt")
  seen.add(fingerprint())
  (tmp_path / "d.txt").write_text("")
  seen.add(fingerprint())
  assert len(seen) == 10


@pytest.mark.parametrize("value, expected", [
    (b"\x00\xff", "00ff"), (decimal.Decimal("1.50"), "1.50"), (datetime.date(2024, 2, 3), "2024-02-03")])
def test_what_json_lacks_is_the_same_everywhere(value, expected):
  assert sources.stable(value) == expected


@pytest.mark.parametrize("total, count, kept", [
    (3, 5, [0, 1, 2]), (5, 5, [0, 1, 2, 3, 4]), (6, 3, [1, 3, 5]), (7, 2, [3, 6]), (4, 1, [3]), (4, 0, [])])
def test_so_many_are_taken_evenly(total, count, kept):
  assert list(sources._evenly_spaced(iter(range(total)), total, count)) == kept


@pytest.mark.parametrize("changed, streams, message", [
    (dict(stream_bytes=700), True, "input.sources.mine.stream_bytes is 700, which cuts the files of a stream, but thi"),
    (dict(stream_files=2), False, "input.sources.mine.stream_files is 2, but prompts and what evaluations read are re"),
    (dict(stream_files=2, stream_bytes=700), False, "input.sources.mine.stream_files is 2, but prompts"),
    (dict(stream_files=1, stream_bytes=700), True, None), (dict(), False, None)])
def test_streams_and_their_parts(tmp_path, changed, streams, message):
  (tmp_path / "a.jsonl").write_text("{}\n")
  cfg = source(type="jsonl", path=str(tmp_path), **changed)
  if message is None:
    open_source(cfg, "mine", streams=streams)
  else:
    with pytest.raises(ConfigError, match=f"^{message}"):
      open_source(cfg, "mine", streams=streams)
