"""Losses on preference pairs, by name: arithmetic on what is left of a pair once its tokens are summed.

B rows, P pairs a row. For a pair of completions y₊ (chosen) and y₋ (rejected) of a prompt x write

    π±  = Σ_t log π(y±_t | x, y±_<t),  the policy's log-probability, a sum over the completion's tokens
    ref±  the same of the frozen reference
    l±  = π± - ref±, the log-ratio, of which β l± is the implicit reward (DPO, arXiv 2305.18290, section 4)
    s±  = f(l±), the score: l± itself, or another derivative of the divergence from the reference (`score`)
    Δ   = s₊ - s₋;  |y±| completion tokens;  ε = label_smoothing;  σ the logistic function

Every function of `LOSSES` maps (Pairs, cfg) to one value for each pair [B, P], finite for pairs that are absent too. It
uses sums over tokens unless its docstring says "averages". The objective is the mean over pairs of the weighted sum of
the losses that `cfg.loss` names, and beside it `sft`, which is a mean over tokens (`terms`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.metrics import Mean

# Exponents of divergences end here: beyond it a score is constant, where float32 would soon overflow.
MAX_EXPONENT = 80.0
# Differences of rewards below this share of the log-probabilities they are made of are rounding.
ROUNDING = 1e-6
# An absent pair's place in an order: behind all others.
LAST = 1e30


class Side(NamedTuple):
  """The chosen or the rejected completions, [B, P] float32."""

  # Sums of the policy's token log-probabilities.
  logps: jax.Array
  # Completion tokens, 0 where there are none.
  count: jax.Array
  # The policy's and the reference's sums that make up the log-ratio: as `logps`, or with LD-DPO's weights on tokens.
  policy: jax.Array
  # None: no loss needs a reference.
  reference: jax.Array | None = None


class Pairs(NamedTuple):
  """Chosen and rejected completions of the same prompts."""

  chosen: Side
  rejected: Side
  # 1 where there is a pair, 0 where a row has fewer than P; [B, P].
  present: jax.Array
  # WPO: a factor of each pair's losses, without a gradient; None: 1.
  weight: jax.Array | None = None


# ----------------------------------------------------------------------------------------------
# What the losses are made of.


def log_ratio(side: Side) -> jax.Array:
  """l = log π(y|x) - log π_ref(y|x), a sum over tokens."""
  return side.policy - side.reference


def average(side: Side) -> jax.Array:
  """The policy's mean log-probability of a completion's tokens."""
  return side.logps / jnp.maximum(side.count, 1.0)


def divergence(ratio: jax.Array, cfg: Any) -> jax.Array:
  """The score s of a log-ratio l under `cfg.f_divergence` (f-DPO, arXiv 2309.16240): s = f'(e^l).

  reverse_kl: l. forward_kl: 1 - e^-l. js: log σ(l) + log 2. alpha: (e^((α - 1) l) - 1) / (α - 1), which for α → 1 is l.
  The paper leaves a constant free, which cancels in Δ; here it is chosen so that a policy that equals its reference
  scores 0 under each, also in losses that look at s₊ and s₋ apart.
  """
  kind = cfg.f_divergence
  if kind == "reverse_kl":
    return ratio
  if kind == "forward_kl":
    return 1.0 - jnp.exp(jnp.minimum(-ratio, MAX_EXPONENT))
  if kind == "js":
    return jax.nn.log_sigmoid(ratio) + math.log(2.0)
  slope = cfg.alpha - 1.0
  if abs(slope) < 1e-6:
    return ratio
  return jnp.expm1(jnp.minimum(slope * ratio, MAX_EXPONENT)) / slope


DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


def scores(pairs: Pairs, cfg: Any) -> tuple[jax.Array, jax.Array]:
  """(s₊, s₋)."""
  return divergence(log_ratio(pairs.chosen), cfg), divergence(log_ratio(pairs.rejected), cfg)


def _margin(pairs: Pairs, cfg: Any) -> jax.Array:
  """β Δ."""
  chosen, rejected = scores(pairs, cfg)
  return cfg.beta * (chosen - rejected)


def _nll(x: jax.Array) -> jax.Array:
  """-log σ(x)."""
  return -jax.nn.log_sigmoid(x)


def _smoothed(x: jax.Array, cfg: Any) -> jax.Array:
  """-(1 - ε) log σ(x) - ε log σ(-x)."""
  if not cfg.label_smoothing:
    return _nll(x)
  return (1.0 - cfg.label_smoothing) * _nll(x) + cfg.label_smoothing * _nll(-x)


def _quantile_gap(a: jax.Array, b: jax.Array, present: jax.Array) -> jax.Array:
  """a minus the b of the same rank, the ranks being those among all pairs of the batch; [B, P], 0 where absent."""
  a, b = (jnp.where(present > 0, x, LAST).reshape(-1) for x in (a, b))
  rank = jnp.argsort(jnp.argsort(jax.lax.stop_gradient(a)))
  return (a - b[jnp.argsort(jax.lax.stop_gradient(b))][rank]).reshape(present.shape)


# ----------------------------------------------------------------------------------------------
# Losses with a reference.


def sigmoid(pairs: Pairs, cfg: Any) -> jax.Array:
  """-(1 - ε) log σ(βΔ) - ε log σ(-βΔ): DPO (arXiv 2305.18290, eq. 7); ε > 0: labels that are wrong that often, cDPO
  (Mitchell 2023, A note on DPO with noisy preferences)."""
  return _smoothed(_margin(pairs, cfg), cfg)


def hinge(pairs: Pairs, cfg: Any) -> jax.Array:
  """max(0, 1 - βΔ): SLiC (arXiv 2305.10425) on log-ratios, as in RSO (arXiv 2309.06657)."""
  return jax.nn.relu(1.0 - _margin(pairs, cfg))


def ipo(pairs: Pairs, cfg: Any) -> jax.Array:
  """(s₊/|y₊| - s₋/|y₋| - 1/(2β))²: IPO (arXiv 2310.12036, eq. 17), β is its τ. Averages, as its authors confirmed."""
  chosen, rejected = _average_scores(pairs, cfg)
  return jnp.square(chosen - rejected - 0.5 / cfg.beta)


def sigmoid_norm(pairs: Pairs, cfg: Any) -> jax.Array:
  """-log σ(β (s₊/|y₊| - s₋/|y₋|)): length-normalised DPO (Tülu 3, arXiv 2411.15124). Averages."""
  chosen, rejected = _average_scores(pairs, cfg)
  return _nll(cfg.beta * (chosen - rejected))


def robust(pairs: Pairs, cfg: Any) -> jax.Array:
  """(-(1 - ε) log σ(βΔ) + ε log σ(-βΔ)) / (1 - 2ε): unbiased under labels flipped with probability ε < ½ (robust DPO,
  arXiv 2403.00409)."""
  x, e = _margin(pairs, cfg), cfg.label_smoothing
  return ((1.0 - e) * _nll(x) - e * _nll(-x)) / (1.0 - 2.0 * e)


def exo_pair(pairs: Pairs, cfg: Any) -> jax.Array:
  """KL((q, 1 - q) ‖ (1 - ε, ε)), q = σ(βΔ): EXO (arXiv 2402.00856, eq. 16). Needs ε > 0."""
  x, e = _margin(pairs, cfg), cfg.label_smoothing
  return (jax.nn.sigmoid(x) * (-_nll(x) - math.log1p(-e)) + jax.nn.sigmoid(-x) * (-_nll(-x) - math.log(e)))


def nca_pair(pairs: Pairs, cfg: Any) -> jax.Array:
  """-log σ(βs₊) - ½ log σ(-βs₊) - ½ log σ(-βs₋): NCA (arXiv 2402.05369) with two completions."""
  chosen, rejected = (cfg.beta * s for s in scores(pairs, cfg))
  return _nll(chosen) + 0.5 * _nll(-chosen) + 0.5 * _nll(-rejected)


def bco_pair(pairs: Pairs, cfg: Any) -> jax.Array:
  """-log σ(βs₊) - log σ(-βs₋): BCO (arXiv 2404.04656), on pairs and without the reward shift δ."""
  chosen, rejected = (cfg.beta * s for s in scores(pairs, cfg))
  return _nll(chosen) + _nll(-rejected)


def sppo_hard(pairs: Pairs, cfg: Any) -> jax.Array:
  """(s₊ - 1/(2β))² + (s₋ + 1/(2β))²: SPPO (arXiv 2405.00675, eq. 4.7) with win rates 1 and 0; β is its 1/η."""
  chosen, rejected = scores(pairs, cfg)
  return jnp.square(chosen - 0.5 / cfg.beta) + jnp.square(rejected + 0.5 / cfg.beta)


def apo_zero(pairs: Pairs, cfg: Any) -> jax.Array:
  """1 - σ(βl₊) + σ(βl₋): APO (arXiv 2408.06266, eq. 7), for chosen completions better than the model's own."""
  return jax.nn.sigmoid(-cfg.beta * log_ratio(pairs.chosen)) + jax.nn.sigmoid(cfg.beta * log_ratio(pairs.rejected))


