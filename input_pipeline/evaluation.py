"""Evaluation data: every document exactly once, in order, weighted as in training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.bad_rows import BadRows, Policy
from input_pipeline.batches import PackedSource, pack, stats_table
from input_pipeline.cache import TokenizedSource, texts_of, tokenize_source
from input_pipeline.chat.image_placeholders import vocab_size
from input_pipeline.examples.base import Encoder
from input_pipeline.examples.registry import learns_texts, open_examples
from input_pipeline.reference import PackedData
from input_pipeline.sources.sources import Source
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError


def default_cache_dir(config: ConfigDict, workdir: str | Path) -> Path:
  """Where tokenised sources are kept."""
  return Path(config.input.cache_dir) if config.input.cache_dir else Path(workdir) / "cache"


def make_eval_data(
    config: ConfigDict, tokenizer: Tokenizer, *, learns: str, workdir: str | Path, sources: ConfigDict | None = None,
    split: str | None = None, max_documents: int | None = None, share_prompts: bool = False, progress: bool = False,
) -> "EvalData":
  """Evaluation data, encoded and packed as the config has it for training; tokenises what is not in the cache yet.

  Args:
    config: the whole config; the sources' weights play no part.
    learns: what the strategy learns from (`trainer.strategies.learns`), one of `kinds.KINDS`.
    sources: name -> config, in place of `input.sources`.
    split: in place of the sources' own; None keeps theirs.
    max_documents: a limit for each source, besides its own.
    share_prompts: see `Units`.

  Raises:
    ConfigError, DataError, OSError: see `open_source`, `tokenize_source`, `pack`.
  """
  sources = config.input.sources if sources is None else sources
  if not len(sources):
    raise ConfigError("no evaluation sources: set evals.<name>.sources or input.sources.")
  if learns in ("taught", "routed"):
    learns = "conversations"  # what teachers say, and whose a row is, is only learned from
  opened, packed = [], []
  for name in sorted(sources):
    source, encoder = open_examples(config, tokenizer, sources[name], name, learns=learns, split=split,
                                    max_documents=max_documents)
    cache_dir = default_cache_dir(config, workdir)
    tokens = tokenize_source(source, encoder, vocab_size(config, tokenizer), cache_dir, progress, Policy.of(config))
    opened.append((source, encoder))
    packed.append(pack(config, tokens, learns=learns, shuffle=False, share_prompts=share_prompts))
  return EvalData(opened, packed, config.seq_len, tokenizer.pad_id, learns_texts(config, learns), Policy.of(config))


class EvalData(PackedData):
  """Rows of all sources, one source after another.

  `num_bytes` counts each source's UTF-8 bytes. It is None where bits per byte would mean nothing, because the tokens
  evaluated are not those of a known text: some are not trained, or lost by `input.over_long`, or came as tokens; and in
  conversations always. Without a BOS, a document's first token is not predicted, yet its bytes are in `num_bytes`.
  """

  def __init__(
      self, sources: list[tuple[Source, Encoder]], packed: list[PackedSource], seq_len: int, pad_id: int,
      count_bytes: bool, policy: Policy,
  ):
    super().__init__(packed, seq_len, pad_id)
    self._sources, self._policy = sources, policy
    self.source_names = tuple(source.name for source, _ in sources)
    self._starts = np.cumsum([0, *(p.plan.num_rows for p in packed)])
    self.num_rows = int(self._starts[-1])
    self.num_documents: dict[str, int] = {p.tokens.name: p.tokens.num_documents for p in packed}
    self.num_bytes: dict[str, int | None] = {
        p.tokens.name: _num_bytes(p.tokens) if count_bytes and not p.plan.stats().lost else None for p in packed}

  def stats(self) -> list[dict[str, Any]]:
    """One row a source, as `TrainData.stats`."""
    return stats_table(self._packed)

  def num_batches(self, batch_size: int) -> int:
    return -(-self.num_rows // batch_size)

  def batch(self, i: int, batch_size: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
    """Rows `rows` of the i-th batch; past the last row, padding (segment 0, weight 0, source -1)."""
    k = i * batch_size + np.arange(batch_size)[rows]
    batch = self._empty(len(k))
    for s, source in enumerate(self._packed):
      here = np.flatnonzero((self._starts[s] <= k) & (k < self._starts[s + 1]))
      if len(here):
        source.fill(batch, here, 0, k[here] - self._starts[s], s)
    return batch

  def raw_texts(self) -> Iterator[str]:
    """Texts of all documents, in order, read from the sources again."""
    for source, encoder in self._sources:
      bad = BadRows(source.name, self._policy)
      for record in source.records(bad):
        texts: list[str] = []
        with bad.none_in(record):
          texts = texts_of(record, encoder)
        yield from texts


def _num_bytes(tokens: TokenizedSource) -> int | None:
  """Bytes of the texts, if every token is of one and counts fully."""
  known = tokens.weights is None and not tokens.dropped and bool((tokens.num_bytes > 0).all())
  return int(tokens.num_bytes.sum()) if known else None
