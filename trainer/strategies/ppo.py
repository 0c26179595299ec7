"""PPO: completions with rewards, where a critic says of each token what reward was to be expected (docs/grpo.md#ppo).

B rows, T length, S segments a row, as for GRPO (grpo.py). The critic (critic.py) is a model of its own beside the
policy. When a rollout's training begins, it is asked for the values of all tokens, and these with the rewards and the
penalty make advantages A and returns R by GAE (trainer/rollouts/returns.py). For a trained token then, with the value V
now and V_old of then (Schulman et al. 2017, arXiv 1707.06347; "The N implementation details of RLHF with PPO",
huggingface.co/blog):

    policy  w(p_old / q) · -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) - entropy_coef · H,  ρ = p / p_old
    critic  value_coef · max((V - R)², (clip(V, V_old - value_clip, V_old + value_clip) - R)²) / 2

The first is aggregated as GRPO's, the second is a mean over the step's tokens; the objective is their sum. ρ is 1 in
the first step after a rollout, to the bit, as GRPO's is.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from trainer.errors import ConfigError, one_of
from trainer.metrics import Mean
from trainer.strategies import critic, grpo, presets, sequences
from trainer.strategies.record import OF_COMPLETIONS, OF_CRITIC, Strategy

KL_IN = ("reward", "loss")
AGGREGATES = ("token", "sequence")


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any,
         reference: Any = None):
  """The losses of policy and critic on the completions of a batch.

  Args:
    model, params, rng: see trainer/strategies/__init__.py; of a `critic.ActorCritic`.
    batch: as for `grpo.loss`, without `advantages`; `token_advantages`, `returns`, `old_values` [B, T], of trained
      tokens, in units of the reward (advantages: whitened, if so).
    cfg: the strategy's options (below), none of them None that has an effect.
    reference: parameters of the reference; needed where the penalty is a term of the loss.

  Returns:
    (terms, metrics): `loss` of the policy, `critic_loss` of the critic, its coefficient included; what the critic's
    model asks for has names that begin with critic/.
  """
  rng = None if cfg.disable_dropout else rng
  stats, out = sequences.token_stats(model, params, batch, rng, ("logprob", "entropy"), cfg.temperature)
  found = grpo.ratios(stats.logprob, batch, "token")
  policy = grpo.clipped_term(found.ratio, advantages_of(batch, found.mask), cfg)
  in_loss = grpo.needs_reference(cfg) and cfg.kl_in == "loss"
  ref_BxT = sequences.reference_logprobs(model, batch, reference, cfg.temperature) if in_loss else None
  total, metrics = grpo.objective(policy, found, stats.entropy, ref_BxT, batch, cfg)

  values_BxT, judged = model.values(params, batch, None if rng is None else jax.random.fold_in(rng, 1))
  losses_BxT, clipped_BxT = value_losses(values_BxT, batch, found.mask, cfg.value_clip)
  metrics["value_loss"] = Mean.of(losses_BxT, found.mask)
  metrics["value/mean"] = Mean.of(values_BxT, found.mask)
  if cfg.value_clip:
    metrics["value/clip_ratio"] = Mean.of(clipped_BxT, found.mask)
  metrics |= grpo.clip_metrics(policy, found.mask, batch)
  terms = {"loss": total, "critic_loss": Mean.of(cfg.value_coef * losses_BxT, found.mask), **out.losses}
  of_critic = {f"{critic.NAME}/{name}": term for name, term in judged.losses.items()}
  shown = {f"{critic.NAME}/{name}": metric for name, metric in judged.metrics.items()}
  return terms | of_critic, metrics | out.metrics | shown


def advantages_of(batch: Mapping[str, jax.Array], mask_BxT: jax.Array) -> jax.Array:
  """Of each trained token its own, [B, T], 0 elsewhere whatever stands there."""
  return jnp.where(mask_BxT > 0, batch["token_advantages"], 0.0)


def value_losses(values_BxT: jax.Array, batch: Mapping[str, jax.Array], mask_BxT: jax.Array, bound: float
                 ) -> tuple[jax.Array, jax.Array]:
  """(half the squared error of each value, or of the value bounded to V_old ± `bound` where that is larger; 1.0 where
  it is the bounded one's), [B, T], 0 outside of trained tokens. 0 as `bound`: none."""
  there_BxT = mask_BxT > 0
  returns_BxT = jnp.where(there_BxT, batch["returns"], 0.0)
  error_BxT = jnp.where(there_BxT, values_BxT, 0.0) - returns_BxT
  if not bound:
    return 0.5 * jnp.square(error_BxT), jnp.zeros_like(error_BxT)
  old_BxT = jnp.where(there_BxT, batch["old_values"], 0.0)
  bounded_BxT = jnp.clip(values_BxT, old_BxT - bound, old_BxT + bound) - returns_BxT
  # `where` rather than `maximum`, whose gradient is divided where both are equal: there V keeps its own.
  clipped_BxT = there_BxT & (jnp.square(bounded_BxT) > jnp.square(error_BxT))
  chosen_BxT = jnp.where(clipped_BxT, bounded_BxT, error_BxT)
  return 0.5 * jnp.square(chosen_BxT), clipped_BxT.astype(jnp.float32)


# ----------------------------------------------------------------------------------------------
# What the rest of a run has to know.


def token_numbers(batch: Mapping[str, jax.Array], logprob_BxT: jax.Array, cfg: Any) -> dict[str, jax.Array]:
  """As `grpo.token_numbers`, with what the critic expected and what came."""
  found = grpo.ratios(logprob_BxT, batch, "token")
  advantage_BxT = advantages_of(batch, found.mask)
  policy = grpo.clipped_term(found.ratio, advantage_BxT, cfg)
  return grpo.numbers_of(found, advantage_BxT, policy, batch) | {key: batch[key] for key in ("old_values", "returns")}


def fill_in(config: ConfigDict) -> list[str]:
  """Gives options without a value the one that follows from others: a completion of each prompt, no moving reference.

  Raises:
    ConfigError: nothing is sampled.
  """
  cfg, rollout = config.strategy, config.rollout
  if not rollout.num_prompts:
    raise ConfigError("strategy 'ppo' learns from completions that it samples, whose tokens its critic values: set "
                      "rollout.num_prompts. From responses with rewards that are there already, grpo learns.")
  with config.unlocked():
    if rollout.group_size is None:
      rollout.group_size = 1
    if cfg.kl_coef > 0:
      defaults: dict[str, Any] = dict(kl_in="reward", reference_ema=0.0)
      in_loss = cfg.kl_in == "loss"
      # In the reward the estimator needs no gradient, and k1 is the exact one in expectation.
      defaults |= dict(kl="k3", kl_corrected=True) if in_loss else dict(kl="k1")
      for key, value in defaults.items():
        cfg[key] = value if cfg[key] is None else cfg[key]
      if cfg.reference_ema > 0 and cfg.reference_ema_steps is None:
        cfg.reference_ema_steps = 512
  return []


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any) -> None:
  """Refuses options that cannot work. Keys are read only where they have an effect. Raises ConfigError."""
  one_of("strategy.aggregate", cfg.aggregate, AGGREGATES)
  for key in ("gamma", "gae_lambda"):
    if not 0 <= cfg[key] <= 1:
      raise ConfigError(f"strategy.{key} is {cfg[key]}; it must be from 0 to 1.")
  for key in ("value_coef", "value_clip"):
    if not 0 <= cfg[key] < math.inf:
      raise ConfigError(f"strategy.{key} is {cfg[key]}; it must be a number from 0 on.")
  if not cfg.value_coef:
    raise ConfigError("strategy.value_coef is 0: the critic would not learn. Use 0.1, say.")
  presets.check_bounds(cfg)
  presets.check_common(cfg)
  if cfg.kl_coef > 0:
    one_of("strategy.kl_in", cfg.kl_in, KL_IN)
    presets.check_divergence(cfg, in_loss=cfg.kl_in == "loss")
  sequences.check_noise(cfg, cfg_model)


