"""Log-probs of a rollout's tokens under the policy as it was when the rollout began, p_old of the ratios of GRPO.

They are those of the program that trains, not of the one that samples, which rounds otherwise: in bfloat16 by more than
narrow bounds on ratios are wide. A rollout's first step needs none, since the policy is then p_old itself. For each of
its other steps the very batch of that step is gone through before the first one, in its micro-batches and with its
dropout, so that a ratio shows how far the policy has moved and nothing else. That is a forward pass more for each step
but the first.

Where a critic values tokens (PPO), the first pass over the rollout is gone through whole, its first step as well: with
the critic, without dropout, and with the reference where that is part of the reward.

B rows, T places of a row, n tokens of an experience, E passes over it.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from trainer import strategies, update
from trainer.strategies import sequences


def make_score_fn(model: Any, cfg: Any, *, seed: int, micro_batch_size: int) -> Callable:
  """Returns `score(params, batch, step, reference, whole) -> {name: float32 [B, T], 0 where nothing is trained}`, to be
  jitted with `whole` static: `old_logprobs`, and with `whole` also `old_values` of the critic and, where `reference`,
  parameters, is not None, its `ref_logprobs`.

  Args:
    model: a `Model` (models/api.py), for `whole` an `ActorCritic` (trainer/strategies/critic.py).
    cfg: the strategy's options, of which `temperature` and `disable_dropout` count.
    seed, micro_batch_size: as for `update.make_update_fn`; `step` updates are done before the one that is meant.
  """
  temperature = strategies.temperature(cfg)

  def score(params: Any, batch: dict[str, jax.Array], step: jax.Array, reference: Any = None, whole: bool = False
            ) -> dict[str, jax.Array]:
    def of_micro(micro, index):
      rng = None if "disable_dropout" in cfg and cfg.disable_dropout else update.step_key(seed, step, index)
      found = {"old_logprobs": sequences.token_stats(model, params, micro, rng, ("logprob",), temperature)[0].logprob}
      if whole:
        found["old_values"] = model.values(params, micro)[0]
      if whole and reference is not None:
        found["ref_logprobs"] = sequences.token_logprobs(model, reference, sequences.unrouted(micro), temperature)
      return found

    return update.of_micro_batches(of_micro, batch, micro_batch_size)

  return score


def of_rollout(score: Callable[[dict[str, np.ndarray], int, bool], dict[str, np.ndarray]],
               batch_of: Callable[[int], dict[str, np.ndarray]], size: int, updates: int, epochs: int,
               with_critic: bool = False) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """(log p_old, float32 [E, n], NaN where the policy is p_old itself: in the first step; what `score` gives of the
  rollout's first pass, float32 [n] each, if there is a critic).

  Args:
    score: `(batch, step of the rollout, whole) -> {name: [B, T]}` on the host.
    batch_of: the batch of a step of the rollout, from 0 on, with `places` (trainer/rollouts/experience.py).
    size: n.
    updates, epochs: steps of a pass; passes.
    with_critic: whether the first pass is scored as a whole.
  """
  old_Exn = np.full((epochs, size), np.nan, np.float32)
  first: dict[str, np.ndarray] = {}
  for nth in range(0 if with_critic else 1, updates * epochs):
    batch, whole = batch_of(nth), with_critic and nth < updates
    places_BxT = batch.pop("places")
    there_BxT = places_BxT >= 0
    found = score(batch, nth, whole)
    if nth:
      old_Exn[nth // updates, places_BxT[there_BxT]] = found["old_logprobs"][there_BxT]
    for name, values_BxT in found.items() if whole else ():
      first.setdefault(name, np.zeros(size, np.float32))[places_BxT[there_BxT]] = values_BxT[there_BxT]
  return old_Exn, first
