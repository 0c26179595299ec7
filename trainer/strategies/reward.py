"""REWARD: a model that scores whole conversations, from preferences between two completions of a prompt.

B rows, S segments a row, P = S / 2 pairs, as for DPO (dpo.py). The score r of a prompt with its completion is that of
its last token (`model.head=score`, one label), and the probability that y₊ is preferred to y₋ is σ(r₊ - r₋): Bradley
and Terry's model, as in InstructGPT (arXiv 2203.02155, eq. 1).
"""

from typing import Any

import jax
import jax.numpy as jnp

from input_pipeline.examples.roles import ABSENT
from trainer.errors import ConfigError
from trainer.metrics import Max, Mean
from trainer.strategies import preference, sequences
from trainer.strategies.dpo import split
from trainer.strategies.record import Strategy


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any):
  """-log σ(r₊ - r₋ - m) + c (r₊ + r₋)², a mean over pairs; m is the row's margin, c `center_rewards_coefficient`.

  With margins: Llama 2 (arXiv 2307.09288, eq. 2). Centring, since the scores' zero is free otherwise: arXiv 2312.09244.

  Args:
    model, params, batch, rng: see `dpo.loss`; a batch has no log-probs, but maybe `advantages` [B, S]: of the chosen
      side its margin.

  Returns:
    (terms, metrics), with sums and weights [B]; metrics have TRL's names.
  """
  rng = None if cfg.disable_dropout else rng
  out = model.apply(params, batch, rng=rng, train=rng is not None)
  scores_BxS = sequences.scores(model, params, out.hidden, batch)[..., 0]
  chosen_BxP, rejected_BxP = split(scores_BxS)
  roles = split(batch["segment_roles"])
  present_BxP = (roles[0] != ABSENT) & (roles[1] != ABSENT)
  margin_BxP = split(batch["advantages"])[0] if "advantages" in batch else 0.0

  def mean(values_BxP: jax.Array) -> Mean:
    return Mean(jnp.sum(jnp.where(present_BxP, values_BxP, 0.0), axis=1),
                jnp.sum(present_BxP, axis=1, dtype=jnp.float32))

  def most(values_BxP: jax.Array, sign: int) -> Max:
    largest = jnp.max(jnp.where(present_BxP, values_BxP, -jnp.inf))
    return Max(jax.lax.stop_gradient(largest), jnp.sum(present_BxP, dtype=jnp.float32), sign)

  loss_BxP = -jax.nn.log_sigmoid(chosen_BxP - rejected_BxP - margin_BxP)
  if cfg.center_rewards_coefficient:
    loss_BxP += cfg.center_rewards_coefficient * jnp.square(chosen_BxP + rejected_BxP)
  size_BxP = jnp.abs(chosen_BxP) + jnp.abs(rejected_BxP)
  metrics = {
      "accuracy": mean(preference.accuracy(chosen_BxP, rejected_BxP, size_BxP)),
      "margin": mean(chosen_BxP - rejected_BxP),
      "mean_reward": mean((chosen_BxP + rejected_BxP) / 2),
      "min_reward": most(-jnp.minimum(chosen_BxP, rejected_BxP), -1),
      "max_reward": most(jnp.maximum(chosen_BxP, rejected_BxP), 1),
  }
  return {"loss": mean(loss_BxP), **out.losses}, metrics | out.metrics


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any) -> None:
  """Refuses options that cannot work."""
  if not 0 <= cfg.center_rewards_coefficient < float("inf"):
    raise ConfigError(f"strategy.center_rewards_coefficient is {cfg.center_rewards_coefficient}; it must be 0 or more.")
  if cfg_model.num_labels != 1:
    raise ConfigError(f"model.num_labels is {cfg_model.num_labels}, but strategy reward learns one score of each "
                      "sequence. Use --config.model.num_labels=1.")
  sequences.check_noise(cfg, cfg_model)


# A reward model from preferences (docs/reward.md).
REWARD = Strategy(loss, data="pairs", graded=True, head="score", check=check, headline={
    "accuracy": "accuracy {:.3f}", "loss": "loss {:.3f}"}, options=dict(
    # Weight of (score of the chosen + score of the rejected)², which keeps scores around 0; 0.01 is common.
    center_rewards_coefficient=0.0,
    # As for dpo.
    disable_dropout=True,
))
