"""The seam between training code and models: plain dicts of arrays in and out, pure functions only.

`make_model` turns the config's `model` section into a `Model`. Strategies call `apply`, which stops at
the hidden states, and hand these with `unembedding(params)` to `trainer/logprobs.py`, so that nothing in
training ever holds logits of shape [B, T, V].

How do I add a model? Write a class with the methods of `Model` and put its dotted path into the config:
`config.model.name = "my_package.my_module.MyModel"`. It is constructed as
`MyModel(cfg_model, vocab_size=…, params_dtype=…, compute_dtype=…, remat=…)`; it may have a
`validate(cfg_model, seq_len)` static method, called before any device work. It reads the keys of
`cfg_model` that it uses; keys of yours that the defaults lack are added with `config.model.my_key = …`.
A batch is a dict with `tokens`, `positions` and `segment_ids`, int32 [B, T] (segment 0 is padding).
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
from ml_collections import ConfigDict

from trainer.config import load_class

Params = dict[str, Any]

ACTIVATION_NAMES = ("batch", "length", "embed", "heads", "kv_heads", "mlp", "vocab")
BUILT_IN = {"transformer": "models.transformer.Transformer"}

_activation_rules: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("rules", default=None)


class Model(Protocol):
  """What training code may ask of a model. All methods are pure and may be traced."""

  # Entries of the unembedding, padding included; ids from num_real_vocab on are never predicted.
  vocab_size: int
  num_real_vocab: int
  num_layers: int
  # cap * tanh(logit / cap) on the final logits; None: no cap.
  final_logit_cap: float | None
  # How many vocabulary entries the log-prob code works on at a time.
  vocab_chunk: int
  # Sentences that say which values were derived from which, to be printed at the start.
  reasons: list[str]

  def abstract_params(self) -> Params:
    """The parameter tree as `ShapeDtypeStruct`s; touches no device."""

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters; each a pure function of `rng` and its path. Can be jitted."""

  def apply(
      self, params: Params, batch: dict, *, rng: jax.Array | None = None, train: bool = False
  ) -> jax.Array:
    """Hidden states [B, T, D] after the final norm, in the compute dtype. `rng` feeds dropout."""

  def unembedding(self, params: Params) -> jax.Array:
    """The matrix [D, V] from hidden states to logits (a view of the embedding when tied)."""

  def logits(self, params: Params, batch: dict | jax.Array) -> jax.Array:
    """`unembed` of `apply`, for people and tests. `batch` may also be just the tokens [B, T]."""

  def unembed(self, params: Params, hidden_BxTxD: jax.Array) -> jax.Array:
    """Logits [B, T, V] float32, final cap applied, -inf at padded entries."""

  def flops_per_token(self, seq_len: int, document_length: float | None = None) -> float:
    """Floating-point operations of forward and backward per token of a row of `seq_len` tokens."""


def make_model(
    cfg_model: ConfigDict, *, vocab_size: int, params_dtype: Any, compute_dtype: Any, remat: str = "none"
) -> Model:
  """Builds the model that `cfg_model.name` names; no parameter is made yet.

  Args:
    cfg_model: the config's `model` section.
    vocab_size: entries of the tokenizer; the model's own vocabulary may be padded beyond it.
    params_dtype: dtype of the parameters.
    compute_dtype: dtype of matrix products and of the residual stream.
    remat: what the backward pass recomputes, see `models.transformer.remat_policy`.

  Raises:
    ConfigError: a value cannot work; nothing has touched a device by then.
  """
  cls = load_class(cfg_model.name, "model.name", BUILT_IN)
  return cls(
      cfg_model, vocab_size=vocab_size, params_dtype=params_dtype, compute_dtype=compute_dtype, remat=remat
  )


def validate(cfg_model: ConfigDict, seq_len: int) -> None:
  """Raises ConfigError if the model cannot be built from `cfg_model`, or not for rows of `seq_len` tokens."""
  cls = load_class(cfg_model.name, "model.name", BUILT_IN)
  if hasattr(cls, "validate"):
    cls.validate(cfg_model, seq_len)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Tells the partitioner how to lay out an activation, one logical name (or None) per dimension.

  The names are those of ACTIVATION_NAMES. Does nothing unless `activation_rules` is active, so that
  models run without a mesh.
  """
  rules = _activation_rules.get()
  if rules is None:
    return x
  unknown = [n for n in names if n is not None and n not in ACTIVATION_NAMES]
  if unknown or len(names) != x.ndim:
    raise ValueError(f"constrain: {names} for shape {x.shape}; a name of {ACTIVATION_NAMES} or None each")
  return rules(x, names)


@contextlib.contextmanager
def activation_rules(fn: Callable[[jax.Array, tuple[str | None, ...]], jax.Array] | None) -> Iterator[None]:
  """While active, `constrain(x, *names)` returns `fn(x, names)`. Wrap what traces a step: its first call."""
  token = _activation_rules.set(fn)
  try:
    yield
  finally:
    _activation_rules.reset(token)
