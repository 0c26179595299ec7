"""From a rollout's rewards and its critic's values to the advantage and the return of each token (PPO).

An action is a token that the policy sampled; the state in which it was chosen is all that stands before it, with value
V. What an environment says between two of them belongs to the step of the first. The reward of a completion is that of
its last token, and with `kl_in="reward"` each token has a penalty besides. After the last token nothing follows, also
where a completion was cut off. With δ_t = r_t + γ V_{t+1} - V_t, the advantage A_t is Σ_l (γλ)^l δ_{t+l} and the
return is A_t + V_t (Schulman et al. 2015, arXiv 1506.02438, eq. 16). All of it is NumPy in float64 on the host, over
the whole rollout, so that neither micro-batches nor devices decide what a token is compared with.

N trajectories of a rollout, L actions of the longest; n tokens of all.
"""

from typing import Any

import numpy as np

from trainer.rollouts.experience import Experience

# Added to variances, as in TRL's masked_whiten.
EPSILON = 1e-8


class Returns:
  """Makes advantages and returns; `cfg`: the options of the strategy (trainer/strategies/ppo.py)."""

  def __init__(self, cfg: Any):
    self._gamma, self._lambda = float(cfg.gamma), float(cfg.gae_lambda)
    self._whiten, self._whiten_rewards = cfg.whiten, cfg.whiten_rewards
    self.penalised = cfg.kl_coef > 0 and cfg.kl_in == "reward"
    self._coef, self._estimator = (float(cfg.kl_coef), str(cfg.kl)) if self.penalised else (0.0, "k1")

  def make(self, experience: Experience, values_n: np.ndarray, log_ratios_n: np.ndarray | None
           ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """({`old_values`, `returns`, `token_advantages`: float32 [n], 0 where nothing was sampled}, metrics).

    Args:
      experience: whose `advantages` are the rewards of its trajectories.
      values_n: of the critic before the rollout's updates.
      log_ratios_n: log p - log p_ref of each token when the rollout's training begins; None: there is no penalty.
    """
    actions_n = experience.weights > 0
    rows = np.repeat(np.arange(len(experience.lengths)), experience.lengths)[actions_n]
    counts_N = np.bincount(rows, minlength=len(experience.lengths))
    places = np.arange(len(rows)) - (np.cumsum(counts_N) - counts_N)[rows]
    there_NxL = np.arange(counts_N.max(initial=0)) < counts_N[:, None]

    def laid_out(values_n: np.ndarray) -> np.ndarray:
      out_NxL = np.zeros(there_NxL.shape)
      out_NxL[rows, places] = values_n[actions_n]
      return out_NxL

    def in_tokens(values_NxL: np.ndarray) -> np.ndarray:
      out_n = np.zeros(len(actions_n), np.float32)
      out_n[actions_n] = values_NxL[rows, places]
      return out_n

    values_NxL, rewards_NxL, metrics = laid_out(values_n), np.zeros(there_NxL.shape), {}
    if log_ratios_n is not None:
      ratios_NxL = laid_out(log_ratios_n)
      rewards_NxL -= self._coef * divergence(ratios_NxL, self._estimator)
      metrics |= _of_penalty(ratios_NxL, rewards_NxL, experience.advantages, there_NxL)
    answered = counts_N > 0
    rewards_NxL[answered, counts_N[answered] - 1] += experience.advantages[answered]
    if self._whiten_rewards:
      rewards_NxL = whitened(rewards_NxL, there_NxL, shift_mean=False)
    advantages_NxL = gae(rewards_NxL, values_NxL, self._gamma, self._lambda)
    returns_NxL = np.where(there_NxL, advantages_NxL + values_NxL, 0.0)
    metrics |= _of_values(values_NxL[there_NxL], returns_NxL[there_NxL], advantages_NxL[there_NxL])
    if self._whiten:
      advantages_NxL = whitened(advantages_NxL, there_NxL)
    return {"old_values": in_tokens(values_NxL), "returns": in_tokens(returns_NxL),
            "token_advantages": in_tokens(advantages_NxL)}, metrics


def gae(rewards_NxL: np.ndarray, values_NxL: np.ndarray, gamma: float, lam: float) -> np.ndarray:
  """Advantages, [N, L]; behind the end of a trajectory rewards and values are 0, and so they are there."""
  advantages_NxL, next_N = np.zeros_like(rewards_NxL), np.zeros(len(rewards_NxL))
  later_N = next_N
  for t in reversed(range(rewards_NxL.shape[1])):
    error_N = rewards_NxL[:, t] + gamma * next_N - values_NxL[:, t]
    later_N, next_N = error_N + gamma * lam * later_N, values_NxL[:, t]
    advantages_NxL[:, t] = later_N
  return advantages_NxL


def whitened(values_NxL: np.ndarray, there_NxL: np.ndarray, shift_mean: bool = True) -> np.ndarray:
  """(values - mean) / √(variance + 1e-8), of a sample, over what is there; without `shift_mean` the mean stays. As
  TRL's masked_whiten. Fewer than two values stay what they are."""
  there = values_NxL[there_NxL]
  if len(there) < 2:
    return values_NxL
  white_NxL = (values_NxL - there.mean()) / np.sqrt(there.var(ddof=1) + EPSILON)
  return np.where(there_NxL, white_NxL if shift_mean else white_NxL + there.mean(), 0.0)


def divergence(log_ratios: np.ndarray, estimator: str) -> np.ndarray:
  """`trainer.strategies.grpo.divergence` without bounds, in NumPy."""
  if estimator == "k1":
    return log_ratios
  return 0.5 * np.square(log_ratios) if estimator == "k2" else np.expm1(-log_ratios) + log_ratios


def _of_penalty(ratios_NxL: np.ndarray, penalties_NxL: np.ndarray, rewards_N: np.ndarray, there_NxL: np.ndarray
                ) -> dict[str, float]:
  """The divergence from the reference, and what it makes of rewards, by TRL's names."""
  if not there_NxL.any():
    return {}
  taken_N = penalties_NxL.sum(axis=1)
  return {"kl": float(divergence(ratios_NxL[there_NxL], "k3").mean()),
          "objective/non_score_reward": float(taken_N.mean()),
          "objective/rlhf_reward": float((taken_N + rewards_N).mean())}


def _of_values(values: np.ndarray, returns: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
  """How well the critic knew what was to come: 1 - Var(R - V) / Var(R), and what came; over all actions."""
  if not len(values):
    return {}
  spread = returns.var()
  explained = {"value/explained_variance": float(1.0 - (returns - values).var() / spread)} if spread > 0 else {}
  return explained | {"value/old_mean": float(values.mean()), "returns/mean": float(returns.mean()),
                      "returns/std": float(returns.std()), "advantage/abs_mean": float(np.abs(advantages).mean())}
