"""Variations of the losses on preferences. The form is that of topic.py."""

GROUP = "Variations of the losses on preferences"

TEXT = """
= divergence.reverse_kl: the score of a log-ratio under the reverse KL (DPO's own)
The log-ratio itself.
equation:
  s = l
source: trainer/strategies/preference.py divergence
test: tests/trainer/strategies/test_preference.py::test_values_by_hand
test: tests/trainer/strategies/test_preference.py::test_gradients_are_those_of_finite_differences
config: config.strategy = strategy("dpo", f_divergence="reverse_kl")
keys: strategy(dpo).f_divergence
paper: Rafailov et al.: Direct Preference Optimization: Your Language Model is Secretly a Reward Model, 2023, arXiv
  2305.18290
see: loss.dpo

= divergence.forward_kl: the score of a log-ratio under the forward KL
How dear it is to leave the reference, by another f-divergence than DPO's; for losses that are functions of the
scores s.
equation:
  s = 1 − e⁻ˡ
source: trainer/strategies/preference.py divergence
test: tests/trainer/strategies/test_preference.py::test_values_by_hand
test: tests/trainer/strategies/test_preference.py::test_gradients_are_those_of_finite_differences
config: config.strategy = strategy("dpo", f_divergence="forward_kl")
keys: strategy(dpo).f_divergence
paper: Wang et al.: Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence
  Constraints, 2023, arXiv 2309.16240
others: TRL: the same up to a constant, which cancels in Δ; here s = 0 for l = 0, which changes losses that look at
  s₊ and s₋ apart.
see: loss.dpo

= divergence.js: the score of a log-ratio under the Jensen–Shannon divergence
How dear it is to leave the reference, by another f-divergence than DPO's; for losses that are functions of the
scores s.
equation:
  s = log σ(l) + log 2
source: trainer/strategies/preference.py divergence
test: tests/trainer/strategies/test_preference.py::test_values_by_hand
test: tests/trainer/strategies/test_preference.py::test_gradients_are_those_of_finite_differences
config: config.strategy = strategy("dpo", f_divergence="js")
keys: strategy(dpo).f_divergence
paper: Wang et al.: Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence
  Constraints, 2023, arXiv 2309.16240
others: TRL: the same up to a constant, which cancels in Δ; here s = 0 for l = 0, which changes losses that look at
  s₊ and s₋ apart.
see: loss.dpo

= divergence.alpha: the score of a log-ratio under an α-divergence
How dear it is to leave the reference, by another f-divergence than DPO's; for losses that are functions of the
scores s.
equation:
  s = (e^((α−1) l) − 1) / (α − 1),  α = strategy.alpha; for α → 1: l
source: trainer/strategies/preference.py divergence
test: tests/trainer/strategies/test_preference.py::test_values_by_hand
test: tests/trainer/strategies/test_preference.py::test_gradients_are_those_of_finite_differences
test: tests/trainer/strategies/test_preference.py::
  test_an_alpha_of_one_is_the_reverse_divergence_and_its_neighbours_are_near
config: config.strategy = strategy("dpo", f_divergence="alpha")
keys: strategy(dpo).f_divergence strategy(dpo).alpha
paper: Wang et al.: Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence
  Constraints, 2023, arXiv 2309.16240
others: TRL: the same up to a constant, which cancels in Δ; here s = 0 for l = 0, which changes losses that look at
  s₊ and s₋ apart.
see: loss.dpo

= dpo.ld_alpha, ld_dpo: length desensitisation (LD-DPO)
Tokens beyond the length of the pair's shorter completion weigh α in the log-ratios of policy and reference.
equation:
  l = Σ_t w_t (log p_t − log p_ref,t),  w_t = 1 up to min(|y₊|, |y₋|) tokens, then α = strategy.ld_alpha
source: trainer/strategies/dpo.py _length_desensitized
test: tests/trainer/strategies/test_dpo.py::test_ld_alpha_weighs_tokens_beyond_the_shorter_completion
config: config.strategy = strategy("dpo", ld_alpha=0.5)
keys: strategy(dpo).ld_alpha
paper: Liu et al.: Length Desensitization in Direct Preference Optimization, 2024, arXiv 2409.06411
others: The metrics rewards/… and logps/… are never weighted so.
see: loss.dpo

= dpo.wpo: weighted preference optimisation (WPO)
Pairs that the policy would itself write count more.
equation:
  each loss of a pair × w₊ w₋,  w = exp(mean over tokens of (log p(token) − log Σ_v p(v)²)), without a gradient
source: trainer/strategies/dpo.py loss @ if use_wpo:
test: tests/trainer/strategies/test_dpo.py::
  test_wpo_weighs_pairs_by_their_likelihood_without_a_gradient
config: config.strategy = strategy("dpo", wpo=True)
keys: strategy(dpo).wpo
paper: Zhou et al.: WPO: Enhancing RLHF with Weighted Preference Optimization, 2024, arXiv 2406.11827, eq. 2
others: TRL: use_weighting.
see: loss.dpo metric.wpo_weight

= dpo.reference_ema, tr_dpo: a reference that follows the policy (TR-DPO)
Every so many updates the reference moves a share of the way towards the policy.
equation:
  after every reference_ema_steps updates:  π_ref ← α π + (1 − α) π_ref,  α = strategy.reference_ema
source: trainer/reference.py mix
test: tests/trainer/test_dpo.py::test_a_moving_reference_follows_the_policy
config: config.strategy = strategy("dpo", reference_ema=0.6, reference_ema_steps=512)
keys: strategy(dpo).reference_ema strategy(dpo).reference_ema_steps
paper: Gorbatovski et al.: Learn Your Reference Model for Real Good Alignment, 2024, arXiv 2404.09656, eq. 5
others: TRL: sync_ref_model with α = 0.6 every 512 steps.
see: exact.reference
"""
