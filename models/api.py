"""The interface between training code and models: plain dicts of arrays in and out, pure functions only.

`make_model` turns the config's `model` section into a `Model`. Strategies call `apply`, which stops at
the hidden states, add the losses that the model itself asks for (`Output`), and hand the hidden states with
`unembedding(params)` to `trainer/strategies/logprobs.py`, so that nothing in training ever holds logits of shape [B, T,
V].

How do I add a model? See docs/extending.md.

A batch is a dict with `tokens`, `positions` and `segment_ids`, int32 [B, T] (segment 0 is padding). With images among
the tokens it also has `images`, `image_index` and perhaps `block_ids`, see models/vlm.py. Where completions share a
prompt (trainer/rollouts/experience.py) it has `prompt_ids`, see models/attention/dispatch.py.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from trainer.dotted import load_class
from trainer.errors import ConfigError
from trainer.metrics import Mean

Params = dict[str, Any]
# What a model keeps of the tokens it has seen: a tree of arrays that only the model looks into.
Cache = Any

BUILT_IN = {"transformer": "models.transformer.Transformer"}


class Output(NamedTuple):
  """What `Model.apply` computes."""

  # Hidden states [B, T, D] after the final norm, in the compute dtype.
  hidden: jax.Array
  # Terms of the training objective that the model itself asks for, coefficients included; see trainer/strategies.
  losses: dict[str, Mean] = {}
  # Metrics of its own, as a strategy's.
  metrics: dict[str, Any] = {}
  # Of a model that also predicts tokens further ahead, hidden states [k, B, T, D] after their norms: the k-th of a
  # token predicts, by the same unembedding, the one after the next k (models/mtp.py). None: it does not.
  ahead: jax.Array | None = None


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
  # A regex over the paths of the parameters that alone are trained (adapters); None: all are.
  trained_only: str | None
  # Sentences that say which values were derived from which, to be printed at the start.
  reasons: list[str]

  def abstract_params(self) -> Params:
    """The parameter tree as `ShapeDtypeStruct`s; touches no device."""

  def init(self, rng: jax.Array) -> Params:
    """Fresh parameters; each a pure function of `rng` and its path. Can be jitted."""

  def apply(self, params: Params, batch: dict, *, rng: jax.Array | None = None, train: bool = False) -> Output:
    """From tokens, and images among them, to hidden states. `rng` feeds dropout."""

  def unembedding(self, params: Params) -> jax.Array:
    """The matrix [D, V] from hidden states to logits (a view of the embedding when tied)."""

  def logits(
      self,
      params: Params,
      tokens_BxT: jax.Array | dict,
      positions: jax.Array | None = None,
      segment_ids: jax.Array | None = None,
      images: Any = None,
      prefix_length: Any = None,
  ) -> jax.Array:
    """`unembed` of `apply`, [B, T, V] float32, for people and tests.

    Without `positions` they count from 0 in each segment; without `segment_ids` a row is one document. A whole
    batch will do in place of the tokens. `images` are for models that take some, `prefix_length` for those whose
    prompts are not causal.
    """

  def unembed(self, params: Params, hidden_BxTxD: jax.Array) -> jax.Array:
    """Logits [B, T, V] float32, final cap applied, -inf at padded entries."""

  def flops_per_token(self, seq_len: int, document_length: float | None = None) -> float:
    """Floating-point operations of forward and backward per token of a row of `seq_len` tokens, without images."""


class Scoring(Model, Protocol):
  """What a model has besides if it scores sequences (`model.head=score`)."""

  # Scores of a sequence; 0: none, it predicts tokens.
  num_labels: int

  def score(self, params: Params, hidden_xD: jax.Array) -> jax.Array:
    """Scores [..., num_labels] float32 of sequences, from the hidden state [..., D] of the last token of each."""


class Generative(Model, Protocol):
  """What a model has besides if texts are to be generated with it (trainer/generate/sampler.py)."""

  # The longest text, in tokens, that can be generated; None: no bound.
  max_length: int | None
  # What it makes of images, a `models.spec_vision.Vision`; None, or no such attribute: it takes none.
  vision: Any
  # Layers with experts, and experts of a token; None, or no such attribute: it has none.
  routing: tuple[int, int] | None
  # Why it cannot share prefixes (`prompt_ids` in batches); None: it can. A model without this attribute does not.
  no_prefix_sharing: str | None

  def empty_cache(self, rows: int, max_length: int, pages: int | None = None) -> Cache:
    """Room for what `rows` texts of up to `max_length` tokens leave for those that follow.

    `pages`: in so many pages, where a layer sees all; the cache has a `table` (`models.attention.cache.Table`) while it
    is read or written."""

  def extend(self, params: Params, batch: dict, cache: Cache | None = None, record: bool = False) -> tuple:
    """`apply` to further tokens [B, T] of the text in each row of a cache without pages: (hidden states [B, T, D], the
    cache with them). Padding is on their right; a row of padding alone stays as it is. Positions follow from the
    cache, and the batch has neither images nor blocks.

    `cache`: None: the texts begin here, one a row, padded on either side, with images perhaps; the cache that comes has
    room for T tokens. `record`: which only a model with `routing` is given, for the experts of each token as well,
    int16 [B, T, L, k]."""

  def copied_cache(self, cache: Cache, other: Cache, rows_M: jax.Array, sources_M: jax.Array) -> Cache:
    """The cache with row `sources_M[m]` of another one in place of its row `rows_M[m]`; a row beyond its last is left
    out. They may have room for texts of other lengths, and either may have pages and a `table`."""

  def has_beginnings(self, length: int) -> bool:
    """Whether a cache of a text of so many tokens, without images, holds all of its beginnings."""

  def beginning_of_cache(self, cache: Cache, length: int) -> Cache:
    """A cache without pages of the first so many tokens of each text, of which it holds the beginnings; its arrays are
    the same."""

  def resized_cache(self, cache: Cache, rows_R: jax.Array, max_length: int, pages_Q: jax.Array | None = None) -> Cache:
    """Those rows of the cache, in this order, with room for texts of up to `max_length` tokens, or as long as before if
    that is more; and those pages. A row or page beyond the cache's last gives an empty one."""

  def decoding_params(self, params: Params) -> Params:
    """The parameters as `decode` and `unembed` read them: what is done with them alone is done once, here."""

  def decode(self, params: Params, tokens_B: jax.Array, active_B: jax.Array, cache: Cache, record: bool = False
             ) -> tuple:
    """One more token for each row of the cache: (its hidden state [B, D], cache). Rows that are not active stay.
    `params`: from `decoding_params`. `record`: as above, the experts being int16 [B, L, k]."""


