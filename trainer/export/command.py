"""Export a run as a Hugging Face folder: python -m trainer.export --workdir=DIR --out=DIR [--step=N] [--dtype=bfloat16]

The folder has config.json, model*.safetensors, the tokenizer's files with the chat template that was trained (in every
place where readers look, trainer/export/chat_files.py), and generation_config.json with the ids that end a text;
`transformers` and vLLM load it unmodified. Arrays are streamed from the checkpoint, whatever mesh it was saved from,
with no device: the host holds one output file's tensors at a time.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from absl import app, flags, logging

from input_pipeline.chat.builtin import find_template
from input_pipeline.chat.image_placeholders import vocab_size
from input_pipeline.chat.template import ChatTemplate
from input_pipeline.examples.conversations import ChatEncoder
from input_pipeline.tokenizer.special_tokens import BOS
from input_pipeline.tokenizer.tokenizer import Tokenizer, load_tokenizer, write_ends
from models import hf, lora
from models.hf import convert, files, pixels, videos
from trainer import startup, strategies
from trainer import tree as tree_lib
from trainer.checkpoints import checkpoint, damage
from trainer.checkpoints.init_from import EMBEDDINGS
from trainer.config import checks as config_checks
from trainer.errors import CheckpointError, ConfigError, DataError, one_of
from trainer.export import adapters as export_adapters
from trainer.export import chat_files, embedding, hugging_face

DTYPES = ("float32", "bfloat16", "float16")
ADAPTER = ("merged", "peft")
ANOTHER = "Export another checkpoint of this run, with --step."
# TensorStore keeps decoded chunks in a cache of at least this size.
CACHE_BYTES = 1 << 26


def export(workdir: str | Path, out: str | Path, *, step: int | None = None, dtype: str | None = None,
           ema: bool = False, adapter: str = "merged", max_shard_bytes: int = files.MAX_SHARD_BYTES,
           overwrite: bool = False, progress: bool = False, folder: Path | None = None, mtp: bool = True) -> Path:
  """Writes a checkpoint of a run as a Hugging Face folder.

  Call it on one process; it needs no more than the files.

  Args:
    out: the folder, made if missing.
    step: which checkpoint; None: the newest.
    dtype: of the tensors; None: that of the parameters.
    ema: write the moving average of the parameters in their place.
    adapter: of a run that trained adapters, `merged` writes the whole model with them added, `peft` them alone, in
      PEFT's format.
    max_shard_bytes: where a new file begins.
    overwrite: replace a model that is in `out`.
    folder: of the checkpoint, where it is none of the workdir's.
    mtp: with the modules that predict tokens further ahead (`model.mtp_layers`).

  Returns:
    `out` as an absolute path.

  Raises:
    ConfigError: no such run, checkpoint or dtype.
    CheckpointError: the checkpoint is damaged.
    HFError: no family can express the model; the message names the keys that stand in the way.
  """
  workdir, out = (Path(path).expanduser().absolute() for path in (workdir, out))
  if dtype is not None and dtype not in DTYPES:
    raise ConfigError(f"export's dtype is {dtype!r}; allowed: {', '.join(DTYPES)}, or leave it out for that of the "
                      "parameters.")
  one_of("export's adapter", adapter, ADAPTER)
  config = _config(workdir)
  folder = folder or _checkpoint(workdir, step)
  stored: Any = StoredLeaves(folder, "ema" if ema else "params")
  tokenizer = load_tokenizer(workdir / "tokenizer.json")
  adapters = {path: leaf for path, leaf in stored.shapes.items() if lora.is_adapter(path)}

  def merged() -> export_adapters.MergedLeaves:
    return export_adapters.MergedLeaves(config, tokenizer, folder, stored.shapes, stored.read)

  if adapter == "peft":
    if not adapters:
      raise ConfigError(f"{folder} holds no adapters: its run had model.lora.rank=0. Export without --adapter=peft.")
    export_adapters.save_peft(out, config, tokenizer, stored.read, dtype, overwrite, merged)
    texts = strategies.of(config).data == "texts"
    if not texts and not (out / files.CONFIG).exists():  # in the base's own folder its files stay
      _write_texts(config, tokenizer, workdir, out)
    return out
  if adapters:
    stored = merged()
  left_out = ("similarity/",) if mtp else ("similarity/", "mtp/")
  stored_shapes = {path: leaf for path, leaf in stored.shapes.items() if not path.startswith(left_out)}
  shapes = _without_padding(stored_shapes, None if config.model.hf else vocab_size(config, tokenizer))
  keys = hf.keys_of(config.model, shapes["embed/embedding"].shape[0])
  keys["mtp_layers"] *= mtp
  original = workdir / hugging_face.FOLDER
  source = files.read_config(original) if (original / files.CONFIG).is_file() else None
  if keys["max_positions"] is None:  # bounds nothing here, but others ask for it: the longest row it was trained on
    keys["max_positions"] = max(config.seq_len, (source or {}).get("max_position_embeddings") or 0)
  family, content = hf.config_json(keys, source, str(original / files.CONFIG), config.model.hf_ignore)

  hf.prepare(out, overwrite)
  convert.write_tensors(stored.read, family, keys, shapes, out, dtype, max_shard_bytes, progress)
  came_along, stop_ids = _write_texts(config, tokenizer, workdir, out)
  pixels.write(out, keys)
  videos.write(out, keys)
  if config.model.head == "embedding":
    embedding.write(out, config, tokenizer)
  generation, ends = _generation(out, source if came_along else {}, tokenizer.bos_id, stop_ids)
  hf.write_json(out / "generation_config.json", generation)
  if not came_along:
    content = {**content, "bos_token_id": tokenizer.bos_id, "eos_token_id": ends, "pad_token_id": None}
  written_as = dtype or np.dtype(shapes["embed/embedding"].dtype).name
  hf.write_json(out / files.CONFIG, hf.with_dtype(content, written_as))  # last: it says that the folder is complete
  return out


def export_at_end(run: Any, out: Path | None, **more: Any) -> None:
  """Exports what a run has come to into `out`, None: nowhere; all processes call it. See `export` for `more`.

  A run whose `ckpt` is never has no checkpoint of that: its parameters are written beside them, and removed again.
  """
  if out is None:
    return
  beside = None if run.saves_last else run.workdir / "for_export"
  if beside is not None:
    saver, (stored, _) = checkpoint.Checkpoints(beside), run.checkpoints.split(run.state)
    saver.save(run.step, {part: stored[part] for part in ("params", "step")}, {"step": run.step, "pinned": run.pinned})
    saver.close()
  if jax.process_index() == 0:
    try:
      export(run.workdir, out, folder=beside and beside / str(run.step), **more)
    finally:
      if beside is not None:
        shutil.rmtree(beside)


class StoredLeaves:
  """The parameters in a checkpoint, read a slice at a time.

  What TensorStore reads and decodes is whole chunks; those that hold a layer of a leaf stay in its cache, so that
  reading the layers of one leaf in order reads each chunk once.

  Args:
    part: `params`, or `ema` for their moving average.

  Attributes:
    shapes: {path: ShapeDtypeStruct}.

  Raises:
    ConfigError: the checkpoint has no such part.
    CheckpointError: it is damaged.
  """

  def __init__(self, folder: Path, part: str = "params"):
    self._folder = folder
    with self._explained(), damage.reading(folder):
      tree = checkpoint.saved_tree(folder)
    saved = checkpoint.policy_leaves(folder, tree_lib.flatten(tree["params"]))
    averages = checkpoint.policy_leaves(folder, tree_lib.flatten(tree.get("ema", {})))
    if part == "ema" and not averages:
      raise ConfigError(f"{folder} holds no moving average of the parameters: its run had optimizer.ema_decay=0. "
                        "Export without --ema.")
    saved |= averages if part == "ema" else {}  # frozen parameters have none
    self.shapes = {path: jax.ShapeDtypeStruct(m.shape, m.dtype) for path, m in saved.items()}
    rows = [_bytes_of_a_row(m.shape, m.storage.chunk_shape, np.dtype(m.dtype).itemsize) for m in saved.values()]
    # Two of the largest: some families have one tensor for gate and up, or a smaller one for query, key and value.
    context = ts.Context({"cache_pool": {"total_bytes_limit": max(CACHE_BYTES, 2 * max(rows))}})
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder / 'state'}/"}}
    self._arrays = {path: self._result(ts.open({"driver": "zarr", "kvstore": {**kvstore, "path": f"{m.name}/"},
                                                "recheck_cached_data": "open"}, context=context, read=True, open=True))
                    for path, m in saved.items()}

  def read(self, path: str, index: tuple[int | slice, ...]) -> np.ndarray:
    """`leaf[index]`; raises CheckpointError if it cannot be read."""
    return self._result(self._arrays[path][index].read())

  def _result(self, future: ts.Future) -> Any:
    try:
      return future.result()
    except Exception as e:
      with self._explained(), damage.reading(self._folder):
        raise e

  @contextlib.contextmanager
  def _explained(self) -> Iterator[None]:
    try:
      yield
    except CheckpointError as e:
      raise type(e)(f"{e}\n{ANOTHER}") from e


def _bytes_of_a_row(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> int:
  """What is decoded to read one layer: all chunks in which it lies."""
  return int(np.prod([chunk[0], *shape[1:]])) * itemsize if shape else itemsize


def _config(workdir: Path) -> Any:
  """The run's resolved config."""
  file = workdir / "config.json"
  if not file.is_file():
    raise ConfigError(f"{workdir} holds no config.json, so it is no workdir of a run. Give the --workdir that it was "
                      "trained in.")
  config = config_checks.resolve(files.read_json(file))
  if config.model.name != "transformer":
    raise hf.HFError(f"{file}: model.name is {config.model.name!r}; only the built-in transformer can be exported.")
  return config