def apo_down(pairs: Pairs, cfg: Any) -> jax.Array:
  """σ(βl₊) + 1 - σ(β(l₊ - l₋)): APO (arXiv 2408.06266, eq. 8), for chosen completions worse than the model's own."""
  chosen, rejected = (cfg.beta * log_ratio(side) for side in (pairs.chosen, pairs.rejected))
  return jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)


def aot(pairs: Pairs, cfg: Any) -> jax.Array:
  """-(1 - ε) log σ(βδ) - ε log σ(-βδ), δ: the policy's gaps π₊ - π₋ in order, minus the reference's ref₊ - ref₋ in
  order: AOT (arXiv 2406.05882), paired. The order is that of all pairs of the step."""
  a, b = pairs.chosen, pairs.rejected
  return _smoothed(
      cfg.beta * _quantile_gap(a.policy - b.policy, a.reference - b.reference, pairs.present), cfg)


def aot_unpaired(pairs: Pairs, cfg: Any) -> jax.Array:
  """As `aot`, with δ: the l₊ in order, minus the l₋ in order (arXiv 2406.05882, unpaired)."""
  return _smoothed(
      cfg.beta * _quantile_gap(log_ratio(pairs.chosen), log_ratio(pairs.rejected), pairs.present), cfg)


def discopop(pairs: Pairs, cfg: Any) -> jax.Array:
  """(1 - m) (-log σ(x)) + m e^-x, x = βΔ, m = σ(x/τ): DiscoPOP (arXiv 2406.08414, eq. 5), τ = discopop_tau."""
  x = _margin(pairs, cfg)
  steep = x / cfg.discopop_tau
  # m e^-x as one exponential: where m vanishes, e^-x alone would overflow.
  return jax.nn.sigmoid(-steep) * _nll(x) + jnp.exp(jax.nn.log_sigmoid(steep) - x)


