"""One reader per source type: `files()` in a fixed order and `read(tally)`, a stream of records.

Readers touch no file before `files()` or `read()` is called, and import their library only then. `identity`
holds the options that change what records come out of the same files. What a record's fields mean is not a reader's
business: `registry.py` finds the text, the conversation or the tokens in them.
"""

import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from input_pipeline.files import (
  BadTextError,
  File,
  NotJSONError,
  Record,
  Tally,
  decode,
  find_files,
  parse_json,
  read_bytes,
  read_lines,
  the_path,
)
from input_pipeline.sources.arrow import ArrowReader, ParquetReader
from input_pipeline.sources.json_files import JsonlReader, parse_object
from input_pipeline.sources.made import (
  ArithmeticMistakesReader,
  ArithmeticPairsReader,
  ArithmeticReader,
  DigitsReader,
  png,
)
from input_pipeline.sources.python import (
  PythonDocstringMatchesReader,
  PythonDocstringPairsReader,
  PythonDocstringsReader,
  PythonStdlibReader,
)
from input_pipeline.sources.tables import CsvReader
from trainer.errors import ConfigError, DataError


class TextReader:
  """Plain UTF-8 files; a document is a file, a line or a paragraph (blank-line separated)."""

  def __init__(self, cfg: ConfigDict, source: str):
    self.path, self.documents, self._source = the_path(cfg, source, "folder/**/*.txt"), cfg.documents, source
    if self.documents not in ("file", "line", "paragraph"):
      raise ConfigError(
          f"input.sources.{source}.documents={self.documents!r}; allowed: 'file', 'line', 'paragraph'."
      )
    self.by_name, self._copies = self.documents == "file", cfg.copies
    self.cuts = {"file": None, "line": "lines", "paragraph": "paragraphs"}[self.documents]
    self.text_key, self.identity = "text", ["text", self.documents]

  def files(self) -> list[File]:
    return find_files(self.path, self._source, lambda name: True, "a UTF-8 text file", self._copies)

  def read(self, tally: Tally) -> Iterator[Record]:
    for name, path in self.files():
      if self.documents == "file":
        yield _of_text(name, str(path), path, [(None, 0, read_bytes(path, tally))])
        continue
      for number, pieces in (self._lines if self.documents == "line" else self._paragraphs)(path, tally):
        yield _of_text(f"{name}:{number}", f"{path}:{number}", path, pieces, strip="\r\n")

  def _lines(self, path: Path, tally: Tally) -> Iterator[tuple[int, list[tuple[int, int, bytes]]]]:
    """(line number, what `read_lines` gives) of each line."""
    return ((line[0], [line]) for line in read_lines(path, tally))

  def _paragraphs(self, path: Path, tally: Tally) -> Iterator[tuple[int, list[tuple[int, int, bytes]]]]:
    """(number of the first line, what `read_lines` gives) of each paragraph."""
    lines: list[tuple[int, int, bytes]] = []
    for line in read_lines(path, tally):
      if line[2].decode("utf-8", "replace").strip("\ufeff" if line[1] == 0 else "").strip():
        lines.append(line)
      elif lines:
        yield lines[0][0], lines
        lines = []
    if lines:
      yield lines[0][0], lines


def _of_text(name: str, where: str, path: Path, pieces: Sequence[tuple[int | None, int, bytes]], strip: str = ""
             ) -> Record:
  """The record of a text, without `strip` at its end; a bad one if it is not UTF-8. Pieces: see `read_lines`."""
  try:
    text = "".join(decode(raw, path, offset, line) for line, offset, raw in pieces)
    return Record(name, where, {"text": text.rstrip(strip) if strip else text})
  except BadTextError as e:
    return Record(name, where, {}, problem=e)


class ArrayRecordReader:
  """ArrayRecord files whose records are JSON objects, or UTF-8 text, which then is the field `text_key`.

  The source's first record decides which of the two all records must be. Without a `text_key`, JSON is text, too.
  """

  by_name = False
  # Added to what a message says about text_key.
  text_hint = " (to '' to train on the JSON itself)"

  def __init__(self, cfg: ConfigDict, source: str):
    self.path, self._source = the_path(cfg, source, "data/*.arrayrecord"), source
    self._never_json, self.text_key, self._copies = not cfg.text_key, cfg.text_key or "text", cfg.copies
    self.identity = ["arrayrecord", self.text_key, self._never_json]

  def files(self) -> list[File]:
    wanted, expected = (".arrayrecord", ".array_record"), "an .arrayrecord file"
    return find_files(self.path, self._source, lambda n: any(w in n for w in wanted), expected, self._copies)

  def read(self, tally: Tally) -> Iterator[Record]:
    as_json = None
    for name, path in self.files():
      before, size = tally.bytes_read, os.path.getsize(path)
      for row, rows, record in self._records(path):
        where = f"{path}: record {row} (from 0)"
        problem, fields = None, {}
        try:
          text = record.decode("utf-8")
          if as_json is None:
            as_json = self._looks_like_json(text)
          not_json = "the first record is a JSON object, this one is not JSON ({})"
          fields = parse_object(text, where, not_json) if as_json else {self.text_key: text}
        except UnicodeDecodeError as e:
          problem = DataError(f"{where}: not valid UTF-8 at byte {e.start}. Records must be UTF-8 text or JSON.")
        except DataError as e:
          problem = e
        yield Record(f"{name}[{row}]", where, fields, path.parent, problem=problem)
        tally.bytes_read = before + size * (row + 1) // rows
      tally.bytes_read = before + size

  def _records(self, path: Path) -> Iterator[tuple[int, int, bytes]]:
    from array_record.python import array_record_module
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
    if self._never_json or not text.lstrip().startswith("{"):
      return False
    try:
      return isinstance(parse_json(text), dict)
    except NotJSONError:
      return False


