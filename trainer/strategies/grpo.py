"""GRPO and its family: completions with rewards, compared with others of the same prompt (docs/grpo.md).

B rows, T length, S segments a row. Each segment is a sequence, a prompt and its completion with positions from 0, with
one advantage A (input_pipeline/examples/advantages.py). For a trained token, with log p of the policy, log p_old of the
policy as it was when the rollout began, log q of the program that sampled it and log p_ref of the reference, all at
`cfg.temperature`:

    ℓ = w(p_old / q) · policy term(ρ, A, log p) + kl_coef · D(log p - log p_ref) - entropy_coef · H
    ρ = exp(log p - log p_old)

log p and log p_old are the loss's own program's: while the policy is what it was, ρ is 1, to the bit, in any precision.
What the sampler computed, with another program, rounds otherwise; it decides w alone (`correction`).

Everything is float32 and chunked over the vocabulary; log-ratios are clamped before `exp` (EXACTNESS.md T30).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.metrics import Max, Mean
from trainer.strategies import presets, sequences
from trainer.strategies.record import OF_ROLLOUTS, Strategy

# Bound on log-ratios: e^20 and its square are finite in float32. Beyond it there is no gradient.
MAX_LOG_RATIO = 20.0


class Ratios(NamedTuple):
  """Where log-probs stand; [B, T] float32, 0 or 1.0 (ratios) outside of trained tokens."""

  # 1.0 on trained tokens of sequences that exist.
  mask: jax.Array
  logprob: jax.Array
  # log p_old, without a gradient.
  old: jax.Array
  # Of the token, and the one that the policy term is of (`cfg.ratio`).
  token: jax.Array
  ratio: jax.Array


class Policy(NamedTuple):
  """The policy term of each token, and where a bound took the ratio's place; [B, T]."""

  losses: jax.Array
  # 1.0 where the ratio is below 1 - clip_low with A < 0, above 1 + clip_high with A > 0, above clip_dual with A < 0;
  # `high` of cispo: above its cap, whatever A. None: this clipping has no such bound.
  low: jax.Array | None = None
  high: jax.Array | None = None
  dual: jax.Array | None = None


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any,
         reference: Any = None):
  """The loss of the completions of a batch.

  Args:
    model, params, rng, reference: see trainer/strategies/__init__.py.
    batch: `tokens`, `positions`, `segment_ids`, `loss_weights` [B, T], where loss_weights is above 0 on sampled
      tokens; `segment_roles`, `advantages` [B, S]; maybe `old_logprobs` [B, T], log p_old in nats of trained tokens
      (without, and where it is NaN: log p of now, so that ρ is 1 and has the gradient of log p); maybe
      `behavior_logprobs` [B, T], log q (NaN: not known, w is 1 there); maybe `ref_logprobs` [B, T], as
      `sequences.token_logprobs` of the reference gives.
    cfg: the strategy's options (below), none of them None that has an effect.

  Returns:
    (terms, metrics): the weight of the term `loss` is trained tokens, sequences, or sequences × aggregate_length; sums
    and weights [B].
  """
  rng = None if cfg.disable_dropout else rng
  stats, out = sequences.token_stats(model, params, batch, rng, ("logprob", "entropy"), cfg.temperature)
  found = ratios(stats.logprob, batch, cfg.ratio)
  policy, drifted = policy_term(found.ratio, advantages_of(batch), found.logprob, cfg), {}
  if cfg.off_policy_mask_threshold:
    kept_BxT, drifted = off_policy_mask(found, batch, cfg.off_policy_mask_threshold)
    policy = policy._replace(losses=kept_BxT * policy.losses)
  ref_BxT = sequences.reference_logprobs(model, batch, reference, cfg.temperature) if needs_reference(cfg) else None
  total, metrics = objective(policy, found, stats.entropy, ref_BxT, batch, cfg)
  return ({"loss": total, **out.losses},
          metrics | drifted | clip_metrics(policy, found.mask, batch) | out.metrics)


# ----------------------------------------------------------------------------------------------
# The parts of the loss.


