"""Tokenised sources on disk: built once, keyed by content, read at random through memory maps.

A cache is a folder `<name>-<key>` with `tokens.bin` (uint16 or uint32, all documents end to end), `offsets.bin` (int64
[documents + 1], where each document begins), `num_bytes.bin` (int64 [records], UTF-8 bytes of the texts in each
record), `meta.json`, and, if some document has them, `weights.bin` and `logprobs.bin` (float32, one for each token);
`teacher_ids.bin` (int32 [tokens, K]) and `teacher_logprobs.bin` (float32 [tokens, K + 1]) are what a teacher has said
of each token (examples/top_k.py), `teachers.bin` (int16 [tokens]) whose it is (examples/routed.py). If documents
consist of parts, as preferences do, `parts.bin` (int64 [documents * parts + 1], where each part begins) and `roles.bin`
(int8 [documents * parts], see roles.py) say which; `advantages.bin` (float32 [documents * parts]) are those of sampled
completions. Images are kept as images/cache.py says. The key is a hash of everything that decides the content, so a
changed file, split, tokenizer or template gets another folder. A folder appears under its final name by one rename,
when it is complete.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import logging

from input_pipeline import folders
from input_pipeline.bad_rows import BAD_ROW, BadRows, Policy
from input_pipeline.cache_writer import BATCH_WITH_IMAGES, Documents, Writer
from input_pipeline.examples.base import Encoded, Encoder
from input_pipeline.files import FileHasher
from input_pipeline.images import cache as cache_images
from input_pipeline.images.cache import ImageWriter, SourceImages, changed_file
from input_pipeline.remarks import Tally
from input_pipeline.sources.readers import Record
from input_pipeline.sources.sources import Source, utf8
from trainer.errors import DataError

# Raise when the same source and encoder would give other files.
VERSION = 6
BATCH_BYTES, BATCH_RECORDS = 4 << 20, 1024
# Tokens whose weights are read at a time.
WEIGHTS_READ = 1 << 22


class TokenizedSource(NamedTuple):
  """Memory maps of one tokenised source; document d is tokens[offsets[d]:offsets[d + 1]], weights likewise."""

  name: str
  tokens: np.ndarray
  offsets: np.ndarray
  # Of each record, which is a document where the encoder makes one of each.
  num_bytes: np.ndarray
  # Identity of the content, equal on every machine.
  fingerprint: str
  # Records that the source skipped: {"empty": …, "undecodable": …}.
  skipped: dict[str, int]
  # Float32, of predicting each token; None: all are 1.
  weights: np.ndarray | None = None
  # Float32, that of each token where it was sampled, NaN where that is not known; None: of no token is it.
  logprobs: np.ndarray | None = None
  # Of each token, where rows have what a teacher said: see `examples.top_k.TopK`; None: they do not.
  teacher_ids: np.ndarray | None = None
  teacher_logprobs: np.ndarray | None = None
  # Int16, of each token the teacher that its row names (examples/routed.py); None: rows name none.
  teachers: np.ndarray | None = None
  # Records that the encoder dropped, by its reasons.
  dropped: dict[str, int] = {}
  # Records by what the encoder took them for.
  shapes: dict[str, int] = {}
  # Where the parts of documents begin, what each is, and maybe what it is worth, see `Encoded`; all documents have as
  # many. None: no parts.
  parts: np.ndarray | None = None
  roles: np.ndarray | None = None
  advantages: np.ndarray | None = None
  # Where it lies; None: only in memory.
  folder: Path | None = None
  images: SourceImages | None = None
  # Entries of objects left out: null in a format that has no absent ones.
  nulls: int = 0
  # Records by the columns in them that nothing reads.
  unread: dict[str, int] = {}

  @property
  def num_documents(self) -> int:
    return len(self.offsets) - 1

  @property
  def parts_each(self) -> int:
    """Parts of a document; 0: it has none."""
    return 0 if self.roles is None else len(self.roles) // self.num_documents

  def of_parts(self) -> "TokenizedSource":
    """The same with each part as a document."""
    return self._replace(offsets=self.parts)

  def count_images(self, doc: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How many tiles or squares of images tokens begin to end of each document have."""
    if self.images is None:
      return np.zeros(len(doc), np.int64)
    first, last = self.images.between(self.offsets[doc] + begin, self.offsets[doc] + end)
    before = np.concatenate([[0], np.cumsum(self.images.squares)])
    return before[last] - before[first]

  def count_trained(self, doc: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How many of tokens begin + 1 to end of each document have a weight, int64 like the arguments.

    Pieces come in the order of the documents and, in a document, of their places.
    """
    start = self.offsets[doc] + np.minimum(begin + 1, end)
    stop = self.offsets[doc] + end
    if self.weights is None:
      return np.asarray(stop - start)
    counts, first = np.zeros(len(start), np.int64), 0
    while first < len(start):
      last = max(first + 1, int(np.searchsorted(stop, start[first] + WEIGHTS_READ, "right")))
      here = slice(first, last)
      total = np.concatenate([[0], np.cumsum(self.weights[start[first]:stop[last - 1]] != 0)])
      counts[here] = total[stop[here] - start[first]] - total[start[here] - start[first]]
      first = last
    return counts


def tokenize_source(
    source: Source, encoder: Encoder, vocab_size: int, cache_dir: Path, progress: bool = False,
    policy: Policy = Policy(),  # noqa: B008 (it is frozen)
) -> TokenizedSource:
  """The tokenised `source`, from `cache_dir` or, if it is not there or is damaged, built there first.

  Several processes may do this at once: each builds under its own name, and the first to finish is kept.

  Args:
    encoder: makes documents of its records.
    vocab_size: the tokenizer's; all ids are below it.
    policy: what becomes of bad rows. A cache is the same whatever it is: of one that was built without its bad rows
      these are known, and stop another run that does not drop them.

  Raises:
    DataError: bad or no documents.
    OSError: the cache cannot be written; the message names the folder.
  """
  cache_dir = Path(cache_dir)
  hasher = FileHasher(cache_dir)
  content = source.fingerprint(hasher)
  hasher.save()
  key = _key(content, encoder, vocab_size)
  if (found := open_cache(cache_dir, source.name, key, policy)) is not None:
    return found
  folder = _folder(cache_dir, source.name, key)
  with folders.new(folder, "the token cache") as temporary:
    _build(temporary, source, encoder, vocab_size, key, progress, policy)
    if source.fingerprint(hasher) != content:
      raise DataError(f"source {source.name!r}: its files changed while they were read. Run the command again.")
    folders.publish(temporary, folder, _arrays)
  return _open(folder, source.name)


def key_of(source: Source, encoder: Encoder, vocab_size: int) -> str:
  """The key of a source's cache; the fingerprint of what `tokenize_source` gives, but for images."""
  return _key(source.fingerprint(), encoder, vocab_size)


def _key(content: str, encoder: Encoder, vocab_size: int) -> str:
  parts = json.dumps([VERSION, content, encoder.fingerprint, vocab_size])
  return hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()


def _folder(cache_dir: Path, name: str, key: str) -> Path:
  return Path(cache_dir) / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{key}"


def open_cache(cache_dir: Path, name: str, key: str, policy: Policy) -> TokenizedSource | None:
  """A source's cache by its key, if it is there; one that is damaged is removed. Raises DataError: see `BadRows`."""
  folder = _folder(cache_dir, name, key)
  if not folder.exists():
    return None
  damage = folders.find_damage(folder, _arrays)
  damage = f"damaged ({damage})" if damage else changed_file(folder)
  if damage is None:
    return _open(folder, name, policy)
  logging.warning("token cache %s is %s; building it again.", folder, damage)
  folders.remove(folder)
  return None


def _build(folder: Path, source: Source, encoder: Encoder, vocab_size: int, key: str, progress: bool,
           policy: Policy) -> None:
  """Streams the source's records through the encoder into `folder`."""
  dropped: Counter[str] = Counter()
  shapes: Counter[str] = Counter()
  unread: Counter[str] = Counter()
  remarks, records, bad = Tally(), 0, BadRows(source.name, policy)
  with source.bar("tokenizing", progress) as advance, Writer(folder) as writer:
    documents = Documents(writer, source.name, vocab_size, encoder, ImageWriter(writer.write))
    most = BATCH_WITH_IMAGES if getattr(encoder, "sees_images", False) else BATCH_RECORDS
    for rows in _batches(source.records(bad), encoder, most, bad):
      results, rows = _encode(rows, encoder, bad)
      shapes.update(encoder.describe(record) for record, _ in rows)
      unread.update(name for record, _ in rows for name in _unread(record, encoder))
      dropped.update(r for r in results if isinstance(r, str))
      made = [r for r in results if not isinstance(r, str)]
      for document in made:
        remarks.add(document.remarks)
      documents.write(made)
      writer.write("num_bytes", np.array([size for _, size in rows], "<i8"))
      records += len(rows)
      advance()
    advance()
    bad.finish()
    documents.close()
    if bad.count:
      dropped[BAD_ROW] = bad.count
    skipped = {"empty": source.tally.empty, "undecodable": source.tally.undecodable}
    _say_what_is_left_out(source.name, skipped, dropped)
    if not documents.tokens:
      reasons = ", ".join(f"{n} dropped: {why}" for why, n in dropped.items())
      raise DataError(f"source {source.name!r}: its {records} documents have no tokens under this tokenizer"
                      f"{f' ({reasons})' if reasons else ''}.")
    meta = {
        "key": key,
        "dtype": documents.dtype.str,
        "records": records,
        "documents": documents.count,
        "tokens": documents.tokens,
        "weights": documents.has_weights,
        "logprobs": documents.has_logprobs,
        "top_k": documents.top_k,
        "routed": documents.routed,
        "parts": documents.parts_each or 0,
        "advantages": documents.has_advantages,
        **documents.images.finish(folder),
        "skipped": skipped,
        "nulls": source.tally.nulls,
        "bad": bad.state(),
        "dropped": dict(dropped),
        "shapes": dict(shapes.most_common()),
        "remarks": remarks.counts,
        "unread": dict(unread.most_common()),
        "checksums": writer.checksums(),
    }
    (folder / "meta.json").write_text(json.dumps(meta), "utf-8")


def _unread(record: Record, encoder: Encoder) -> list[str]:
  """The columns with something in them that nothing reads."""
  read = encoder.columns(record)
  return [*record.others, *(name for name, value in record.fields.items()
                            if name not in read and value is not None and value not in ("", [], {}))]


def _say_what_is_left_out(name: str, skipped: dict[str, int], dropped: dict[str, int]) -> None:
  """Empty documents have nothing to lose; all counts are in the start-up table, too."""
  if any(skipped.values()):
    logging.log(logging.WARNING if skipped["undecodable"] else logging.INFO,
                "source %r: skipped %s", name, ", ".join(f"{n} {why}" for why, n in skipped.items()))
  dropped = {why: n for why, n in dropped.items() if why != BAD_ROW}  # which are told one by one
  if dropped:
    logging.warning("source %r: dropped %s", name, ", ".join(f"{n} ({why})" for why, n in dropped.items()))


def texts_of(record: Record, encoder: Encoder) -> list[str]:
  """What the encoder reads in it. Raises DataError: it has no text, or one that is none in UTF-8."""
  texts = list(encoder.texts(record))
  for text in texts:
    utf8(text, record.where)
  return texts


def _batches(records: Iterator[Record], encoder: Encoder, most: int, bad: BadRows
             ) -> Iterator[list[tuple[Record, int]]]:
  """Records to encode together, each with the bytes of text in it."""
  batch, held = [], 0
  for record in records:
    with bad.none_in(record):
      batch.append((record, sum(len(text.encode()) for text in texts_of(record, encoder))))
      held += batch[-1][1] + sum(_entries(v) for v in record.fields.values() if isinstance(v, list))
    if held >= BATCH_BYTES or len(batch) >= most:
      yield batch
      batch, held = [], 0
  if batch:
    yield batch


def _entries(values: list) -> int:
  """How many a list has, and the lists in it."""
  return len(values) + sum(len(value) for value in values if isinstance(value, list))


def _encode(rows: list[tuple[Record, int]], encoder: Encoder, bad: BadRows
            ) -> tuple[list[Encoded | str], list[tuple[Record, int]]]:
  """(the documents in them and why others are dropped, the rows that are not bad)."""
  try:
    return encoder.encode([record for record, _ in rows]), rows
  except DataError:  # whose, is seen one by one
    results, good = [], []
  for record, size in rows:
    with bad.none_in(record):
      results += encoder.encode([record])
      good.append((record, size))
  return results, good


def _arrays(meta: dict) -> dict[str, tuple[str, int]]:
  """(dtype, length) of each array of a cache."""
  arrays = {"tokens": (meta["dtype"], meta["tokens"]), "offsets": ("<i8", meta["documents"] + 1),
            "num_bytes": ("<i8", meta["records"])}
  for name in ("weights", "logprobs"):
    if meta.get(name):
      arrays[name] = ("<f4", meta["tokens"])
  if k := meta.get("top_k"):
    arrays |= {"teacher_ids": ("<i4", meta["tokens"] * k), "teacher_logprobs": ("<f4", meta["tokens"] * (k + 1))}
  if meta.get("routed"):
    arrays["teachers"] = ("<i2", meta["tokens"])
  if parts := meta.get("parts", 0) * meta["documents"]:
    arrays |= {"parts": ("<i8", parts + 1), "roles": ("<i1", parts)}
    arrays |= {"advantages": ("<f4", parts)} if meta.get("advantages") else {}
  return arrays | cache_images.arrays(meta)


def _open(folder: Path, name: str, policy: Policy | None = None) -> TokenizedSource:
  """The cache in a folder; `policy` if it was built before, so that its bad rows are not told yet."""
  meta = json.loads((folder / "meta.json").read_text("utf-8"))
  if policy is not None:
    BadRows(name, policy).restore(meta["bad"]).finish()
  Tally(meta["remarks"]).say(name, meta["documents"])
  maps: dict[str, np.ndarray] = {
      key: np.memmap(folder / f"{key}.bin", dtype, mode="r") for key, (dtype, _) in _arrays(meta).items()}
  for key in ("teacher_ids", "teacher_logprobs"):
    if key in maps:
      maps[key] = maps[key].reshape(meta["tokens"], -1)
  counts = {key: meta[key] for key in ("skipped", "nulls", "dropped", "shapes", "unread")}
  fingerprint, images = meta["key"], None
  if "image_bytes" in maps:
    fingerprint += f"-{meta['image_contents']}"  # they may lie beside the data, which the key is of
    parts = [maps.pop(f"image_{key}") for key in ("bytes", "offsets", "places", "ids", "tokens")]
    images = SourceImages(*parts, maps.pop("image_squares", np.ones(len(parts[-1]), np.int64)),
                          meta.get("videos", 0))
  return TokenizedSource(name, **maps, fingerprint=fingerprint, folder=folder, images=images, **counts)