def generates(model: Model) -> bool:
  """Whether it is `Generative`; of what it then has, some may be left out."""
  return hasattr(model, "extend")


def make_model(
    cfg_model: ConfigDict,
    *,
    vocab_size: int,
    params_dtype: Any,
    compute_dtype: Any,
    remat: str = "none",
    frozen: str | None = None,
    freeze: Sequence[str] = (),
    matmul_rules: Any = None,
) -> Model:
  """Builds the model that `cfg_model.name` names; no parameter is made yet.

  Args:
    cfg_model: the config's `model` section.
    vocab_size: entries of the tokenizer; the model's own vocabulary may be padded beyond it.
    compute_dtype: dtype of matrix products and of the residual stream.
    remat: what the backward pass recomputes, see `models.remat.remat_policy`.
    frozen: how parameters that are not trained are kept: a dtype, int8 or nf4 (`config.precision.frozen`); None: in
      params_dtype. A model's class is given it, and `freeze`, only if it differs from params_dtype.
    freeze: regexes of parameters that are not trained (`config.optimizer.freeze`), besides those that `trained_only`
      leaves out.
    matmul_rules: a `models.quantization.matmul.MatmulRules`: which matmuls are computed in 8 bits; None: none. A
      model's class is given it only if it is not None.

  Raises:
    ConfigError: a value cannot work; nothing has touched a device by then.
  """
  cls = load_class(cfg_model.name, "model.name", BUILT_IN)
  kept = {} if frozen in (None, jnp.dtype(params_dtype).name) else dict(frozen=frozen, freeze=tuple(freeze))
  if matmul_rules is not None:
    taken = inspect.signature(cls).parameters.values()
    if not any(parameter.name == "matmul_rules" or parameter.kind == parameter.VAR_KEYWORD for parameter in taken):
      raise ConfigError(f"precision.matmul is {matmul_rules.matmul.form}, but {cfg_model.name} does not take "
                        "`matmul_rules`: it would multiply as ever. Use --config.precision.matmul=none, or see "
                        "models/quantization/matmul.py.")
    kept["matmul_rules"] = matmul_rules
  return cls(
      cfg_model, vocab_size=vocab_size, params_dtype=params_dtype, compute_dtype=compute_dtype, remat=remat, **kept
  )


def validate(cfg_model: ConfigDict, seq_len: int) -> None:
  """Raises ConfigError if the model cannot be built from `cfg_model`, or not for rows of `seq_len` tokens."""
  cls = load_class(cfg_model.name, "model.name", BUILT_IN)
  if hasattr(cls, "validate"):
    cls.validate(cfg_model, seq_len)
