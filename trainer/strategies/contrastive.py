"""CONTRASTIVE: embeddings of texts, near where one answers the other, and far from those of all others in the batch.

B rows, S segments a row, as similarity.py has them. Each query is compared with the texts of the whole batch: of all
devices and micro-batches of the step. Of several micro-batches the embeddings are made first (`whole`), then the
gradient with respect to them, then that of the parameters, a micro-batch at a time: GradCache (Gao et al. 2021, arXiv
2101.06983), which gives the gradient of the batch in one piece.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from input_pipeline.examples.embedded import ENDS
from models.hf import sentence_transformers
from trainer.errors import ConfigError, one_of
from trainer.metrics import Mean
from trainer.strategies import similarity
from trainer.strategies.record import Strategy

LOSSES = ("infonce", "siglip")
# Options whose default is what a folder of sentence-transformers says.
_OF_FOLDERS = ("pooling", "query_prompt", "document_prompt", "as_messages", "generation_prompt")
# {what is learned: the temperature that it begins with}: sentence-transformers' scale is 20, CLIP's begins at 1 / 0.07.
_TEMPERATURES = {"fixed": 0.05, "scale": 0.07, "scale_bias": 0.1}


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any):
  """`similarity.compare`, a mean over the queries of the batch.

  Args:
    model: with `model.head=embedding`; of its parameters `similarity` are those that are learned of it.
    params, batch, rng: see trainer/strategies/__init__.py. A batch has segment_roles [B, S]; a micro-batch of several
      has `whole`, too, what that function gives.

  Returns:
    (terms, metrics), with sums and weights [B]; `pairs`, how many there are.
  """
  out = model.apply(params, batch, rng=rng, train=rng is not None)
  embedded_BxSxD = similarity.embeddings(out.hidden, batch, cfg.pooling)
  learned = params.get("similarity", {})
  if "whole" in batch:
    of_whole = batch["whole"]
    # Linear in what is differentiated, with the whole batch's gradient; its value is not of interest.
    along_B = jnp.sum(of_whole["gradients"] * embedded_BxSxD, axis=(1, 2))
    along_B += sum(of_whole["learned"][name] * learned[name] for name in learned)
    rows = dict(of_whole["rows"])
    rows["loss"] += along_B - jax.lax.stop_gradient(along_B)
  else:
    rows = _row_sums(embedded_BxSxD, learned, batch, cfg)
  queries_B, scalars = rows.pop("queries"), jax.lax.stop_gradient(_scalars(learned, cfg))
  means = {name: Mean(sum_B, queries_B) for name, sum_B in rows.items()}
  metrics = {"temperature": Mean(queries_B / scalars.scale, queries_B), "pairs": jnp.sum(queries_B)}
  if cfg.loss == "siglip":
    metrics["bias"] = Mean(queries_B * scalars.bias, queries_B)
  return {"loss": means.pop("loss"), **out.losses}, means | metrics | out.metrics


def whole(model: Any, params: Any, batch: dict[str, jax.Array], cfg: Any, in_micro_batches: Callable) -> dict[str, Any]:
  """What each micro-batch is told of the whole batch; see `record.Strategy`. A tree of arrays [B, …]."""

  def embed(micro: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
    return similarity.embeddings(model.apply(params, micro, rng=rng, train=True).hidden, micro, cfg.pooling)

  def total(embedded_BxSxD: jax.Array, learned: Mapping[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    rows = _row_sums(embedded_BxSxD, learned, batch, cfg)
    return jnp.sum(rows["loss"]), rows

  (_, rows), (gradients, of_learned) = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
      in_micro_batches(embed), params.get("similarity", {}))
  count = len(batch["tokens"])
  shares = {name: jnp.full(count, 1 / count) * gradient for name, gradient in of_learned.items()}
  return {"rows": rows, "gradients": gradients, "learned": shares}


def _row_sums(embedded_BxSxD: jax.Array, learned: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], cfg: Any
              ) -> dict[str, jax.Array]:
  """{what: its sum over the queries of each row, [B]}, `queries` their number."""
  of = similarity.labels(batch, cfg.negatives)
  losses_Q, metrics = similarity.compare(embedded_BxSxD, _scalars(learned, cfg), of, cfg)
  values = {"loss": losses_Q, "queries": of.queries.astype(jnp.float32), **metrics}
  return {name: jnp.sum(values_Q.reshape(len(embedded_BxSxD), -1), axis=1) for name, values_Q in values.items()}


def _scalars(learned: Mapping[str, jax.Array], cfg: Any) -> similarity.Scalars:
  """What is learned is the difference to what it begins with, of the scale the logarithm's, as in SigLIP."""
  zero = jnp.float32(0.0)
  return similarity.Scalars(jnp.exp(learned.get("log_scale", zero)) / cfg.temperature,
                            learned.get("bias", zero) + (cfg.bias or 0.0))


