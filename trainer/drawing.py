"""Drawing tokens: temperature, truncation, and the log-probs that say of what distribution a token is.

B rows, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.config import ConfigError


class Options(NamedTuple):
  """How a token is drawn, from softmax(logits / temperature).

  Truncation keeps the tokens that pass all three, and draws from them alone in proportion: `top_k` most likely ones
  (0: all); of these, the fewest most likely ones with a share of at least `top_p`; those at least `min_p` times as
  likely as the most likely. Tokens as likely as the least likely one that is kept are kept too.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  @property
  def truncated(self) -> bool:
    """Whether some tokens cannot be drawn."""
    return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

  def check(self, where: str = "") -> None:
    """Raises ConfigError for values out of range; `where` precedes the keys' names."""
    allowed = dict(temperature=(self.temperature >= 0, "0 (the most likely token) or more"),
                   top_k=(self.top_k >= 0, "0 (no limit) or more"), top_p=(0 < self.top_p <= 1, "above 0, up to 1"),
                   min_p=(0 <= self.min_p <= 1, "0 to 1"))
    for key, (fits, what) in allowed.items():
      if not fits:
        raise ConfigError(f"{where}{key}: found {getattr(self, key)}, allowed: {what}.")


def draw(keys_B: jax.Array, logits_BxV: jax.Array, numbers: jax.Array, top_k: jax.Array, *, greedy: bool,
         truncated: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Tokens int32 [B], their log-probs in the distribution they are drawn from and without truncation, float32 [B].

  Args:
    keys_B: random keys.
    logits_BxV: float32, -inf for what is never drawn.
    numbers: temperature, top_p, min_p; see `Options`.
    top_k: see `Options`.
    greedy: take the most likely token; the temperature must then be 1.
    truncated: whether top_k, top_p or min_p leave anything out.
  """
  full_BxV = jax.nn.log_softmax(logits_BxV / numbers[0])
  kept_BxV = full_BxV
  if truncated:
    kept_BxV = jax.nn.log_softmax(jnp.where(_kept(full_BxV, numbers[1], numbers[2], top_k), full_BxV, -jnp.inf))
  if greedy:
    tokens_B = jnp.argmax(full_BxV, axis=-1)
  else:
    tokens_B = jax.vmap(jax.random.categorical)(keys_B, kept_BxV)
  kept_B, full_B = (jnp.take_along_axis(part, tokens_B[:, None], axis=1)[:, 0] for part in (kept_BxV, full_BxV))
  return tokens_B.astype(jnp.int32), kept_B, full_B


def _kept(logprobs_BxV: jax.Array, top_p: jax.Array, min_p: jax.Array, top_k: jax.Array) -> jax.Array:
  """Which tokens truncation leaves, [B, V]."""
  V = logprobs_BxV.shape[1]
  ordered_BxV = jnp.sort(logprobs_BxV, axis=1, descending=True)
  kth_B = jnp.where(top_k > 0, ordered_BxV[:, jnp.clip(top_k, 1, V) - 1], -jnp.inf)
  shares_BxV = jax.nn.softmax(jnp.where(ordered_BxV >= kth_B[:, None], ordered_BxV, -jnp.inf))
  before_BxV = jnp.cumsum(shares_BxV, axis=1) - shares_BxV
  pth_B = jnp.min(jnp.where(before_BxV < top_p, ordered_BxV, jnp.inf), axis=1)
  # A sum of float32 may reach 1 before its end.
  pth_B = jnp.where(top_p < 1, pth_B, -jnp.inf)
  mth_B = ordered_BxV[:, 0] + jnp.log(min_p)
  least_B = jnp.maximum(jnp.maximum(kth_B, pth_B), mth_B)
  return logprobs_BxV >= least_B[:, None]
