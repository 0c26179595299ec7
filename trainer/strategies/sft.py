"""SFT: next-token cross-entropy on the trained parts of conversations.

Which tokens these are is decided by the data (`config.chat`, docs/sft.md) and stands in `loss_weights`, which is 0
elsewhere; with `normalize = "sequence"` the weights of each conversation add up to 1. So the objective is that of SEQ,
divided by the weights of the whole step.
"""

from typing import Any

import jax

from trainer.strategies import seq
from trainer.strategies.record import Strategy


def loss(model: Any, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None, cfg: Any):
  """See `seq.next_token_loss`.

  Args:
    cfg: `label_smoothing`, `z_loss`, `mtp_weight`, `dft`. (`normalize` is the data's: see above.)
  """
  return seq.next_token_loss(model, params, batch, rng, cfg, dft=cfg.dft, more=("entropy",))


# Next-token cross-entropy over the parts of conversations that `config.chat` says (fine-tuning).
SFT = Strategy(loss, data="conversations", options=dict(
    # token: the mean over the trained tokens of a step; sequence: the mean over its conversations of their means.
    normalize="token",
    # Weight each token's loss by its own probability, without a gradient (DFT, arXiv 2508.05629).
    dft=False,
    # These as for seq.
    label_smoothing=0.0,
    z_loss=0.0,
    mtp_weight=0.1,
), check=seq.check)