def objective(policy: Policy, found: Ratios, entropy_BxT: jax.Array, ref_BxT: jax.Array | None,
              batch: dict[str, jax.Array], cfg: Any) -> tuple[Mean, dict[str, Any]]:
  """(the loss, metrics): policy terms, corrected for what sampled, with penalty and bonus. `ref_BxT`: log p_ref of
  trained tokens; None: there is no penalty."""
  mask_BxT, metrics = found.mask, {}
  if "behavior_logprobs" in batch:
    known_BxT = jnp.where(jnp.isnan(batch["behavior_logprobs"]), 0.0, mask_BxT)
    mismatch_BxT = jnp.where(known_BxT > 0, found.old - batch["behavior_logprobs"], 0.0)
    weight_BxT, metrics = correction(mismatch_BxT, known_BxT, batch, cfg)
    policy = policy._replace(losses=weight_BxT * policy.losses)
  losses_BxT = policy.losses - cfg.entropy_coef * entropy_BxT
  if ref_BxT is not None:
    log_ratio_BxT = jnp.where(mask_BxT > 0, found.logprob - ref_BxT, 0.0)
    penalty_BxT = divergence(log_ratio_BxT, cfg.kl) * (found.token if cfg.kl_corrected else 1.0)
    losses_BxT = losses_BxT + cfg.kl_coef * penalty_BxT
    metrics["kl"] = Mean.of(divergence(log_ratio_BxT, "k3"), mask_BxT)

  metrics["policy_loss"] = aggregate(policy.losses, mask_BxT, batch, cfg)
  metrics["entropy"] = Mean.of(entropy_BxT, mask_BxT)
  metrics["policy/ratio_mean"] = Mean.of(found.ratio, mask_BxT)
  # Tokens are those of p_old, so that this is k3 of KL(p_old ‖ p).
  metrics["policy/approx_kl"] = Mean.of(divergence(found.old - found.logprob, "k3"), mask_BxT)
  return aggregate(losses_BxT, mask_BxT, batch, cfg), metrics


