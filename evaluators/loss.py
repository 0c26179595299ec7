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
from jax.experimental import multihost_utils

from evaluators import common
from input_pipeline import loader
from trainer import logprobs
from trainer.config import ConfigError
from trainer.mesh import batch_sharding, check_batch, place_batch
from trainer.strategies import seq

COMPRESSORS = {
    "gzip": ("gzip -9", lambda data: gzip.compress(data, 9)),
    "xz": ("xz -9e", lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
}


class Loss:
  """Yields `loss` (nats a token), `perplexity`, `accuracy`, `bits_per_byte`, and with several sources each one's.

  Sums over rows are taken on the device in float32, sums over the split on the host in float64, and divided
  once: the values do not depend on the batch size (EXACTNESS.md I6). bits_per_byte divides the bits of every predicted
  token, end-of-document tokens included, by the UTF-8 bytes of the documents.
  """

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    config = setup.config
    # The training sources with this evaluator's split, or sources of its own, which name their splits themselves.
    own = len(cfg.sources) > 0
    self._data = loader.make_eval_data(
        cfg.sources if own else config.input.sources, setup.tokenizer, seq_len=config.seq_len,
        split=None if own else cfg.split, max_documents=cfg.max_documents, packing=config.input.packing,
        cache_dir=loader.default_cache_dir(config.input, setup.workdir), add_bos=config.tokenizer.add_bos,
        add_eos=config.tokenizer.add_eos, progress=jax.process_index() == 0)
    leaking = [n for n in config.input.sources if config.input.sources[n].split == "all"]
    if not own and cfg.split != "all" and leaking:
      raise ConfigError(
          f"evals.{name} evaluates the split {cfg.split!r} of the training sources, but input.sources.{leaking[0]} "
          f"trains on all of it. Use --config.input.sources.{leaking[0]}.split=train, or "
          f"--config.evals.{name}.split=all to evaluate on training data on purpose.")
    self._batch_size = cfg.batch_size or config.batch_size // config.grad_accum_steps
    check_batch(setup.mesh, self._batch_size, f"evals.{name}.batch_size")
    self._sharding = batch_sharding(setup.mesh)
    self._row_sums = jax.jit(_make_row_sums(setup.model))
    self._baselines = {}
    for key in cfg.baselines:
      if key not in COMPRESSORS:
        raise ConfigError(f"evals.{name}.baselines names {key!r}; known: {', '.join(COMPRESSORS)}.")
    if cfg.baselines:
      text = "".join(self._data.raw_texts()).encode()
      for key in cfg.baselines:
        shown, compress = COMPRESSORS[key]
        self._baselines[key] = 8 * len(compress(text)) / len(text)
        logging.info("%s of the %d bytes of evals.%s: %.4f bits per byte", shown, len(text), name, self._baselines[key])

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]:
    sums = np.zeros((len(self._data.source_names), 3))
    for index in range(self._data.num_batches(self._batch_size)):
      batch = place_batch(lambda rows, index=index: self._data.batch(index, self._batch_size, rows), self._batch_size,
                          self._sharding)
      rows_Bx3, source_ids_B = _on_every_host((self._row_sums(params, batch), batch["source_ids"]))
      real = source_ids_B >= 0
      np.add.at(sums, source_ids_B[real], np.asarray(rows_Bx3, np.float64)[real])
    yield from _values("", sums.sum(axis=0), sum(self._data.num_bytes.values()))
    if len(sums) > 1:
      for name, row in zip(self._data.source_names, sums, strict=True):
        yield from _values(f"/{name}", row, self._data.num_bytes[name])
    for key, bits in self._baselines.items():
      yield f"bits_per_byte_{key}", bits


def _make_row_sums(model: Any):
  def row_sums(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """[B, 3]: each row's Σ weighted nll, Σ weighted hits, Σ weights."""
    hidden_BxTxD = model.apply(params, batch)
    targets_BxT, weights_BxT = seq.next_tokens(batch)
    stats = logprobs.token_stats(
        hidden_BxTxD, model.unembedding(params), targets_BxT, chunk=model.vocab_chunk, logit_cap=model.final_logit_cap,
        num_real_vocab=model.num_real_vocab, want=("logprob", "is_top"))
    columns = (-stats.logprob * weights_BxT, stats.is_top * weights_BxT, weights_BxT)
    return jnp.stack([jnp.sum(x, axis=1) for x in columns], axis=1)

  return row_sums


def _values(suffix: str, sums: np.ndarray, num_bytes: int) -> Iterator[tuple[str, float]]:
  nll, hits, weight = (float(x) for x in sums)
  if weight == 0:
    raise ValueError(f"nothing to evaluate{' in ' + suffix[1:] if suffix else ''}: no token has a weight.")
  yield f"loss{suffix}", nll / weight
  yield f"perplexity{suffix}", math.exp(min(nll / weight, 700.0))
  yield f"accuracy{suffix}", hits / weight
  yield f"bits_per_byte{suffix}", nll / math.log(2) / num_bytes


def _on_every_host(arrays: Any) -> Any:
  if jax.process_count() == 1:
    return jax.device_get(arrays)
  return multihost_utils.process_allgather(arrays, tiled=True)
