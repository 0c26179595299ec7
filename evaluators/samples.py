"""Text samples: continuations of given prompts, written to samples/ and TensorBoard."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from evaluators import common
from trainer.errors import ConfigError
from trainer.generate.completion import Completion
from trainer.generate.sampler import Sampler
from trainer.generate.sampling import Options
from trainer.generate.stop_strings import StopStrings, columns
from trainer.modes.inspect import CONTEXT, token_texts


class Samples:
  """Continues each prompt by `max_new_tokens` tokens, or until a token that ends the document or a string of `stop`.

  Every token is drawn from the full softmax at `temperature` (0: the most likely one); what is drawn is a function of
  (seed, step, prompt, position) and of the parameters, see trainer/generate/sampler.py. Where the strategy has a
  reference policy in memory, what that writes from the same draws stands beside it. `samples/<name>_<step>.txt` is for
  people; `samples/<name>_<step>.jsonl` has a line for each prompt, with every token and its log-prob, in the
  distribution that it was drawn from.
  """

  wants_reference = True

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    self._name, self._setup, self._tokenizer = name, setup, setup.tokenizer
    self._prompts, self._new = tuple(cfg.prompts), cfg.max_new_tokens
    self._temperature, self._seed = cfg.temperature, setup.config.seed
    Options(self._temperature).check(f"evals.{name}.")
    if not self._prompts:
      raise ConfigError(f'evals.{name}.prompts is empty: give texts to continue, e.g. ("def ",).')
    self._stop = StopStrings(self._tokenizer, cfg.stop, cfg.keep_stop, f"evals.{name}.stop")
    bos = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
    self._ids = [np.array([*bos, *ids], np.int32) for ids in self._tokenizer.encode_batch(list(self._prompts))]
    if not all(map(len, self._ids)):
      raise ConfigError(f"evals.{name}.prompts has an empty prompt, and this tokenizer has no BOS token to start from.")
    self._sampler = Sampler(setup.model, setup.mesh, rows=cfg.batch_size or 32)
    self._sampler.check(self._ids, self._new, f"evals.{name}.")

  def run(self, params: Any, step: int, reference: Any = None) -> Iterator[tuple[str, float]]:
    completions = self._generate(params, step)
    rows = [{"prompt": prompt, "temperature": self._temperature, **self._row(ids, completion)}
            for prompt, ids, completion in zip(self._prompts, self._ids, completions, strict=True)]
    if reference is not None:
      for row, ids, other in zip(rows, self._ids, self._generate(reference, step), strict=True):
        row["reference"] = self._row(ids, other)
    shown = "\n\n".join(map(_shown, rows))
    if jax.process_index() == 0:
      common.write_samples(self._setup.workdir / "samples" / f"{self._name}_{step:08d}", rows, shown)
      self._setup.writer.write_texts(step, {f"eval/{self._name}": shown})
    yield "new_tokens", sum(len(completion.ids) for completion in completions) / len(completions)

  def _row(self, prompt_ids: np.ndarray, completion: Completion) -> dict[str, Any]:
    """What was generated, whole and token by token."""
    before = prompt_ids[-CONTEXT:].tolist()  # some tokenizers write the first token of a text differently
    return {"completion": self._stop.text(completion), **columns(completion.finish_reason, completion.stop_reason),
            "tokens": token_texts([*before, *completion.ids.tolist()], self._tokenizer)[len(before):],
            "ids": completion.ids.tolist(), "logprobs": [round(x, 4) for x in completion.logprobs.tolist()]}

  def _generate(self, params: Any, step: int) -> list[Any]:
    return self._sampler.generate(
        params, self._ids, max_new_tokens=self._new, temperature=self._temperature,
        stop_ids=self._tokenizer.stop_ids, seed=f"{self._seed}/{step}", **self._stop.options)


def _shown(row: dict[str, Any]) -> str:
  """A line of the table for people."""
  text = f"--- {row['prompt']!r}\n{row['prompt']}{row['completion']}"
  if "reference" in row:
    text += f"\n--- the reference\n{row['prompt']}{row['reference']['completion']}"
  return text
