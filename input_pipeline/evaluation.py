"""Evaluation data: every document exactly once, in order."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from input_pipeline.batches import PackedSource, empty_batch
from input_pipeline.cache import tokenize_source
from input_pipeline.packing import make_plan
from input_pipeline.sources import Source, open_source
from input_pipeline.tokenizer import Tokenizer
from trainer.config import ConfigError


def make_eval_data(
    cfg_sources: ConfigDict, tokenizer: Tokenizer, *, seq_len: int, split: str | None = None,
    max_documents: int | None = None, packing: str = "concat", cache_dir: str | Path, add_bos: bool, add_eos: bool,
    progress: bool = False,
) -> "EvalData":
  """Evaluation data of the sources in `cfg_sources`; tokenises what is not in the cache yet.

  Args:
    cfg_sources: name -> config, as in `input.sources`; weights play no part.
    tokenizer: the training run's.
    seq_len: places in a row.
    split: in place of the sources' own; None keeps theirs.
    max_documents: a limit for each source, beside its own.
    packing: concat | best_fit | none.
    cache_dir: folder of the token caches.
    add_bos: as in training.
    add_eos: as in training.
    progress: show a bar while tokenising.

  Raises:
    ConfigError, DataError, OSError: see `open_source`, `tokenize_source`.
  """
  if not len(cfg_sources):
    raise ConfigError("no evaluation sources: set evals.<name>.sources or input.sources.")
  sources, packed = [], []
  for name in sorted(cfg_sources):
    source = open_source(cfg_sources[name], name, split=split, max_documents=max_documents)
    tokens = tokenize_source(source, tokenizer, Path(cache_dir), add_bos, add_eos, progress)
    plan = make_plan(packing, np.diff(tokens.offsets), seq_len, seed=0, name=name, shuffle=False)
    sources.append(source)
    packed.append(PackedSource(tokens, plan))
  return EvalData(sources, packed, seq_len, tokenizer.pad_id)


class EvalData:
  """Rows of all sources, one source after another. `num_bytes` counts each source's UTF-8 bytes.

  Without a BOS, a document's first token is not predicted, yet its bytes are in `num_bytes`.
  """

  def __init__(self, sources: list[Source], packed: list[PackedSource], seq_len: int, pad_id: int):
    self._sources, self._packed, self._seq_len, self._pad_id = sources, packed, seq_len, pad_id
    self.source_names = tuple(source.name for source in sources)
    self._starts = np.cumsum([0, *(p.plan.num_rows for p in packed)])
    self.num_rows = int(self._starts[-1])
    tokens = {p.tokens.name: p.tokens for p in packed}
    self.num_documents: dict[str, int] = {name: t.num_documents for name, t in tokens.items()}
    self.num_bytes: dict[str, int] = {name: int(t.num_bytes.sum()) for name, t in tokens.items()}

  def num_batches(self, batch_size: int) -> int:
    return -(-self.num_rows // batch_size)

  def batch(self, i: int, batch_size: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
    """Rows `rows` of the i-th batch; past the last row, padding (segment 0, weight 0, source -1)."""
    k = i * batch_size + np.arange(batch_size)[rows]
    batch = empty_batch(len(k), self._seq_len, self._pad_id)
    for s, source in enumerate(self._packed):
      here = np.flatnonzero((self._starts[s] <= k) & (k < self._starts[s + 1]))
      if len(here):
        source.fill(batch, here, 0, k[here] - self._starts[s], s)
    return batch

  def raw_texts(self) -> Iterator[str]:
    """Texts of all documents, in order, read from the sources again."""
    for source in self._sources:
      for document in source.documents():
        yield document.text