class TfdsReader:
  """A dataset prepared by `tensorflow_datasets` as ArrayRecord, read without TensorFlow."""

  by_name = False

  def __init__(self, cfg: ConfigDict, source: str):
    self.data_dir, self.text_key, self._source = cfg.path, cfg.text_key, source
    self.dataset, self.split = cfg.dataset, cfg.dataset_split
    if not self.dataset:
      raise ConfigError(f"input.sources.{source}.dataset is not set: type 'tfds' needs it, e.g. 'ag_news_subset'.")
    # Names may have arguments, and namespaces whose code or data TFDS would fetch.
    if not re.fullmatch(r"\w+(/[\w.+-]+)?(:(\d+|\*)(\.(\d+|\*)){0,2})?", self.dataset):
      raise ConfigError(f"input.sources.{source}.dataset is {self.dataset!r}; expected 'name', 'name/config' or "
                        "'name:version' of a dataset that was prepared in path. Nothing is downloaded.")
    self.identity = ["tfds", self.dataset, self.split]

  @cached_property
  def _builder(self):
    import tensorflow_datasets as tfds
    folder = Path(os.path.expanduser(self.data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")))
    for file in sorted((folder / re.split("[/:]", self.dataset)[0]).glob("**/features.json")):
      _check_features(file)
    try:
      builder = tfds.builder(self.dataset, data_dir=self.data_dir)
    except Exception as e:  # TFDS raises many kinds: asserts, those of JSON, of protocol buffers
      reason = (str(e).strip() or type(e).__name__).splitlines()[0]
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

  def read(self, tally: Tally) -> Iterator[Record]:
    before, size = tally.bytes_read, sum(os.path.getsize(f.path) for f in self.files())
    features = self._builder.info.features
    try:
      rows = self._builder.as_data_source(split=self.split)
    except Exception as e:
      reason = (str(e).strip() or type(e).__name__).splitlines()[0]
      raise DataError(f"TFDS dataset {self.dataset!r} in {self._builder.data_dir} cannot be read: {reason}") from e
    for row in range(len(rows)):
      name = f"{self.dataset}/{self.split}[{row}]"
      fields, problem, folder = {}, None, Path(str(self._builder.data_dir))
      try:
        fields = _from_tfds(features, rows[row])
      except ImportError as e:
        raise DataError(f"{name}: TFDS cannot read this dataset's features without another library: {e}.") from e
      except Exception as e:  # of what its shards hold; many kinds
        problem = DataError(f"{name}: cannot be read from {folder}: {type(e).__name__}: {e}.")
      yield Record(name, name, fields, folder, problem=problem)
      tally.bytes_read = before + size * (row + 1) // len(rows)


def _check_features(file: Path) -> None:
  """TFDS imports the modules that a features.json names, which come with the data: they may be its own alone.

  Raises:
    DataError: naming the class.
  """
  try:
    left = [parse_json(file.read_text("utf-8"))]
    while left:
      part = left.pop()
      for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(value, (dict, list)):
          left.append(value)
        elif key == "json" and isinstance(value, str):  # features of older versions, as JSON within JSON
          left.append([parse_json(value)])
        elif key in ("pythonClassName", "python_class_name", "type") and "." in str(value) and not str(
            value).startswith("tensorflow_datasets."):
          raise DataError(f"{file}: names the class {value!r:.80}, whose code would be run. Only features of TFDS are "
                          "read: prepare the dataset with these.")
  except (OSError, ValueError) as e:
    if isinstance(e, DataError):
      raise
    raise DataError(f"{file}: not a readable description of features: {e}. Prepare the dataset again.") from e


def _from_tfds(feature: Any, value: Any) -> Any:
  """A feature's value in plain Python: lists for arrays, strings for bytes that are UTF-8, PNG for images.

  A sequence of records, for which TFDS has a record of sequences, becomes a list of records.
  """
  inner = getattr(feature, "feature", None)  # asked first: a sequence passes other attributes on to what is in it
  if inner is not None:
    return [_from_tfds(inner, v) for v in _unstack(value)]
  if isinstance(value, dict):
    return {key: _from_tfds(feature[key], value[key]) for key in sorted(value)}
  # By its name: the class itself is there only once TFDS is loaded.
  if type(feature).__name__ == "Image" and getattr(value, "ndim", 0) == 3 and value.dtype == "uint8":
    return png(value[..., 0] if value.shape[2] == 1 else value)
  return _plain(value)


def _unstack(value: Any) -> list:
  """The items of a sequence, of which TFDS gives a dict of sequences if they are records."""
  if not isinstance(value, dict):
    return list(value)
  columns = {key: _unstack(column) for key, column in value.items()}
  return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _plain(value: Any) -> Any:
  value = value.tolist() if hasattr(value, "tolist") else value
  if isinstance(value, list):
    return [_plain(v) for v in value]
  if isinstance(value, bytes):
    try:
      return value.decode("utf-8")
    except UnicodeDecodeError:
      return value
  return value


READERS = {
    "text": TextReader,
    "jsonl": JsonlReader,
    "csv": CsvReader,
    "parquet": ParquetReader,
    "arrow": ArrowReader,
    "arrayrecord": ArrayRecordReader,
    "tfds": TfdsReader,
    "python_stdlib": PythonStdlibReader,
    "python_docstrings": PythonDocstringsReader,
    "python_docstring_pairs": PythonDocstringPairsReader,
    "python_docstring_matches": PythonDocstringMatchesReader,
    "arithmetic": ArithmeticReader,
    "arithmetic_mistakes": ArithmeticMistakesReader, "arithmetic_pairs": ArithmeticPairsReader,
    "digits": DigitsReader,
}