def fill_in(config: Any) -> list[str]:
  """Sets what follows from the loss and from a folder of sentence-transformers; see `record.Strategy`."""
  cfg, model, notes = config.strategy, config.model, []
  for key, least in (("negatives", 0), ("max_length", 1)):
    if cfg[key] is not None and cfg[key] < least:
      raise ConfigError(f"strategy.{key} is {cfg[key]}; it must be {least} or more.")
  found = sentence_transformers.read(model.hf) if model.hf is not None else None
  with config.unlocked():
    if found is not None:
      of_folder = {key: getattr(found, key) for key in _OF_FOLDERS}
      for key, value in of_folder.items():
        if cfg[key] is None:
          cfg[key] = value
        elif cfg[key] != value:
          notes.append(f"strategy.{key} = {cfg[key]!r}, as this config says; {model.hf} says {value!r}")
    as_they_are = found is not None or cfg.as_messages
    cfg.pooling, cfg.text_ends = cfg.pooling or "last", cfg.text_ends or ("tokenizer" if as_they_are else "eos")
    cfg.query_prompt, cfg.document_prompt = cfg.query_prompt or "", cfg.document_prompt or ""
    # None: as in the configs of runs that were begun before there was such a key.
    cfg.as_messages, cfg.generation_prompt = cfg.as_messages or None, bool(cfg.generation_prompt)
    if cfg.max_length is None:
      cfg.max_length = config.seq_len // (2 + cfg.negatives)
      if found is not None and found.max_length is not None and found.max_length < cfg.max_length:
        cfg.max_length = found.max_length
    if model.head == "embedding" and model.similarity is None:
      model.similarity = "scale_bias" if cfg.loss == "siglip" else "fixed"
    if cfg.temperature is None:
      cfg.temperature = _TEMPERATURES.get(model.similarity, _TEMPERATURES["fixed"])
    if cfg.bias is None and cfg.loss == "siglip":
      cfg.bias = -10.0
  notes.append(f"strategy: pooling = {cfg.pooling}, max_length = {cfg.max_length} tokens of a text, temperature = "
               f"{cfg.temperature:g}")
  return notes


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any) -> None:
  """Refuses options that cannot work."""
  for key, allowed in (("loss", LOSSES), ("pooling", tuple(similarity.POOLINGS)), ("text_ends", ENDS)):
    one_of(f"strategy.{key}", cfg[key], allowed)
  if not 0 < cfg.temperature < float("inf"):
    raise ConfigError(f"strategy.temperature is {cfg.temperature}; it must be above 0.")
  if cfg.loss == "siglip" and cfg.symmetric:
    raise ConfigError("strategy.symmetric is True, but siglip compares pairs, whichever is the query. Use False.")
  if cfg.loss == "infonce" and (cfg.bias or cfg_model.similarity == "scale_bias"):
    what = f"strategy.bias is {cfg.bias}" if cfg.bias else "model.similarity is 'scale_bias'"
    raise ConfigError(f"{what}, which changes nothing of infonce: it is the same for all candidates. Leave out the "
                      "bias (model.similarity=scale learns the temperature), or use --config.strategy.loss=siglip.")


# Embeddings of texts from pairs (docs/embeddings.md).
CONTRASTIVE = Strategy(loss, data="matches", head="embedding", check=check, fill_in=fill_in, whole=whole, headline={
    "accuracy": "accuracy {:.3f}", "pairs": "pairs {:.0f}", "loss": "loss {:.3f}"}, options=dict(
    # infonce (a softmax over the texts of the batch) | siglip (a sigmoid of each).
    loss="infonce",
    # infonce: also over the queries of the batch, for each positive; the mean of both.
    symmetric=False,
    # Which hidden states of a text are its embedding: last, of its last token | mean, of all. Default: that of model.hf
    # if this is a folder of sentence-transformers, or last.
    pooling=str,
    # Divides cosines; with model.similarity=scale what it begins with. Default: 0.05 of infonce, 0.1 of siglip, 0.07
    # where infonce learns it.
    temperature=float,
    # siglip: what is added to cosines / temperature, or begins so. Default: -10.
    bias=float,
    # Hard negatives of a row at most; its document has room for so many.
    negatives=0,
    # A text that is the same as the positive, or answers the same query, is no negative of it.
    mask_duplicates=True,
    # What stands before each query and each other text. Default: as pooling, or nothing.
    query_prompt=str,
    document_prompt=str,
    # Tokens of a text, those that begin and end it included; what is longer is cut. Default: as many as let the texts
    # of a row fit into seq_len, seq_len / (2 + negatives).
    max_length=int,
    # What begins and ends a text: tokenizer: what transformers has this tokenizer write around it; eos: EOS as well,
    # and BOS where it writes nothing, unless tokenizer.add_eos and add_bos are False. Default: tokenizer of a folder of
    # sentence-transformers (model.hf), else eos.
    text_ends=str,
    # Each text is what the user says in a conversation, and a prompt its system message, as sentence-transformers gives
    # images and texts to models that see both. Default: as pooling, or False.
    as_messages=bool,
    # Texts that are conversations end with what begins the model's answer (Qwen3-VL-Embedding), whose last token is
    # then pooled. Default: as pooling, or False.
    generation_prompt=bool,
))
