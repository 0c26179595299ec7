"""One reader per source type: `files()` in a fixed order and `read(tally)`, a stream of documents.

Readers touch no file before `files()` or `read()` is called, and import their library only then. `identity`
holds the options that change what documents come out of the same files.
"""

import io
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from absl import logging
from ml_collections import ConfigDict

from input_pipeline.files import DataError, File, Tally, decode, find_files, read_bytes, read_lines, walk
from trainer.config import ConfigError


class Document(NamedTuple):
  """A document; `name` is its file's relative name, with ":line" or "[row]" where a file holds several."""

  name: str
  text: str


def _path(cfg: ConfigDict, source: str, example: str) -> str:
  path = cfg.path
  if not path:
    raise ConfigError(f"input.sources.{source}.path is not set: type {cfg.type!r} needs it, e.g. {example!r}.")
  return path


def _field(record, key: str, where: str, option: str) -> str:
  """`record[key]` as text, or a DataError that says which record and what it has instead."""
  if not isinstance(record, dict):
    raise DataError(f"{where}: expected a JSON object with the key {key!r}, found {type(record).__name__}.")
  if key not in record:
    raise DataError(f"{where}: no key {key!r}; found {', '.join(map(repr, record)) or 'no keys'}. Set {option}.")
  text = record[key]
  if not isinstance(text, str):
    raise DataError(f"{where}: {key!r} must be a string, found {type(text).__name__}. Set {option}.")
  return text


class TextReader:
  """Plain UTF-8 files; a document is a file, a line or a paragraph (blank-line separated)."""

  def __init__(self, cfg: ConfigDict, source: str):
    self.path, self.documents, self._source = _path(cfg, source, "folder/**/*.txt"), cfg.documents, source
    if self.documents not in ("file", "line", "paragraph"):
      raise ConfigError(
          f"input.sources.{source}.documents={self.documents!r}; allowed: 'file', 'line', 'paragraph'."
      )
    self.by_name = self.documents == "file"
    self.identity = ["text", self.documents]

  def files(self) -> list[File]:
    return find_files(self.path, self._source, lambda name: True, "a UTF-8 text file")

  def read(self, tally: Tally) -> Iterator[Document]:
    for name, path in self.files():
      if self.documents == "file":
        yield Document(name, decode(read_bytes(path, tally), path))
      elif self.documents == "line":
        for number, offset, line in read_lines(path, tally):
          yield Document(f"{name}:{number}", decode(line, path, offset, number).rstrip("\r\n"))
      else:
        yield from self._paragraphs(name, path, tally)

  def _paragraphs(self, name: str, path: Path, tally: Tally) -> Iterator[Document]:
    lines, first = [], 1
    for number, offset, line in read_lines(path, tally):
      text = decode(line, path, offset, number)
      if text.strip():
        first = first if lines else number
        lines.append(text)
      elif lines:
        yield Document(f"{name}:{first}", "".join(lines).rstrip("\r\n"))
        lines = []
    if lines:
      yield Document(f"{name}:{first}", "".join(lines).rstrip("\r\n"))


class JsonlReader:
  """JSON Lines, also .gz and .zst; blank lines are skipped."""

  by_name = False
  suffixes = tuple(a + b for a in (".jsonl", ".ndjson", ".json") for b in ("", ".gz", ".zst"))

  def __init__(self, cfg: ConfigDict, source: str):
    self.path, self.text_key, self._source = _path(cfg, source, "data/*.jsonl"), cfg.text_key, source
    self.identity = ["jsonl", self.text_key]

  def files(self) -> list[File]:
    expected = "a .jsonl, .jsonl.gz or .jsonl.zst file"
    return find_files(self.path, self._source, lambda name: name.endswith(self.suffixes), expected)

  def read(self, tally: Tally) -> Iterator[Document]:
    option = f"input.sources.{self._source}.text_key"
    for name, path in self.files():
      for number, offset, line in read_lines(path, tally):
        text = decode(line, path, offset, number).strip()
        if not text:
          continue
        try:
          record = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as e:
          detail = f"{e.msg} at column {e.colno}" if isinstance(e, json.JSONDecodeError) else "nested too deeply"
          raise DataError(
              f"{path}:{number}: not valid JSON ({detail}): {text[:60]!r}. Each line must be one JSON object."
          ) from e
        yield Document(f"{name}:{number}", _field(record, self.text_key, f"{path}:{number}", option))


