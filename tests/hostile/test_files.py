"""Files that are not what their names say: every reader, and what lies where data should be."""

import gzip
import json
import os

import pytest
import zstandard

from input_pipeline import files
from tests.hostile.common import config_of, named, prepare, refused, write

FINE = {"text": "fine"}
DEEP = 100_000


def text(*parts, name="a.txt", **changed):
  """Makes a text file of these bytes."""
  return lambda folder: config_of(write(folder / name, *parts), "text", "seq", split="all", **changed)


def jsonl(*rows, name="a.jsonl", strategy="seq", **changed):
  return lambda folder: config_of(write(folder / name, *rows), "jsonl", strategy, split="all", **changed)


def parquet(columns, strategy="seq", cut=None, flipped=None, **changed):
  """Makes a Parquet file of {column: values}, its end cut off or a byte flipped."""
  def make(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq
    file = folder / "a.parquet"
    pq.write_table(pa.table(columns() if callable(columns) else columns), file)
    raw = bytearray(file.read_bytes())[:cut]
    if flipped is not None:
      raw[flipped] ^= 0xFF
    file.write_bytes(bytes(raw))
    return config_of(file, "parquet", strategy, split="all", **changed)
  return make


def arrayrecord(*records, damage=None, **changed):
  def make(folder):
    from array_record.python.array_record_module import ArrayRecordWriter
    file = folder / "a.arrayrecord"
    writer = ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
      writer.write(record)
    writer.close()
    if damage:
      file.write_bytes(damage(file.read_bytes()))
    return config_of(file, "arrayrecord", "seq", split="all", **changed)
  return make


def fifo(folder):
  os.mkfifo(folder / "a.jsonl")
  return config_of(folder / "a.jsonl", split="all")


def fifo_in_folder(folder):
  os.mkfifo(folder / "a.jsonl")
  return config_of(folder, split="all")


def loop_of_links(folder):
  (folder / "a.jsonl").symlink_to(folder / "b.jsonl")
  (folder / "b.jsonl").symlink_to(folder / "a.jsonl")
  return config_of(folder / "a.jsonl", split="all")


def unreadable(folder):
  file = write(folder / "a.jsonl", FINE)
  file.chmod(0)
  return config_of(file, "jsonl", "seq", split="all")


def named_like_a_file(folder):
  (folder / "a.jsonl").mkdir()
  return config_of(folder / "a.jsonl", split="all")


def glob_of_nothing(folder):
  write(folder / "a.txt", "text")
  return config_of(folder / "*.jsonl", split="all")


def path_of(path, kind="jsonl"):
  return lambda folder: config_of(path, kind, "seq", split="all")


def tfds(dataset, features=None, path=True, **changed):
  """A source of TFDS, with a features.json in the folder of the data set."""
  def make(folder):
    if features is not None:
      write(folder / "evil" / "1.0.0" / "features.json", features)
      write(folder / "evil" / "1.0.0" / "dataset_info.json",
            json.dumps({"name": "evil", "version": "1.0.0", "fileFormat": "array_record",
                        "splits": [{"name": "train", "shardLengths": ["1"], "numBytes": "1"}]}))
    return config_of(folder if path is True else path, "tfds", "seq", dataset=dataset, split="all", **changed)
  return make


GZ = gzip.compress(b'{"text": "fine"}\n' * 1000)
ZST = zstandard.compress(b'{"text": "fine"}\n' * 1000)
FILES = [
    ("text not utf-8", text(b"fine\n\xff\xfe"), "{folder}/a.txt", "not valid UTF-8 at byte offset 5"),
    ("text utf-16", text("fine".encode("utf-16")), "a.txt", "not valid UTF-8 at byte offset 0"),
    ("text half a character at the end", text("für".encode()[:2]), "a.txt", "unexpected end of data"),
    ("text encoded surrogate", text(b"a\xed\xa0\x80b"), "a.txt", "not valid UTF-8 at byte offset 1"),
    ("text empty file", text(b""), "no text", "a.txt", "0 bytes"),
    ("text only bom", text(b"\xef\xbb\xbf"), "no text", "a.txt"),
    ("text only blank paragraphs", text(b"\n \n\n", documents="paragraph"), "no text", "a.txt"),
    ("text bad line", text(b"a\nb\n\x80\n", documents="line"), "a.txt:3", "not valid UTF-8"),
    ("text unknown documents", text(b"a", documents="word"), "documents='word'", "'file', 'line', 'paragraph'"),
    ("gz cut", jsonl(GZ[:-9], name="a.jsonl.gz"), "a.jsonl.gz", "damaged or truncated"),
    ("gz head only", jsonl(GZ[:5], name="a.jsonl.gz"), "a.jsonl.gz", "damaged or truncated"),
    ("gz not gz", jsonl(b"plain", name="a.jsonl.gz"), "a.jsonl.gz", "Not a gzipped file"),
    ("gz wrong checksum", jsonl(GZ[:-8] + b"\0" * 8, name="a.jsonl.gz"), "a.jsonl.gz", "CRC check failed"),
    ("gz flipped", jsonl(GZ[:30] + bytes([GZ[30] ^ 255]) + GZ[31:], name="a.jsonl.gz"), "a.jsonl.gz", "damaged"),
    ("zst cut", jsonl(ZST[:-3], name="a.jsonl.zst"), "a.jsonl.zst", "truncated"),
    ("zst not zst", jsonl(b"plain text", name="a.jsonl.zst"), "a.jsonl.zst", "damaged"),
    ("zst flipped", jsonl(ZST[:9] + bytes([ZST[9] ^ 255]) + ZST[10:], name="a.jsonl.zst"), "a.jsonl.zst"),
    ("zst window too large", jsonl(b"\x28\xb5\x2f\xfd\x00\xff" + b"\0" * 20, name="a.jsonl.zst"), "a.jsonl.zst"),
    ("fifo", fifo, "a.jsonl", "neither a file nor a folder"),
    ("fifo in a folder", fifo_in_folder, "no files", "expected a .jsonl"),
    ("loop of links", loop_of_links, "a.jsonl", "neither a file nor a folder"),
    ("folder named like a file", named_like_a_file, "a.jsonl", "no files"),
    ("glob of nothing", glob_of_nothing, "*.jsonl", "no files"),
    ("no such file", path_of("/nowhere/a.jsonl"), "/nowhere/a.jsonl", "does not exist"),
    ("path with a nul", path_of("a\0b.jsonl"), "input.sources.main.path"),
    ("path of half a character", path_of("a\udc80b.jsonl"), "input.sources.main.path", "does not exist"),
    ("path with an escape", path_of("/nowhere/\x1b]0;red"), "input.sources.main.path", "does not exist"),
    ("path far too long", path_of("/" + "a" * 10_000), "input.sources.main.path"),
    ("path empty", path_of(""), "input.sources.main.path is not set"),
    ("path only commas", path_of(",,"), "input.sources.main.path is empty"),
    ("path a device", path_of("/dev/zero", "text"), "/dev/zero", "neither a file nor a folder"),
    ("path a url", path_of("https://me:secret@example.com/a.jsonl"), "https://example.com/a.jsonl",
     "a user, a password or a signature"),
    ("path of a user who is not there", path_of("~nobody_here/a.jsonl"), "~nobody_here/a.jsonl", "does not exist"),
    ("parquet not parquet", lambda f: config_of(write(f / "a.parquet", b"PAR1"), "parquet", "seq", split="all"),
     "a.parquet", "not a readable Parquet file"),
    ("parquet empty file", lambda f: config_of(write(f / "a.parquet", b""), "parquet", "seq", split="all"),
     "a.parquet", "not a readable Parquet file"),
    ("parquet cut", parquet({"text": ["fine"] * 100}, cut=-20), "a.parquet", "not a readable Parquet file"),
    ("parquet flipped in the middle", parquet({"text": [f"fine {i}" for i in range(1000)]}, flipped=40), "a.parquet"),
    ("parquet no such column", parquet({"body": ["fine"]}), "a.parquet: row 0", "no key 'text'; found 'body'"),
    ("parquet numbers for text", parquet({"text": [1, 2]}), "row 0", "'text' must be a string, found int"),
    ("parquet null for text", parquet({"text": ["a", None]}), "row 1", "'text' must be a string, found null"),
    ("parquet bytes for text", parquet({"text": [b"\xff"]}), "row 0", "must be a string, found bytes"),
    ("parquet no rows", parquet({"text": []}), "a.parquet"),
    ("parquet a date far away", parquet(lambda: _far_dates(), "sft"), "a.parquet", "row 0"),
    ("arrayrecord not one", lambda f: config_of(write(f / "a.arrayrecord", b"x" * 100), "arrayrecord", "seq"),
     "a.arrayrecord", "not a readable ArrayRecord file"),
    ("arrayrecord empty file", lambda f: config_of(write(f / "a.arrayrecord", b""), "arrayrecord", "seq"),
     "a.arrayrecord", "not a readable ArrayRecord file"),
    ("arrayrecord cut", arrayrecord(*[b"fine"] * 9, damage=lambda raw: raw[:-50]), "a.arrayrecord", "not a readable"),
    ("arrayrecord flipped", arrayrecord(*[b"fine" * 50] * 9, damage=lambda raw: raw[:300] + b"\xff" * 60 + raw[360:]),
     "a.arrayrecord"),
    ("arrayrecord not utf-8", arrayrecord(b"fine", b"\xff"), "a.arrayrecord: record 1", "not valid UTF-8"),
    ("arrayrecord json then not", arrayrecord(b'{"text": "a"}', b"plain"), "record 1", "this one is not JSON"),
    ("tfds no dataset", tfds(None), "input.sources.main.dataset is not set"),
    ("tfds unknown", tfds("no_such_dataset_here"), "dataset='no_such_dataset_here' not found"),
    ("tfds traversal", tfds("../../etc"), "input.sources.main.dataset", "'../../etc'"),
    ("tfds url of a bucket", tfds("evil", path="gs://bucket/folder"), "dataset='evil' not found", "gs://bucket"),
    ("tfds of hugging face", tfds("huggingface:squad"), "input.sources.main.dataset", "huggingface:squad"),
    ("tfds community code", tfds("kaggle:my_ds"), "input.sources.main.dataset", "kaggle:my_ds"),
    ("tfds arguments in the name", tfds("evil/data_dir='/tmp'"), "input.sources.main.dataset"),
    ("tfds features not json", tfds("evil", "{"), "evil", "features.json"),
    ("tfds features name code", tfds("evil", {"pythonClassName": "antigravity.pwned",
     "featuresDict": {"features": {}}}),
     "features.json", "antigravity.pwned"),
    ("tfds features name code inside", tfds("evil", {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict", "featuresDict": {
            "features": {"text": {"pythonClassName": "this.pwned"}}}}), "features.json", "this.pwned"),
    ("tfds features of the old form name code", tfds("evil", {"type": "antigravity.pwned", "content": {}}),
     "features.json", "antigravity.pwned"),
    ("tfds shards missing", tfds("evil", {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {"features": {}}}), "evil"),
    ("digits unknown question", lambda f: config_of("", "digits", "seq", dataset="colour"), "dataset is 'colour'"),
    ("unknown type", path_of("a.bin", "pickle"), "type='pickle'", "'jsonl'"),
]