def _checkpoint(workdir: Path, step: int | None) -> Path:
  if step is None:
    return checkpoint.find(str(workdir))
  folder = workdir / "checkpoints" / str(step)
  if not (folder / "state").is_dir():
    steps = sorted(int(p.name) for p in folder.parent.glob("*") if p.name.isdigit())
    raise ConfigError(f"{workdir} has no checkpoint of step {step}; there are: {', '.join(map(str, steps)) or 'none'}.")
  return folder


def _without_padding(shapes: Mapping[str, jax.ShapeDtypeStruct], vocab_size: int | None) -> dict[str, Any]:
  """The shapes with only the real entries of the vocabulary; None: all are."""
  cut = {path: list(leaf.shape) for path, leaf in shapes.items()}
  if vocab_size is not None:
    for path in cut.keys() & EMBEDDINGS.keys():
      cut[path][EMBEDDINGS[path]] = min(vocab_size, cut[path][EMBEDDINGS[path]])
  return {path: jax.ShapeDtypeStruct(tuple(shape), shapes[path].dtype) for path, shape in cut.items()}


def _is_of(original: Path, tokenizer: Tokenizer) -> bool:
  """Whether the run used the tokenizer of the folder that it started from."""
  try:
    return (original / "tokenizer.json").is_file() and load_tokenizer(original).fingerprint == tokenizer.fingerprint
  except DataError:  # one that cannot be read was not used
    return False


