"""KTO: completions that were judged one by one (arXiv 2402.01306), and APO's loss for such data (arXiv 2408.06266).

For a completion y of a prompt x, r = log π(y|x) - log π_ref(y|x), a sum over tokens:

    λ_D (1 - σ(β (r - z)))  if y is desirable,  λ_U (1 - σ(β (z - r)))  if it is not,

averaged over completions. z is the divergence KL(π ‖ π_ref) as completions of other prompts show it: the mean of r over
mismatched sequences, a prompt followed by another example's completion, and no less than 0; it gets no gradient. It is
one number for the whole step, so that a step must be one micro-batch. With `loss = "apo_zero_unpaired"` z is 0, and
mismatched sequences are not needed.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from input_pipeline.examples.roles import DESIRABLE, MISMATCHED, UNDESIRABLE
from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.strategies import sequences
from trainer.strategies.record import Strategy

LOSSES = ("kto", "apo_zero_unpaired")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Difference:
  """The difference of two means that have different weights."""

  plus: Mean
  minus: Mean

  def __add__(self, other: "Difference") -> "Difference":
    return Difference(self.plus + other.plus, self.minus + other.minus)

  def to_floats(self, name: str) -> dict[str, float]:
    """{name: value}; nothing if one of the means has no value."""
    if float(self.plus.weight) == 0.0 or float(self.minus.weight) == 0.0:
      return {}
    plus, minus = (float(mean.sum) / float(mean.weight) for mean in (self.plus, self.minus))
    return {name: plus - minus}


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any,
         reference: Any = None):
  """KTO's loss on the completions of a batch.

  Args:
    model, params, rng, cfg, reference: see trainer/strategies/__init__.py.
    batch: as for dpo.loss, with `segment_roles` [B, S] of DESIRABLE, UNDESIRABLE, MISMATCHED or ABSENT.

  Returns:
    (terms, metrics): `loss` is a mean over completions; sums and weights [B].
  """
  rng = None if cfg.disable_dropout else rng
  stats, out = sequences.token_stats(model, params, batch, rng, ("logprob", "is_top", "entropy"))
  count_BxS = sequences.segment_sums(sequences.completion_mask(batch), batch)
  logps_BxS = sequences.segment_sums(stats.logprob, batch)
  ref_BxS = sequences.segment_sums(sequences.reference_logprobs(model, batch, reference), batch)
  ratio_BxS = logps_BxS - ref_BxS

  desirable_BxS, undesirable_BxS, mismatched_BxS = (
      (batch["segment_roles"] == role).astype(jnp.float32) for role in (DESIRABLE, UNDESIRABLE, MISMATCHED))
  z = divergence(ratio_BxS, mismatched_BxS) if cfg.loss == "kto" else 0.0
  loss_BxS = example_losses(ratio_BxS, z, cfg)

  judged_BxS = desirable_BxS + undesirable_BxS
  metrics: dict[str, Any] = {}
  for name, side_BxS in (("chosen", desirable_BxS), ("rejected", undesirable_BxS)):
    metrics[f"rewards/{name}"] = Mean.of(cfg.beta * ratio_BxS, side_BxS)
    metrics[f"logps/{name}"] = Mean.of(logps_BxS, side_BxS)
    metrics[f"logps_mean/{name}"] = Mean.of(logps_BxS / jnp.maximum(count_BxS, 1.0), side_BxS)
    metrics[f"logps_ref/{name}"] = Mean.of(ref_BxS, side_BxS)
  metrics["rewards/margins"] = Difference(*(
      Mean(jnp.sum(m.sum), jnp.sum(m.weight)) for m in (metrics["rewards/chosen"], metrics["rewards/rejected"])))
  if cfg.loss == "kto":
    metrics["kl"] = Mean.of(ratio_BxS, mismatched_BxS)
  for name, values_BxT, side_BxS in (("entropy", stats.entropy, judged_BxS),
                                     ("mean_token_accuracy", stats.is_top, desirable_BxS)):
    values_BxS = sequences.segment_sums(values_BxT, batch)
    metrics[name] = Mean(jnp.sum(values_BxS * side_BxS, axis=1), jnp.sum(count_BxS * side_BxS, axis=1))
  losses_BxS = jnp.where(desirable_BxS > 0, loss_BxS[0], jnp.where(undesirable_BxS > 0, loss_BxS[1], 0.0))
  return {"loss": Mean.of(losses_BxS, judged_BxS), **out.losses}, metrics | out.metrics


def divergence(ratio_BxS: jax.Array, mismatched_BxS: jax.Array) -> jax.Array:
  """z: the mean log-ratio of the batch's mismatched sequences, at least 0, without a gradient; 0 if there are none."""
  total = jnp.sum(jax.lax.stop_gradient(ratio_BxS) * mismatched_BxS)
  return jnp.maximum(total / jnp.maximum(jnp.sum(mismatched_BxS), 1.0), 0.0)


def example_losses(ratio_BxS: jax.Array, z: jax.Array | float, cfg: Any) -> tuple[jax.Array, jax.Array]:
  """(the loss of each sequence if it is desirable, the same if it is undesirable)."""
  x_BxS = cfg.beta * (ratio_BxS - z)
  return cfg.desirable_weight * jax.nn.sigmoid(-x_BxS), cfg.undesirable_weight * jax.nn.sigmoid(x_BxS)


def no_sums(cfg: Any) -> frozenset[str]:
  """The loss from whose rewards a mean of the batch is subtracted."""
  return frozenset({"loss"} if cfg.loss == "kto" else ())


def at_reference(cfg: Any) -> dict[str, float]:
  """No margin."""
  return {"rewards/margins": 0.0}


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any = None) -> None:
  """Refuses options of the strategy that cannot work, before any device work; see `dpo.check`. Raises ConfigError."""
  sequences.check_noise(cfg, cfg_model)
  if cfg.loss not in LOSSES:
    raise ConfigError(f"strategy.loss is {cfg.loss!r}; allowed for kto: {', '.join(LOSSES)}.")
  if not cfg.beta > 0:
    raise ConfigError(f"strategy.beta is {cfg.beta}; it must be above 0.")
  for key in ("desirable_weight", "undesirable_weight"):
    if not 0 <= cfg[key] < float("inf"):
      raise ConfigError(f"strategy.{key} is {cfg[key]}; it must be a number from 0 on.")
  if cfg.reference == "none":
    raise ConfigError("strategy.reference is 'none', but kto compares the policy with one. Use "
                      "strategy.reference='start'.")
  if cfg.loss == "kto" and grad_accum_steps > 1:
    raise ConfigError(
        "strategy.loss is 'kto', which subtracts one estimate of the divergence from all rewards of a step, but "
        f"grad_accum_steps is {grad_accum_steps}: micro-batches would each have their own. Use "
        "--config.grad_accum_steps=1, with more devices or remat if memory is short, or loss='apo_zero_unpaired'.")


# Completions that were judged one by one as desirable or not.
KTO = Strategy(
    loss, data="labelled", mismatched=lambda cfg: cfg.loss == "kto", needs_reference=True, check=check, no_sums=no_sums,
    at_reference=at_reference,
    options=dict(
        # kto | apo_zero_unpaired (without the estimate of the divergence that kto subtracts from rewards)
        loss="kto",
        # As for dpo.
        beta=0.1,
        # Factors on the losses of desirable and undesirable completions.
        desirable_weight=1.0,
        undesirable_weight=1.0,
        # These as for dpo.
        reference="start",
        precompute=False,
        reference_ema=0.0,
        reference_ema_steps=512,
        disable_dropout=True,
    ))
