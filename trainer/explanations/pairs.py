"""Losses on preferences: DPO and its family, KTO. The form is that of topic.py."""

GROUP = "Losses on preferences"

_TESTS = (
    "tests/trainer/strategies/test_preference.py::test_values_by_hand",
    "tests/trainer/strategies/test_preference.py::test_gradients_are_those_of_finite_differences")
# {kind: (what is added to the equation, tests of all of that kind)}
LIKE = {
    "pair": ("""

l± = log π(y±|x) − log π_ref(y±|x), sums over the completion's tokens; s± = l± unless strategy.f_divergence says
otherwise; Δ = s₊ − s₋; |y±| tokens; β = strategy.beta; ε = strategy.label_smoothing; σ the logistic function.
The objective is the mean over the pairs of the whole optimizer step.""", (
        *_TESTS,
        "tests/trainer/strategies/test_preference.py::test_a_policy_that_equals_its_reference_has_the_closed_form")),
    "free": ("""

π± = log π(y±|x), sums over the completion's tokens; |y±| tokens; β = strategy.beta; ε = strategy.label_smoothing;
σ the logistic function. No reference is kept for it. The objective is a mean over the whole optimizer step.""",
             _TESTS),
}

TEXT = """
= loss.dpo: preferences between two completions (the strategy dpo)
Weighted sums of losses on pairs, by name, on log-probs of the policy and of a frozen reference. The default is
sigmoid alone: DPO.
equation:
  L = mean over pairs of  Σ_name weight[name] · loss_name(pair)
      + (w_sft + w_orpo + cpo_alpha · w_cpo) · mean over the chosen completions' tokens of −log p

  with wpo: each pair's losses, but sft, times  exp(mean_t(log p_t − log Σ_v p_v²)) of both, without a gradient
  both means are over the whole optimizer step, each divided once by its own total
source: trainer/strategies/preference.py terms
source: trainer/strategies/dpo.py loss
test: tests/trainer/strategies/test_preference.py::
  test_terms_are_means_over_pairs_and_over_tokens_with_their_coefficients
test: tests/trainer/strategies/test_dpo.py::test_values_and_metrics_are_those_of_the_sequences_alone
test: tests/trainer/test_dpo.py::test_at_the_first_step_policy_and_reference_are_one
config: config.strategy = strategy("dpo", loss={"sigmoid": 1.0}, beta=0.1)
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).label_smoothing strategy(dpo).f_divergence
  strategy(dpo).ld_alpha strategy(dpo).wpo strategy(dpo).reference strategy(dpo).precompute
paper: Rafailov et al.: Direct Preference Optimization: Your Language Model is Secretly a Reward Model, 2023, arXiv
  2305.18290
others: TRL: its sft term is a mean of micro-batch means; label_smoothing is not applied to sigmoid any more; MPO is
  loss_type=["sigmoid", "bco_pair", "sft"] with loss_weights=[0.8, 0.2, 1.0], here loss={"sigmoid": 0.8, "bco_pair":
  0.2, "sft": 1.0}.
others: TRL needs the logits of policy and reference for the whole vocabulary; here they are made in chunks.
see: loss.sigmoid loss.kto metric.rewards/margins exact.reference

= loss.sigmoid, loss.dpo.sigmoid, cdpo: DPO; with label smoothing cDPO
The logistic loss of the difference of implicit rewards.
equation:
  −(1−ε) log σ(βΔ) − ε log σ(−βΔ)
  at the first step, policy = reference: ln 2
source: trainer/strategies/preference.py sigmoid
config: config.strategy = strategy("dpo", loss={"sigmoid": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).label_smoothing
paper: Rafailov et al.: Direct Preference Optimization: Your Language Model is Secretly a Reward Model, 2023, arXiv
  2305.18290, eq. 7
others: cDPO (ε > 0): Mitchell, A note on DPO with noisy preferences and relationship to IPO, 2023. TRL does not
  apply label_smoothing to sigmoid any more.
see: loss.dpo
like: pair

= loss.hinge, loss.dpo.hinge, slic: SLiC's hinge loss on log-ratios
Pairs with a margin above 1 have no gradient.
equation:
  max(0, 1 − βΔ)
  at the first step, policy = reference: 1
source: trainer/strategies/preference.py hinge
config: config.strategy = strategy("dpo", loss={"hinge": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: Zhao et al.: SLiC-HF: Sequence Likelihood Calibration with Human Feedback, 2023, arXiv 2305.10425
paper: Liu et al.: Statistical Rejection Sampling Improves Preference Optimization, 2023, arXiv 2309.06657
see: loss.dpo
like: pair

= loss.ipo, loss.dpo.ipo: identity preference optimisation
Pulls the difference of average log-ratios towards 1/(2β).
equation:
  (s₊/|y₊| − s₋/|y₋| − 1/(2β))²        averages over tokens; β is the paper's τ
  at the first step, policy = reference: 1/(4β²)
source: trainer/strategies/preference.py ipo
config: config.strategy = strategy("dpo", loss={"ipo": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: Azar et al.: A General Theoretical Paradigm to Understand Learning from Human Preferences, 2023, arXiv
  2310.12036, eq. 17
others: TRL: the same; its early versions used sums, before the authors confirmed that averages are meant.
see: loss.dpo
like: pair

= loss.sigmoid_norm, loss.dpo.sigmoid_norm, dpo_norm: length-normalised DPO
DPO on averages over tokens, so that length alone wins nothing.
equation:
  −log σ(β (s₊/|y₊| − s₋/|y₋|))
  at the first step, policy = reference: ln 2
source: trainer/strategies/preference.py sigmoid_norm
config: config.strategy = strategy("dpo", loss={"sigmoid_norm": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: Lambert et al.: Tülu 3: Pushing Frontiers in Open Language Model Post-Training, 2024, arXiv 2411.15124
others: TRL: loss_type="sigmoid_norm", the same formula.
see: loss.dpo
like: pair

= loss.robust, loss.dpo.robust: DPO that is unbiased under flipped labels
If each label is wrong with probability ε, its expectation is the DPO loss of the right labels.
equation:
  (−(1−ε) log σ(βΔ) + ε log σ(−βΔ)) / (1 − 2ε)        ε < ½
  at the first step, policy = reference: ln 2
source: trainer/strategies/preference.py robust
config: config.strategy = strategy("dpo", loss={"robust": 1.0}, label_smoothing=0.1)
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).label_smoothing
paper: Ray Chowdhury, Kini, Natarajan: Provably Robust DPO: Aligning Language Models with Noisy Feedback, 2024,
  arXiv 2403.00409
see: loss.dpo
like: pair

= loss.exo_pair, loss.dpo.exo_pair, exo: efficient exact optimisation, on pairs
The divergence of the policy's preference from the smoothed label, in the direction that seeks modes.
equation:
  q (log q − log(1−ε)) + (1−q)(log(1−q) − log ε),  q = σ(βΔ)        needs ε > 0
  at the first step, policy = reference: −ln 2 − ½ ln(ε(1−ε))
source: trainer/strategies/preference.py exo_pair
config: config.strategy = strategy("dpo", loss={"exo_pair": 1.0}, label_smoothing=0.001)
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).label_smoothing
paper: Ji et al.: Towards Efficient Exact Optimization of Language Model Alignment, 2024, arXiv 2402.00856, eq. 16
others: The target is undefined for ε = 0, which is refused here.
see: loss.dpo
like: pair

= loss.nca_pair, loss.dpo.nca_pair, nca: noise contrastive alignment, on pairs
Looks at each completion's reward by itself, so that the chosen one need not fall.
equation:
  −log σ(βs₊) − ½ log σ(−βs₊) − ½ log σ(−βs₋)
  at the first step, policy = reference: 2 ln 2
source: trainer/strategies/preference.py nca_pair
config: config.strategy = strategy("dpo", loss={"nca_pair": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: Chen et al.: Noise Contrastive Alignment of Language Models with Explicit Rewards, 2024, arXiv 2402.05369
see: loss.dpo
like: pair

= loss.bco_pair, loss.dpo.bco_pair, bco: binary classifier optimisation, on pairs
Tells chosen from rejected completions, each by itself.
equation:
  −log σ(βs₊) − log σ(−βs₋)
  at the first step, policy = reference: 2 ln 2
source: trainer/strategies/preference.py bco_pair
config: config.strategy = strategy("dpo", loss={"bco_pair": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: Jung et al.: Binary Classifier Optimization for Large Language Model Alignment, 2024, arXiv 2404.04656
others: The paper shifts rewards by a running mean δ; on pairs neither TRL nor Weft does.
see: loss.dpo
like: pair

= loss.sppo_hard, loss.dpo.sppo_hard, sppo: self-play preference optimisation, with win rates 1 and 0
Pulls the score of the chosen completion to 1/(2β) and that of the rejected one to −1/(2β).
equation:
  (s₊ − 1/(2β))² + (s₋ + 1/(2β))²        β is the paper's 1/η
  at the first step, policy = reference: 1/(2β²)
source: trainer/strategies/preference.py sppo_hard
config: config.strategy = strategy("dpo", loss={"sppo_hard": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: Wu et al.: Self-Play Preference Optimization for Language Model Alignment, 2024, arXiv 2405.00675, eq. 4.7
see: loss.dpo
like: pair

= loss.apo_zero, loss.dpo.apo_zero: anchored preference optimisation, chosen better than the model's own
Raises the chosen completion and lowers the rejected one.
equation:
  1 − σ(βl₊) + σ(βl₋)
  at the first step, policy = reference: 1
source: trainer/strategies/preference.py apo_zero
config: config.strategy = strategy("dpo", loss={"apo_zero": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: D'Oosterlinck et al.: Anchored Preference Optimization and Contrastive Revisions: Addressing
  Underspecification in Alignment, 2024, arXiv 2408.06266, eq. 7
see: loss.dpo
like: pair

= loss.apo_down, loss.dpo.apo_down: anchored preference optimisation, chosen worse than the model's own
Lowers both completions, the rejected one more.
equation:
  σ(βl₊) + 1 − σ(β(l₊ − l₋))
  at the first step, policy = reference: 1
source: trainer/strategies/preference.py apo_down
config: config.strategy = strategy("dpo", loss={"apo_down": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: D'Oosterlinck et al.: Anchored Preference Optimization and Contrastive Revisions, 2024, arXiv 2408.06266, eq.
  8
see: loss.dpo
like: pair

= loss.aot, loss.dpo.aot: alignment by optimal transport, paired
The policy's gaps, in order, should lie above the reference's, in order: a comparison of distributions.
equation:
  −(1−ε) log σ(βδ) − ε log σ(−βδ)
  δ: the policy's gaps π₊ − π₋ in order, minus the reference's gaps ref₊ − ref₋ in order, over all pairs of the step
  at the first step, policy = reference: ln 2
source: trainer/strategies/preference.py aot
source: trainer/strategies/preference.py _quantile_gap
config: config.strategy = strategy("dpo", loss={"aot": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).label_smoothing
paper: Melnyk et al.: Distributional Preference Alignment of LLMs via Optimal Transport, 2024, arXiv 2406.05882
others: TRL sorts over the pairs of each device; here over all of the step, which needs grad_accum_steps=1.
see: loss.dpo
like: pair

= loss.aot_unpaired, loss.dpo.aot_unpaired: alignment by optimal transport, unpaired
The chosen log-ratios, in order, should lie above the rejected ones, in order.
equation:
  −(1−ε) log σ(βδ) − ε log σ(−βδ)
  δ: the l₊ in order, minus the l₋ in order, over all pairs of the step
  at the first step, policy = reference: ln 2
source: trainer/strategies/preference.py aot_unpaired
source: trainer/strategies/preference.py _quantile_gap
config: config.strategy = strategy("dpo", loss={"aot_unpaired": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).label_smoothing
paper: Melnyk et al.: Distributional Preference Alignment of LLMs via Optimal Transport, 2024, arXiv 2406.05882
others: TRL sorts over the pairs of each device; here over all of the step, which needs grad_accum_steps=1.
see: loss.dpo
like: pair

= loss.discopop, loss.dpo.discopop: a loss that a language model discovered
Logistic for pairs that are right by far, exponential for those that are wrong, blended by the margin.
equation:
  (1−m)(−log σ(x)) + m e⁻ˣ,  x = βΔ,  m = σ(x/τ),  τ = strategy.discopop_tau
  at the first step, policy = reference: ½ ln 2 + ½
source: trainer/strategies/preference.py discopop
config: config.strategy = strategy("dpo", loss={"discopop": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).discopop_tau
paper: Lu et al.: Discovering Preference Optimization Algorithms with and for Large Language Models, 2024, arXiv
  2406.08414, eq. 5
others: TRL overflows for pairs that are ranked far wrong; here m e⁻ˣ is one exponential, which stays finite.
see: loss.dpo
like: pair

= loss.dpo.sft, rpo: cross-entropy of the chosen completions, beside losses on pairs
Keeps chosen completions likely in themselves. Divided by tokens, not by pairs.
equation:
  −log π(y₊|x), over all pairs, / chosen tokens of the step
source: trainer/strategies/preference.py sft
config: config.strategy = strategy("dpo", loss={"sft": 1.0})
keys: strategy(dpo).loss
paper: Pang et al.: Iterative Reasoning Preference Optimization, 2024, arXiv 2404.19733
others: TRL: loss_type with "sft" (once rpo_alpha); there a mean over the micro-batch's tokens.
see: loss.dpo
like: free

= loss.simpo, loss.dpo.simpo: a reference-free loss on average log-probs, with a margin
The average log-probability of the chosen completion should be higher by γ/β.
equation:
  −(1−ε) log σ(x) − ε log σ(−x),  x = β (π₊/|y₊| − π₋/|y₋|) − γ,  γ = strategy.simpo_gamma; β of 2 or more
source: trainer/strategies/preference.py simpo
config: config.strategy = strategy("dpo", loss={"simpo": 1.0}, beta=2.0)
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).label_smoothing strategy(dpo).simpo_gamma
paper: Meng, Xia, Chen: SimPO: Simple Preference Optimization with a Reference-Free Reward, 2024, arXiv 2405.14734,
  eq. 6
see: loss.dpo
like: free

= loss.orpo, loss.dpo.orpo: odds ratio preference optimisation
Fine-tuning with a term on the odds of the two completions; the cross-entropy comes with it.
equation:
  −β log σ(log odds(p₊) − log odds(p₋)),  p± = exp(π±/|y±|),  odds(p) = p/(1−p)
  plus once the cross-entropy of the chosen completions; β is the paper's λ
source: trainer/strategies/preference.py orpo
source: trainer/strategies/preference.py terms
config: config.strategy = strategy("dpo", loss={"orpo": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta
paper: Hong, Lee, Thorne: ORPO: Monolithic Preference Optimization without Reference Model, 2024, arXiv 2403.07691,
  eq. 7
others: TRL's ORPO takes the cross-entropy of the prompt, too; here of the completion alone.
see: loss.dpo
like: free

= loss.cpo, loss.dpo.cpo: contrastive preference optimisation
DPO with a uniform reference, plus the cross-entropy of the chosen completions.
equation:
  −(1−ε) log σ(x) − ε log σ(−x),  x = β (π₊ − π₋)
  plus strategy.cpo_alpha times the cross-entropy of the chosen completions
source: trainer/strategies/preference.py cpo
source: trainer/strategies/preference.py terms
config: config.strategy = strategy("dpo", loss={"cpo": 1.0})
keys: strategy(dpo).loss strategy(dpo).beta strategy(dpo).label_smoothing strategy(dpo).cpo_alpha
paper: Xu et al.: Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine
  Translation, 2024, arXiv 2401.08417, eq. 3
see: loss.dpo
like: free

= loss.kto, loss.kto.kto: completions that were judged one by one
Each completion is desirable or not; its reward is compared with how far the policy is from the reference on
completions that do not belong to their prompts.
equation:
  λ_D (1 − σ(β(r − z)))   if it is desirable
  λ_U (1 − σ(β(z − r)))   if it is not               mean over the completions of the step

  r = log π(y|x) − log π_ref(y|x), a sum over tokens;  λ_D, λ_U = desirable_weight, undesirable_weight
  z = max(0, mean of r over mismatched sequences of the step), without a gradient
source: trainer/strategies/kto.py example_losses
source: trainer/strategies/kto.py divergence
test: tests/trainer/strategies/test_kto.py::test_values_and_metrics_are_those_of_the_sequences_alone
test: tests/trainer/strategies/test_kto.py::test_the_divergence_has_no_gradient
test: tests/trainer/strategies/test_kto.py::test_a_policy_that_equals_its_reference
config: config.strategy = strategy("kto")
keys: strategy(kto).loss strategy(kto).beta strategy(kto).desirable_weight strategy(kto).undesirable_weight
paper: Ethayarajh et al.: KTO: Model Alignment as Prospect Theoretic Optimization, 2024, arXiv 2402.01306
others: TRL: z is that of a device's micro-batch, averaged over devices; here of the whole step, which needs
  grad_accum_steps=1.
see: loss.apo_zero_unpaired metric.kl

= loss.apo_zero_unpaired, loss.kto.apo_zero_unpaired: KTO without its estimate of the divergence
As kto with z = 0: no mismatched sequences, any number of micro-batches.
equation:
  λ_D (1 − σ(βr))  if it is desirable,  λ_U (1 − σ(−βr))  if it is not
source: trainer/strategies/kto.py example_losses
test: tests/trainer/strategies/test_kto.py::test_values_and_metrics_are_those_of_the_sequences_alone
test: tests/trainer/strategies/test_kto.py::test_without_the_divergence_micro_batches_change_nothing
config: config.strategy = strategy("kto", loss="apo_zero_unpaired")
keys: strategy(kto).loss strategy(kto).beta
paper: D'Oosterlinck et al.: Anchored Preference Optimization and Contrastive Revisions, 2024, arXiv 2408.06266
see: loss.kto loss.apo_zero
"""
