"""SEQ: next-token cross-entropy (pretraining)."""

from typing import Any

import jax
import jax.numpy as jnp

from trainer import logprobs
from trainer.metrics import Mean


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any):
  """Cross-entropy of each token given those before it in its segment; see `next_token_loss`.

  Args:
    cfg: `label_smoothing` and `z_loss`, see `logprobs.cross_entropy`.
  """
  return next_token_loss(model, params, batch, rng, label_smoothing=cfg.label_smoothing, z_loss=cfg.z_loss)


def next_token_loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, *,
                    label_smoothing: float, z_loss: float, dft: bool = False, more: tuple[str, ...] = ()):
  """Weighted cross-entropy of the tokens of a batch.

  Args:
    model: the seam of models/api.py.
    params: nested dict of arrays.
    batch: `tokens`, `positions`, `segment_ids`, `loss_weights`, each [B, T]. `loss_weights[b, t]` weights the
      prediction of `tokens[b, t]` from position t - 1; it is 0 for the first token of a segment and for padding.
    rng: key for dropout and noise; None: none.
    label_smoothing: see `logprobs.cross_entropy`.
    z_loss: see `logprobs.cross_entropy`.
    dft: weight each token's loss by its probability, which gets no gradient (arXiv 2508.05629, eq. 9).
    more: further statistics of `logprobs.STATS` to report as metrics.

  Returns:
    (terms, metrics): `loss` is weighted by `loss_weights`; with them the model's own.
  """
  out = model.apply(params, batch, rng=rng, train=rng is not None)
  targets_BxT, weights_BxT = next_tokens(batch)
  stats = logprobs.token_stats(
      out.hidden, model.unembedding(params), targets_BxT, chunk=model.vocab_chunk, logit_cap=model.final_logit_cap,
      num_real_vocab=model.num_real_vocab,
      want=("is_top", *logprobs.cross_entropy_stats(label_smoothing, z_loss), *more))
  loss_BxT = logprobs.cross_entropy(stats, label_smoothing=label_smoothing, z_loss=z_loss)
  if dft:
    loss_BxT = loss_BxT * jax.lax.stop_gradient(jnp.exp(stats.logprob))

  def mean(values_BxT: jax.Array) -> Mean:
    return Mean(jnp.sum(values_BxT * weights_BxT, axis=1), jnp.sum(weights_BxT, axis=1))

  metrics = {"accuracy": mean(stats.is_top)} | {name: mean(getattr(stats, name)) for name in more}
  if label_smoothing or z_loss or dft:
    metrics["nll"] = mean(-stats.logprob)
  return {"loss": mean(loss_BxT), **out.losses}, metrics | out.metrics


def next_tokens(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
  """What each position predicts, and the weight of that prediction: (targets_BxT, weights_BxT).

  Rows keep their length T, a size that accelerators like; the last position predicts nothing and weighs 0.
  """
  targets_BxT = jnp.roll(batch["tokens"], -1, axis=1)
  weights_BxT = jnp.roll(batch["loss_weights"], -1, axis=1).at[:, -1].set(0.0)
  return targets_BxT, weights_BxT
