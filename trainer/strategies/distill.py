"""DISTILL: learning from a teacher's distributions over what the data, or the student itself, say.

At each trained token the student's distribution is pulled towards the teacher's, by a generalised Jensen-Shannon
divergence (trainer/strategies/divergence.py): GKD (arXiv 2306.13649), and with beta = 0 on given texts the loss of
Hinton et al. (arXiv 1503.02531) without its factor T². Off-policy the texts are conversations, whose trained tokens are
those of SFT. On-policy (`rollout.num_prompts` above 0) they are completions that the student samples; its choice of
tokens has no gradient, as in GKD. The teacher is another model over the same tokens (trainer/strategies/teacher.py).
"""

from typing import Any

import jax
import jax.numpy as jnp

from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.strategies import divergence, seq, teacher
from trainer.strategies.record import OF_ROLLOUTS, Strategy


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any, reference: Any = None):
  """The divergence of each trained token.

  Args:
    model, params, batch, rng: see `seq.next_token_loss`; dropout is the student's alone.
    cfg: `teacher`, `beta`, `temperature`. (`normalize` is the data's.)
    reference: what has the teacher's parameters as `teacher`.

  Returns:
    (terms, metrics): `loss` is weighted by `loss_weights`; with them the model's own.
  """
  out = model.apply(params, batch, rng=rng, train=rng is not None)
  other, given = teacher.make_model(cfg.teacher, "float32", out.hidden.dtype.name), reference["teacher"]
  _, weights_BxT = seq.next_tokens(batch)
  loss_BxT = divergence.jensen_shannon(
      divergence.Side(out.hidden, model.unembedding(params), model.final_logit_cap, model.num_real_vocab),
      divergence.Side(other.apply(given, batch).hidden, other.unembedding(given), other.final_logit_cap,
                      other.num_real_vocab),
      beta=cfg.beta, chunk=model.vocab_chunk, temperature=cfg.temperature)
  mean = Mean(jnp.sum(loss_BxT * weights_BxT, axis=1), jnp.sum(weights_BxT, axis=1))
  return {"loss": mean, **out.losses}, dict(out.metrics)


def check(cfg: Any, grad_accum_steps: int, cfg_model: Any) -> None:
  """Refuses options that cannot work."""
  del grad_accum_steps
  if not 0 <= cfg.beta <= 1:
    raise ConfigError(f"strategy.beta is {cfg.beta}; allowed: 0 (forward KL) to 1 (reverse KL).")
  if not cfg.temperature > 0:
    raise ConfigError(f"strategy.temperature is {cfg.temperature}; it must be above 0.")
  source = teacher.find(cfg.teacher)
  if "none" != cfg_model.vision.tower or source.section.vision.tower != "none":
    raise ConfigError("strategy distill learns from texts alone, but the student or its teacher sees images.")


# The teacher's distribution at the trained tokens of conversations, or at those of sampled completions (knowledge
# distillation).
DISTILL = Strategy(loss, data="conversations", rewarded=False, teacher=True, check=check, headline={
    "loss": "divergence {:.3f}", **OF_ROLLOUTS}, options=dict(
    # The model to learn from: a Hugging Face folder, or a run (its workdir or a checkpoint), with the same tokenizer.
    teacher=str,
    # The divergence: 0 forward KL(teacher ‖ student), 1 reverse, between them generalised Jensen-Shannon.
    beta=0.5,
    # Divides the logits of both.
    temperature=1.0,
    # As for sft; of conversations alone.
    normalize="token",
))
