"""What an adapter checkpoint is exported as: adapters alone in PEFT's format, or merged into their base.

Such a checkpoint holds no base. For a merge it is made again, as at the start of the run, in the host's memory and in
the form in which it was trained on (bfloat16, int8, nf4): what is exported then computes what was evaluated. Layers are
merged as they are written.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from input_pipeline.tokenizer.tokenizer import Tokenizer
from models import api, hf, lora
from models.hf import peft
from models.lora import ReadLeaf
from models.quantization import quantize
from trainer import tree
from trainer.checkpoints import init_from


class MergedLeaves:
  """The parameters of an adapter checkpoint's model without adapters, each kernel with its adapter's product added.

  Args:
    trained: {path: ShapeDtypeStruct} of what it holds: adapters, and what is trained as a whole.
    read_trained: gives `leaf[index]` of one of these.

  Attributes:
    shapes: {path: ShapeDtypeStruct}; what was quantised counts as bfloat16.

  Raises:
    ConfigError: the base is not the one that the adapters were trained on.
  """

  def __init__(self, config: Any, tokenizer: Tokenizer, checkpoint: Path, trained: Mapping[str, Any],
               read_trained: ReadLeaf):
    model = _model(config, tokenizer)
    device = jax.sharding.SingleDeviceSharding(_host())
    stored = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
              for path, leaf in tree.flatten(model.abstract_params()).items() if path not in trained}
    base, where = init_from.first_params(init_from.origin_of(config), model, tree.unflatten(stored), partial=True)
    init_from.check_base(config, base, where, checkpoint)
    self._base = {path: np.asarray(leaf) for path, leaf in tree.flatten(base).items()}
    self.shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if path in self._base else jax.numpy.bfloat16)
                   for path, leaf in quantize.logical(stored).items()}
    self.shapes |= {path: leaf for path, leaf in trained.items() if not lora.is_adapter(path)}
    self._trained, self._read_trained = trained, read_trained
    self.read = lora.merged_reader(self._read_base, read_trained, filter(lora.is_adapter, trained),
                                   model.spec.lora)

  def lengths(self, kernel: str) -> np.ndarray:
    """|W| [L, out] of the base's kernel of that path."""
    return np.asarray(init_from.base_lengths(kernel, self._base))

  def table(self, path: str) -> np.ndarray:
    """The rows of the base's table of tokens of that path, float32 [V, D]."""
    return init_from.base_table(path, self._base)

  def _read_base(self, path: str, index: tuple[int | slice, ...]) -> np.ndarray:
    if path in self._trained:
      return self._read_trained(path, index)
    if path in self._base:
      values = self._base[path][index]
      return values.astype(np.float32) if path.endswith(("/kernel", "/embedding")) else values
    layer, *rest = index
    parts = {end: self._base[path + end][layer] for end in ("_int8", "_nf4", "_scale") if path + end in self._base}
    return np.asarray(_dequantize(parts))[tuple(rest)]


_dequantize = jax.jit(lambda parts: quantize.dequantize(parts, np.float32), backend="cpu")


def save_peft(out: Path, config: Any, tokenizer: Tokenizer, read_adapter: ReadLeaf, dtype: str | None,
              overwrite: bool, base: Callable[[], MergedLeaves]) -> None:
  """Writes what is trained in PEFT's format; see `hf.save_adapters`. `overwrite`: replace adapters that `out` holds.
  `base`: makes the base, which DoRA's lengths and the rows of tables are written with."""
  if (out / peft.CONFIG).exists() and not overwrite:
    raise hf.HFError(f"{out} already holds adapters. Give another folder, or say that they may be overwritten.")
  if config.model.head == "embedding":
    raise hf.HFError("model.head is 'embedding': a model of embeddings is written as a whole, with how it pools. "
                     "Export --adapter=merged.")
  shapes = quantize.logical(tree.flatten(_model(config, tokenizer).abstract_params()))
  if config.model.hf:
    family, keys, _ = hf.architecture(config.model.hf, config.model.hf_ignore)
  else:
    keys = hf.keys_of(config.model, shapes["embed/embedding"].shape[0])
    family, _ = hf.config_json(keys)
  lora_ = config.model.lora
  made = base() if lora_.dora or lora_.trainable_token_indices else None
  layout = hf.AdapterLayout(family, keys, shapes, lora_, made.lengths if made is not None and lora_.dora else None,
                            None if made is None else made.table)
  hf.save_adapters(out, read_adapter, layout, base=config.model.hf,
                   dtype=None if dtype is None else jax.numpy.dtype(dtype))


def _model(config: Any, tokenizer: Tokenizer) -> api.Model:
  return api.make_model(config.model, vocab_size=tokenizer.vocab_size, params_dtype=config.precision.params,
                        compute_dtype="float32", frozen=config.precision.frozen, freeze=config.optimizer.freeze)


def _host() -> jax.Device:
  """A device whose memory is the host's."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX was told to start without it
    return jax.local_devices()[0]
