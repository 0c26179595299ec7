"""Text samples: continuations of given prompts, written to samples/ and TensorBoard."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from evaluators import common
from trainer.config import ConfigError


class Samples:
  """Continues each prompt by `max_new_tokens` tokens, or until the end-of-document token.

  Every token is drawn from the full softmax at `temperature` (0: the most likely one) with a key that is a function
  of (seed, step, prompt, position) alone. Each new token takes a forward pass over the whole row.
  """

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    self._name, self._setup, self._tokenizer = name, setup, setup.tokenizer
    self._prompts, self._new = tuple(cfg.prompts), cfg.max_new_tokens
    self._temperature, self._seed = cfg.temperature, setup.config.seed
    if not self._prompts:
      raise ConfigError(f'evals.{name}.prompts is empty: give texts to continue, e.g. ("def ",).')
    bos = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
    encoded = [bos + list(ids) for ids in self._tokenizer.encode_batch(list(self._prompts))]
    if not all(encoded):
      raise ConfigError(f"evals.{name}.prompts has an empty prompt, and this tokenizer has no BOS token to start from.")
    self._lengths = np.array([len(ids) for ids in encoded], np.int32)
    width = int(self._lengths.max()) + self._new
    self._tokens = np.full((len(encoded), width), self._tokenizer.pad_id, np.int32)
    for row, ids in zip(self._tokens, encoded, strict=True):
      row[:len(ids)] = ids
    self._sample = jax.jit(_make_sampler(setup.model, self._new, self._temperature))

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]:
    rng = jax.random.fold_in(jax.random.key(self._seed), step)
    tokens = np.asarray(self._sample(params, self._tokens, self._lengths, rng))
    texts, produced = [], 0
    for prompt, row, length in zip(self._prompts, tokens, self._lengths, strict=True):
      new = row[length:length + self._new]
      stops = np.flatnonzero(new == self._tokenizer.eos_id) if self._tokenizer.eos_id is not None else ()
      new = new[:stops[0]] if len(stops) else new
      produced += len(new)
      texts.append((prompt, self._tokenizer.decode(new)))
    if jax.process_index() == 0:
      folder = self._setup.workdir / "samples"
      folder.mkdir(exist_ok=True)
      shown = "\n\n".join(f"--- {prompt!r}\n{prompt}{text}" for prompt, text in texts)
      (folder / f"{self._name}_{step:08d}.txt").write_text(shown + "\n", encoding="utf-8")
      self._setup.writer.write_texts(step, {f"eval/{self._name}": shown})
    yield "new_tokens", produced / len(texts)


def _make_sampler(model: Any, max_new: int, temperature: float):
  def sample(params: Any, tokens_BxT: jax.Array, lengths_B: jax.Array, rng: jax.Array) -> jax.Array:
    B, T = tokens_BxT.shape
    rows_B = jnp.arange(B)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(rng, row))(rows_B)
    positions_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))

    def step(i, tokens_BxT):
      last_B = lengths_B + i - 1
      batch = {"tokens": tokens_BxT, "positions": positions_BxT,
               "segment_ids": (positions_BxT <= last_B[:, None]).astype(jnp.int32)}
      hidden_Bx1xD = model.apply(params, batch)[rows_B, last_B][:, None]
      logits_BxV = model.unembed(params, hidden_Bx1xD)[:, 0]
      if temperature == 0:
        new_B = jnp.argmax(logits_BxV, axis=-1)
      else:
        at_position = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys_B)
        new_B = jax.vmap(jax.random.categorical)(at_position, logits_BxV / temperature)
      return tokens_BxT.at[rows_B, last_B + 1].set(new_B.astype(tokens_BxT.dtype))

    return jax.lax.fori_loop(0, max_new, step, tokens_BxT)

  return sample
