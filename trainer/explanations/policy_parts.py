"""What the losses on rewards are made of. The form is that of topic.py."""

GROUP = "Parts of the losses on rewards"

_LOOPS = "tests/trainer/strategies/test_grpo.py::test_value_and_gradient_are_those_of_loops_over_tokens"
# {kind: (what is added to the equation, tests of all of that kind)}
LIKE = {
    "part": ("", (_LOOPS,)),
    "advantage": ("""

Rewards of all completions of a rollout, in float64, before anything is divided among steps or devices; a completion
without a reward is in no mean, no deviation and no count.""", ()),
}

TEXT = r"""
= ratio.token, importance_ratio: the ratio of each token
How much likelier a token is now than when the rollout began.
equation:
  ρ = p / p_old = exp(log p − log p_old)        the difference clamped to ±20
  p_old: the policy itself in a rollout's first step; in later ones what the same program gave before that step
source: trainer/strategies/grpo.py ratios
source: trainer/old_policy.py of_rollout
config: config.strategy = strategy("grpo", ratio="token")
keys: strategy(grpo).ratio strategy(grpo).temperature
test: tests/trainer/test_old_policy.py::test_in_bfloat16_a_policy_that_does_not_move_has_ratios_of_one
test: tests/trainer/test_old_policy.py::test_later_steps_are_compared_with_the_policy_when_the_rollout_began
paper: Schulman et al.: Proximal Policy Optimization Algorithms, 2017, arXiv 1707.06347
others: The denominator is the policy that sampled, never the reference. TRL, as here: the policy itself where every
  step has a rollout of its own, else log-probs computed once by the trainer.
others: verl (2025) recomputes old_log_prob with the training engine after sampling with another one.
see: ratio.sequence correction.token metric.policy/ratio_mean
like: part

= correction.token, importance_sampling_correction, tis, mis, truncated_importance_sampling: weights on what was sampled
Tokens come from the sampler's program, the gradient from the trainer's: a weight makes up for what the two differ by.
equation:
  w = p_old / q of the token, without a gradient;  ℓ = w · policy term + …
  token_truncate: min(max(w, correction_min), correction_max);   token_mask: 0 beyond these bounds
  sequence_truncate, sequence_mask: the same of Π_t p_old,t / q_t over the sequence's trained tokens
source: trainer/strategies/grpo.py correction
config: config.strategy = strategy("grpo", correction="token_truncate", correction_max=2.0)
keys: strategy(grpo).correction strategy(grpo).correction_min strategy(grpo).correction_max
test: tests/trainer/strategies/test_grpo.py::test_what_another_program_sampled_is_weighted
paper: Yao et al.: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025,
  https://fengyao.notion.site/off-policy-rl
others: TRL: vllm_importance_sampling_mode with the same names, _clip_min and _clip_max; on by default
  (sequence_mask, 3).
others: verl: rollout_is=token or sequence with rollout_is_threshold truncates; rollout_rs masks, and takes what it
  masks out of the divisors, which here stay those of the batch.
see: ratio.token metric.sampling/kl
like: part

= ratio.sequence: one ratio for a sequence (GSPO)
The geometric mean of the ratios of a sequence's trained tokens.
equation:
  ρ = exp( (1/n) Σ_t (log p_t − log p_old,t) )
source: trainer/strategies/grpo.py sequence_ratio
config: config.strategy = strategy("grpo", ratio="sequence")
keys: strategy(grpo).ratio
paper: Zheng et al.: Group Sequence Policy Optimization, 2025, arXiv 2507.18071, eq. 7
see: loss.gspo ratio.token
like: part

= clip.ppo, clip: PPO's bounds on the ratio
Beyond the bounds a token has no gradient in the direction that would take it further.
equation:
  −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A)
source: trainer/strategies/grpo.py policy_term
config: config.strategy = strategy("grpo", clip="ppo", clip_low=0.2, clip_high=0.28)
keys: strategy(grpo).clip strategy(grpo).clip_low strategy(grpo).clip_high
test: tests/trainer/strategies/test_grpo.py::test_on_policy_the_gradient_is_that_of_reinforce
paper: Schulman et al.: Proximal Policy Optimization Algorithms, 2017, arXiv 1707.06347, eq. 7
paper: Yu et al.: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025, arXiv 2503.14476, eq. 8
others: TRL: epsilon and epsilon_high. verl: clip_ratio_low and clip_ratio_high.
others: A ratio exactly on a bound keeps its gradient here; autodiff of min and clip would halve it.
see: clip.dual metric.clip_ratio/region_mean
like: part

= clip.dual, delta: a bound for negative advantages
Bounds the loss of a token with a negative advantage that has become far likelier.
equation:
  where A < 0:  −max(min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A), c A),  c = strategy.clip_dual > 1
source: trainer/strategies/grpo.py policy_term @ if cfg.clip_dual:
config: config.strategy = strategy("grpo", clip_dual=3.0)
keys: strategy(grpo).clip_dual
paper: Ye et al.: Mastering Complex Control in MOBA Games with Deep Reinforcement Learning, 2019, arXiv 1912.09729
others: TRL: delta, off by default. verl (2025): clip_ratio_c, 3.0 by default and never off.
see: clip.ppo
like: part

= clip.cispo: a bounded weight without a gradient
The ratio weighs log p, up to a cap, and gets no gradient.
equation:
  −sg(min(ρ, clip_high)) A log p                sg: no gradient
source: trainer/strategies/grpo.py policy_term @ if cfg.clip == "cispo"
config: config.strategy = strategy("grpo", clip="cispo", clip_high=5.0)
keys: strategy(grpo).clip strategy(grpo).clip_high
paper: MiniMax: MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, 2025, arXiv 2506.13585,
  eq. 4
others: TRL: epsilon_high is the cap, too, and defaults to epsilon = 0.2.
see: loss.cispo metric.cispo_clip_ratio
like: part

= clip.none: no bound
The ratio as it is.
equation:
  −ρ A
source: trainer/strategies/grpo.py policy_term @ if cfg.clip == "none"
config: config.strategy = strategy("grpo", clip="none")
keys: strategy(grpo).clip
see: loss.rloo
like: part

= aggregate.token: the mean over the step's tokens
Each token counts the same; long completions count more.
equation:
  Σ ℓ / (trained tokens of the optimizer step)
source: trainer/strategies/grpo.py aggregate @ if cfg.aggregate == "token"
config: config.strategy = strategy("grpo", aggregate="token")
keys: strategy(grpo).aggregate
test: tests/trainer/strategies/test_grpo_model.py::test_micro_batches_do_not_change_the_gradient
others: TRL: "bnpo" divides by the tokens of a device's micro-batch, "dapo" by those of the generation batch.
others: verl (2025): "token-mean" of each micro-batch; the means are averaged.
see: aggregate.sequence aggregate.constant exact.accumulation
like: part

= aggregate.sequence: the mean over sequences of their means
Each completion counts the same; a token of a long one counts less.
equation:
  mean over sequences of (Σ ℓ / their trained tokens)
source: trainer/strategies/grpo.py aggregate @ if cfg.aggregate == "sequence"
config: config.strategy = strategy("grpo", aggregate="sequence")
keys: strategy(grpo).aggregate
others: TRL: loss_type="grpo". verl: "seq-mean-token-mean".
see: aggregate.token
like: part

= aggregate.constant: a sum over tokens with a fixed divisor
Neither the length of a completion nor the number of tokens of the step divides.
equation:
  Σ ℓ / (sequences of the step · aggregate_length)
source: trainer/strategies/grpo.py aggregate @ number_B * float(cfg.aggregate_length)
config: config.strategy = strategy("grpo", aggregate="constant", aggregate_length=512)
keys: strategy(grpo).aggregate strategy(grpo).aggregate_length
others: TRL: loss_type="dr_grpo", divided by B · max_completion_length.
see: loss.dr_grpo
like: part

= kl.k1: the log-ratio as an estimate of the divergence
Unbiased in value; as a loss its gradient is 0 in expectation, so that it is refused without kl_corrected.
equation:
  k1 = d,  d = log p − log p_ref of the sampled token
source: trainer/strategies/grpo.py divergence @ if estimator == "k1"
config: config.strategy = strategy("grpo", kl_coef=0.01, kl="k1", kl_corrected=True)
keys: strategy(grpo).kl strategy(grpo).kl_coef strategy(grpo).kl_corrected
test: tests/trainer/strategies/test_grpo.py::test_estimators_by_hand
test: tests/trainer/strategies/test_grpo.py::test_which_estimators_have_the_gradient_of_the_divergence
paper: Schulman: Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html
others: verl: kl_loss_type="kl", or "k1".
see: kl.corrected kl.k3

= kl.k2: half the squared log-ratio
Biased in value, but on-policy its gradient is that of KL(π ‖ π_ref).
equation:
  k2 = d² / 2,  d = log p − log p_ref of the sampled token
source: trainer/strategies/grpo.py divergence @ if estimator == "k2"
config: config.strategy = strategy("grpo", kl_coef=0.01, kl="k2", kl_corrected=False)
keys: strategy(grpo).kl strategy(grpo).kl_coef strategy(grpo).kl_corrected
test: tests/trainer/strategies/test_grpo.py::test_estimators_by_hand
test: tests/trainer/strategies/test_grpo.py::test_which_estimators_have_the_gradient_of_the_divergence
paper: Schulman: Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html
others: verl: kl_loss_type="mse", or "k2".
see: kl.corrected

= kl.k3: the estimate that is never negative
Unbiased in value; uncorrected, its gradient is that of KL(π_ref ‖ π).
equation:
  k3 = e^(−d) − 1 + d,  d = log p − log p_ref of the sampled token, clamped to ±20
source: trainer/strategies/grpo.py divergence @ jnp.expm1(-d_BxT) + d_BxT
config: config.strategy = strategy("grpo", kl_coef=0.01, kl="k3")
keys: strategy(grpo).kl strategy(grpo).kl_coef strategy(grpo).kl_corrected
test: tests/trainer/strategies/test_grpo.py::test_estimators_by_hand
test: tests/trainer/strategies/test_grpo.py::test_which_estimators_have_the_gradient_of_the_divergence
paper: Schulman: Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html
others: verl: kl_loss_type="low_var_kl", or "k3", its default; clamped to ±20 in d and to ±10 in value.
others: TRL: k3 for each token, times the ratio with use_bias_correction_kl.
see: kl.corrected metric.kl

= kl.corrected: the penalty times the ratio
Makes the gradient that of KL(π ‖ π_ref), also when the policy has moved since sampling.
equation:
  kl_coef · ρ_token · D,  with the gradient of ρ_token = p / p_old, whatever strategy.ratio is
  expected gradient on-policy:  k1, k3 corrected: of KL(π ‖ π_ref);  k2 uncorrected: the same;
  k3 uncorrected: of KL(π_ref ‖ π);  k1 uncorrected: 0
source: trainer/strategies/grpo.py loss @ penalty_BxT =
config: config.strategy = strategy("grpo", kl_coef=0.01, kl="k3", kl_corrected=True)
keys: strategy(grpo).kl_corrected strategy(grpo).kl
test: tests/trainer/strategies/test_grpo.py::test_which_estimators_have_the_gradient_of_the_divergence
test: tests/trainer/strategies/test_grpo.py::test_the_penalty_and_the_bonus_are_those_of_loops_over_tokens
others: TRL: use_bias_correction_kl.
see: kl.k3 kl.k2

= entropy_bonus: a reward for open distributions
Keeps the policy from becoming certain too early.
equation:
  − entropy_coef · H,  H = −Σ_v p(v) log p(v) of each trained token at strategy.temperature, with its gradient
source: trainer/strategies/grpo.py loss @ losses_BxT = policy.losses
source: trainer/logprobs.py _forward @ entropy_BxT =
config: config.strategy = strategy("grpo", entropy_coef=0.001)
keys: strategy(grpo).entropy_coef
test: tests/trainer/strategies/test_grpo.py::test_the_penalty_and_the_bonus_are_those_of_loops_over_tokens
others: TRL: entropy_coef, with an adaptive variant. verl: entropy_coeff. Both have the logits of the whole vocabulary;
  here they are made in chunks.
see: metric.entropy

= baseline.group: the mean of the group
What a completion is compared with: the other completions of its prompt, and itself.
equation:
  b = mean of the rewards of the group;  equal rewards have advantages of exactly 0
source: trainer/advantages.py advantages @ if baseline == "group"
config: config.strategy = strategy("grpo", baseline="group")
keys: strategy(grpo).baseline
test: tests/trainer/test_advantages.py::test_baseline_and_scale_of_the_group
test: tests/trainer/test_advantages.py::test_equal_rewards_have_advantages_of_exactly_zero
others: A group of one completion: verl takes a mean of 0 and a deviation of 1, so that its reward is its advantage;
  here it has nothing to be compared with, and its advantage is 0.
see: scale.group loss.grpo
like: advantage

= baseline.leave_one_out: the mean of the group's others
Unbiased: a completion is no part of what it is compared with.
equation:
  b_i = (Σ_j r_j − r_i) / (n − 1)
source: trainer/advantages.py advantages @ elif baseline == "leave_one_out"
config: config.strategy = strategy("grpo", baseline="leave_one_out")
keys: strategy(grpo).baseline
test: tests/trainer/test_advantages.py::test_leaving_one_out
paper: Ahmadian et al.: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
  LLMs, 2024, arXiv 2402.14740
see: loss.rloo
like: advantage

= baseline.batch: the mean of all completions of the rollout
Prompts are compared with one another.
equation:
  b = mean of all rewards
source: trainer/advantages.py advantages @ elif baseline == "batch"
config: config.strategy = strategy("grpo", baseline="batch", scale="batch")
keys: strategy(grpo).baseline
test: tests/trainer/test_advantages.py::test_baseline_and_scale_of_the_batch
test: tests/trainer/test_advantages.py::test_equal_rewards_of_a_whole_batch
see: loss.reinforce++
like: advantage

= baseline.none: rewards as they are
For rewards that are advantages already.
equation:
  b = 0
source: trainer/advantages.py advantages @ base_PxG = 0.0
config: config.strategy = strategy("grpo", baseline="none", scale="none")
keys: strategy(grpo).baseline
test: tests/trainer/test_explain.py::test_without_baseline_and_scale_rewards_are_advantages
see: scale.none
like: advantage

= scale.group: the deviation of the group
Divides by the standard deviation of the group's rewards, of a sample.
equation:
  s = sqrt( Σ (r − mean)² / (n − 1) ) + 1e-4
source: trainer/advantages.py advantages @ if scale == "group"
source: trainer/advantages.py _deviation
config: config.strategy = strategy("grpo", scale="group")
keys: strategy(grpo).scale
test: tests/trainer/test_advantages.py::test_baseline_and_scale_of_the_group
test: tests/trainer/test_advantages.py::test_dividing_by_nothing_is_refused
others: TRL: the same, 1e-4. verl: 1e-6 in place of 1e-4. AstrAI divides by the count, without an addend.
see: baseline.group
like: advantage

= scale.batch: the deviation of all rewards
One divisor for the whole rollout.
equation:
  s = standard deviation of all rewards, of a sample, + 1e-4
source: trainer/advantages.py advantages @ elif scale == "batch"
config: config.strategy = strategy("grpo", scale="batch")
keys: strategy(grpo).scale
test: tests/trainer/test_advantages.py::test_baseline_and_scale_of_the_batch
others: TRL: scale_rewards="batch".
see: baseline.batch
like: advantage

= scale.none: no division
Differences of rewards are advantages.
equation:
  s = 1
source: trainer/advantages.py advantages @ values_PxG = r_PxG - base_PxG
config: config.strategy = strategy("grpo", scale="none")
keys: strategy(grpo).scale
test: tests/trainer/test_explain.py::test_without_baseline_and_scale_rewards_are_advantages
others: TRL: scale_rewards="none". verl: norm_adv_by_std_in_grpo=False.
see: loss.dr_grpo
like: advantage

= rollout.dynamic_sampling, dynamic_sampling: groups that teach nothing are replaced
Prompts whose completions all have the same reward make room for the next ones, so many times over.
equation:
  a group is replaced if max r − min r ≤ 1e-6 · max(1, max |r|)
source: trainer/advantages.py zero_spread
source: trainer/rollout.py Rollouts._roll @ for attempt in
config: config.rollout.resample = 10
keys: rollout.resample
test: tests/trainer/test_grpo.py::test_groups_without_spread_are_replaced_by_the_next_prompts
test: tests/trainer/test_advantages.py::test_the_smallest_differences_that_count
paper: Yu et al.: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025, arXiv 2503.14476
see: loss.dapo metric.frac_reward_zero_std
"""
