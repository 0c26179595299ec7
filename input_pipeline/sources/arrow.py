"""Rows of Arrow tables, of Parquet files and of datasets' `save_to_disk`, as the same rows stand in JSON Lines.

Arrow's structs have the same fields in every row: an object that lacks one has null there. What an object of the row
itself said is not known, so that nulls within columns are left out and counted; those in lists, in maps and in columns
of JSON (datasets' `Json()`, Arrow's extension type) are of the rows, and stay.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from input_pipeline.files import (
  SAVED_DATASET,
  SAVED_SPLITS,
  File,
  NotJSONError,
  Record,
  Tally,
  find_files,
  parse_json,
  the_path,
)
from input_pipeline.sources import row_groups
from trainer.errors import DataError

if TYPE_CHECKING:
  import pyarrow as pa

# Rows made at a time.
ROWS = 512
# What a value of Arrow's becomes; None: it stays as it is.
Change = Callable[[Any, Tally], Any] | None


class _TableReader:
  """What readers of files of Arrow tables share.

  `only_text` (set by the source) leaves all columns unread but `text_key`, in files that have it.
  """

  by_name = False
  only_text = False
  _kind = ""

  def __init__(self, cfg: ConfigDict, source: str, example: str):
    self.path, self.text_key, self._source = the_path(cfg, source, example), cfg.text_key, source
    self._copies = cfg.copies

  def files(self) -> list[File]:
    raise NotImplementedError

  def _open(self, path: Path) -> AbstractContextManager[tuple["pa.Schema", int, Callable]]:
    """The schema; rows, or whatever grows with them; and what gives record batches of some columns."""
    raise NotImplementedError

  def read(self, tally: Tally) -> Iterator[Record]:
    import pyarrow as pa
    for name, path in self.files():
      before, size, row = tally.bytes_read, os.path.getsize(path), 0
      if path.suffix == ".json":  # describes the others
        continue
      try:
        with self._open(path) as (schema, total, batches):
          names = list(schema.names)
          columns = [self.text_key] if self.only_text and self.text_key in names else names
          others = tuple(n for n in names if n not in columns)
          change = _changes(schema)
          for batch in batches(columns):
            for fields, why in _rows(batch, change, tally):
              where = f"{path}: row {row} (from 0)"
              problem = None if why is None else DataError(f"{where}: {why}")
              yield Record(f"{name}[{row}]", where, fields, path.parent, others, problem)
              row += 1
              tally.bytes_read = before + size * row // max(total, row)
      except (pa.ArrowException, OSError) as e:
        raise DataError(f"{path}: not a readable {self._kind} file: {e}") from e
      tally.bytes_read = before + size


class ParquetReader(_TableReader):
  """The rows of Parquet files, streamed by row groups."""

  _kind, cuts = "Parquet", "row groups"

  def __init__(self, cfg: ConfigDict, source: str):
    super().__init__(cfg, source, "data/*.parquet")
    self.identity = ["parquet", CHANGED]

  def files(self) -> list[File]:
    return find_files(self.path, self._source, lambda n: n.endswith(".parquet"), "a .parquet file", self._copies)

  @contextmanager
  def _open(self, path: Path):
    import pyarrow.parquet as pq
    with row_groups.opened(path) as (file, groups), pq.ParquetFile(file) as table:
      groups = range(table.num_row_groups) if groups is None else groups
      yield table.schema_arrow, sum(table.metadata.row_group(g).num_rows for g in groups), lambda columns: (
          table.iter_batches(ROWS, groups, columns))


class ArrowReader(_TableReader):
  """Folders that datasets' `save_to_disk` wrote, and Arrow files (IPC, of a stream or of a file)."""

  _kind = "Arrow"

  def __init__(self, cfg: ConfigDict, source: str):
    super().__init__(cfg, source, "data/my_dataset")
    self._split = cfg.dataset_split
    self.identity = ["arrow", CHANGED]

  def files(self) -> list[File]:
    entries = [self.path] if os.path.exists(self.path) else [p.strip() for p in self.path.split(",")]
    files: list[File] = []
    for entry in entries:
      folder = Path(os.path.expanduser(entry))
      if (folder / SAVED_SPLITS).is_file():
        folder = self._of_split(folder)
      if (folder / SAVED_DATASET).is_file():
        files += self._saved(folder)
      else:  # `datasets` keeps what its own functions made in files of such names, beside the data
        files += find_files(entry, self._source, _is_arrow, "an .arrow file, or a folder of save_to_disk", self._copies)
    return files

  def _of_split(self, folder: Path) -> Path:
    """The folder of the split that is asked for, of a DatasetDict."""
    splits = _parsed(folder / SAVED_SPLITS).get("splits")
    if not isinstance(splits, list) or self._split not in splits:
      found = ", ".join(map(repr, splits)) if isinstance(splits, list) else repr(splits)
      raise DataError(f"{folder} has the splits {found}, and no {self._split!r}. Name one of them with "
                      f"input.sources.{self._source}.dataset_split.")
    return folder / self._split

  def _saved(self, folder: Path) -> list[File]:
    """The files of a Dataset in their order, after what describes them."""
    state = _parsed(folder / SAVED_DATASET)
    listed = state.get("_data_files")
    names = [file.get("filename") if isinstance(file, dict) else None for file in listed] if isinstance(
        listed, list) else [None]
    if not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
      raise DataError(f"{folder / SAVED_DATASET}: _data_files is {listed!r:.100}; expected the names of files beside "
                      "it. Save the dataset again with save_to_disk.")
    if state.get("_indices_data_files") or state.get("_indices_files"):
      raise DataError(f"{folder}: was saved with an order of its rows beside the data, which is not read. Save it "
                      "again after flatten_indices().")
    for name in names:
      if not (folder / name).is_file():
        raise DataError(f"{folder / name} is missing, which {SAVED_DATASET} beside it lists. Copy the whole folder.")
    return [File(name, folder / name) for name in (SAVED_DATASET, *names)]

  @contextmanager
  def _open(self, path: Path):
    import pyarrow as pa
    with pa.memory_map(str(path)) as raw:
      of_file = raw.read(6) == b"ARROW1"
      raw.seek(0)
      if of_file:
        table = pa.ipc.open_file(raw)
        every = (table.get_batch(i) for i in range(table.num_record_batches))
      else:
        table = every = pa.ipc.open_stream(raw)
      yield table.schema, os.path.getsize(path), lambda columns: (
          batch.select(columns).slice(start, ROWS) for batch in every for start in range(0, batch.num_rows, ROWS))


