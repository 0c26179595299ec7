"""SEQ: next-token cross-entropy (pretraining)."""

from typing import Any

import jax
import jax.numpy as jnp

from trainer.metrics import Mean
from trainer.strategies import chunked_loss, logprobs
from trainer.strategies.record import Strategy


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
    model: see models/api.py.
    params: nested dict of arrays.
    batch: `tokens`, `positions`, `segment_ids`, `loss_weights`, each [B, T]. `loss_weights[b, t]` weights the
      prediction of `tokens[b, t]` from position t - 1; it is 0 for the first token of a segment and for padding.
    rng: key for dropout and noise; None: none.
    label_smoothing: see `logprobs.cross_entropy`.
    z_loss: see `logprobs.cross_entropy`.
    dft: weight each token's loss by its probability, which gets no gradient (arXiv 2508.05629, eq. 9).
    more: further statistics of `logprobs.STATS` to report as metrics.

  Returns:
    (terms, metrics): `loss` is weighted by `loss_weights`; with them the model's own. With a vocabulary of several
    chunks and many tokens, the term is one number, and the rows' losses are a metric of the same name.
  """
  out = model.apply(params, batch, rng=rng, train=rng is not None)
  targets_BxT, weights_BxT = next_tokens(batch)
  want = ("is_top", *logprobs.cross_entropy_stats(label_smoothing, z_loss), *more)

  def losses_of(hidden_BxTxD, kernel_DxV, targets_BxT, chunk, num_real_vocab):
    """The loss of each token, and its metrics."""
    stats = logprobs.token_stats(hidden_BxTxD, kernel_DxV, targets_BxT, chunk=chunk, logit_cap=model.final_logit_cap,
                                 num_real_vocab=num_real_vocab, want=want)
    loss_BxT = logprobs.cross_entropy(stats, label_smoothing=label_smoothing, z_loss=z_loss)
    if dft:
      loss_BxT = loss_BxT * jax.lax.stop_gradient(jnp.exp(stats.logprob))
    shown = {"accuracy": stats.is_top} | {name: getattr(stats, name) for name in more}
    if label_smoothing or z_loss or dft:
      shown["nll"] = -stats.logprob
    return loss_BxT, shown

  def mean(values_BxT: jax.Array) -> Mean:
    return Mean(jnp.sum(values_BxT * weights_BxT, axis=1), jnp.sum(weights_BxT, axis=1))

  kernel_DxV = model.unembedding(params)
  vocab_chunks = logprobs.num_chunks(kernel_DxV.shape[1], model.vocab_chunk)
  chunks = chunked_loss.token_chunks(out.hidden, kernel_DxV, vocab_chunks)
  if chunks == 1:
    loss_BxT, shown = losses_of(out.hidden, kernel_DxV, targets_BxT, model.vocab_chunk, model.num_real_vocab)
    terms, metrics = {"loss": mean(loss_BxT)}, {}
  else:
    # Logits of a chunk of tokens over all entries take as much memory. The kernel is padded here, once for all chunks.
    kernel_DxV, num_real_vocab = logprobs.padded(kernel_DxV, model.num_real_vocab, out.hidden.dtype)
    V = kernel_DxV.shape[1]

    def some(hidden_nxD, kernel_DxV, tokens):
      loss_1xn, shown = losses_of(hidden_nxD[None], kernel_DxV, tokens[0][None], V, num_real_vocab)
      return tokens[1] * loss_1xn[0], {name: values[0] for name, values in (shown | {"loss": loss_1xn}).items()}

    total, shown = chunked_loss.sum_over_rows(some, chunks, out.hidden, kernel_DxV, (targets_BxT, weights_BxT),
                                            weights_BxT != 0)
    # The gradient is that of the sum; the rows' losses, and so the sources', are only reported.
    terms, metrics = {"loss": Mean(total, jnp.sum(weights_BxT))}, {"loss": mean(shown.pop("loss"))}
  metrics |= {name: mean(values) for name, values in shown.items()}
  return {**terms, **out.losses}, metrics | out.metrics


def next_tokens(batch: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
  """What each position predicts, and the weight of that prediction: (targets_BxT, weights_BxT).

  Rows keep their length T, a size that accelerators like; the last position predicts nothing and weighs 0.
  """
  targets_BxT = jnp.roll(batch["tokens"], -1, axis=1)
  weights_BxT = jnp.roll(batch["loss_weights"], -1, axis=1).at[:, -1].set(0.0)
  return targets_BxT, weights_BxT


# Next-token cross-entropy over documents (pretraining).
SEQ = Strategy(loss, options=dict(
    # Mass moved from the target to the uniform distribution over the vocabulary.
    label_smoothing=0.0,
    # Coefficient of log(Z)², which keeps the softmax normaliser near 1 (PaLM, section 5).
    z_loss=0.0,
))
