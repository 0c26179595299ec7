"""Embed: python -m trainer.embed --workdir=DIR [--step=N] | --hf=DIR --texts=FILE --out=FILE.npy [--prompt=query] …

FILE has a text a line (.txt) or rows, JSON Lines, CSV or Parquet, with a column `text` (`--key`): a string, the
messages of a conversation, or one of these with images, as rows of training have them (docs/embeddings.md). Each text
gets the prompt that queries, or other texts, were trained with. A Hugging Face folder that does not say how it pools is
asked with `--pooling`. What is written is a float32 array [texts, hidden size] of vectors of length 1, whose dot
products are the similarities; without `--out` they are printed, a JSON list a line.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from input_pipeline.batches import check_ids
from input_pipeline.chat.image_placeholders import ImageFormat, image_format
from input_pipeline.chat.schema import ShapeReader
from input_pipeline.examples.embedded import Embedded, Text, TextReader, max_length_of, text_tokens
from input_pipeline.examples.roles import QUERY
from input_pipeline.images.images import Images
from input_pipeline.sources.sources import open_source
from trainer import startup
from trainer.config import source, strategy
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError, DataError
from trainer.generate import image_tokens
from trainer.generate.buckets import bucket
from trainer.generate.command import Loaded, load
from trainer.strategies import contrastive, similarity

# The shortest row, in tokens.
MIN_LENGTH = 16
PROMPTS = ("query", "document", "none")


class Embedder:
  """Embeddings by a model that is loaded.

  Args:
    loaded: of a run of strategy contrastive, or of a folder, whose config `of_folder` has completed.
    mesh: where its parameters are.
    rows: texts at a time.

  Attributes:
    images: how the model sees images; None: it does not.
    max_length: tokens of a text at most.

  Raises:
    ConfigError: a run of another strategy.
  """

  def __init__(self, loaded: Loaded, mesh: jax.sharding.Mesh, rows: int = 32):
    config = loaded.config
    if "pooling" not in config.strategy:
      raise ConfigError(f"{loaded.origin} is of strategy {config.strategy.name!r}, which learns no embeddings. Give a "
                        "run of strategy contrastive.")
    mesh_lib.check_batch(mesh, rows, "--batch_size")
    self._loaded, self._cfg, self._rows, self._mesh = loaded, config.strategy, rows, mesh
    self.max_length = max_length_of(config)
    self._tokens, self.images = text_tokens(config, loaded.tokenizer), image_format(config, loaded.tokenizer)
    self._layout = image_tokens.layout_of(loaded.model)

    def embed(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
      return similarity.embeddings(loaded.model.apply(params, batch).hidden, batch, self._cfg.pooling)[:, 0]

    self._embed = jax.jit(embed, out_shardings=NamedSharding(mesh, PartitionSpec()))

  def __call__(self, texts: Sequence[Text], prompt: str = "none") -> tuple[np.ndarray, int]:
    """(embeddings float32 [N, D], how many texts were cut to `max_length`). `prompt`: one of PROMPTS.

    Raises:
      DataError: a text that cannot be rendered, or an image that cannot be used.
    """
    before = {"query": self._cfg.query_prompt, "document": self._cfg.document_prompt, "none": ""}[prompt]
    encoded = [_not_dropped(made, n) for n, made in enumerate(self._tokens.encode([
        self._tokens.prompted(before, text) for text in texts]))]
    order = sorted(range(len(texts)), key=lambda i: len(encoded[i].ids))
    found: list[np.ndarray] = [np.zeros(0)] * len(texts)
    for begin in range(0, len(order), self._rows):
      some = order[begin:begin + self._rows]
      batch = self._batch([encoded[i] for i in some])
      placed = mesh_lib.place(batch, mesh_lib.batch_sharding(self._mesh))
      for i, vector in zip(some, np.asarray(self._embed(self._loaded.params, placed), np.float32), strict=False):
        found[i] = vector
    return np.stack(found), sum(text.cut for text in encoded)

  def _batch(self, texts: list[Embedded]) -> dict[str, np.ndarray]:
    """A text a row."""
    length = min(bucket(max(len(text.ids) for text in texts), MIN_LENGTH), max(self.max_length, MIN_LENGTH))
    pixels = [() if self.images is None else Images(text.images, self.images.preprocess) for text in texts]
    shown = [image_tokens.of_text(self._layout, text.ids, images, len(text.ids), "a text")
             for text, images in zip(texts, pixels, strict=True)]
    batch = image_tokens.batch_of_texts(self._layout, self._rows, length, self._loaded.tokenizer.pad_id,
                                        [text.ids for text in texts], shown)
    batch["segment_roles"] = np.full((self._rows, 1), QUERY, np.int32)
    return check_ids(batch, self._loaded.model.vocab_size)


def _not_dropped(made: Embedded | str, number: int) -> Embedded:
  if isinstance(made, str):
    raise DataError(f"text {number} has {made}, so that it has no embedding. Repair it, or leave it out.")
  return made


def of_folder(loaded: Loaded, pooling: str | None, max_length: int | None) -> None:
  """Completes the config of a folder with how it pools, its prompts and its longest text.

  Raises:
    ConfigError: it does not say how it pools, and nobody else does.
  """
  config = loaded.config
  said = contrastive.sentence_transformers.read(config.model.hf)
  if pooling is None and said is None:
    raise ConfigError(f"{loaded.origin} has no modules.json, which says how hidden states become an embedding. Give "
                      f"--pooling={' or '.join(similarity.POOLINGS)}.")
  with config.unlocked():
    config.strategy = strategy("contrastive", pooling=pooling)
    config.seq_len = 2 * (max_length or (said and said.max_length) or config.model.max_positions or 512)
    config.strategy.max_length = max_length
    notes = contrastive.fill_in(config)
  sys.stderr.write("\n".join(notes) + "\n")


def read_texts(path: str, key: str, images: ImageFormat | None = None) -> list[Text]:
  """The texts of a file; `images`: how the model sees them, None: it does not.

  Raises:
    ConfigError, DataError: there are none, or a row without one.
  """
  texts: list[Text]
  if path.endswith(".txt"):
    lines = Path(path).read_text("utf-8").split("\n")
    texts = [*lines[:-1]] if lines[-1] == "" else [*lines]
  else:
    kind = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}.get(Path(path).suffix, "jsonl")
    rows = open_source(source(type=kind, path=path, text_key=key, split="all"), "texts", texts=images is None)
    reader, beside = TextReader(images), ShapeReader(images=images)
    texts = [_text(record, key, reader, beside) for record in rows.records()]
    if rows.tally.empty:
      raise DataError(f"{path}: {rows.tally.empty} rows have nothing in {key!r}, which has no embedding. Remove them.")
  if not texts:
    raise DataError(f"{path} has no texts.")
  return texts


def _text(record: Any, key: str, reader: TextReader, beside: ShapeReader) -> Text:
  """The text of a row: what its column says, with the images that stand beside it, or these alone."""
  if record.problem is not None:
    raise record.problem
  others = {name: value for name, value in record.fields.items() if name != key}
  value, shared = record.fields.get(key), beside.images_of(record._replace(fields=others))
  if value is None and shared:
    value, shared = {"images": [ref.value for ref in shared]}, ()
  if value is None:
    raise DataError(f"{record.where}: no text in {key!r}; its columns are {', '.join(record.fields)}. Name it by "
                    "--key.")
  return reader.read(record, [(key, value)], shared)[0]


def _define_flags() -> None:
  startup.define_model_flags()
  flags.DEFINE_string("texts", None, "The file of texts.")
  flags.DEFINE_string("key", "text", "The column that has them, of rows.")
  flags.DEFINE_string("out", None, "The .npy file to write.")
  flags.DEFINE_enum("prompt", "none", PROMPTS, "What stands before each text: the prompt of queries, of other texts.")
  flags.DEFINE_enum("pooling", None, tuple(similarity.POOLINGS), "Of a folder: which hidden states. Default: its own.")
  flags.DEFINE_integer("max_length", None, "Of a folder: tokens of a text at most. Default: its own.", lower_bound=1)
  flags.DEFINE_integer("batch_size", 32, "Texts at a time.", lower_bound=1)
  flags.mark_flag_as_required("texts")


def _run(given: Any) -> None:
  if given.workdir and (given.pooling or given.max_length):
    raise ConfigError("--pooling and --max_length are of a folder; a run has them in its config.")
  if given.out and not given.out.endswith(".npy"):
    raise ConfigError(f"--out is {given.out!r}; what is written is an array of NumPy. Name it FILE.npy.")
  loaded, mesh = load(given)
  if given.hf:
    of_folder(loaded, given.pooling, given.max_length)
  embedder = Embedder(loaded, mesh, given.batch_size)
  texts = read_texts(given.texts, given.key, embedder.images)
  vectors, cut = embedder(texts, given.prompt)
  sys.stderr.write(f"{loaded.origin}: {len(texts):,} texts, {cut:,} of them cut to {embedder.max_length} tokens\n")
  if given.out:
    np.save(given.out, vectors)
  else:
    sys.stdout.writelines(lines(vectors))


def lines(vectors: np.ndarray) -> Iterator[str]:
  """A JSON list for each embedding, with as many digits as tell float32 apart."""
  for vector in vectors:
    yield json.dumps([float(str(x)) for x in vector]) + "\n"


def main(argv: list[str]) -> None:
  startup.run_given(argv, _run, "the file of texts is written --texts=FILE")