# Part of the identity of what is read: raise it when the same files would give other rows.
CHANGED = 2


def _is_arrow(name: str) -> bool:
  return name.endswith(".arrow") and not os.path.basename(name).startswith(("cache-", "tmp"))


def _parsed(path: Path) -> dict:
  try:
    found = parse_json(path.read_text("utf-8"))
  except (OSError, ValueError) as e:
    raise DataError(f"{path}: cannot be read: {e}. Save the dataset again with save_to_disk.") from e
  if not isinstance(found, dict):
    raise DataError(f"{path}: is a {type(found).__name__}; expected an object. Save the dataset again.")
  return found


def _rows(batch: "pa.RecordBatch", change: dict[str, Change], tally: Tally) -> Iterator[tuple[dict, str | None]]:
  """(fields, why it cannot be used) of each row."""
  try:
    plain = batch.to_pylist()
  except (ValueError, OverflowError):  # text that is not UTF-8, or a date far away, in one of them
    plain = None
  for i in range(batch.num_rows):
    try:
      fields = batch.slice(i, 1).to_pylist()[0] if plain is None else plain[i]
      yield {key: value if change[key] is None else change[key](value, tally) for key, value in fields.items()}, None
    except UnicodeDecodeError as e:
      yield {}, f"text that is not valid UTF-8 ({e.reason})."
    except NotJSONError as e:
      yield {}, f"a column of JSON holds what is not valid JSON ({e})."
    except (ValueError, OverflowError) as e:
      yield {}, f"a value that Python has no place for: {e}."


def _changes(schema: "pa.Schema") -> dict[str, Change]:
  """What becomes of each column's values."""
  try:
    features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
  except (KeyError, ValueError, TypeError):
    features = {}
  return {field.name: _change(field, _of(features, field.name)) for field in schema}


def _of(feature: Any, name: str) -> Any:
  """What datasets' description of an object says of one of its fields; None: nothing."""
  if not isinstance(feature, dict) or isinstance(feature.get("_type"), str):
    return None
  return feature.get(name)


def _change(field: "pa.Field", feature: Any) -> Change:
  """What becomes of a field's values, which Arrow gives as objects, lists, and lists of pairs."""
  import pyarrow as pa
  kind = field.type
  named = isinstance(feature, dict) and feature.get("_type") == "Json"
  extension = (field.metadata or {}).get(b"ARROW:extension:name", getattr(kind, "extension_name", b""))
  if named or extension in (b"arrow.json", "arrow.json"):
    return lambda value, tally: parse_json(value) if isinstance(value, str) else value
  if pa.types.is_struct(kind):
    parts = {part.name: _change(part, _of(feature, part.name)) for part in kind}
    return lambda value, tally: _object(value, parts, tally)
  if pa.types.is_map(kind):
    if not (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)):
      return None
    inner = _change(kind.item_field, None)
    return lambda value, tally: None if value is None else {
        key: _changed(part, inner, tally) for key, part in (value.items() if isinstance(value, dict) else value)}
  if hasattr(kind, "value_field"):  # lists of all kinds
    inside = feature.get("feature") if isinstance(feature, dict) else feature[0] if isinstance(
        feature, list) and feature else None
    each = _change(kind.value_field, inside)
    return None if each is None else lambda value, tally: None if value is None else [
        _changed(part, each, tally) for part in value]
  return None


def _changed(value: Any, change: Change, tally: Tally) -> Any:
  return value if change is None or value is None else change(value, tally)


def _object(value: dict | None, parts: dict[str, Change], tally: Tally) -> dict | None:
  """An object without what is null in it."""
  if value is None:
    return None
  found = {key: _changed(part, parts[key], tally) for key, part in value.items() if part is not None}
  tally.nulls += len(value) - len(found)
  return found
