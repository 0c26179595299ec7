"""Log-probs of a rollout's tokens under the policy as it was when the rollout began, p_old of the ratios of GRPO.

They are those of the program that trains, not of the one that samples, which rounds otherwise: in bfloat16 by more than
narrow bounds on ratios are wide. A rollout's first step needs none, since the policy is then p_old itself. For each of
its other steps the very batch of that step is gone through before the first one, in its micro-batches and with its
dropout, so that a ratio shows how far the policy has moved and nothing else. That is a forward pass more for each step
but the first.

B rows, T places of a row, n tokens of an experience, E passes over it.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trainer import strategies, update
from trainer.strategies import sequences


def make_score_fn(model: Any, cfg: Any, *, seed: int, micro_batch_size: int) -> Callable:
  """Returns `score(params, batch, step) -> log-probs`, float32 [B, T], 0 where nothing is trained, to be jitted.

  Args:
    model: a `Model` (models/api.py).
    cfg: the strategy's options, of which `temperature` and `disable_dropout` count.
    seed, micro_batch_size: as for `update.make_update_fn`; `step` updates are done before the one that is meant.
  """

  def score(params: Any, batch: dict[str, jax.Array], step: jax.Array) -> jax.Array:
    def of_micro(micro, index):
      rng = None if "disable_dropout" in cfg and cfg.disable_dropout else update.step_key(seed, step, index)
      return sequences.token_stats(model, params, micro, rng, ("logprob",), strategies.temperature(cfg))[0].logprob

    return update.of_micro_batches(of_micro, batch, micro_batch_size)

  return score


def of_rollout(score: Callable[[dict[str, np.ndarray], int], np.ndarray],
               batch_of: Callable[[int], dict[str, np.ndarray]], size: int, updates: int, epochs: int) -> np.ndarray:
  """float32 [E, n]; NaN where the policy is p_old itself: in the first step.

  Args:
    score: `(batch, step of the rollout) -> log-probs` on the host, [B, T].
    batch_of: the batch of a step of the rollout, from 0 on, with `places` (trainer/rollouts/experience.py).
    size: n.
    updates, epochs: steps of a pass; passes.
  """
  old_Exn = np.full((epochs, size), np.nan, np.float32)
  for nth in range(1, updates * epochs):
    batch = batch_of(nth)
    places_BxT = batch.pop("places")
    there_BxT = places_BxT >= 0
    old_Exn[nth // updates, places_BxT[there_BxT]] = score(batch, nth)[there_BxT]
  return old_Exn
