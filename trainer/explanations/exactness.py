"""What does not depend on how a run is run, and parts of the model that the loss depends on; as topic.py says."""

GROUP = "Exactness"

TEXT = """
= exact.accumulation, gradient_accumulation, grad_accum: one division for the whole step
Micro-batches add up sums of losses, weights and float32 gradients; one division by the step's whole weight follows, so
that neither their number nor the devices change the gradient.
equation:
  gradient = ∇ Σ_terms ( Σ sum / Σ weight ),  each Σ over all micro-batches, rows and devices of the step
  several terms: the others' sums are scaled by (first term's whole weight) / (their whole weight), known from the batch
  no weight at all: the gradient is exactly 0
source: trainer/update.py _make_sums_fn @ loss_sum, weight, metrics, grads =
source: trainer/update.py _scales
source: trainer/update.py _divisor
test: tests/trainer/test_update.py::test_micro_batches_do_not_change_the_gradient
test: tests/trainer/test_update.py::test_each_term_is_divided_by_its_own_total
test: tests/trainer/test_update.py::test_nothing_to_train_is_a_zero_gradient
config: config.grad_accum_steps = 4
keys: batch_size grad_accum_steps
others: Transformers: averaged micro-batch means until version 4.46 (October 2024); since then its loss is divided by
  the items of the step.
others: verl (2025): token means of micro-batches are averaged.
see: loss.seq metric.loss aggregate.token

= exact.packing, packing: documents that share a row do not see one another
Attention takes segment numbers, positions begin anew, and the first token of a document is not predicted. So a packed
row computes what its documents compute alone.
equation:
  token t attends to s only if  segment[s] = segment[t] > 0  and  s ≤ t  (and within the window)
  w = 0 for the first token of a segment and for padding
source: input_pipeline/batches.py fill
source: trainer/strategies/seq.py next_tokens
test: tests/models/test_exactness.py::test_perturbing_one_document_leaves_the_others_bitwise
test: tests/models/test_exactness.py::test_packing_and_padding_change_nothing
test: tests/input_pipeline/test_packing.py::test_every_token_but_the_first_is_trained_exactly_once
config: config.input.packing = "best_fit"
keys: input.packing input.over_long seq_len
others: TRL: padding_free needs a FlashAttention variant to keep documents apart; with another attention it warns and
  goes on.
see: loss.seq exact.chunked_logits

= exact.chunked_logits, chunked_logits: no array of the size of the logits
Log-probs, entropy and cross-entropy are made from hidden states, so many vocabulary entries (or tokens) at a time,
forward and backward. A hand-written gradient needs three numbers a token.
equation:
  d log p(target)/dz = 1[target] − p,   d log Z/dz = p,   dH/dz = −p (log p + H),   d mean logit/dz = 1/V
source: trainer/logprobs.py token_stats
source: trainer/logprobs.py _logit_grads
source: trainer/token_sums.py sum_over_tokens
test: tests/trainer/test_logprobs.py::test_values_and_gradients_equal_full_logits
test: tests/trainer/test_program.py::test_no_strategy_ever_has_the_logits_of_the_whole_vocabulary
config: config.model.vocab_chunk = 8192
keys: model.vocab_chunk
others: TRL: chunked_nll for SFT; DPO and GRPO have the logits of the whole vocabulary unless Liger's kernels are used,
  with which options are left out.

= exact.data_order, data_order: rows are a function of the seed and the step
Shuffling and packing are arithmetic on row numbers; no iterator has a state.
equation:
  row k of the run = mixture.locate(k) → (source, epoch, row of the epoch's permutation)
source: input_pipeline/loader.py TrainData.batch
source: input_pipeline/packing.py permutation
test: tests/input_pipeline/test_loader.py::test_batches_are_the_same_by_any_route
test: tests/input_pipeline/test_loader.py::test_batch_size_changes_neither_rows_nor_their_order
keys: seed batch_size
others: Many trainers save the state of an iterator, or replay it up to the step, which depends on hosts and workers.
see: exact.resume

= exact.resume: a run that was stopped becomes the run that was not
A step is a function of the state and of the data's position. A checkpoint holds both, and what is left of a rollout.
equation:
  state_k+1 = update(state_k, batch(seed, k)),  dropout: fold_in(fold_in(key(seed), k), micro-batch)
source: trainer/update.py step_key
source: trainer/run.py Run.save
source: trainer/rollout.py Rollouts.saved
test: tests/test_faults.py::test_killed_at_any_moment_it_becomes_the_same_run
test: tests/trainer/test_grpo.py::test_stopped_anywhere_it_becomes_the_same_run
test: tests/trainer/test_sft.py::test_a_stopped_run_goes_on_as_if_it_had_not
keys: ckpt_steps ckpt_percent keep_last
others: TRL: the rollouts in flight are not in its checkpoints.
see: exact.data_order exact.finite_guard

= exact.finite_guard, finite_guard, nan: a step that is not finite changes nothing
Decided inside the compiled step, on all devices alike; rows that are to blame are written out.
equation:
  if Σ loss and |gradient| are finite: the update;  else parameters, optimizer and average as they were, bit by bit
source: trainer/update.py make_update_fn @ finite =
test: tests/trainer/test_update.py::test_a_step_that_is_not_finite_changes_nothing
test: tests/trainer/test_rows.py::test_a_nan_batch_is_skipped_counted_and_its_rows_are_written
keys: optimizer.max_nonfinite_steps
see: metric.nonfinite_steps exact.clipping

= exact.clipping, clipping, grad_clip: the gradient's global norm is bounded
Of the divided gradient, over all trained parameters together; within the bound no bit changes.
equation:
  g ← g · clip_norm / |g|   if |g| > clip_norm,   |g| = √ Σ g² in float32
source: trainer/optim.py clipping
test: tests/trainer/test_optim.py::test_clipping_scales_to_the_bound_and_reports_the_norm_before
test: tests/trainer/test_optim.py::test_clipping_changes_no_bit_within_the_bound
test: tests/trainer/test_optim.py::test_clipping_keeps_a_nonfinite_norm_visible
keys: optimizer.clip_norm
paper: Pascanu, Mikolov, Bengio: On the difficulty of training recurrent neural networks, 2013, arXiv 1211.5063
others: PyTorch: clip_grad_norm_ divides by |g| + 1e-6.
see: metric.grad_norm

= exact.reference, reference_policy: which policy is the reference
An artefact, never the weights that the run happened to resume: its source is named, its fingerprint stands in every
checkpoint, and a run goes on only with that same reference.
equation:
  start: the parameters the run began with;  base: the model with its adapter off;  a path: another run or folder
source: trainer/reference.py first_reference
source: trainer/reference.py overlay
test: tests/trainer/test_dpo.py::test_the_reference_is_what_the_run_began_with_and_does_not_move
test: tests/trainer/test_dpo.py::test_another_run_can_be_the_reference_and_must_stay_the_same
test: tests/trainer/test_dpo.py::test_precomputed_and_live_references_give_the_same_losses
config: config.strategy.reference = "start"
keys: strategy(dpo).reference strategy(dpo).precompute strategy(dpo).reference_ema
others: TRL: the model's weights when the trainer is made; with an adapter, the base.
see: loss.dpo dpo.reference_ema

= exact.moments, moments: moments in fewer bits, rounded at random
Moving averages change by less than the distance of two numbers of 8 bits; rounded to the nearest they would stand
still. The random bits are a function of seed, step and path.
equation:
  stored = x rounded up or down at random, so that its mean is x
source: trainer/moments.py Moments.encode
source: trainer/moments.py to_bfloat16
test: tests/trainer/test_moments.py::test_rounding_keeps_the_mean
test: tests/trainer/test_moments.py::test_moving_averages_move_where_rounding_to_the_nearest_stands_still
config: config.precision.moments = "int8"
keys: precision.moments precision.second_moments precision.stochastic_rounding
paper: Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit Optimizers via Block-wise Quantization, 2022, arXiv 2110.02861
others: The paper keeps a scale for each block of entries and rounds to the nearest; here there is one for each row.
see: optimizer.adamw

= moe.balance, balance_loss, load_balancing: an even load of experts
Keeps the router from sending all tokens of a document to a few experts.
equation:
  balance_loss · mean over tokens and layers of  Σ_e p_e · (E / k) · (share of the document's tokens that use e)
  p: the router's softmax over E experts, k of which a token uses; 1 if even
source: models/moe.py statistics @ if moe.balance_loss
source: models/moe.py report
test: tests/models/test_moe.py::test_losses_in_closed_form
test: tests/models/test_moe.py::test_statistics_equal_a_loop_over_tokens
test: tests/models/test_moe.py::test_micro_batches_change_neither_gradient_nor_terms_nor_load
config: config.model.moe.balance_loss = 0.001
keys: model.moe.balance_loss
paper: DeepSeek-AI: DeepSeek-V3 Technical Report, 2024, arXiv 2412.19437, eq. 17
paper: Fedus, Zoph, Shazeer: Switch Transformers, 2021, arXiv 2101.03961
others: Switch, and Transformers, take the shares over the tokens of a batch on a device, so that the loss depends on
  how it is cut; here they are of each document.
see: metric.moe/max_load moe.z_loss

= moe.z_loss, router_z_loss: small logits of the router
Keeps the logarithm of the router's normaliser near 0.
equation:
  z_loss · mean over tokens and layers of (log Σ_e exp(logit_e))²
source: models/moe.py statistics @ if moe.z_loss
test: tests/models/test_moe.py::test_losses_in_closed_form
config: config.model.moe.z_loss = 0.001
keys: model.moe.z_loss
paper: Zoph et al.: ST-MoE: Designing Stable and Transferable Sparse Expert Models, 2022, arXiv 2202.08906, eq. 5
see: moe.balance loss.z_loss

= neftune: noise on the embeddings
Even noise in training, the smaller the longer a document is.
equation:
  embedding + u · neftune_alpha / √(document length · hidden_size),  u even in [−1, 1) for each entry
source: models/layers.py embedding_noise
test: tests/trainer/strategies/test_sft.py::
  test_neftune_noise_has_the_papers_size_for_each_document_and_is_only_in_training
config: config.model.neftune_alpha = 5.0
keys: model.neftune_alpha
paper: Jain et al.: NEFTune: Noisy Embeddings Improve Instruction Finetuning, 2023, arXiv 2310.05914, algorithm 1
others: Transformers: neftune_noise_alpha takes the length of the padded row; here it is that of the document.

= lora, adapters: low-rank adapters, and how they begin
Only A and B are trained; at first they change nothing.
equation:
  y = x W + dropout(x) A B · scale,   scale = alpha / rank
  A [in, rank] even in ± 1/√in,  B [rank, out] = 0
source: models/layers.py Linear.__init__ @ self.lora_a =
source: models/layers.py Linear._finish
test: tests/models/test_lora.py::test_a_fresh_adapter_changes_nothing
test: tests/models/test_lora.py::test_initial_values_are_even_within_the_bound_and_differ_by_path_and_layer
test: tests/models/hf/test_peft.py::test_logits_are_those_of_peft
config: config.model.lora.rank = 16
keys: model.lora.rank model.lora.alpha model.lora.targets model.lora.dropout
paper: Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, 2021, arXiv 2106.09685
others: PEFT: the same initial values (kaiming_uniform with a = √5).
see: rslora

= rslora: adapters whose scale keeps with the rank
High ranks learn as fast as low ones.
equation:
  scale = alpha / √rank
source: models/spec.py _lora @ scale =
test: tests/models/test_lora.py::test_the_kernel_is_moved_by_a_times_b_times_the_scale
config: config.model.lora.update(rank=64, rslora=True)
keys: model.lora.rslora
paper: Kalajdzievski: A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023, arXiv 2312.03732
see: lora
"""