def _average_scores(pairs: Pairs, cfg: Any) -> tuple[jax.Array, jax.Array]:
  chosen, rejected = scores(pairs, cfg)
  return chosen / jnp.maximum(pairs.chosen.count, 1.0), rejected / jnp.maximum(pairs.rejected.count, 1.0)


# ----------------------------------------------------------------------------------------------
# Losses without one.


def sft(pairs: Pairs, cfg: Any) -> jax.Array:
  """-π₊, to be divided by tokens, not pairs: cross-entropy of the chosen completions (as in RPO, arXiv 2404.19733)."""
  return -pairs.chosen.logps


def simpo(pairs: Pairs, cfg: Any) -> jax.Array:
  """-(1 - ε) log σ(x) - ε log σ(-x), x = β (π₊/|y₊| - π₋/|y₋|) - γ: SimPO (arXiv 2405.14734, eq. 6), γ = simpo_gamma.
  Averages; no reference. Its β is 2 or more."""
  return _smoothed(cfg.beta * (average(pairs.chosen) - average(pairs.rejected)) - cfg.simpo_gamma, cfg)


def orpo(pairs: Pairs, cfg: Any) -> jax.Array:
  """-β log σ(log odds(p₊) - log odds(p₋)), p± = exp(π±/|y±|), odds(p) = p / (1 - p): the odds-ratio part of ORPO (arXiv
  2403.07691, eq. 7), β is its λ. Averages; no reference. `terms` adds the other part, sft."""

  def log_odds(side: Side) -> jax.Array:
    # Below 0: a certain completion, or one without tokens, has finite odds.
    logp = jnp.minimum(average(side), -1e-6)
    return logp - jnp.log(-jnp.expm1(logp))

  return cfg.beta * _nll(log_odds(pairs.chosen) - log_odds(pairs.rejected))


