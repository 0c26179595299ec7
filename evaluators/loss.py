"""Held-out loss, perplexity, bits per byte and accuracy, over every document of a split exactly once."""

import gzip
import lzma
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from evaluators import common
from trainer.distributed import processes
from trainer.errors import ConfigError
from trainer.strategies import logprobs, seq

COMPRESSORS = {
    "gzip": ("gzip -9", lambda data: gzip.compress(data, 9)),
    "xz": ("xz -9e", lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
}


class Loss:
  """Yields `loss` (nats a token), `perplexity`, `accuracy`, `bits_per_byte`, and with several sources each one's.

  Sums over rows are taken on the device in float32, sums over the split on the host in float64, and divided
  once: the values do not depend on the batch size (EXACTNESS.md I6). bits_per_byte divides the bits of every predicted
  token, end-of-document tokens included, by the UTF-8 bytes of the documents; it is left out where these are not whole
  texts (`EvalData.num_bytes`), as with conversations.
  """

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    self._examples = common.Examples(name, cfg, setup)
    self._data = self._examples.data
    self._row_sums = jax.jit(_make_row_sums(setup.model))
    self._baselines = {}
    # None: not defined for these data, so that there are no bits per byte.
    self._num_bytes = dict(self._data.num_bytes)
    self._all_bytes = None if None in self._num_bytes.values() else sum(self._num_bytes.values())
    for key in cfg.baselines:
      if key not in COMPRESSORS:
        raise ConfigError(f"evals.{name}.baselines names {key!r}; known: {', '.join(COMPRESSORS)}.")
    if cfg.baselines and self._all_bytes is None:
      raise ConfigError(f"evals.{name}.baselines is {tuple(cfg.baselines)}, but bits per byte mean nothing here: the "
                        "tokens evaluated are not those of whole texts. Leave it empty.")
    if cfg.baselines:
      text = "".join(self._data.raw_texts()).encode()
      for key in cfg.baselines:
        shown, compress = COMPRESSORS[key]
        self._baselines[key] = 8 * len(compress(text)) / len(text)
        logging.info("%s of the %d bytes of evals.%s: %.4f bits per byte", shown, len(text), name, self._baselines[key])

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]:
    sums = np.zeros((len(self._data.source_names), 3))
    for batch in self._examples:
      rows_Bx3, source_ids_B = processes.on_every_host((self._row_sums(params, batch), batch["source_ids"]))
      common.add_by_source(sums, source_ids_B, rows_Bx3)
    yield from _values("", sums.sum(axis=0), self._all_bytes)
    if len(sums) > 1:
      for name, row in zip(self._data.source_names, sums, strict=True):
        yield from _values(f"/{name}", row, self._num_bytes[name])
    for key, bits in self._baselines.items():
      yield f"bits_per_byte_{key}", bits


def _make_row_sums(model: Any):
  def row_sums(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """[B, 3]: each row's Σ weighted nll, Σ weighted hits, Σ weights."""
    hidden_BxTxD = model.apply(params, batch).hidden
    targets_BxT, weights_BxT = seq.next_tokens(batch)
    stats = logprobs.token_stats(
        hidden_BxTxD, model.unembedding(params), targets_BxT, chunk=model.vocab_chunk, logit_cap=model.final_logit_cap,
        num_real_vocab=model.num_real_vocab, want=("logprob", "is_top"))
    columns = (-stats.logprob * weights_BxT, stats.is_top * weights_BxT, weights_BxT)
    return jnp.stack([jnp.sum(x, axis=1) for x in columns], axis=1)

  return row_sums


def _values(suffix: str, sums: np.ndarray, num_bytes: int | None) -> Iterator[tuple[str, float]]:
  nll, hits, weight = (float(x) for x in sums)
  if weight == 0:
    raise ValueError(f"nothing to evaluate{' in ' + suffix[1:] if suffix else ''}: no token has a weight.")
  yield f"loss{suffix}", nll / weight
  yield f"perplexity{suffix}", math.exp(min(nll / weight, 700.0))
  yield f"accuracy{suffix}", hits / weight
  if num_bytes is not None:
    yield f"bits_per_byte{suffix}", nll / math.log(2) / num_bytes