class ParquetReader:
  """A string column of Parquet files, streamed by row groups."""

  by_name = False

  def __init__(self, cfg: ConfigDict, source: str):
    self.path, self.text_key, self._source = _path(cfg, source, "data/*.parquet"), cfg.text_key, source
    self.identity = ["parquet", self.text_key]

  def files(self) -> list[File]:
    return find_files(self.path, self._source, lambda n: n.endswith(".parquet"), "a .parquet file")

  def read(self, tally: Tally) -> Iterator[Document]:
    try:
      import pyarrow as pa
      import pyarrow.parquet as pq
    except ImportError as e:
      raise DataError(f"source {self._source!r}: reading Parquet needs `pip install pyarrow`.") from e
    for name, path in self.files():
      before, size = tally.bytes_read, os.path.getsize(path)
      try:
        with pq.ParquetFile(path) as table:
          self._check_column(path, table.schema_arrow, pa.types)
          row, rows = 0, max(table.metadata.num_rows, 1)
          for batch in table.iter_batches(batch_size=512, columns=[self.text_key]):
            for text in batch.column(0).to_pylist():
              if text is None:
                where = f"{path}: row {row} (from 0)"
                raise DataError(f"{where} has null in column {self.text_key!r}. Filter such rows out.")
              yield Document(f"{name}[{row}]", text)
              row += 1
            tally.bytes_read = before + size * row // rows
      except UnicodeDecodeError as e:
        raise DataError(f"{path}: column {self.text_key!r} is not valid UTF-8, in row {row} (from 0) or after.") from e
      except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: not a readable Parquet file: {e}") from e
      tally.bytes_read = before + size

  def _check_column(self, path: Path, schema, types) -> None:
    option = f"input.sources.{self._source}.text_key"
    if self.text_key not in schema.names:
      found = ", ".join(map(repr, schema.names))
      raise DataError(f"{path}: no column {self.text_key!r}; found {found}. Set {option}.")
    kind = schema.field(self.text_key).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
      raise DataError(f"{path}: column {self.text_key!r} must hold strings, found {kind}. Set {option}.")


class ArrayRecordReader:
  """ArrayRecord files whose records are UTF-8 text, or JSON objects with `text_key`.

  The source's first record decides which of the two all records must be.
  """

  by_name = False

  def __init__(self, cfg: ConfigDict, source: str):
    self.path, self.text_key, self._source = _path(cfg, source, "data/*.arrayrecord"), cfg.text_key, source
    self.identity = ["arrayrecord", self.text_key]

  def files(self) -> list[File]:
    wanted = (".arrayrecord", ".array_record")
    return find_files(self.path, self._source, lambda n: any(w in n for w in wanted), "an .arrayrecord file")

  def read(self, tally: Tally) -> Iterator[Document]:
    option = f"input.sources.{self._source}.text_key"
    as_json = None
    for name, path in self.files():
      before, size = tally.bytes_read, os.path.getsize(path)
      for row, rows, record in self._records(path):
        where = f"{path}: record {row} (from 0)"
        try:
          text = record.decode("utf-8")
        except UnicodeDecodeError as e:
          raise DataError(f"{where}: not valid UTF-8 at byte {e.start}. Records must be UTF-8 text or JSON.") from e
        if as_json is None:
          as_json = self._looks_like_json(text)
        if as_json:
          try:
            record = json.loads(text)
          except (json.JSONDecodeError, RecursionError) as e:
            raise DataError(f"{where}: the first record is a JSON object, this one is not JSON: {e}.") from e
          hint = f"{option} (to '' to train on the JSON itself)"
          text = _field(record, self.text_key, where, hint)
        yield Document(f"{name}[{row}]", text)
        tally.bytes_read = before + size * (row + 1) // rows
      tally.bytes_read = before + size

  def _records(self, path: Path) -> Iterator[tuple[int, int, bytes]]:
    try:
      from array_record.python import array_record_module
    except ImportError as e:
      raise DataError(f"source {self._source!r}: reading ArrayRecord needs `pip install array_record`.") from e
    try:
      reader = array_record_module.ArrayRecordReader(str(path))
      if not reader.ok():
        raise RuntimeError("no ArrayRecord index in it")
      rows = reader.num_records()
      for start in range(0, rows, 256):
        stop = min(start + 256, rows)
        for row, record in enumerate(reader.read(start, stop), start):
          yield row, rows, record
      reader.close()
    except (RuntimeError, IndexError) as e:
      raise DataError(f"{path}: not a readable ArrayRecord file: {e}.") from e

  def _looks_like_json(self, text: str) -> bool:
    if not self.text_key or not text.lstrip().startswith("{"):
      return False
    try:
      return isinstance(json.loads(text), dict)
    except (json.JSONDecodeError, RecursionError):
      return False


