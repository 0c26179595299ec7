"""Text samples: continuations of given prompts, written to samples/ and TensorBoard."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from evaluators import common
from trainer.config import ConfigError
from trainer.drawing import Options
from trainer.sampler import Sampler


class Samples:
  """Continues each prompt by `max_new_tokens` tokens, or until a token that ends the document.

  Every token is drawn from the full softmax at `temperature` (0: the most likely one); what is drawn is a function of
  (seed, step, prompt, position) and of the parameters, see trainer/sampler.py. Where the strategy has a reference
  policy in memory, what that writes from the same draws stands beside it.
  """

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    self._name, self._setup, self._tokenizer = name, setup, setup.tokenizer
    self._prompts, self._new = tuple(cfg.prompts), cfg.max_new_tokens
    self._temperature, self._seed = cfg.temperature, setup.config.seed
    Options(self._temperature).check(f"evals.{name}.")
    if not self._prompts:
      raise ConfigError(f'evals.{name}.prompts is empty: give texts to continue, e.g. ("def ",).')
    bos = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
    self._ids = [np.array([*bos, *ids], np.int32) for ids in self._tokenizer.encode_batch(list(self._prompts))]
    if not all(map(len, self._ids)):
      raise ConfigError(f"evals.{name}.prompts has an empty prompt, and this tokenizer has no BOS token to start from.")
    self._sampler = Sampler(setup.model, setup.mesh, rows=cfg.batch_size or 32)
    self._sampler.check(self._ids, self._new, f"evals.{name}.")

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]:
    completions = self._generate(params, step)
    texts = [f"--- {prompt!r}\n{prompt}{self._tokenizer.decode(completion.text_ids)}"
             for prompt, completion in zip(self._prompts, completions, strict=True)]
    if self._setup.reference is not None:
      beside = [self._tokenizer.decode(c.text_ids) for c in self._generate(self._setup.reference(), step)]
      texts = [f"{text}\n--- the reference\n{prompt}{other}"
               for text, prompt, other in zip(texts, self._prompts, beside, strict=True)]
    shown = "\n\n".join(texts)
    if jax.process_index() == 0:
      folder = self._setup.workdir / "samples"
      folder.mkdir(exist_ok=True)
      (folder / f"{self._name}_{step:08d}.txt").write_text(shown + "\n", encoding="utf-8")
      self._setup.writer.write_texts(step, {f"eval/{self._name}": shown})
    yield "new_tokens", sum(len(completion.ids) for completion in completions) / len(completions)

  def _generate(self, params: Any, step: int) -> list[Any]:
    return self._sampler.generate(
        params, self._ids, max_new_tokens=self._new, temperature=self._temperature,
        stop_ids=self._tokenizer.stop_ids, seed=f"{self._seed}/{step}")