def cpo(pairs: Pairs, cfg: Any) -> jax.Array:
  """-(1 - ε) log σ(x) - ε log σ(-x), x = β (π₊ - π₋): the preference part of CPO (arXiv 2401.08417, eq. 3). No
  reference. `terms` adds the other part, cpo_alpha * sft."""
  return _smoothed(cfg.beta * (pairs.chosen.logps - pairs.rejected.logps), cfg)


LOSSES: dict[str, Callable[[Pairs, Any], jax.Array]] = {
    fn.__name__: fn
    for fn in (sigmoid, hinge, ipo, sigmoid_norm, robust, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down,
               aot, aot_unpaired, discopop, sft, simpo, orpo, cpo)
}
REFERENCE_FREE = frozenset({"sft", "simpo", "orpo", "cpo"})
# Functions of the scores, for which other divergences are defined.
SCORED = frozenset(LOSSES) - REFERENCE_FREE - {"apo_zero", "apo_down", "aot", "aot_unpaired"}
SMOOTHED = frozenset({"sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "simpo", "cpo"})
# Not a sum over pairs: one pair's loss depends on the others of the batch.
WHOLE_BATCH = frozenset({"aot", "aot_unpaired"})
# Implicit rewards that are averages over tokens.
AVERAGED_REWARD = frozenset({"simpo", "orpo"})


def active(cfg: Any) -> dict[str, float]:
  """{name: weight} of the losses in `cfg.loss` whose weight is not 0."""
  return {name: float(weight) for name, weight in cfg.loss.items() if weight}


def terms(pairs: Pairs, cfg: Any) -> tuple[dict[str, Mean], dict[str, Mean]]:
  """The objective's terms, and each loss by itself, for the losses of `cfg.loss`.

  `loss` is the weighted sum of all losses on pairs, a mean over pairs. What is a mean over the chosen completions'
  tokens is a term of its own, `sft`, or `loss` if there is nothing else: its coefficient is the sum of the weight of
  sft, that of orpo, and cpo_alpha times that of cpo. Sums and weights are [B].

  Returns:
    (terms, metrics): `losses/<name>`, unweighted, of every loss named, and of `sft` where another one includes it.
  """
  weights = active(cfg)
  paired = {name: weight for name, weight in weights.items() if name != "sft"}
  tokens = weights.get("sft", 0.0) + weights.get("orpo", 0.0)
  if "cpo" in weights:
    tokens += weights["cpo"] * cfg.cpo_alpha

  def mean(values: jax.Array, weight: jax.Array = pairs.present) -> Mean:
    return Mean(jnp.sum(jnp.where(pairs.present > 0, values, 0.0), axis=1), jnp.sum(weight, axis=1))

  found, metrics = {}, {}
  if paired:
    total: Any = 0.0
    for name, weight in paired.items():
      value = LOSSES[name](pairs, cfg)
      value = value if pairs.weight is None else value * pairs.weight
      metrics[f"losses/{name}"] = mean(value)
      total = total + weight * value
    found["loss"] = mean(total)
  if tokens:
    nll, count = sft(pairs, cfg), pairs.chosen.count * pairs.present
    metrics["losses/sft"] = mean(nll, count)
    found["sft" if paired else "loss"] = mean(tokens * nll, count)
  return found, metrics


def accuracy(chosen: jax.Array, rejected: jax.Array, scale: jax.Array) -> jax.Array:
  """1 where the chosen completion has the higher reward, 0 where the rejected one has, 0.5 for ties.

  Args:
    chosen: rewards of the chosen completions.
    rejected: rewards of the rejected ones.
    scale: the sizes of the numbers that the rewards are differences of, added up. Rewards that differ by less than
      their rounding (1e-6 of it) are a tie: those of a policy that still equals its reference.
  """
  margin = chosen - rejected
  return 0.5 * (1.0 + jnp.where(jnp.abs(margin) > ROUNDING * scale, jnp.sign(margin), 0.0))


def names_in(weights: Mapping[str, float], group: frozenset[str]) -> list[str]:
  """Those of the named losses that belong to a group, in order."""
  return [name for name in weights if name in group]