def _write_texts(config: Any, tokenizer: Tokenizer, workdir: Path, out: Path) -> tuple[bool, tuple[int, ...]]:
  """Writes the tokenizer, the processor of images and the chat template.

  Returns:
    (whether the tokenizer is that of the folder which the run started from, the ids that end what the model says).
  """
  original = workdir / hugging_face.FOLDER
  came_along = (original / files.CONFIG).is_file() and _is_of(original, tokenizer)
  _write_tokenizer(config, tokenizer, original if came_along else None, out)
  hf.copy_small_files(original, out, (*pixels.FILES, videos.FILE))
  own = not config.chat.template
  template, stop_ids = _chat(config, tokenizer)
  if template is not None:
    chat_files.write(out, template, own)
  return came_along, stop_ids


def _write_tokenizer(config: Any, tokenizer: Tokenizer, original: Path | None, out: Path) -> None:
  """The tokenizer that the run used, with the files it came with: those of `original`, if it is from there."""
  for old in [old for name in hf.SMALL_FILES for old in out.glob(name)]:  # of a model that is being replaced
    old.unlink()
  if original is not None:
    hf.copy_small_files(original, out, hf.SMALL_FILES)
    return
  tokenizer.save(out / "tokenizer.json")
  if config.tokenizer.add_bos is not False and tokenizer.named_tokens.get("bos_token") == BOS:
    write_ends(out / "tokenizer.json", (tokenizer.bos_id,))
  named = files.read_json(out / "tokenizer_config.json")
  # Without this, transformers would choose a class by the model, which may split text in another way.
  named.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
  hf.write_json(out / "tokenizer_config.json", named)