def spread(values_BxS: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
  """Each token's value of its segment, [B, T] float32 (float64 of such); 0 in padding."""
  # As in `sequences.segment_sums`: no gather, whose gradient would be a scatter, and no [B, T, S] is kept.
  values_BxS = sequences.at_least_float32(values_BxS)
  return jnp.sum(jnp.where(sequences.in_segment(batch), values_BxS[:, None, :], 0.0), axis=2)


def ratios(logprob_BxT: jax.Array, batch: Mapping[str, jax.Array], kind: str) -> Ratios:
  """p / p_old; `logprob_BxT`: log p, float32, of trained tokens at least; `kind`: see `strategy.ratio`."""
  mask_BxT = sequences.completion_mask(batch) * spread(batch["segment_roles"] > 0, batch)
  # `where`: what stands in prompts and padding of the batch's arrays may not count, whatever it is.
  logp_BxT = jnp.where(mask_BxT > 0, logprob_BxT, 0.0)
  old_BxT = jax.lax.stop_gradient(logp_BxT)
  if "old_logprobs" in batch:
    given_BxT = batch["old_logprobs"]
    old_BxT = jnp.where((mask_BxT > 0) & ~jnp.isnan(given_BxT), given_BxT, old_BxT)
  difference_BxT = logp_BxT - old_BxT
  token_BxT = _exp(difference_BxT)
  ratio_BxT = sequence_ratio(difference_BxT, mask_BxT, batch) if kind == "sequence" else token_BxT
  return Ratios(mask_BxT, logp_BxT, old_BxT, token_BxT, ratio_BxT)


def advantages_of(batch: Mapping[str, jax.Array]) -> jax.Array:
  """Of each token that of its sequence, [B, T]."""
  return spread(jnp.where(batch["segment_roles"] > 0, batch["advantages"], 0.0), batch)


def correction(mismatch_BxT: jax.Array, mask_BxT: jax.Array, batch: dict[str, jax.Array], cfg: Any
               ) -> tuple[jax.Array, dict[str, Any]]:
  """(weights of the tokens' policy terms [B, T], without a gradient; metrics), from log p_old - log q.

  Importance sampling for tokens that another program sampled than the one that trains: p_old / q of the token, or
  of the sequence, which is the product over its trained tokens. truncate: bounded by correction_min and correction_max;
  mask: 0 beyond these (as TRL's vllm_importance_sampling_mode). Divisors of the loss stay what they are.
  """
  level, _, how = cfg.correction.partition("_")
  ratio, there = _exp(mismatch_BxT), mask_BxT
  if level == "sequence":
    there = (sequences.segment_sums(mask_BxT, batch) > 0).astype(jnp.float32)
    ratio = _exp(sequences.segment_sums(mismatch_BxT, batch))
  metrics = {
      "sampling/sampling_logp_difference/mean": Mean.of(jnp.abs(mismatch_BxT), mask_BxT),
      "sampling/sampling_logp_difference/max": _extreme(jnp.abs(mismatch_BxT), mask_BxT),
      # Tokens are those of q, so that this is k3 of KL(q ‖ p_old).
      "sampling/kl": Mean.of(divergence(-mismatch_BxT, "k3"), mask_BxT),
      "sampling/importance_sampling_ratio/min": _extreme(ratio, there, -1),
      "sampling/importance_sampling_ratio/mean": Mean.of(ratio, there),
      "sampling/importance_sampling_ratio/max": _extreme(ratio, there),
  }
  if not how:
    return jnp.ones_like(mismatch_BxT), metrics
  bounded = (ratio < cfg.correction_min) | (ratio > cfg.correction_max)
  metrics["sampling/correction_bounded"] = Mean.of(bounded, there)
  weight = jnp.where(bounded, 0.0, ratio) if how == "mask" else jnp.clip(ratio, cfg.correction_min, cfg.correction_max)
  return (spread(weight, batch) if level == "sequence" else weight), metrics


def off_policy_mask(found: Ratios, batch: Mapping[str, jax.Array], threshold: float
                    ) -> tuple[jax.Array, dict[str, Any]]:
  """(0.0 on tokens of completions that are worse than others and that the policy would hardly say any more, else 1.0,
  [B, T]; metrics).

  Such is a sequence with A < 0 whose mean of log q - log p over trained tokens is above `threshold` (DeepSeek-V3.2,
  arXiv 2512.02556, eq. 9); of log p_old where q is not known. Divisors of the loss stay what they are.
  """
  sampled_BxT = batch.get("behavior_logprobs", found.old)
  sampled_BxT = jnp.where(jnp.isnan(sampled_BxT), found.old, sampled_BxT)
  drift_BxT = jnp.where(found.mask > 0, sampled_BxT - jax.lax.stop_gradient(found.logprob), 0.0)
  count_BxS = sequences.segment_sums(found.mask, batch)
  mean_BxS = sequences.segment_sums(drift_BxT, batch) / jnp.maximum(count_BxS, 1.0)
  dropped_BxS = ((batch["advantages"] < 0) & (mean_BxS > threshold)).astype(jnp.float32)
  metrics = {"policy/off_policy_masked": Mean.of(dropped_BxS, (count_BxS > 0).astype(jnp.float32))}
  return 1.0 - spread(dropped_BxS, batch), metrics


def sequence_ratio(difference_BxT: jax.Array, mask_BxT: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
  """GSPO's ratio (arXiv 2507.18071, eq. 7): exp of the mean of log p - log p_old over the sequence's trained tokens.

  [B, T], the same at all tokens of a sequence, with its gradient through each of them.
  """
  count_BxS = sequences.segment_sums(mask_BxT, batch)
  return spread(_exp(sequences.segment_sums(difference_BxT, batch) / jnp.maximum(count_BxS, 1.0)), batch)


def policy_term(ratio_BxT: jax.Array, advantage_BxT: jax.Array, logp_BxT: jax.Array, cfg: Any) -> Policy:
  """The policy term of each token.

  ppo: -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347, eq. 7); with clip_dual no more than
  -clip_dual · A where A < 0 (arXiv 1912.09729). cispo: -sg(min(ρ, clip_high)) A log p (arXiv 2506.13585, eq. 4).
  sapo: -4/τ sigmoid(τ (ρ - 1)) A, whose gradient fades away from ρ = 1, where it is that of -ρ A; τ is of A's sign
  (arXiv 2511.20347). none: -ρ A.
  """
  if cfg.clip == "none":
    return Policy(-ratio_BxT * advantage_BxT)
  if cfg.clip == "sapo":
    temperature_BxT = jnp.where(advantage_BxT > 0, cfg.sapo_temperature_pos, cfg.sapo_temperature_neg)
    return Policy(-4.0 / temperature_BxT * jax.nn.sigmoid(temperature_BxT * (ratio_BxT - 1.0)) * advantage_BxT)
  if cfg.clip == "cispo":
    weight_BxT = jax.lax.stop_gradient(jnp.minimum(ratio_BxT, cfg.clip_high))
    return Policy(-weight_BxT * advantage_BxT * logp_BxT, high=ratio_BxT > cfg.clip_high)
  return clipped_term(ratio_BxT, advantage_BxT, cfg)


def clipped_term(ratio_BxT: jax.Array, advantage_BxT: jax.Array, cfg: Any) -> Policy:
  """The policy term ppo of `policy_term`."""
  # Bounds in place of min and clip, whose gradient is divided where both sides are equal: there ρ keeps its own.
  low_BxT = (ratio_BxT < 1.0 - cfg.clip_low) & (advantage_BxT < 0)
  high_BxT = (ratio_BxT > 1.0 + cfg.clip_high) & (advantage_BxT > 0)
  ratio_BxT = jnp.where(low_BxT, 1.0 - cfg.clip_low, jnp.where(high_BxT, 1.0 + cfg.clip_high, ratio_BxT))
  dual_BxT = None
  if cfg.clip_dual:
    dual_BxT = (ratio_BxT > cfg.clip_dual) & (advantage_BxT < 0)
    ratio_BxT = jnp.where(dual_BxT, cfg.clip_dual, ratio_BxT)
  return Policy(-ratio_BxT * advantage_BxT, low_BxT, high_BxT, dual_BxT)


def divergence(log_ratio_BxT: jax.Array, estimator: str) -> jax.Array:
  """Schulman's estimators of KL(policy ‖ reference) from d = log p - log p_ref of a sampled token, in nats.

  k1 = d, k2 = d² / 2, k3 = e^(-d) - 1 + d (http://joschu.net/blog/kl-approx.html).
  """
  d_BxT = jnp.clip(log_ratio_BxT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  if estimator == "k1":
    return d_BxT
  if estimator == "k2":
    return 0.5 * jnp.square(d_BxT)
  return jnp.expm1(-d_BxT) + d_BxT


def aggregate(values_BxT: jax.Array, mask_BxT: jax.Array, batch: dict[str, jax.Array], cfg: Any) -> Mean:
  """The mean of trained tokens' values that `cfg.aggregate` says, as sums and weights [B].

  token: over the step's tokens. sequence: over sequences, of their means over tokens. constant: sums over tokens,
  divided by sequences × aggregate_length. A sequence without a trained token is none.
  """
  if cfg.aggregate == "token":
    return Mean.of(values_BxT, mask_BxT)
  sums_BxS = sequences.segment_sums(values_BxT * mask_BxT, batch)
  count_BxS = sequences.segment_sums(mask_BxT, batch)
  number_B = jnp.sum((count_BxS > 0).astype(jnp.float32), axis=1)
  if cfg.aggregate == "sequence":
    return Mean(jnp.sum(sums_BxS / jnp.maximum(count_BxS, 1.0), axis=1), number_B)
  return Mean(jnp.sum(sums_BxS, axis=1), number_B * float(cfg.aggregate_length))


def _exp(log_ratio: jax.Array) -> jax.Array:
  return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


# ----------------------------------------------------------------------------------------------
# Metrics, by TRL's names: means over trained tokens.


def _extreme(values: jax.Array, where: jax.Array, sign: int = 1) -> Max:
  """The largest value (sign 1) or the smallest (-1) of those where `where` is above 0."""
  values = jax.lax.stop_gradient(values)
  return Max(jnp.max(jnp.where(where > 0, sign * values, -jnp.inf)), jnp.sum(where.astype(jnp.float32)), sign)


def clip_metrics(policy: Policy, mask_BxT: jax.Array, batch: dict[str, jax.Array]) -> dict[str, Any]:
  """Shares of trained tokens whose ratio is bounded; `low_min` and `high_max`: of those of a sequence."""
  if policy.high is None:
    return {}
  if policy.low is None:
    return {"cispo_clip_ratio": Mean.of(policy.high, mask_BxT)}
  count_BxS = sequences.segment_sums(mask_BxT, batch)

  def extreme(bounded_BxT: jax.Array, sign: int) -> Max:
    return _extreme(sequences.segment_sums(bounded_BxT * mask_BxT, batch) / jnp.maximum(count_BxS, 1.0),
                    count_BxS > 0, sign)

  metrics = {
      "clip_ratio/low_mean": Mean.of(policy.low, mask_BxT),
      "clip_ratio/low_min": extreme(policy.low, -1),
      "clip_ratio/high_mean": Mean.of(policy.high, mask_BxT),
      "clip_ratio/high_max": extreme(policy.high, 1),
      "clip_ratio/region_mean": Mean.of(policy.low | policy.high, mask_BxT),
  }
  if policy.dual is not None:
    metrics["clip_ratio/dual_mean"] = Mean.of(policy.dual, mask_BxT)
  return metrics


# ----------------------------------------------------------------------------------------------
# What the rest of a run has to know.


def needs_reference(cfg: Any) -> bool:
  """Whether the policy is held near a reference."""
  return cfg.kl_coef > 0


def token_numbers(batch: Mapping[str, jax.Array], logprob_BxT: jax.Array, cfg: Any) -> dict[str, jax.Array]:
  """What the loss makes of advantages and of the log-probs when the rollout began, [B, T] each."""
  found, advantage_BxT = ratios(logprob_BxT, batch, cfg.ratio), advantages_of(batch)
  return numbers_of(found, advantage_BxT, policy_term(found.ratio, advantage_BxT, found.logprob, cfg), batch)


def numbers_of(found: Ratios, advantage_BxT: jax.Array, policy: Policy, batch: Mapping[str, jax.Array]
               ) -> dict[str, jax.Array]:
  """See `token_numbers`."""
  bounds = [bound for bound in (policy.low, policy.high, policy.dual) if bound is not None]
  clipped_BxT = sum(bounds, jnp.zeros(found.mask.shape, jnp.int32)) > 0
  sampled = {key: batch[key] for key in ("behavior_logprobs",) if key in batch}
  return sampled | {"old_logprobs": found.old, "ratios": found.ratio, "advantages": advantage_BxT,
                    "clipped": clipped_BxT.astype(jnp.int32)}


# Completions with rewards, compared with others of the same prompt (docs/grpo.md). What is not given has the
# preset's value (trainer/strategies/presets.py).
GRPO = Strategy(
    loss, data="rollouts", rollout_keys=("advantages", "behavior_logprobs", "old_logprobs"), fill_in=presets.fill_in,
    needs_reference=needs_reference, check=presets.check, token_numbers=token_numbers, headline=OF_ROLLOUTS,
    options=dict(
        # grpo | dapo | dr_grpo | gspo | cispo | sapo | luspo | gdpo | rloo | reinforce++ | astrai
        preset="grpo",
        # token | sequence: of what the ratio between the policy now and when it sampled is (sequence: GSPO).
        ratio=str,
        # ppo: the ratio counts between 1 - clip_low and 1 + clip_high. cispo: up to clip_high, as a weight without a
        # gradient. sapo: a gate that closes softly away from 1, the sooner the higher sapo_temperature_pos, and
        # sapo_temperature_neg where the advantage is not positive. none. `clip_dual` bounds the ratio where the
        # advantage is negative; 0: it does not.
        clip=str,
        clip_low=float,
        clip_high=float,
        clip_dual=float,
        sapo_temperature_pos=float,
        sapo_temperature_neg=float,
        # Leaves out completions with a negative advantage whose log-prob, in the mean over their tokens, has fallen by
        # more than this since they were sampled (nats, 0.5 say; DeepSeek-V3.2); 0: none.
        off_policy_mask_threshold=0.0,
        # token: the mean over tokens. sequence: the mean over completions of their means. constant: the sum over
        # completions × `aggregate_length` (default: rollout.max_new_tokens).
        aggregate=str,
        aggregate_length=int,
        # Several rewards: sum_then_normalize: what is compared is their weighted sum. normalize_then_sum: each is
        # compared by itself, and the weighted sum of that divided by its deviation over the rollout (GDPO).
        combine=str,
        # Advantage: (reward - baseline) / scale. group | leave_one_out | batch | none; group | batch | none: a
        # standard deviation.
        baseline=str,
        scale=str,
        # Coefficient and estimator (k1 | k2 | k3) of the divergence from the reference, for each token; `kl_corrected`:
        # times the ratio, so that the gradient is unbiased.
        kl_coef=float,
        kl=str,
        kl_corrected=bool,
        # Of the bonus on the entropy of each token's distribution.
        entropy_coef=float,
        # Weights p_old / q on tokens that were sampled, with log-probs q, by another program than the one that trains
        # (docs/grpo.md): none | token_truncate | token_mask | sequence_truncate | sequence_mask. Of a token, or
        # of a completion; bounded by correction_min and correction_max, or 0 beyond these.
        correction="none",
        correction_min=0.0,
        correction_max=3.0,
        # Of the distribution whose log-probs are trained. Default: rollout.temperature.
        temperature=float,
        # These as for dpo.
        reference="start",
        precompute=False,
        reference_ema=float,
        reference_ema_steps=int,
        disable_dropout=True,
    ))
