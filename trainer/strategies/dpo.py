"""DPO and its family: preferences between two completions of the same prompt.

B rows, T length, S segments a row, P = S / 2 pairs. Segments 2p - 1 and 2p of a row are pair p's chosen and rejected
sequence, each prompt and completion with positions from 0. Policy and reference go through the same functions of
sequences.py, in float32 and chunked over the vocabulary; all that follows is arithmetic on [B, P] (preference.py).
"""

import difflib
import math
from typing import Any

import jax
import jax.numpy as jnp

from input_pipeline.examples.roles import ABSENT
from trainer.errors import ConfigError, one_of
from trainer.metrics import Mean
from trainer.strategies import preference, sequences
from trainer.strategies.preference import Pairs, Side
from trainer.strategies.record import HEADLINE, Strategy


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any,
         reference: Any = None):
  """The losses of `cfg.loss` on the pairs of a batch; see preference.py.

  Args:
    model, params, rng, cfg, reference: see trainer/strategies/__init__.py.
    batch: `tokens`, `positions`, `segment_ids`, `loss_weights` [B, T], where loss_weights is above 0 on completion
      tokens; `segment_roles` [B, S], above 0 where that segment exists; maybe `ref_logprobs` [B, T], as
      `token_logprobs` of the reference gives.

  Returns:
    (terms, metrics), with sums and weights [B].
  """
  weights = preference.active(cfg)
  use_wpo = bool(set(weights) - {"sft"}) and cfg.wpo  # sft is not a comparison
  rng = None if cfg.disable_dropout else rng
  want = ("logprob", "is_top", "entropy") + ("log_square",) * use_wpo
  stats, out = sequences.token_stats(model, params, batch, rng, want)
  ref_BxT = sequences.reference_logprobs(model, batch, reference) if needs_reference(cfg) else None

  def sums(values_BxT):
    return sequences.segment_sums(values_BxT, batch)

  mask_BxT, roles_BxP = sequences.completion_mask(batch), split(batch["segment_roles"])
  present_BxP = ((roles_BxP[0] != ABSENT) & (roles_BxP[1] != ABSENT)).astype(jnp.float32)
  count_BxS, logps_BxS = sums(mask_BxT), sums(stats.logprob)
  ref_BxS = None if ref_BxT is None else sums(ref_BxT)
  policy_BxS, anchor_BxS = logps_BxS, ref_BxS
  if ref_BxT is not None and cfg.ld_alpha != 1.0:
    share_BxT = _length_desensitized(batch, mask_BxT, count_BxS, cfg.ld_alpha)
    policy_BxS, anchor_BxS = sums(stats.logprob * share_BxT), sums(ref_BxT * share_BxT)
  columns = [split(x) for x in (logps_BxS, count_BxS, policy_BxS, anchor_BxS)]
  pairs = Pairs(*(Side(*(column[i] for column in columns)) for i in (0, 1)), present_BxP)
  if use_wpo:
    # Mean over tokens of log p(token) - log Σ_v p(v)² (WPO, arXiv 2406.11827, eq. 2), chosen and rejected multiplied.
    aligned_BxS = sums(stats.logprob - stats.log_square) / jnp.maximum(count_BxS, 1.0)
    pairs = pairs._replace(weight=jax.lax.stop_gradient(jnp.exp(sum(split(aligned_BxS)))))

  terms, metrics = preference.terms(pairs, cfg)
  metrics |= _pair_metrics(pairs, split(ref_BxS), weights, cfg.beta)
  metrics |= _token_metrics(sums(stats.entropy), sums(stats.is_top), count_BxS, present_BxP)
  return terms | out.losses, metrics | out.metrics


def needs_reference(cfg: Any) -> bool:
  """Whether a loss of `cfg.loss` compares the policy with a reference."""
  return bool(set(preference.active(cfg)) - preference.REFERENCE_FREE)


def no_sums(cfg: Any) -> frozenset[str]:
  """Names of losses that put a batch in order, and of the one that they are added to."""
  sorting = preference.names_in(preference.active(cfg), preference.WHOLE_BATCH)
  return frozenset({"loss", *(f"losses/{name}" for name in sorting)} if sorting else ())


def at_reference(cfg: Any) -> dict[str, float]:
  """No margin; and the sigmoid of 0 is a half."""
  alone = [*cfg.loss.keys()] == ["sigmoid"] and not cfg.label_smoothing
  return {"rewards/margins": 0.0} | ({"losses/sigmoid": math.log(2)} if alone else {})


def split(values_BxS: jax.Array | None) -> tuple[Any, Any]:
  """Of segments: (chosen, rejected), each [B, P]; (None, None) for None."""
  if values_BxS is None:
    return None, None
  if values_BxS.shape[1] % 2:
    raise ValueError(f"batch['segment_roles'] has shape {values_BxS.shape}: pairs need an even number of segments")
  return values_BxS[:, 0::2], values_BxS[:, 1::2]


