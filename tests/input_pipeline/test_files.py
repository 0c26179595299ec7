"""Which files a path names, in which order, and what reading damaged ones says."""

import gzip
import os

import pytest
import zstandard

from input_pipeline.files import Tally, find_files, hash_file, read_bytes, read_lines
from trainer.errors import DataError


def names(spec, matches=lambda name: True):
  return [f.name for f in find_files(str(spec), "mine", matches, "a text file")]


@pytest.fixture
def folder(tmp_path):
  for name in ("b.txt", "a/z.txt", "a/b/c.txt", "B.txt", ".hidden/x.txt", "a/.hidden.txt", "note.md"):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(name)
  return tmp_path


def test_folder_is_searched_in_sorted_order_without_hidden_files(folder):
  assert names(folder) == ["B.txt", "a/b/c.txt", "a/z.txt", "b.txt", "note.md"]
  assert names(folder, lambda name: name.endswith(".md")) == ["note.md"]


def test_glob_file_and_commas_keep_the_order_given(folder):
  assert names(folder / "**" / "*.txt") == ["B.txt", "a/b/c.txt", "a/z.txt", "b.txt"]
  assert names(f"{folder}/note.md, {folder}/a/*.txt") == ["note.md", "z.txt"]
  assert names(folder / "a" / ".hidden.txt") == [".hidden.txt"]


def test_a_comma_in_an_existing_path_is_part_of_it(tmp_path):
  (tmp_path / "a,b.txt").write_text("x")
  assert names(tmp_path / "a,b.txt") == ["a,b.txt"]


def test_symlink_loops_and_repeated_files_are_read_once(folder):
  os.symlink(folder, folder / "a" / "loop")
  os.symlink(folder / "b.txt", folder / "same.txt")
  os.symlink(folder / "gone.txt", folder / "broken.txt")
  assert names(folder) == ["B.txt", "a/b/c.txt", "a/z.txt", "b.txt", "note.md"]
  assert names(f"{folder}/b.txt,{folder}") == ["b.txt", "B.txt", "a/b/c.txt", "a/z.txt", "note.md"]


def test_what_runs_write_among_the_data_is_not_read(folder, monkeypatch, caplog):
  """By a folder and by a glob, of which none is a run's; who names a run's folder, or one in it, has what is in it."""
  for name in ("runs/one/samples/text-4.txt", "runs/one/log.txt", "runs/two/log.txt", "runs/notes.txt"):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(name)
  for name in ("one", "two"):
    (folder / "runs" / name / "started").write_text("2026-11-29T06:24:45.123456+00:00\n")
  (folder / "a" / "started").write_text("a text of someone's that has this name")
  texts = ["B.txt", "a/b/c.txt", "a/z.txt", "b.txt", "runs/notes.txt"]
  assert names(folder, lambda name: name.endswith(".txt")) == names(folder / "**" / "*.txt") == texts
  assert "input.sources.mine.path: 3 files are of runs" in caplog.records[-1].message
  assert all(str(folder / "runs" / name) in caplog.records[-1].message for name in ("one", "two"))
  monkeypatch.chdir(folder)
  assert names("**/*.txt") == names(".", lambda name: name.endswith(".txt")) == texts
  told = len(caplog.records)
  assert names("runs/one") == ["log.txt", "samples/text-4.txt", "started"]
  assert names("runs/one/**/*.txt") == ["log.txt", "samples/text-4.txt"]
  assert names("runs/one/samples") == ["text-4.txt"] and names("runs/one/log.txt") == ["log.txt"]
  monkeypatch.chdir(folder / "runs" / "one")
  assert names("*.txt") == ["log.txt"] and len(caplog.records) == told


@pytest.mark.parametrize("spec, said", [
    ("{}/absent.txt", "absent.txt' does not exist (the folder holds .hidden, B.txt, a, b.txt, note.md)"),
    ("{}/no/such/file", "does not exist"),
    ("no_such_folder/train.txt", "no_such_folder'). Name a text file"),
    ("tatsu-lab/alpaca", "tatsu-lab'; on Hugging Face's hub: hf://datasets/tatsu-lab/alpaca). Name a text file"),
    ("{}/*.csv", "has no files; expected a text file"),
    (" , ", "is empty"),
])
def test_what_is_missing_is_named(folder, spec, said):
  with pytest.raises(DataError) as error:
    names(spec.format(folder))
  assert said in str(error.value) and "input.sources.mine.path" in str(error.value)


def test_folder_with_other_files_only_lists_them(folder):
  with pytest.raises(DataError, match="only B.txt, a/b/c.txt, a/z.txt, b.txt, note.md; expected a text file"):
    names(folder, lambda name: False)


TEXT = b"".join(b"line %d\n" % i for i in range(5000)) + b"last, no end"


def compressed(tmp_path, kind):
  path = tmp_path / f"x.txt{kind}"
  data = {"": TEXT, ".gz": gzip.compress(TEXT)}.get(kind)
  if kind == ".zst":  # two frames, as `cat a.zst b.zst` makes
    compress = zstandard.ZstdCompressor().compress
    data = compress(TEXT[:1234]) + compress(TEXT[1234:])
  path.write_bytes(data)
  return path


@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
def test_lines_with_numbers_and_offsets(tmp_path, kind):
  path, tally = compressed(tmp_path, kind), Tally()
  lines = list(read_lines(path, tally))
  assert b"".join(line for _, _, line in lines) == TEXT == read_bytes(path, Tally())
  assert [n for n, _, _ in lines] == list(range(1, 5002))
  assert all(TEXT[offset:].startswith(line) for _, offset, line in lines[::500])
  assert tally.bytes_read == path.stat().st_size


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_truncated_and_damaged_compression(tmp_path, kind):
  path = compressed(tmp_path, kind)
  whole = path.read_bytes()
  path.write_bytes(whole[:-20])
  with pytest.raises(DataError, match="truncated"):
    read_bytes(path, Tally())
  path.write_bytes(b"not compressed at all")
  with pytest.raises(DataError, match=rf"x.txt{kind}: damaged"):
    read_bytes(path, Tally())


def test_hash_depends_on_content_alone(tmp_path):
  for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
    (tmp_path / name).write_text(text)
  a, b, c = (hash_file(tmp_path / name) for name in "abc")
  assert a == b != c
