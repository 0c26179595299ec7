"""GRPO and its presets. The form is that of topic.py."""

GROUP = "Learning from rewards"

# {kind: (what is added to the equation, tests of all of that kind)}
LIKE = {
    "preset": ("""

ρ = p / p_old, p_old: when the rollout began; A = (r − baseline) / scale of its completion (baseline.…, scale.…);
log-probs at strategy.temperature. Every divisor is that of the whole optimizer step.""", (
        "tests/trainer/test_explain.py::test_presets_are_what_their_equations_say",
        "tests/trainer/strategies/test_grpo.py::test_every_preset_offline_is_what_it_is_on_policy",
        "tests/trainer/strategies/test_presets.py::test_values_of_the_recipes")),
}

TEXT = r"""
= loss.grpo, loss.grpo.grpo: group relative policy optimisation (the strategy grpo and its preset)
Completions of the same prompt are compared by their rewards; tokens of the better ones become likelier, within a bound
on how far the policy moves from the one that sampled them.
equation:
  L = mean over sequences of the mean over their trained tokens of ℓ
  ℓ = −min(ρ A, clip(ρ, 1 − 0.2, 1 + 0.2) A) + kl_coef · D(log p − log p_ref) − entropy_coef · H
  A = (r − mean of the group) / (standard deviation of the group + 1e-4);  kl_coef = 0, entropy_coef = 0 in the preset
source: trainer/strategies/grpo.py loss
source: trainer/strategies/grpo.py policy_term
source: trainer/strategies/presets.py PRESETS @ "grpo": dict(
config: config.strategy = strategy("grpo")
keys: strategy(grpo).preset strategy(grpo).ratio strategy(grpo).clip strategy(grpo).aggregate strategy(grpo).baseline
  strategy(grpo).scale strategy(grpo).kl_coef strategy(grpo).entropy_coef rollout.group_size
paper: Shao et al.: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, 2024, arXiv
  2402.03300, eq. 3
others: The paper penalises with 0.04 times k3, uncorrected, and samples 64 completions: kl_coef=0.04, kl="k3",
  kl_corrected=False.
others: TRL: loss_type="grpo"; its default is "dapo", divided by the tokens of the generation batch, which differs from
  those of the optimizer step where several steps share a generation.
others: verl (2025): token-mean by default, a mean of micro-batch means; dual clipping at clip_ratio_c = 3 is always on;
  deviations plus 1e-6.
see: loss.dapo loss.dr_grpo clip.ppo baseline.group scale.group metric.policy/ratio_mean
preset: grpo
like: preset

= loss.dapo, loss.grpo.dapo: decoupled clip and dynamic sampling
GRPO with a higher upper bound, a mean over tokens in place of sequences, and prompts replaced whose completions all
have the same reward.
equation:
  L = Σ ℓ / (trained tokens of the step)
  ℓ = −min(ρ A, clip(ρ, 1 − 0.2, 1 + 0.28) A)
  A = (r − mean of the group) / (standard deviation of the group + 1e-4)
  groups whose rewards are all equal are replaced by new prompts, up to 10 times
source: trainer/strategies/presets.py PRESETS @ "dapo": dict(
source: trainer/strategies/grpo.py policy_term
source: trainer/strategies/grpo.py aggregate @ if cfg.aggregate == "token"
source: trainer/rollout.py Rollouts._roll @ for attempt in
config: config.strategy = strategy("grpo", preset="dapo")
keys: strategy(grpo).clip_low strategy(grpo).clip_high strategy(grpo).aggregate rollout.resample
paper: Yu et al.: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025, arXiv 2503.14476, eq. 8
others: The paper samples 16 completions and punishes overlong ones softly: the reward of type length.
others: TRL: loss_type="dapo" divides by the tokens of the generation batch; epsilon_high=0.28 is yours to set.
others: verl (2025): token-mean is taken over each micro-batch, and the micro-batches' means are averaged.
see: loss.grpo clip.ppo aggregate.token
preset: dapo
like: preset

= loss.dr_grpo, loss.grpo.dr_grpo: GRPO done right: without its two divisions
Neither the deviation of the rewards nor the length of a completion divides, since both favour some prompts or lengths.
equation:
  L = Σ ℓ / (sequences of the step · aggregate_length),  aggregate_length = rollout.max_new_tokens unless given
  ℓ = −min(ρ A, clip(ρ, 1 − 0.2, 1 + 0.2) A)
  A = r − mean of the group
source: trainer/strategies/presets.py PRESETS @ "dr_grpo": dict(
source: trainer/strategies/grpo.py aggregate
config: config.strategy = strategy("grpo", preset="dr_grpo")
keys: strategy(grpo).aggregate strategy(grpo).aggregate_length strategy(grpo).scale rollout.max_new_tokens
paper: Liu et al.: Understanding R1-Zero-Like Training: A Critical Perspective, 2025, arXiv 2503.20783
others: TRL: loss_type="dr_grpo" with scale_rewards="none"; the constant is max_completion_length.
others: verl (2025): loss_agg_mode="seq-mean-token-sum-norm" with norm_adv_by_std_in_grpo=False; the constant is the
  padded length of the responses, and the sum over sequences is not divided by their number.
see: loss.grpo aggregate.constant scale.none
preset: dr_grpo
like: preset

= loss.gspo, loss.grpo.gspo: group sequence policy optimisation
One ratio for a whole sequence, the geometric mean of its tokens', with bounds near 1.
equation:
  L = mean over sequences of −min(ρ A, clip(ρ, 1 − 0.0003, 1 + 0.0004) A)
  ρ = exp( (1/n) Σ_t (log p_t − log p_old,t) ),  n trained tokens, with its gradient through each of them
  A = (r − mean of the group) / (standard deviation of the group + 1e-4)
source: trainer/strategies/presets.py PRESETS @ "gspo": dict(
source: trainer/strategies/grpo.py sequence_ratio
source: trainer/strategies/grpo.py policy_term
config: config.strategy = strategy("grpo", preset="gspo")
keys: strategy(grpo).ratio strategy(grpo).clip_low strategy(grpo).clip_high
paper: Zheng et al.: Group Sequence Policy Optimization, 2025, arXiv 2507.18071, eq. 7
others: TRL: importance_sampling_level="sequence" with loss_type="grpo"; bounds as near to 1 as these are yours to set.
others: verl (2025): loss_mode="gspo"; the ratio's logarithm is clamped to at most 10.
see: ratio.sequence loss.grpo
preset: gspo
like: preset

= loss.cispo, loss.grpo.cispo: clipped importance sampling weights
REINFORCE whose tokens are weighted by a bounded ratio without a gradient: a token that the bound of PPO would silence
still learns.
equation:
  L = Σ ℓ / (trained tokens of the step)
  ℓ = −sg(min(ρ, 5.0)) A log p                  sg: no gradient
  A = (r − mean of the group) / (standard deviation of the group + 1e-4)
source: trainer/strategies/presets.py PRESETS @ "cispo": dict(
source: trainer/strategies/grpo.py policy_term @ if cfg.clip == "cispo"
config: config.strategy = strategy("grpo", preset="cispo")
keys: strategy(grpo).clip strategy(grpo).clip_high
paper: MiniMax: MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, 2025, arXiv 2506.13585,
  eq. 4, 5
others: TRL: with its default epsilon the cap is 0.2, and every weight is 0.2; its documentation recommends
  epsilon_high=5.0. Here clip_high below 1 is refused.
see: clip.cispo loss.grpo
preset: cispo
like: preset

= loss.rloo, loss.grpo.rloo: REINFORCE, leave one out
REINFORCE on whole completions, each compared with the mean reward of the prompt's other completions.
equation:
  L = Σ ℓ / (sequences of the step · 1)
  ℓ = −ρ A + 0.05 · k2                          on-policy ρ = 1, with the gradient of log p
  A = r − mean of the group's other completions;  k2 = (log p − log p_ref)² / 2
source: trainer/strategies/presets.py PRESETS @ "rloo": dict(
source: trainer/advantages.py advantages @ elif baseline == "leave_one_out"
config: config.strategy = strategy("grpo", preset="rloo")
keys: strategy(grpo).clip strategy(grpo).aggregate strategy(grpo).aggregate_length strategy(grpo).baseline
  strategy(grpo).kl_coef strategy(grpo).kl
paper: Ahmadian et al.: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
  LLMs, 2024, arXiv 2402.14740
others: The paper's divergence is part of the reward, of the whole completion and before the baseline.
others: verl (2025): adv_estimator="rloo" has the same advantages; the loss is then PPO's, with clipping.
see: baseline.leave_one_out clip.none kl.k2
preset: rloo
like: preset

= loss.reinforce++, loss.grpo.reinforce++, reinforce_plus_plus: REINFORCE++
PPO's bounds without a critic: rewards are normalised over the whole rollout, not within groups.
equation:
  L = Σ ℓ / (trained tokens of the step)
  ℓ = −min(ρ A, clip(ρ, 1 − 0.2, 1 + 0.2) A) + 0.01 · k2
  A = (r − mean of all) / (standard deviation of all + 1e-4);  k2 = (log p − log p_ref)² / 2
source: trainer/strategies/presets.py PRESETS @ "reinforce++": dict(
source: trainer/advantages.py advantages @ elif baseline == "batch"
config: config.strategy = strategy("grpo", preset="reinforce++")
keys: strategy(grpo).baseline strategy(grpo).scale strategy(grpo).kl_coef strategy(grpo).kl
paper: Hu: REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models, 2025, arXiv 2501.03262
others: The paper subtracts k1 of the token and of those after it from the reward, and normalises the result; here only
  rewards are normalised and k2 is in the loss. Its "w/ baseline" is baseline="group".
others: verl (2025): adv_estimator="reinforce_plus_plus" whitens discounted returns over the tokens of the batch.
see: baseline.batch scale.batch kl.k2
preset: reinforce++
like: preset

= loss.astrai, loss.grpo.astrai: AstrAI's recipe
A mean over tokens, a reference that is the policy of every 200th step, and a squared penalty.
equation:
  L = Σ ℓ / (trained tokens of the step)
  ℓ = −min(ρ A, clip(ρ, 1 − 0.2, 1 + 0.2) A) + 0.02 · k2
  A = (r − mean of the group) / (standard deviation of the group + 1e-4);  k2 = (log p − log p_ref)² / 2
  π_ref ← π after every 200th update
source: trainer/strategies/presets.py PRESETS @ "astrai": dict(
source: trainer/reference.py mix
config: config.strategy = strategy("grpo", preset="astrai")
keys: strategy(grpo).kl_coef strategy(grpo).reference_ema strategy(grpo).reference_ema_steps rollout.group_size
others: AstrAI's penalty (log p − log p_ref)² is twice k2: its coefficient 0.01 is 0.02 here. Its deviations are divided
  by the count and have no 1e-4. docs/grpo.md has the rest.
see: loss.grpo dpo.reference_ema
preset: astrai
like: preset
"""
