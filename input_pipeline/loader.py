"""Training batches as a pure function of (seed, step): sources, packing, mixture and stages put together.

Steps take consecutive runs of the mixture's rows. Row k of the whole run is the same whatever the batch size,
the hosts, the workers and the restarts; so a checkpoint needs the step, and the sizes that batches had (steps.py).
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from input_pipeline.bad_rows import BadRows, Policy
from input_pipeline.batches import PackedSource, check_ids, pack, resolve_layout, stats_table
from input_pipeline.cache import texts_of, tokenize_source
from input_pipeline.chat.image_placeholders import vocab_size
from input_pipeline.evaluation import EvalData, default_cache_dir, make_eval_data
from input_pipeline.examples.registry import open_examples
from input_pipeline.examples.roles import MISMATCHED
from input_pipeline.mixture import Mixture, stage_weights
from input_pipeline.parts import first_part
from input_pipeline.prefetch import Prefetcher
from input_pipeline.reference import PackedData
from input_pipeline.sources.sources import open_source
from input_pipeline.steps import MAX_STEPS, ROWS, Past, Steps, steps_of_batches
from input_pipeline.streams import StreamedSource
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.errors import ConfigError

__all__ = [
    "EvalData", "Prefetcher", "TrainData", "default_cache_dir", "make_eval_data", "make_train_data", "train_texts"]


def used_sources(input_cfg: ConfigDict) -> list[str]:
  """Sorted names of the sources that have a positive weight in some stage.

  Raises:
    ConfigError: no sources, or bad weights.
  """
  if not len(input_cfg.sources):
    raise ConfigError("input.sources is empty: add one, e.g. config.input.sources.mine = source(type='text', path=…).")
  base = {name: input_cfg.sources[name].weight for name in sorted(input_cfg.sources)}
  _, weights = stage_weights(base, input_cfg.weight_stages)
  return [name for name in base if any(stage[name] for stage in weights)]


def train_texts(cfg: ConfigDict, learns: str) -> Callable[[], Iterator[str]]:
  """A function that gives, from the start at each call, the texts of all training documents, those of a stream's first
  part; see `make_train_data`."""
  for name in used_sources(cfg.input):
    open_source(cfg.input.sources[name], name, streams=True)  # its keys are checked now

  def texts() -> Iterator[str]:
    for name in used_sources(cfg.input):
      source, encoder = open_examples(cfg, None, cfg.input.sources[name], name, learns=learns, streams=True)
      with first_part(source, cfg) as part:
        bad = BadRows(name, Policy.of(cfg))
        for record in part.records(bad):
          texts: list[str] = []
          with bad.none_in(record):
            texts = texts_of(record, encoder)
          yield from texts
        bad.finish()

  return texts


def make_train_data(
    cfg: ConfigDict, tokenizer: Tokenizer, *, learns: str, workdir: str | Path, share_prompts: bool = False,
    progress: bool = False, past: Past | None = None
) -> "TrainData":
  """The training data of a full config; tokenises what is not in the cache yet.

  Args:
    learns: what the strategy learns from (`trainer.strategies.learns`), one of `kinds.KINDS`.
    share_prompts: see `Units`.
    past: of the run that is gone on with.

  Raises:
    ConfigError, DataError, OSError: see `open_source`, `Mixture`, `tokenize_source`, `StreamedSource`.
  """
  i = cfg.input
  names = used_sources(i)
  taken = steps_of_batches(cfg.batch_size, cfg.grad_accum_steps, i.batch_size_stages, cfg.seq_len, past)
  steps, weights = stage_weights({n: i.sources[n].weight for n in sorted(i.sources)}, i.weight_stages)
  packed: list[Any] = []
  for name in i.sources:
    if name not in names:
      open_source(i.sources[name], name, streams=True)  # its keys are checked all the same
      logging.warning("source %r has weight 0 throughout and is not used.", name)
  for name in names:
    source, encoder = open_examples(cfg, tokenizer, i.sources[name], name, learns=learns, streams=True)
    if i.sources[name].stream_files:
      packed.append(StreamedSource(cfg, source, encoder, tokenizer, learns=learns, workdir=workdir, progress=progress))
      continue
    tokens = tokenize_source(source, encoder, vocab_size(cfg, tokenizer), default_cache_dir(cfg, workdir), progress,
                             Policy.of(cfg))
    packed.append(pack(cfg, tokens, learns=learns, share_prompts=share_prompts))
  if learns == "mismatched":
    _tell_of_single_prompts(packed)
  if learns == "rollouts":
    _check_logprobs(cfg, packed)
  shares = np.array([[stage[name] for name in names] for stage in weights], np.float64)
  if i.mixture_by == "tokens" and len(names) > 1:
    shares = shares / [_trained_per_row(source) for source in packed]
  starts = [taken.rows_before(step) for step in steps]
  mixture = Mixture(starts, shares, [source.plan.num_rows for source in packed], i.stop, names)
  contents = [source.tokens.fingerprint for source in packed]
  row_images = [] if packed[0].row_images is None else [packed[0].row_images.fingerprint]

  def fingerprint(starts: list[int]) -> str:
    return _hash([cfg.seed, cfg.seq_len, *resolve_layout(cfg, learns), starts, shares.tolist(), contents, *row_images,
                  *["prompts shared"] * share_prompts])

  data = TrainData(packed, mixture, taken, cfg.seq_len, tokenizer.pad_id, fingerprint(starts),
                   functools.partial(Prefetcher, depth=i.prefetch, workers=i.workers))
  data.go_to(past.step if past else 0)
  if past and past.of == ROWS:  # other sizes move what a stage of weights begins with
    data.past_fingerprint = fingerprint([Steps(ROWS, (), past._replace(begin=MAX_STEPS)).rows_before(s) for s in steps])
  return data


def _trained_per_row(source: PackedSource) -> float:
  stats = source.plan.stats()
  if not stats.trained:
    raise ConfigError(
        f"input.mixture_by='tokens', but source {source.tokens.name!r} trains no token: none of its "
        "tokens has a weight. Set input.mixture_by='examples' or give it longer documents."
    )
  return stats.trained / stats.rows


def _check_logprobs(cfg: ConfigDict, packed: list[PackedSource]) -> None:
  """Refuses a correction for what nobody knows; says where log-probs are there and nothing is corrected."""
  correction = cfg.strategy.correction if "correction" in cfg.strategy else "none"
  there = [source.tokens.name for source in packed if source.tokens.logprobs is not None]
  if correction != "none" and not there:
    raise ConfigError(f"strategy.correction is {correction!r}, which compares with the log-probs that responses were "
                      "sampled with, but no row of the data has them: give responses as token ids with a column "
                      "'logprobs' (docs/rewards.md), or use correction='none'.")
  if correction == "none" and there:
    logging.info("%s: with 'logprobs'; strategy.correction is 'none', so that the distance from what sampled the "
                 "responses is measured (sampling/…), not corrected for.", ", ".join(map(repr, there)))


def _tell_of_single_prompts(packed: list[PackedSource]) -> None:
  """Warns of sources that have a single prompt, so that no completion of another one can estimate the divergence."""
  alone = [source.tokens.name for source in packed if not (np.asarray(source.tokens.roles) == MISMATCHED).any()]
  whole = len(alone) == len(packed)
  for name in alone:
    logging.warning(
        "source %r: all its examples have the same prompt, but the strategy estimates how far the policy is from its "
        "reference by completions of other prompts: %s", name,
        "there is no estimate, and z is 0 throughout. Add examples with other prompts, or say so (kto: "
        "--config.strategy.loss=apo_zero_unpaired)." if whole else "the estimate is of the other sources alone.")


def _hash(parts) -> str:
  return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class TrainData(PackedData):
  """Training data (trainer/data.py): batches by step.

  One epoch is as many rows as all used sources have together, whatever their weights. Sources may be streams
  (streams.py), whose rows are not known before they are read.
  """

  # That the first batch has those of `example`.
  shapes_known = True

  def __init__(
      self, packed: list[Any], mixture: Mixture, taken: Steps, seq_len: int, pad_id: int, fingerprint: str,
      prefetch: Callable[..., Prefetcher] = Prefetcher
  ):
    super().__init__(packed, seq_len, pad_id)
    self._prefetch, self.row_tokens = prefetch, seq_len
    self._mixture, self.taken = mixture, taken
    self.source_names = mixture.names
    # Equal if and only if every row of the run is (`stop` and the batch size change no row).
    self.fingerprint = fingerprint
    # What it was to the run that is gone on with, if its data are these.
    self.past_fingerprint = fingerprint
    self._streams = {s: source for s, source in enumerate(packed) if isinstance(source, StreamedSource)}
    # None: how many rows streams have is not known before they are read.
    self.rows_per_epoch = None if self._streams else int(mixture.rows.sum())
    # None: endless. The last step's batch is filled up with padding rows.
    self.num_rows: int | None = mixture.num_rows
    self.num_steps: int | None = None if self.num_rows is None else self.taken.steps_for(self.num_rows)

  def go_to(self, step: int) -> None:
    """Begins to read what `step` takes of streams."""
    if self._streams:
      draws = self._mixture.draws(self._rows_taken(step))
      for s, stream in self._streams.items():
        stream.begin(int(draws[s]))

  def batch_range(self, step: int) -> tuple[int, int]:
    """(first row of the run that `step` takes, how many it takes)."""
    return self.taken.range(step)

  def tokens_seen(self, step: int) -> int:
    """Row positions that the steps before `step` take."""
    return self.taken.tokens_before(step)

  def example(self, step: int, program: Any) -> dict[str, Any]:
    """The batch of `step` in its place, given the run's program (trainer/program.py)."""
    vocab_size = program.model.vocab_size
    return program.place_rows(lambda rows: check_ids(self.batch(step, rows), vocab_size), self.batch_range(step)[1])

  def batches(self, run: Any) -> Prefetcher:
    """The batches of the run (trainer/run.py) from its step on, in their places."""
    return self._prefetch(lambda step: self.example(step, run.program), run.step, run.total_steps, closed=self._close)

  def _close(self) -> None:
    for stream in self._streams.values():
      stream.close()

  def take(self, run: Any) -> dict[str, np.ndarray]:
    """The batch of the run's next update, on the host."""
    return self.batch(run.step)

  def saved(self, step: int) -> tuple[dict[str, Any], None]:
    """What a checkpoint must hold besides the step and `taken`: nothing. (JSON-able, arrays.)"""
    return {}, None

  def restore(self, step: int, meta: dict[str, Any] | None, arrays: dict[str, np.ndarray] | None) -> None:
    """Nothing is to be done: rows follow from the step."""

  def epoch(self, step: int) -> float:
    """Epochs taken before `step`; with streams, of that one which has seen the smallest part of its files."""
    rows = self._rows_taken(step)
    if self._streams:
      draws = self._mixture.draws(rows)
      return min(stream.epoch(int(draws[s])) for s, stream in self._streams.items())
    return rows / self.rows_per_epoch

  def counters(self, step: int) -> dict[str, dict[str, float]]:
    """For each source, the rows and the epochs of it taken before `step`."""
    draws = self._mixture.draws(self._rows_taken(step)).tolist()
    epochs = [self._streams[s].epoch(d) if s in self._streams else d / r
              for s, (d, r) in enumerate(zip(draws, self._mixture.rows.tolist(), strict=True))]
    return {n: {"rows": d, "epoch": e} for n, d, e in zip(self.source_names, draws, epochs, strict=True)}

  def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
    """Rows `rows` of the batch of `step`: tokens, positions, segment_ids, loss_weights [R, T], source_ids [R]; where
    documents have parts, segment_roles [R, S], and maybe advantages [R, S]; where these share prompts, prompt_ids
    [R, T] (trainer/rollouts/experience.py); if some source has them, behavior_logprobs [R, T]; after `use`,
    ref_logprobs [R, T]; if the model sees images, what `ImageLayout.empty` has.

    A pure function: neither the calls before nor the thread matter.
    """
    first, size = self.batch_range(step)
    k = first + np.arange(size)[rows]
    batch = self._empty(len(k))
    there = np.arange(len(k)) if self.num_rows is None else np.flatnonzero(k < self.num_rows)
    source, epoch, row = self._mixture.locate(k[there])
    for s, e in np.unique(np.stack([source, epoch]), axis=1).T.tolist():
      here = np.flatnonzero((source == s) & (epoch == e))
      self._packed[s].fill(batch, there[here], e, row[here], s)
    return batch

  def document_lengths(self) -> np.ndarray:
    """Tokens of each document of all sources, of streams of the part at hand, int64, as they were before anything was
    cut."""
    packed = [self._streams[s].at_hand() if s in self._streams else source for s, source in enumerate(self._packed)]
    return np.concatenate([np.diff(source.tokens.offsets) for source in packed])

  def stats(self) -> list[dict[str, Any]]:
    """One row a source for the start-up table (`trainer.telemetry.terminal.stats`)."""
    return stats_table(self._packed)

  def _rows_taken(self, step: int) -> int:
    rows = self.taken.rows_before(step)
    return rows if self.num_rows is None else min(rows, self.num_rows)