class TfdsReader:
  """A dataset prepared by `tensorflow_datasets` as ArrayRecord, read without TensorFlow."""

  by_name = False

  def __init__(self, cfg: ConfigDict, source: str):
    self.data_dir, self.text_key, self._source = cfg.path, cfg.text_key, source
    self.dataset, self.split = cfg.dataset, cfg.dataset_split
    if not self.dataset:
      raise ConfigError(f"input.sources.{source}.dataset is not set: type 'tfds' needs it, e.g. 'ag_news_subset'.")
    self.identity = ["tfds", self.dataset, self.split, self.text_key]

  @cached_property
  def _builder(self):
    try:
      import tensorflow_datasets as tfds
    except ImportError as e:
      raise DataError(
          f"source {self._source!r}: type 'tfds' needs `pip install tensorflow-datasets importlib_resources` ({e})."
      ) from e
    try:
      builder = tfds.builder(self.dataset, data_dir=self.data_dir)
    except (ValueError, AssertionError, ImportError, FileNotFoundError) as e:  # DatasetNotFoundError is a ValueError
      reason = str(e).strip().splitlines()[0]
      raise DataError(
          f"input.sources.{self._source}.dataset={self.dataset!r} not found with data_dir {self.data_dir!r}: {reason} "
          "Set dataset ('name', 'name/config' or 'name:version') and path (the folder it was prepared in)."
      ) from e
    if not builder.info.splits:
      raise DataError(
          f"TFDS dataset {self.dataset!r} is not prepared in {builder.data_dir}. Prepare it once with "
          f"`tfds.builder({self.dataset!r}, file_format='array_record').download_and_prepare()`."
      )
    return builder

  @cached_property
  def _split_info(self):
    try:
      return self._builder.info.splits[self.split]
    except (KeyError, ValueError) as e:
      found = ", ".join(map(repr, self._builder.info.splits))
      raise DataError(
          f"input.sources.{self._source}.dataset_split={self.split!r}: {self.dataset!r} has the splits {found}."
      ) from e

  def files(self) -> list[File]:
    shards = sorted({Path(str(p)) for p in self._split_info.filepaths})
    description = [p for p in (Path(str(self._builder.data_dir)) / "features.json",) if p.exists()]
    return [File(p.name, p) for p in [*description, *shards]]

  def read(self, tally: Tally) -> Iterator[Document]:
    before, size = tally.bytes_read, sum(os.path.getsize(f.path) for f in self.files())
    features = self._builder.info.features
    option = f"input.sources.{self._source}.text_key"
    if self.text_key not in features:
      found = ", ".join(map(repr, sorted(features)))
      raise DataError(f"TFDS dataset {self.dataset!r}: no feature {self.text_key!r}; found {found}. Set {option}.")
    try:
      rows = self._builder.as_data_source(split=self.split)
    except (NotImplementedError, ValueError, FileNotFoundError) as e:
      reason = str(e).strip().splitlines()[0]
      raise DataError(f"TFDS dataset {self.dataset!r} in {self._builder.data_dir} cannot be read: {reason}") from e
    for row in range(len(rows)):
      name, text = f"{self.dataset}/{self.split}[{row}]", rows[row][self.text_key]
      if not isinstance(text, bytes | str):
        raise DataError(f"{name}: {self.text_key!r} must be text, found {type(text).__name__}. Set {option}.")
      if isinstance(text, bytes):
        try:
          text = text.decode("utf-8")
        except UnicodeDecodeError as e:
          raise DataError(f"{name}: {self.text_key!r} is not valid UTF-8 at byte {e.start}.") from e
      yield Document(name, text)
      tally.bytes_read = before + size * (row + 1) // len(rows)


class PythonStdlibReader:
  """The sources of the running Python's standard library: real text that every machine has."""

  by_name = True
  identity = ["python_stdlib"]
  # Not part of the library proper, or packaged separately by some distributions.
  skipped = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})

  def __init__(self, cfg: ConfigDict, source: str):
    self._source = source

  def files(self) -> list[File]:
    folder = sysconfig.get_paths()["stdlib"]
    found = (File(Path(os.path.relpath(p, folder)).as_posix(), Path(p)) for p in walk(folder, self.skipped))
    files = sorted(f for f in found if f.name.endswith(".py"))
    if not files:
      raise DataError(
          f"source {self._source!r}: this Python has no library sources in {folder!r} (a zipped or embedded Python?). "
          "Use type='text' with a path."
      )
    return files

  def read(self, tally: Tally) -> Iterator[Document]:
    for name, path in self.files():
      raw = read_bytes(path, tally)
      try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = io.TextIOWrapper(io.BytesIO(raw), encoding).read()
      except (SyntaxError, UnicodeDecodeError, LookupError) as e:
        tally.undecodable += 1
        logging.info("%s: skipped, its encoding is not readable: %s", path, e)
      else:
        yield Document(name, text)


READERS = {
    "text": TextReader,
    "jsonl": JsonlReader,
    "parquet": ParquetReader,
    "arrayrecord": ArrayRecordReader,
    "tfds": TfdsReader,
    "python_stdlib": PythonStdlibReader,
}
