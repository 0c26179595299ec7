"""Metrics: rows of metrics.jsonl. The form is that of topic.py."""

GROUP = "Metrics"

TEXT = """
= metric.loss: the loss of the optimizer step
The first term of the objective, before the update was taken.
equation:
  Σ sum / Σ weight over all rows, micro-batches and devices of the step
source: trainer/metrics.py to_floats
source: trainer/update.py _by_source
test: tests/trainer/test_update.py::test_the_loss_is_the_weighted_mean_over_the_whole_step
test: tests/trainer/test_metrics.py::test_means_add_as_sums_and_weights
others: With several sources, loss/NAME is that of each source's rows. With several terms, objective is their sum.
others: For strategies on rewards its value says little: on-policy it is minus a mean of advantages.
see: metric.objective exact.accumulation

= metric.objective: the sum of the terms
Logged where there are several: the loss, the cross-entropy beside preferences, losses of a mixture of experts.
equation:
  Σ_terms ( Σ sum / Σ weight )
source: trainer/update.py _make_sums_fn @ if len(terms) > 1
test: tests/trainer/test_update.py::test_each_term_is_divided_by_its_own_total
see: metric.loss

= metric.nll: the loss without label smoothing, z-loss and DFT
Logged where one of these is on.
equation:
  Σ w (−log p) / Σ w
source: trainer/strategies/seq.py next_token_loss @ if label_smoothing or z_loss or dft
test: tests/trainer/strategies/test_seq.py::test_loss_weight_and_metrics
see: loss.label_smoothing metric.perplexity

= metric.accuracy, mean_token_accuracy: how often the right token is the most likely one
Ties count as right.
equation:
  Σ w [no entry has a higher logit than the target] / Σ w
source: trainer/logprobs.py _forward @ is_top=
test: tests/trainer/test_logprobs.py::test_is_top_counts_ties_as_right
others: TRL: mean_token_accuracy; that name is used here for preferences, of the chosen completions' tokens.

= metric.entropy: how open the policy's distribution is
In nats: log V if all tokens are equally likely, 0 if one is certain.
equation:
  Σ w H / Σ w,  H = −Σ_v p(v) log p(v);  of grpo at strategy.temperature, of preferences over all completion tokens
source: trainer/logprobs.py _forward @ entropy_BxT =
test: tests/trainer/strategies/test_sft.py::test_entropy_is_reported
test: tests/trainer/strategies/test_grpo.py::test_metrics_are_shares_of_trained_tokens
see: entropy_bonus

= metric.grad_norm: the norm of the gradient before it is clipped
Of the divided gradient, so that it does not depend on micro-batches or devices.
equation:
  √ Σ g² over all trained parameters, float32
source: trainer/optim.py global_norm
test: tests/trainer/test_update.py::test_clipping_bounds_the_step_and_logs_the_norm_before_it
see: exact.clipping metric.update_norm

= metric.update_norm, param_norm: how far parameters moved, and how large they are
Their ratio is the relative change of a step.
equation:
  update_norm = √ Σ (change)²,  param_norm = √ Σ p²  over trained parameters, after the update
source: trainer/update.py make_update_fn @ "param_norm":
test: tests/test_docs.py::test_the_callback_measures_the_updates

= metric.params_changed: the share of bfloat16 parameters that an update changed
Small updates of bfloat16 parameters vanish unless they are rounded at random.
equation:
  entries whose bits changed / entries
source: trainer/optim.py Optimizer._advance @ changed =
test: tests/trainer/test_moments.py::test_bfloat16_parameters_move_on_average_however_small_the_updates
keys: precision.params precision.stochastic_rounding

= metric.trained_tokens: the sum of the step's loss weights
What the loss of seq and sft is divided by.
equation:
  Σ w
source: trainer/update.py make_update_fn @ "trained_tokens":
test: tests/trainer/test_sft.py::test_packing_and_padding_change_neither_loss_nor_gradient

= metric.nonfinite_steps: steps that were skipped
How many steps of the run had a loss or a gradient that is not finite.
equation:
  count since the run's first start
source: trainer/update.py make_update_fn @ "nonfinite": state
test: tests/trainer/test_update.py::test_a_step_that_is_not_finite_changes_nothing
keys: optimizer.max_nonfinite_steps
see: exact.finite_guard

= metric.learning_rate: the learning rate of the update
And one more for each other combination of multiplier and warm-up in use.
equation:
  learning_rate · schedule(k),  k updates before this one
source: trainer/optim.py Optimizer.learning_rates
test: tests/trainer/test_optim.py::test_learning_rates_name_every_group_in_use
see: schedule.warmup

= metric.tokens_per_second: row positions a second
Padding included. Compilation, evaluation and checkpoints are left out, waiting for data is not.
equation:
  (row positions since the last row of metrics) / (seconds that were not paused)
  a step's seconds: from the end of the one before to its own, on the device
source: trainer/throughput.py Chrono.window
source: trainer/throughput.py Ends
test: tests/trainer/test_throughput.py::test_rates_leave_pauses_out_and_mfu_follows_its_formula
test: tests/trainer/test_throughput.py::test_a_step_s_time_is_from_end_to_end_whenever_its_metrics_are_fetched
see: metric.mfu

= metric.mfu, mfu: model FLOPs utilisation
The share of the devices' peak that the model's own arithmetic takes.
equation:
  mfu = flops_per_token · tokens_per_second / (devices · peak)
  flops_per_token = 6 N + 12 H K Σ over layers of the mean number of visible keys
  N weights in matrix products (unembedding included), H query heads, K head size; a causal row of T: (T + 1)/2 keys
  peak: dense bfloat16 of the data sheet; elsewhere measured, and what steps reach if that is more
source: trainer/throughput.py Chrono.window
source: models/transformer.py Transformer.flops_per_token
test: tests/trainer/test_throughput.py::test_rates_leave_pauses_out_and_mfu_follows_its_formula
test: tests/models/test_moe.py::test_flops_count_the_experts_that_a_token_passes_through
paper: Chowdhery et al.: PaLM: Scaling Language Modeling with Pathways, 2022, arXiv 2204.02311, appendix B
others: PaLM and nanoGPT count attention in full, 12 L H Q T, although half of it is masked; here by half, so that the
  same run has a lower MFU.
see: metric.tokens_per_second metric.goodput

= metric.goodput, goodput: the share of all time that counted
Since the run's first start, when it did not run included.
equation:
  (seconds of steps and rollouts that are in the run) / (seconds since its first start)
source: trainer/throughput.py Chrono.goodput
test: tests/trainer/test_throughput.py::test_goodput_is_the_share_of_all_time_since_the_first_start
see: metric.mfu

= metric.perplexity: e to the held-out loss
Of the evaluator loss, over all documents of a split.
equation:
  exp( Σ −log p / tokens )
source: evaluators/loss.py _values
test: tests/evaluators/test_loss.py::test_it_equals_a_plain_computation_document_by_document
others: Depends on the tokenizer; bits per byte do not.
see: metric.bits_per_byte

= metric.bits_per_byte, bpb, bits_per_byte: how well the held-out text is compressed
Comparable between tokenizers, and with gzip and xz.
equation:
  Σ −log₂ p(token) / UTF-8 bytes of the documents;  the end of a document is predicted, its beginning never
source: evaluators/loss.py _values
test: tests/evaluators/test_loss.py::test_it_equals_a_plain_computation_document_by_document
test: tests/evaluators/test_loss.py::test_baselines_compress_the_same_text
config: config.evals.val = evaluator(type="loss", baselines=("gzip", "xz"))
keys: evals.<name>.baselines
see: metric.perplexity

= metric.rewards/margins, rewards/margins, rewards/chosen, rewards/rejected: implicit rewards of preferences
Whatever the loss: β times the log-ratio.
equation:
  rewards/chosen = mean over pairs of β l₊,  rewards/rejected: β l₋,  rewards/margins: their difference
  without a reference: β π±, for simpo and orpo β π±/|y±|
source: trainer/strategies/dpo.py _pair_metrics
test: tests/trainer/strategies/test_dpo.py::test_values_and_metrics_are_those_of_the_sequences_alone
test: tests/trainer/strategies/test_dpo.py::test_rewards_without_a_reference
keys: strategy(dpo).beta
see: metric.rewards/accuracies loss.dpo

= metric.rewards/accuracies, rewards/accuracies: how often the chosen completion has the higher reward
Ties count one half: a policy that equals its reference has 0.5.
equation:
  mean over pairs of 1 if β l₊ > β l₋, 0 if less, ½ if they differ by less than 1e-6 of what they are made of
source: trainer/strategies/preference.py accuracy
test: tests/trainer/strategies/test_preference.py::test_ties_count_one_half_and_so_does_rounding
others: TRL counts a tie as wrong.
see: metric.rewards/margins

= metric.logps/chosen, logps, logps_mean, logps_ref: log-probabilities of completions
That logps/chosen falls during DPO is normal: the difference is what rises.
equation:
  logps/chosen = mean over pairs of Σ_t log p;  logps_mean/chosen: of Σ_t log p / |y|
  logps_ref/chosen: the same sums of the reference
source: trainer/strategies/dpo.py _pair_metrics
test: tests/trainer/strategies/test_dpo.py::test_values_and_metrics_are_those_of_the_sequences_alone
others: TRL: logps/chosen is a mean of sums, too.
see: loss.dpo

= metric.wpo_weight: WPO's factor
How likely the policy is to write the pairs of the step itself.
equation:
  mean over pairs of w₊ w₋
source: trainer/strategies/dpo.py _pair_metrics @ if pairs.weight is not None
test: tests/trainer/strategies/test_dpo.py::test_wpo_weighs_pairs_by_their_likelihood_without_a_gradient
see: dpo.wpo

= metric.kl, kl: how far the policy is from the reference
Of grpo the mean of k3, whatever the penalty and uncorrected; of kto the mean log-ratio of mismatched sequences.
equation:
  grpo: Σ (e^(−d) − 1 + d) / trained tokens,  d = log p − log p_ref
  kto:  mean over mismatched sequences of Σ_t d
source: trainer/strategies/grpo.py loss @ metrics["kl"]
source: trainer/strategies/kto.py loss @ metrics["kl"]
test: tests/trainer/strategies/test_grpo.py::test_metrics_are_shares_of_trained_tokens
test: tests/trainer/strategies/test_kto.py::test_values_and_metrics_are_those_of_the_sequences_alone
see: kl.k3 metric.policy/approx_kl

= metric.policy/approx_kl, approx_kl, ppo_kl: how far the policy is from what it was when the rollout began
0 in the first update after a rollout.
equation:
  mean over trained tokens of ρ − 1 − log ρ,  ρ = p / p_old of the token
source: trainer/strategies/grpo.py loss @ metrics["policy/approx_kl"]
test: tests/trainer/strategies/test_grpo.py::test_metrics_are_shares_of_trained_tokens
others: verl: ppo_kl, the mean of log p_old − log p. Not the metric kl, which compares with the reference.
see: metric.sampling/kl metric.policy/ratio_mean metric.kl

= metric.policy/ratio_mean, policy/ratio_mean: the mean ratio, before it is bounded
Exactly 1 in the first update after a rollout, in any precision; that is right, and its gradient is not 0.
equation:
  Σ ρ / trained tokens
source: trainer/strategies/grpo.py loss @ metrics["policy/ratio_mean"]
test: tests/trainer/test_old_policy.py::test_in_bfloat16_a_policy_that_does_not_move_has_ratios_of_one
see: ratio.token ratio.sequence

= metric.clip_ratio/region_mean, clip_fraction, clipfrac, clip_ratio: the share of tokens whose ratio is bounded
0 in the first update after a rollout.
equation:
  low_mean:  share with ρ < 1 − clip_low and A < 0;   high_mean: with ρ > 1 + clip_high and A > 0
  region_mean: either;   dual_mean: with ρ > clip_dual and A < 0
  low_min, high_max: the smallest and largest such share of one sequence
source: trainer/strategies/grpo.py _clip_metrics
test: tests/trainer/strategies/test_grpo.py::test_metrics_are_shares_of_trained_tokens
others: PPO codes and verl: clipfrac, pg_clipfrac. TRL: the same names; its low_min and high_max are over processes.
see: clip.ppo clip.dual

= metric.cispo_clip_ratio: the share of tokens whose weight is capped
Whatever their advantage; 0 in the first update after a rollout.
equation:
  share of trained tokens with ρ > clip_high
source: trainer/strategies/grpo.py _clip_metrics @ if clip == "cispo"
test: tests/trainer/strategies/test_grpo.py::test_metrics_are_shares_of_trained_tokens
see: clip.cispo

= metric.sampling/sampling_logp_difference, sampling/importance_sampling_ratio: sampler and trainer, token by token
Of the same tokens and parameters, by the two programs: rounding, about 1e-5 in float32, more in bfloat16.
equation:
  mean and max over trained tokens of |log p_old − log q|,  q: what the sampler computed
  sampling/importance_sampling_ratio/{min,mean,max}: of p_old / q, before it is bounded; with a correction of sequences,
  of their products
source: trainer/strategies/grpo.py correction
test: tests/trainer/test_grpo.py::test_what_is_trained_is_what_was_sampled
test: tests/trainer/strategies/test_grpo.py::test_metrics_are_shares_of_trained_tokens
others: TRL: the same names, between the sampler's log-probs (vLLM's) and its own; the ratio after it is bounded.
see: ratio.token correction.token metric.sampling/kl

= metric.sampling/kl, sampling/kl, sampling/correction_bounded, rollout_corr: how far the sampler is from the trainer
The divergence of the two distributions, and how often the correction's bounds take hold.
equation:
  sampling/kl: mean over trained tokens of r − 1 − log r,  r = p_old / q: k3 of KL(q ‖ p_old)
  sampling/correction_bounded: share of r (of tokens, or of sequences) below correction_min or above correction_max
source: trainer/strategies/grpo.py correction
test: tests/trainer/strategies/test_grpo.py::test_metrics_are_shares_of_trained_tokens
test: tests/trainer/strategies/test_grpo.py::test_what_another_program_sampled_is_weighted
others: verl: rollout_corr/k3_kl, and rollout_is_ratio_fraction_high and _low.
see: correction.token metric.sampling/sampling_logp_difference

= metric.reward, reward, reward_std: what completions earn
Of all that was sampled, replaced groups included.
equation:
  reward = mean over completions of Σ_k w_k r_k;  reward_std: mean over groups of the deviation within the group
  rewards/NAME/{mean,std,failed,abstained}: of one function
source: trainer/advantages.py statistics
test: tests/trainer/test_advantages.py::test_statistics_of_a_rollout
see: metric.frac_reward_zero_std

= metric.frac_reward_zero_std, frac_reward_zero_std, frac_without_reward: groups that teach nothing, missing rewards
Of groups with two rewards or more, those whose rewards are all equal; of completions, those without a reward.
equation:
  share of groups with max r − min r ≤ 1e-6 · max(1, max |r|)
  frac_without_reward: share of completions for which a function failed, or all abstained
source: trainer/advantages.py zero_spread
test: tests/trainer/test_advantages.py::test_equal_rewards_have_advantages_of_exactly_zero
others: max − min, not the deviation: that of equal numbers need not be 0 in floating point.
see: rollout.dynamic_sampling

= metric.advantage/abs_mean, advantage/abs_mean: the mean size of advantages
0 if nothing is to be learned.
equation:
  mean over completions trained on of |A|
source: trainer/advantages.py statistics @ "advantage/abs_mean"
test: tests/trainer/test_advantages.py::test_statistics_of_a_rollout
see: baseline.group

= metric.completions/clipped_ratio, completions/clipped_ratio: completions that did not end by themselves
Of all that was sampled; if it rises, completions get longer than rollout.max_new_tokens lets them.
equation:
  share of completions without a stop token or a stop string within rollout.max_new_tokens
source: trainer/groups.py metrics @ "completions/clipped_ratio"
test: tests/trainer/test_groups.py::test_metrics_are_of_all_that_was_sampled
keys: rollout.max_new_tokens rollout.mask_truncated

= metric.completions/stop_string_ratio, completions/stop_string_ratio: completions that a stop string ended
Of all that was sampled, where rollout.stop has any; of an environment's episodes, the last completion.
equation:
  share of completions whose last token completes a string of rollout.stop
source: trainer/environment.py Episodes.metrics
test: tests/trainer/test_stop_strings.py::test_a_rollout_is_trained_as_it_was_sampled
keys: rollout.stop rollout.keep_stop

= metric.rollout/timeouts, rollout/timeouts: episodes whose environment took too long
Of all that was sampled, where rollout.environment_timeout_seconds is set. They are not trained.
equation:
  number of episodes in which a call of reset or step took longer than the limit
source: trainer/environment.py Episodes.metrics
test: tests/trainer/test_environment_calls.py::test_a_call_that_hangs_costs_its_own_episode
keys: rollout.environment rollout.environment_timeout_seconds

= metric.moe/max_load, moe/dead_experts: how evenly experts are used
Of the whole step's tokens.
equation:
  max_load: mean over layers of (the fullest expert's assignments / the mean);  1: even
  dead_experts: share of experts without any token, over all layers
source: models/moe.py Load.to_floats
test: tests/models/test_moe.py::test_load_of_layers
see: moe.balance

= metric.pass@k, pass_at_k: the chance that one of k completions is right
From n completions, of which c are right.
equation:
  1 − C(n − c, k) / C(n, k), averaged over prompts
source: evaluators/generate.py pass_at_k
test: tests/evaluators/test_generate.py::test_pass_at_k_is_the_mean_over_all_choices_of_k
config: config.evals.math = evaluator(type="generate", num_samples=8, pass_at=(1, 8))
keys: evals.<name>.num_samples evals.<name>.pass_at
paper: Chen et al.: Evaluating Large Language Models Trained on Code, 2021, arXiv 2107.03374
"""