def _length_desensitized(batch: dict[str, jax.Array], mask_BxT, count_BxS, alpha: float) -> jax.Array:
  """LD-DPO's weights of tokens (arXiv 2409.06411): `alpha` beyond the length of the pair's shorter completion,
  1 up to there; [B, T]."""
  shorter_BxP = jnp.minimum(*split(count_BxS))
  segment_BxT = jnp.maximum(batch["segment_ids"] - 1, 0)
  before_BxS = jnp.cumsum(count_BxS, axis=1) - count_BxS
  number_BxT = jnp.cumsum(mask_BxT, axis=1) - jnp.take_along_axis(before_BxS, segment_BxT, axis=1)
  shorter_BxT = jnp.take_along_axis(jnp.repeat(shorter_BxP, 2, axis=1), segment_BxT, axis=1)
  return jnp.where(number_BxT <= shorter_BxT, 1.0, alpha)


def _pair_metrics(pairs: Pairs, reference: tuple[Any, Any], weights: dict[str, float], beta: float) -> dict[str, Mean]:
  """Means over pairs, by TRL's names. The reward is β times the log-ratio whatever the loss, or without a reference β
  times the log-probability, which is an average over tokens for SimPO and ORPO."""
  metrics, rewards, scale_BxP = {}, {}, 0.0
  averaged = bool(preference.names_in(weights, preference.AVERAGED_REWARD))

  def mean(values_BxP: jax.Array) -> Mean:
    return Mean(jnp.sum(jnp.where(pairs.present > 0, values_BxP, 0.0), axis=1), jnp.sum(pairs.present, axis=1))

  for name, side, ref_BxP in (("chosen", pairs.chosen, reference[0]), ("rejected", pairs.rejected, reference[1])):
    metrics[f"logps/{name}"] = mean(side.logps)
    metrics[f"logps_mean/{name}"] = mean(preference.average(side))
    if ref_BxP is not None:
      metrics[f"logps_ref/{name}"] = mean(ref_BxP)
      rewards[name] = beta * (side.logps - ref_BxP)
      scale_BxP += beta * (jnp.abs(side.logps) + jnp.abs(ref_BxP))
    else:
      rewards[name] = beta * (preference.average(side) if averaged else side.logps)
      scale_BxP += jnp.abs(rewards[name])
    metrics[f"rewards/{name}"] = mean(rewards[name])
  metrics["rewards/margins"] = mean(rewards["chosen"] - rewards["rejected"])
  metrics["rewards/accuracies"] = mean(preference.accuracy(rewards["chosen"], rewards["rejected"], scale_BxP))
  if pairs.weight is not None:
    metrics["wpo_weight"] = mean(pairs.weight)
  return metrics


def _token_metrics(entropy_BxS, is_top_BxS, count_BxS, present_BxP) -> dict[str, Mean]:
  """Means over completion tokens: the entropy over all of them, the accuracy over those of chosen completions."""
  present_BxS = jnp.repeat(present_BxP, 2, axis=1)

  def mean(values, count, present) -> Mean:
    return Mean(jnp.sum(values * present, axis=1), jnp.sum(count * present, axis=1))

  return {
      "entropy": mean(entropy_BxS, count_BxS, present_BxS),
      "mean_token_accuracy": mean(split(is_top_BxS)[0], split(count_BxS)[0], present_BxP),
  }


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any = None) -> None:
  """Refuses options of the strategy that cannot work, before any device work. Raises ConfigError.

  Args:
    grad_accum_steps: micro-batches of a step.
    cfg_model: the config's `model` section; None: not looked at.
  """
  known = list(preference.LOSSES)
  for name, weight in cfg.loss.items():
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
      raise ConfigError(f"strategy.loss names {name!r}; " + (f"did you mean {near[0]!r}? " if near else "")
                        + f"Known losses: {', '.join(known)}.")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
      raise ConfigError(f"strategy.loss.{name} is {weight!r}; it is the weight of that loss, a number from 0 on.")
  weights = preference.active(cfg)
  if not weights:
    raise ConfigError("strategy.loss names no loss with a weight above 0: there is nothing to train. For instance "
                      'loss={"sigmoid": 1.0}.')
  if not cfg.beta > 0:
    raise ConfigError(f"strategy.beta is {cfg.beta}; it must be above 0.")
  _check_options(cfg, weights)
  if (together := preference.names_in(weights, preference.WHOLE_BATCH)) and grad_accum_steps > 1:
    raise ConfigError(
        f"strategy.loss has {together[0]!r}, which puts all pairs of a step in order, but grad_accum_steps is "
        f"{grad_accum_steps}: pairs of different micro-batches are never seen together. Use "
        "--config.grad_accum_steps=1, with more devices or remat if memory is short, or another loss.")
  sequences.check_noise(cfg, cfg_model)
  if needs_reference(cfg) and cfg.reference == "none":
    raise ConfigError(
        f"strategy.reference is 'none', but {', '.join(n for n in weights if n not in preference.REFERENCE_FREE)} "
        f"compares the policy with one. Use strategy.reference='start', or only losses of "
        f"{', '.join(n for n in known if n in preference.REFERENCE_FREE)}.")


