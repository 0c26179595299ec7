"""Losses on tokens: pretraining and fine-tuning. The form is that of topic.py."""

GROUP = "Losses on tokens"

TEXT = """
= loss.seq, cross_entropy, nll: next-token cross-entropy (pretraining)
The negative log-probability of each token given those before it in its document, averaged over all trained tokens
of the optimizer step.
equation:
  L = Σ w[b,t] · ℓ[b,t] / Σ w[b,t]        over all rows, micro-batches and devices of the step
  ℓ = −log p(token)                         p = softmax(logits), float32
  w = 1, but 0 for the first token of a document and for padding

  with strategy.label_smoothing = ε and strategy.z_loss = z:
  ℓ = (1 − ε)(−log p(token)) + ε (log Z − mean logit) + z (log Z)²
source: trainer/strategies/seq.py next_token_loss @ def losses_of
source: trainer/logprobs.py cross_entropy
source: trainer/strategies/seq.py next_tokens
test: tests/trainer/strategies/test_seq.py::test_loss_weight_and_metrics
test: tests/trainer/strategies/test_seq.py::
  test_the_first_token_of_a_row_and_the_last_position_take_no_part
test: tests/trainer/test_update.py::test_the_loss_is_the_weighted_mean_over_the_whole_step
config: config.strategy = strategy("seq")
keys: strategy(seq).label_smoothing strategy(seq).z_loss
others: Transformers: its Trainer averaged the means of micro-batches until version 4.46 (October 2024), so that a
  micro-batch with few tokens counted as much as a full one; since then it divides by the step's items.
others: GPT-2 style trainers often cut one long stream of tokens into rows, where tokens of a document see those of
  the document before; here documents that share a row never see each other.
see: loss.sft loss.label_smoothing loss.z_loss exact.accumulation exact.packing

= loss.sft: cross-entropy of what the assistant says (fine-tuning)
The loss of seq with weights from the data: 1 on the parts of a conversation that chat.train_on names, 0 elsewhere.
equation:
  L = Σ w · ℓ / Σ w      ℓ as in loss.seq

  normalize = "token":     w = 1 on trained tokens: the mean over the step's trained tokens
  normalize = "sequence":  w = 1 / (trained tokens of the conversation): the mean over conversations of their means
source: trainer/strategies/sft.py loss
source: input_pipeline/batches.py fill @ if normalize == "sequence"
test: tests/trainer/strategies/test_sft.py::test_without_options_it_is_seq
test: tests/trainer/test_sft.py::test_packing_and_padding_change_neither_loss_nor_gradient
test: tests/input_pipeline/test_examples_chat.py::test_ids_and_weights_equal_the_references
config: config.strategy = strategy("sft")
keys: strategy(sft).normalize strategy(sft).dft strategy(sft).label_smoothing strategy(sft).z_loss chat.train_on
others: TRL: completion_only_loss (its default for prompt and completion) is chat.train_on="completion";
  assistant_only_loss needs a template with {% generation %} marks, which many stock templates lack. Here the spans
  follow from rendering the conversation turn by turn.
see: loss.seq loss.dft exact.accumulation

= loss.dft: dynamic fine-tuning: each token's loss times its probability
Tokens that the model finds unlikely count less; the factor gets no gradient.
equation:
  ℓ = −sg(p(token)) · log p(token)         sg: no gradient
  L = Σ w · ℓ / Σ w                        divided as in loss.sft
source: trainer/strategies/seq.py next_token_loss @ if dft:
test: tests/trainer/strategies/test_sft.py::
  test_dft_weighs_each_token_by_its_probability_without_a_gradient_through_it
config: config.strategy = strategy("sft", dft=True)
keys: strategy(sft).dft
paper: Wu et al.: On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification,
  2025, arXiv 2508.05629, eq. 9
others: TRL: loss_type="dft", the same formula.
see: loss.sft

= loss.label_smoothing: label smoothing
Moves a share ε of the target's mass to the uniform distribution over the real vocabulary (padded entries are not
real).
equation:
  (1 − ε)(−log p(token)) + ε (log Z − mean over v of logit_v)
  the second part is the cross-entropy with the uniform distribution
source: trainer/logprobs.py cross_entropy
test: tests/trainer/test_logprobs.py::test_cross_entropy_with_label_smoothing_and_z_loss
test: tests/trainer/strategies/test_seq.py::test_loss_weight_and_metrics
config: config.strategy = strategy("seq", label_smoothing=0.1)
keys: strategy(seq).label_smoothing strategy(sft).label_smoothing
paper: Szegedy et al.: Rethinking the Inception Architecture for Computer Vision, 2016, arXiv 1512.00567
others: The metric nll is the loss without it, loss the one with it.
see: loss.seq metric.nll

= loss.z_loss: z-loss on the output softmax
Keeps the logarithm of the softmax normaliser near 0, so that logits do not drift.
equation:
  z (log Z)²        log Z = log Σ_v exp(logit_v),  z = strategy.z_loss
source: trainer/logprobs.py cross_entropy @ if z_loss:
test: tests/trainer/test_logprobs.py::test_cross_entropy_with_label_smoothing_and_z_loss
test: tests/trainer/strategies/test_seq.py::test_loss_weight_and_metrics
config: config.strategy = strategy("seq", z_loss=1e-4)
keys: strategy(seq).z_loss strategy(sft).z_loss
paper: Chowdhery et al.: PaLM: Scaling Language Modeling with Pathways, 2022, arXiv 2204.02311, section 5
  (coefficient 1e-4)
see: loss.seq moe.z_loss
"""
