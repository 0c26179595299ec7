"""Drawing tokens: temperature, truncation, and the log-probs that say of what distribution a token is.

B rows, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.errors import ConfigError

# Entries of the vocabulary that are drawn from at a time.
BLOCK = 128


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
  scaled_BxV = logits_BxV / numbers[0]
  masses_BxN, total_B = _masses(scaled_BxV)
  kept_BxV, kept_masses_BxN, kept_total_B = scaled_BxV, masses_BxN, total_B
  if truncated:
    full_BxV = scaled_BxV - total_B[:, None]
    kept_BxV = jnp.where(_kept(full_BxV, numbers[1], numbers[2], top_k), scaled_BxV, -jnp.inf)
    kept_masses_BxN, kept_total_B = _masses(kept_BxV)
  if greedy:
    tokens_B = jnp.argmax(scaled_BxV, axis=-1)
  else:
    tokens_B = jax.vmap(_draw_one)(keys_B, kept_BxV, kept_masses_BxN)
  drawn_B = jnp.take_along_axis(scaled_BxV, tokens_B[:, None], axis=1)[:, 0]
  return tokens_B.astype(jnp.int32), drawn_B - kept_total_B, drawn_B - total_B


def _blocks(logits: jax.Array) -> jax.Array:
  """[…, V] as […, N, BLOCK], with -inf after the last."""
  V = logits.shape[-1]
  padded = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, -V % BLOCK)], constant_values=-jnp.inf)
  return padded.reshape(*logits.shape[:-1], -1, BLOCK)


def _masses(logits_BxV: jax.Array) -> tuple[jax.Array, jax.Array]:
  """log Σ exp of each block of logits, [B, N], and of all, [B]."""
  top_B = logits_BxV.max(-1)
  sums_BxN = jnp.exp(_blocks(logits_BxV) - top_B[:, None, None]).sum(-1)
  return top_B[:, None] + jnp.log(sums_BxN), top_B + jnp.log(sums_BxN.sum(-1))


def _draw_one(key: jax.Array, logits_V: jax.Array, masses_N: jax.Array) -> jax.Array:
  """A token drawn from softmax(logits): first its block, then the token within it.

  The probability of a token is that of its block times its share of that. A random number for each block and each of
  BLOCK tokens does for this, where one for each entry of the vocabulary would take longer than the logits do.
  """
  of_block, of_token = jax.random.split(key)
  block = jax.random.categorical(of_block, masses_N)
  within = jax.random.categorical(of_token, jnp.take(_blocks(logits_V), block, axis=0))
  return block * BLOCK + within


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