def _chat(config: Any, tokenizer: Tokenizer) -> tuple[ChatTemplate | None, tuple[int, ...]]:
  """(the template that conversations were trained with, the ids that end what the model says), EXACTNESS.md T11c.

  The template is that of the workdir's tokenizer, where `workdir.save_config` put it.
  """
  if (kind := strategies.of(config).data) == "texts":
    return None, tokenizer.stop_ids
  with config.unlocked():
    config.chat.template = None
  if kind == "matches":  # texts that are embedded may be conversations
    return find_template(config.chat, tokenizer), tokenizer.stop_ids
  encoder = ChatEncoder(config, tokenizer)
  try:
    return encoder.template, encoder.stop_ids
  except DataError as e:  # a template that rows without turns were trained beside, and that does not fit the tokenizer
    logging.warning("the tokenizer's chat template ends no turn with a token of its own: %s", e)
    return encoder.template, tokenizer.stop_ids


def _generation(out: Path, source: Mapping[str, Any], bos_id: int | None,
                stop_ids: tuple[int, ...]) -> tuple[dict[str, Any], Any]:
  """(generation_config.json, the ids that end a text: None, a number or a list).

  The ids are those that the generation_config.json of `out` names, in its order, then those of `source`, the
  config.json that came along, and `stop_ids`.
  """
  file = out / "generation_config.json"
  generation = files.read_json(file) if file.is_file() else {}
  first, second = ([] if ids is None else ids if isinstance(ids, list) else [ids]
                   for ids in (generation.get("eos_token_id"), source.get("eos_token_id")))
  ends = list(dict.fromkeys([*first, *sorted({*second, *stop_ids})]))
  ends = ends[0] if len(ends) == 1 else ends or None
  known = {"bos_token_id": generation.get("bos_token_id", bos_id), "eos_token_id": ends}
  return {**generation, **{key: value for key, value in known.items() if value is not None}}, ends


def _define_flags() -> None:
  flags.DEFINE_string("workdir", None, "The run's folder.")
  flags.DEFINE_string("out", None, "The folder to write, made if missing.")
  flags.DEFINE_integer("step", None, "Which checkpoint. Default: the newest.")
  flags.DEFINE_enum("dtype", None, DTYPES, "Of the tensors. Default: that of the parameters.")
  flags.DEFINE_bool("ema", False, "Write the moving average of the parameters (optimizer.ema_decay).")
  flags.DEFINE_enum("adapter", "merged", ADAPTER, "Of a run that trained adapters: the whole model, or they alone.")
  flags.DEFINE_float("max_shard_gb", files.MAX_SHARD_BYTES / 1e9, "Size in GB above which there are several files.",
                     lower_bound=1e-9)
  flags.DEFINE_bool("mtp", True, "With what predicts tokens further ahead (model.mtp_layers).")
  flags.DEFINE_bool("overwrite", False, "Replace a model that --out holds.")
  flags.mark_flags_as_required(["workdir", "out"])


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments {argv[1:]}")
  jax.config.update("jax_platforms", "cpu")  # nothing here needs an accelerator
  given = flags.FLAGS
  with startup.one_message(ConfigError, DataError, OSError):
    out = export(given.workdir, given.out, step=given.step, dtype=given.dtype, ema=given.ema,
                 adapter=given.adapter, mtp=given.mtp,
                 max_shard_bytes=round(given.max_shard_gb * 1e9), overwrite=given.overwrite, progress=True)
  if given.adapter == "peft":
    print(f"{out}: adapters in PEFT's format")
    return
  kind = files.read_config(out)["model_type"]
  size = sum(path.stat().st_size for path in files.weights_in(out))
  print(f"{out}: {kind}, {len(files.TensorFolder(out).tensors)} tensors, {size / 1e6:,.1f} MB")