# Completions with rewards, and a critic beside the policy (docs/grpo.md#ppo).
PPO = Strategy(
    loss, data="rollouts", critic=True, rollout_keys=("behavior_logprobs", "old_logprobs", *OF_CRITIC), fill_in=fill_in,
    needs_reference=grpo.needs_reference, check=check, token_numbers=token_numbers, headline={
        **OF_COMPLETIONS, "value/explained_variance": "explained {:.2f}"}, options=dict(
        # What the critic begins as: start, the parameters that the run begins with, with a new head; or a Hugging Face
        # folder or a run (a reward model, say), of any size, with the same tokenizer.
        critic="start",
        # Discount of later rewards, and of later errors of the critic in an advantage (GAE): 0, the critic's word for
        # all that follows the next token; 1, what followed.
        gamma=1.0,
        gae_lambda=0.95,
        # Whether advantages have mean 0 and variance 1 over the rollout's tokens; rewards of tokens variance 1.
        whiten=True,
        whiten_rewards=False,
        # Of the critic's loss; how far a value may move from the old one before it no longer counts (0: no bound).
        value_coef=0.1,
        value_clip=0.2,
        # The ratio counts between 1 - clip_low and 1 + clip_high; clip_dual bounds it where the advantage is negative
        # (0: not). As for grpo.
        clip_low=0.2,
        clip_high=0.2,
        clip_dual=0.0,
        # token: the mean over tokens. sequence: the mean over completions of their means.
        aggregate="token",
        # Coefficient of the divergence from the reference at each token; kl_in: reward, taken off the token's reward
        # before advantages are made, or loss, as for grpo; its estimator (reward: k1; loss: k3), and kl_corrected as
        # for grpo, in the loss alone.
        kl_coef=0.05,
        kl_in=str,
        kl=str,
        kl_corrected=bool,
        # These as for grpo.
        entropy_coef=0.0,
        correction="none",
        correction_min=0.0,
        correction_max=3.0,
        temperature=float,
        reference="start",
        reference_ema=float,
        reference_ema_steps=int,
        disable_dropout=True,
    ))
