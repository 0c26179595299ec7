"""From tokens to the sequences that rows hold: what the strategies on completions share, and their evaluators.

B rows, T length, S segments a row. Each segment is a prompt and its completion with positions from 0; `loss_weights`
is above 0 on the completion's tokens, and `segment_roles` [B, S] says what segment s + 1 is
(input_pipeline/examples/roles.py; 0: there is none). A prompt that several completions of a row share (`prompt_ids`) is
a segment beyond S, of which nothing is trained (trainer/rollouts/experience.py).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainer.errors import ConfigError
from trainer.strategies import logprobs


def completion_mask(batch: Mapping[str, Any]) -> jax.Array:
  """1.0 on completion tokens, [B, T]; a row's first token has none before it, and is none."""
  return (jnp.asarray(batch["loss_weights"]) > 0).astype(jnp.float32).at[:, 0].set(0.0)


def unrouted(batch: Mapping[str, Any]) -> dict[str, Any]:
  """The batch for another model than the one that sampled it, which chooses experts of its own."""
  return {key: part for key, part in batch.items() if key not in ("sampled_experts", "replayed_experts")}


def token_stats(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, want: tuple[str, ...],
                temperature: float = 1.0):
  """(`logprobs.TokenStats` of each token given those before it, aligned with the tokens and 0 outside completions; the
  model's `Output`). `temperature` divides the logits."""
  out, mask_BxT = model.apply(params, batch, rng=rng, train=rng is not None), completion_mask(batch)
  stats = logprobs.token_stats(
      out.hidden, model.unembedding(params), jnp.roll(batch["tokens"], -1, axis=1), chunk=model.vocab_chunk,
      logit_cap=model.final_logit_cap, num_real_vocab=model.num_real_vocab, temperature=temperature,
      want=want, counts_BxT=jnp.roll(mask_BxT > 0, -1, axis=1))

  def align(values_BxT):
    # `where`, not a product: nothing outside completions may count, whatever its value.
    return jnp.where(mask_BxT > 0, jnp.roll(values_BxT, 1, axis=1), 0.0)

  return jax.tree.map(align, stats), out


def token_logprobs(model: Any, params: Any, batch: dict[str, jax.Array], temperature: float = 1.0) -> jax.Array:
  """log p(token | those before it), [B, T] float32, 0 outside completions; without dropout.

  Of the reference's parameters these are what a batch holds as `ref_logprobs`.
  """
  return token_stats(model, params, batch, None, ("logprob",), temperature)[0].logprob


def reference_logprobs(model: Any, batch: dict[str, jax.Array], reference: Any, temperature: float = 1.0) -> jax.Array:
  """The reference's `token_logprobs`, without a gradient: those of the batch, or else those of its parameters."""
  if "ref_logprobs" in batch:
    return jnp.where(completion_mask(batch) > 0, batch["ref_logprobs"].astype(jnp.float32), 0.0)
  if reference is None:
    raise ValueError("these losses compare the policy with a reference, but the batch has no ref_logprobs and no "
                     "parameters were given as `reference`")
  own = unrouted(batch)
  return jax.lax.stop_gradient(token_logprobs(model, jax.lax.stop_gradient(reference), own, temperature))


def segment_sums(values_BxT: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Sums over each segment's tokens, [B, S] float32 (float64 of such), S as in `batch["segment_roles"]`."""
  # A reduction rather than a scatter: always in the same order, and fused, so that no [B, T, S] is kept.
  return jnp.sum(jnp.where(in_segment(batch), at_least_float32(values_BxT)[:, :, None], 0.0), axis=1)


def at_least_float32(values: jax.Array) -> jax.Array:
  """The same numbers in float32, or in float64 where they are of that."""
  return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def scores(model: Any, params: Any, hidden_BxTxD: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
  """What a model with `model.head=score` says of each segment, by the hidden state of its last token, as
  *ForSequenceClassification does; [B, S, num_labels] float32, S as in `batch["segment_roles"]`."""
  return model.score(params, last_hidden(hidden_BxTxD, batch))


def last_hidden(hidden_BxTxD: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
  """The hidden state of each segment's last token, [B, S, D]; of a segment that is not there that of any."""
  mask_BxTxS = in_segment(batch)
  last_BxS = jnp.max(jnp.where(mask_BxTxS, jnp.arange(mask_BxTxS.shape[1])[:, None], 0), axis=1)
  return jnp.take_along_axis(hidden_BxTxD, last_BxS[:, :, None], axis=1)


def mean_hidden(hidden_BxTxD: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
  """The mean of each segment's hidden states, [B, S, D] float32; 0 of a segment that is not there."""
  mask_BxTxS = in_segment(batch).astype(jnp.float32)
  counts_BxS = jnp.maximum(jnp.sum(mask_BxTxS, axis=1), 1.0)
  sums_BxSxD = jnp.einsum("bts,btd->bsd", mask_BxTxS, at_least_float32(hidden_BxTxD), precision="highest")
  return sums_BxSxD / counts_BxS[:, :, None]


def in_segment(batch: Mapping[str, jax.Array]) -> jax.Array:
  """Whether token t is of segment s + 1, [B, T, S]."""
  return batch["segment_ids"][:, :, None] == jnp.arange(1, batch["segment_roles"].shape[1] + 1)


def check_noise(cfg: Any, cfg_model: Any) -> None:
  """Refuses dropout and noise that `disable_dropout` leaves without effect; raises ConfigError."""
  if cfg_model is None or not cfg.disable_dropout:
    return
  noise = {"model.dropout": cfg_model.dropout, "model.neftune_alpha": cfg_model.neftune_alpha,
           "model.lora.dropout": cfg_model.lora.dropout if cfg_model.lora.rank else 0.0}
  for key, value in noise.items():
    if value:
      raise ConfigError(f"{key} is {value}, but strategy.disable_dropout leaves it without effect. Use "
                        f"--config.{key}=0, or --config.strategy.disable_dropout=False.")
