"""SEQ: next-token cross-entropy (pretraining)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.strategies import chunked_loss, logprobs
from trainer.strategies.record import Strategy


class NextTokens(NamedTuple):
  """What each position of rows predicts."""

  targets_BxT: jax.Array
  weights_BxT: jax.Array


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any):
  """Cross-entropy of each token given those before it in its segment; see `next_token_loss`.

  Args:
    cfg: `label_smoothing` and `z_loss`, see `logprobs.cross_entropy`; `mtp_weight`.
  """
  return next_token_loss(model, params, batch, rng, cfg)


def next_token_loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any, *,
                    dft: bool = False, more: tuple[str, ...] = ()):
  """Weighted cross-entropy of the tokens of a batch.

  Args:
    model, params, rng: see trainer/strategies/__init__.py.
    batch: `tokens`, `positions`, `segment_ids`, `loss_weights`, each [B, T]. `loss_weights[b, t]` weights the
      prediction of `tokens[b, t]` from position t - 1; it is 0 for the first token of a segment and for padding.
    cfg: `label_smoothing` and `z_loss`, see `logprobs.cross_entropy`; and, of a model that predicts tokens further
      ahead, `mtp_weight`, see `_further_loss`.
    dft: weight each token's loss by its probability, which gets no gradient (arXiv 2508.05629, eq. 9).
    more: further statistics of `logprobs.STATS` to report as metrics.

  Returns:
    (terms, metrics): `loss` is weighted by `loss_weights`; with them the model's own. With a vocabulary of several
    chunks and many tokens, the term is one number, and the rows' losses are a metric of the same name.
  """
  out = model.apply(params, batch, rng=rng, train=rng is not None)
  kernel_DxV = model.unembedding(params)
  loss, shown = _cross_entropy(model, kernel_DxV, out.hidden, next_tokens(batch), cfg, dft, more)
  terms, metrics = {"loss": loss}, shown
  if getattr(out, "ahead", None) is not None:
    further, of_modules = _further_loss(model, kernel_DxV, out.ahead, batch, cfg, dft)
    terms, metrics = terms | further, metrics | of_modules
  return {**terms, **out.losses}, metrics | out.metrics


def _further_loss(model: Any, kernel_DxV: jax.Array, ahead_kxBxTxD: jax.Array, batch: dict[str, jax.Array],
                  cfg: Any, dft: bool) -> tuple[dict[str, Mean], dict[str, Mean]]:
  """(λ / D times the loss of each of D modules that predict tokens further ahead, metrics) (DeepSeek-V3, arXiv
  2412.19437, eq. 24 and 25), each a mean over what that module predicts; `mtp_weight` is λ."""
  terms, metrics = {}, {}
  for k, hidden_BxTxD in enumerate(ahead_kxBxTxD, 1):
    loss, shown = _cross_entropy(model, kernel_DxV, hidden_BxTxD, next_tokens(batch, k), cfg, dft)
    terms[f"mtp/term_{k}"] = Mean(loss.sum * (cfg.mtp_weight / len(ahead_kxBxTxD)), loss.weight)
    shown["loss"] = shown.get("loss", loss)
    metrics |= {f"mtp/{name}_{k}": value for name, value in shown.items()}
  return terms, metrics


def _cross_entropy(model: Any, kernel_DxV: jax.Array, hidden_BxTxD: jax.Array, tokens: NextTokens, cfg: Any, dft: bool,
                   more: tuple[str, ...] = ()) -> tuple[Mean, dict[str, Mean]]:
  """(the loss of these tokens, its metrics); see `next_token_loss`."""
  (targets_BxT, weights_BxT), label_smoothing, z_loss = tokens, cfg.label_smoothing, cfg.z_loss
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

  vocab_chunks = logprobs.num_chunks(kernel_DxV.shape[1], model.vocab_chunk)
  chunks = chunked_loss.token_chunks(hidden_BxTxD, kernel_DxV, vocab_chunks)
  if chunks == 1:
    loss_BxT, shown = losses_of(hidden_BxTxD, kernel_DxV, targets_BxT, model.vocab_chunk, model.num_real_vocab)
    return Mean.of(loss_BxT, weights_BxT), {name: Mean.of(values, weights_BxT) for name, values in shown.items()}
  # Logits of a chunk of tokens over all entries take as much memory. The kernel is padded here, once for all chunks.
  kernel_DxV, num_real_vocab = logprobs.padded(kernel_DxV, model.num_real_vocab, hidden_BxTxD.dtype)
  V = kernel_DxV.shape[1]

  def some(hidden_nxD, kernel_DxV, tokens):
    loss_1xn, shown = losses_of(hidden_nxD[None], kernel_DxV, tokens.targets_BxT[None], V, num_real_vocab)
    return tokens.weights_BxT * loss_1xn[0], {name: values[0] for name, values in (shown | {"loss": loss_1xn}).items()}

  total, shown = chunked_loss.sum_over_rows(some, chunks, hidden_BxTxD, kernel_DxV, tokens, weights_BxT != 0)
  # The gradient is that of the sum; the rows' losses, and so the sources', are only reported.
  return Mean(total, jnp.sum(weights_BxT)), {name: Mean.of(values, weights_BxT) for name, values in shown.items()}


def next_tokens(batch: dict[str, Any], further: int = 0) -> NextTokens:
  """What each position predicts, and the weight of that prediction.

  Rows keep their length T, a size that accelerators like; the last position predicts nothing and weighs 0. `further`:
  of the token after the next so many, which weighs nothing if it is of another segment.
  """
  targets_BxT = jnp.roll(batch["tokens"], -1 - further, axis=1)
  weights_BxT = jnp.roll(batch["loss_weights"], -1 - further, axis=1).at[:, -1 - further:].set(0.0)
  if further:
    segments_BxT = batch["segment_ids"]
    weights_BxT = jnp.where(jnp.roll(segments_BxT, -1 - further, axis=1) == segments_BxT, weights_BxT, 0.0)
  return NextTokens(targets_BxT, weights_BxT)


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any) -> None:
  """Refuses modules that predict tokens further ahead and have no part in the loss: weight decay would move them."""
  if cfg_model.mtp_layers and not cfg.mtp_weight > 0:
    raise ConfigError(f"strategy.mtp_weight is {cfg.mtp_weight}, allowed: above 0, since model.mtp_layers is "
                      f"{cfg_model.mtp_layers}: what predicts tokens further ahead would not be trained. Use "
                      "--config.model.mtp_layers=0 for a model without.")


# Next-token cross-entropy over documents (pretraining).
SEQ = Strategy(loss, options=dict(
    # Mass moved from the target to the uniform distribution over the vocabulary.
    label_smoothing=0.0,
    # Coefficient of log(Z)², which keeps the softmax normaliser near 1 (PaLM, section 5).
    z_loss=0.0,
    # Factor λ on the mean loss of the modules that predict tokens further ahead (model.mtp_layers; DeepSeek-V3, arXiv
    # 2412.19437, eq. 25; Megatron's mtp_loss_scaling_factor).
    mtp_weight=0.1,
), check=check)