def _far_dates():
  import pyarrow as pa
  return {"text": pa.array(["a"]), "at": pa.array([2**62], pa.timestamp("us"))}


@pytest.mark.parametrize("row", named([(row[0], row[1:]) for row in FILES]))
def test_a_bad_file_is_one_message(row, tmp_path, guard):
  make, *expected = row
  folder = tmp_path / "data"
  folder.mkdir()
  if make is unreadable and os.geteuid() == 0:
    pytest.skip("root reads everything")
  config = make(folder)
  with guard.only(tmp_path / "work"):
    refused(lambda: prepare(config, tmp_path / "work"), *(part.format(folder=folder) for part in expected))


@pytest.mark.parametrize("name, compress", [("a.jsonl.zst", zstandard.compress), ("a.jsonl.gz", gzip.compress)])
def test_a_line_that_unpacks_without_an_end_is_refused_before_it_is_all_there(name, compress, tmp_path, monkeypatch):
  monkeypatch.setattr(files, "MAX_LINE", 1 << 20)
  monkeypatch.setattr(files, "UNPACKED", 64)
  largest, split = [0], files._split_lines

  def watched(chunks, path):
    def passed():
      for chunk in chunks:
        largest[0] = max(largest[0], len(chunk))
        yield chunk
    return split(passed(), path)

  monkeypatch.setattr(files, "_split_lines", watched)
  config = config_of(write(tmp_path / name, compress(b"0" * (1 << 26))), "jsonl", "seq", split="all")
  refused(lambda: prepare(config, tmp_path / "work"), name, "a line of more than 1,048,576 bytes")
  assert 1 < largest[0] <= 1 << 23
