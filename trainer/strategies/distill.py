"""DISTILL: learning from a teacher's distributions over what the data, or the student itself, say.

At each trained token the student's distribution is pulled towards the teacher's, by a generalised Jensen-Shannon
divergence (trainer/strategies/divergence.py): GKD (arXiv 2306.13649), and with beta = 0 on given texts the loss of
Hinton et al. (arXiv 1503.02531) without its factor T². Off-policy the texts are conversations, whose trained tokens are
those of SFT. On-policy (`rollout.num_prompts` above 0) they are completions that the student samples; its choice of
tokens has no gradient, as in GKD. The teacher is another model over the same tokens (trainer/strategies/teacher.py), or
several are, each with its weight or for the rows that name it (trainer/strategies/teachers.py).

With `cached_top_k` what the teacher says of the data is computed before the first step, cut to its k most probable
tokens (trainer/strategies/top_k.py), and it leaves the memory. With `teacher` "rows" the data bring it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.strategies import divergence, seq, sequences, teacher, teachers, top_k
from trainer.strategies.record import OF_COMPLETIONS, Strategy


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any, reference: Any = None):
  """The divergence of each trained token.

  Args:
    model, params, batch, rng: see `seq.next_token_loss`; dropout is the student's alone.
    cfg: `teacher` or `teachers`, `beta`, `temperature`. (`normalize` is the data's.)
    reference: what has the teacher's parameters, or those of several by name, as `teacher`. Not looked at where the
      batch has `teacher_ids` and `teacher_logprobs` (`input_pipeline.reference.of_teachers`).

  Returns:
    (terms, metrics): `loss` is weighted by `loss_weights`; of several teachers, `teachers.metrics`; with them the
    model's own.
  """
  out = model.apply(params, batch, rng=rng, train=rng is not None)
  student = divergence.Side(out.hidden, model.unembedding(params), model.final_logit_cap, model.num_real_vocab)
  options = dict(beta=cfg.beta, chunk=model.vocab_chunk, temperature=cfg.temperature)
  others = {name: teacher.make_model(one.path, "float32", out.hidden.dtype.name, one.key)
            for name, one in teachers.of(cfg).items()}
  _, weights_BxT = seq.next_tokens(batch)
  if "teacher_ids" in batch:
    real = min([model.num_real_vocab, *(other.num_real_vocab for other in others.values())])
    said = [jnp.roll(batch[key], -1, axis=1) for key in ("teacher_ids", "teacher_logprobs")]
    losses = [top_k.jensen_shannon(student._replace(num_real_vocab=real), said[0][:, :, n], said[1][:, :, n], **options)
              for n in range(said[0].shape[2])]
  else:
    given, read = teachers.apart(cfg, reference["teacher"]), sequences.unrouted(batch)
    losses = [divergence.jensen_shannon(student, divergence.Side(
        other.apply(given[name], read).hidden, other.unembedding(given[name]), other.final_logit_cap,
        other.num_real_vocab), **options) for name, other in others.items()]
  loss_BxT, metrics = losses[0], dict(out.metrics)
  if shares := teachers.shares(batch, len(losses)):
    # Where a share is 0 nothing is added, so that what one teacher alone gives stays what it is, to the bit.
    loss_BxT = sum((jnp.where(share > 0, share * of_one, 0.0)
                    for (_, share), of_one in zip(shares, losses, strict=True)), jnp.zeros(()))
    metrics |= teachers.metrics(list(others), losses, shares, weights_BxT)
  mean = Mean.of(loss_BxT, weights_BxT)
  return {"loss": mean, **out.losses}, metrics


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any) -> None:
  """Refuses options that cannot work."""
  if not 0 <= cfg.beta <= 1:
    raise ConfigError(f"strategy.beta is {cfg.beta}; allowed: 0 (forward KL) to 1 (reverse KL).")
  if not cfg.temperature > 0:
    raise ConfigError(f"strategy.temperature is {cfg.temperature}; it must be above 0.")
  if cfg.cached_top_k < 0:
    raise ConfigError(f"strategy.cached_top_k is {cfg.cached_top_k}; it must be at least 0 (the whole distribution).")
  if teachers.in_rows(cfg):
    if not cfg.cached_top_k:
      raise ConfigError("strategy.teacher is 'rows', and strategy.cached_top_k is 0. Say how many entries of each "
                        "token are kept: as many as the column teacher_ids has, or fewer.")
    if cfg.temperature != 1:
      raise ConfigError(f"strategy.temperature is {cfg.temperature}, but what rows bring of their teacher is said at "
                        "temperature 1, and of few tokens cannot be put to another. Use 1, or name a model as teacher.")
  sources = [teacher.find(one.path, one.key) for one in teachers.of(cfg).values()]
  if "none" != cfg_model.vision.tower or any(source.section.vision.tower != "none" for source in sources):
    raise ConfigError("strategy distill learns from texts alone, but the student or its teacher sees images.")


# The teacher's distribution at the trained tokens of conversations, or at those of sampled completions (knowledge
# distillation).
DISTILL = Strategy(loss, data="conversations", rewarded=False, teacher=True, check=check, headline={
    "loss": "divergence {:.3f}", **OF_COMPLETIONS}, options=dict(
    # The model to learn from: a Hugging Face folder, or a run (its workdir or a checkpoint), with the same tokenizer.
    # Or rows: the data have its most probable tokens, in the columns teacher_ids and teacher_logprobs.
    teacher=str,
    # Several in place of one: {name: dict(path=…, weight=1.0, sources=(), keys=())}. The loss of a token is the
    # weighted mean of the divergences from those that teach its row: those of its source, and those without sources.
    teachers={},
    # The column in which each row names the one of `teachers` that it learns from, by its name or one of its `keys`
    # (multi-teacher distillation by domain); None: there is none.
    teacher_key=str,
    # The divergence: 0 forward KL(teacher ‖ student), 1 reverse, between them generalised Jensen-Shannon.
    beta=0.5,
    # Divides the logits of both.
    temperature=1.0,
    # Compute before the first step, and keep beside the token cache, the teacher's so many most probable tokens at each
    # trained one, with the mass of the rest; it then leaves the memory. 0: its whole distribution, in each step. With
    # teacher="rows": keep so many of those that rows have.
    cached_top_k=0,
    # As for sft; of conversations alone.
    normalize="token",
))
