"""SEQ: next-token cross-entropy (pretraining)."""

from typing import Any

import jax
import jax.numpy as jnp

from trainer import logprobs
from trainer.metrics import Mean


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any):
  """Cross-entropy of each token given those before it in its segment.

  Args:
    model: the seam of models/api.py.
    params: nested dict of arrays.
    batch: `tokens`, `positions`, `segment_ids`, `loss_weights`, each [B, T]. `loss_weights[b, t]` weights the
      prediction of `tokens[b, t]` from position t - 1; it is 0 for the first token of a segment and for padding.
    rng: key for dropout; None: no dropout.
    cfg: `label_smoothing` and `z_loss`, see `logprobs.cross_entropy`.

  Returns:
    (sum of weighted losses, sum of weights, metrics).
  """
  hidden_BxTxD = model.apply(params, batch, rng=rng, train=rng is not None)
  targets_BxT, weights_BxT = next_tokens(batch)
  stats = logprobs.token_stats(
      hidden_BxTxD, model.unembedding(params), targets_BxT, chunk=model.vocab_chunk, logit_cap=model.final_logit_cap,
      num_real_vocab=model.num_real_vocab,
      want=("is_top", *logprobs.cross_entropy_stats(cfg.label_smoothing, cfg.z_loss)))
  loss_BxT = logprobs.cross_entropy(stats, label_smoothing=cfg.label_smoothing, z_loss=cfg.z_loss)

  loss_B, weight_B = jnp.sum(loss_BxT * weights_BxT, axis=1), jnp.sum(weights_BxT, axis=1)
  metrics = {
      "loss": Mean(loss_B, weight_B),
      "accuracy": Mean(jnp.sum(stats.is_top * weights_BxT, axis=1), weight_B),
  }
  if cfg.label_smoothing or cfg.z_loss:
    metrics["nll"] = Mean(jnp.sum(-stats.logprob * weights_BxT, axis=1), weight_B)
  return jnp.sum(loss_B), jnp.sum(weight_B), metrics


def next_tokens(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
  """What each position predicts, and the weight of that prediction: (targets_BxT, weights_BxT).

  Rows keep their length T, a size that accelerators like; the last position predicts nothing and weighs 0.
  """
  targets_BxT = jnp.roll(batch["tokens"], -1, axis=1)
  weights_BxT = jnp.roll(batch["loss_weights"], -1, axis=1).at[:, -1].set(0.0)
  return targets_BxT, weights_BxT