def _check_options(cfg: Any, weights: dict[str, float]) -> None:
  """Keys are read only where a loss uses them, so that the audit finds those without effect."""
  if smoothed := preference.names_in(weights, preference.SMOOTHED):
    if not 0 <= cfg.label_smoothing < 0.5:
      raise ConfigError(f"strategy.label_smoothing is {cfg.label_smoothing}; it is the share of pairs whose labels are "
                        "wrong, from 0 to below 0.5.")
    if "exo_pair" in smoothed and cfg.label_smoothing == 0:
      raise ConfigError("strategy.loss has 'exo_pair', whose target is undefined for strategy.label_smoothing=0. "
                        "Use --config.strategy.label_smoothing=0.001, say.")
  if needs_reference(cfg):
    one_of("strategy.f_divergence", cfg.f_divergence, preference.DIVERGENCES)
    unscored = set(weights) - preference.SCORED - preference.REFERENCE_FREE
    if cfg.f_divergence != "reverse_kl" and unscored:
      raise ConfigError(f"strategy.f_divergence is {cfg.f_divergence!r}, which is not defined for "
                        f"{', '.join(sorted(unscored))}. Use reverse_kl, or only losses of "
                        f"{', '.join(n for n in preference.LOSSES if n in preference.SCORED)}.")
    if not 0 <= cfg.ld_alpha <= 1:
      raise ConfigError(f"strategy.ld_alpha is {cfg.ld_alpha}; it is the weight of tokens beyond the length of the "
                        "shorter completion, from 0 to 1 (1: as any other).")
  if "cpo" in weights and not 0 <= cfg.cpo_alpha < float("inf"):
    raise ConfigError(f"strategy.cpo_alpha is {cfg.cpo_alpha}; it is the weight of sft within cpo, from 0 on.")
  if "discopop" in weights and not 0 < cfg.discopop_tau < 1:
    raise ConfigError(f"strategy.discopop_tau is {cfg.discopop_tau}; it must be above 0 and below 1, where the loss "
                      "of a pair ranked wrong grows linearly, not exponentially.")


# Preferences between two completions of a prompt (docs/dpo.md).
DPO = Strategy(
    loss, data="pairs", needs_reference=needs_reference, check=check, no_sums=no_sums, at_reference=at_reference,
    headline={**HEADLINE, "rewards/accuracies": "accuracy {:.3f}"},
    options=dict(
        # {name: weight} of the losses that are added up: sigmoid (DPO), hinge, ipo, sigmoid_norm, robust, exo_pair,
        # nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, aot, aot_unpaired, discopop, sft; without a reference:
        # simpo, orpo, cpo.
        loss={"sigmoid": 1.0},
        # How dear it is to leave the reference: rewards are beta * log-ratio. simpo wants 2 or more.
        beta=0.1,
        # Share of pairs whose labels are wrong: sigmoid, robust, exo_pair, aot, aot_unpaired, simpo, cpo.
        label_smoothing=0.0,
        # reverse_kl | forward_kl | js | alpha: the divergence from the reference; `alpha` is of the last one.
        f_divergence="reverse_kl",
        alpha=0.5,
        # Weight of tokens beyond the length of the pair's shorter completion (LD-DPO, arXiv 2409.06411); 1: off.
        ld_alpha=1.0,
        # Weigh pairs by how likely the policy is to write them (WPO, arXiv 2406.11827).
        wpo=False,
        # simpo: by how much the chosen one's reward should be higher.
        simpo_gamma=0.5,
        # cpo: weight of sft within it.
        cpo_alpha=1.0,
        # discopop: the temperature at which it blends its two losses.
        discopop_tau=0.05,
        # What the policy is compared with. start: the parameters the run began with; a path: a workdir, a checkpoint
        # or a Hugging Face folder; none.
        reference="start",
        # Compute the reference's log-probs of all pairs before the first step, and keep them beside the token cache.
        precompute=False,
        # Every reference_ema_steps steps the reference moves by that share towards the policy (TR-DPO, arXiv
        # 2404.09656); 0: never.
        reference_ema=0.0,
        reference_ema_steps=512,
        # Neither dropout nor noise in the policy; there is none in the reference.
        disable_dropout=True,
    ))
