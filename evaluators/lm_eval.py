"""Tasks of lm-evaluation-harness as an evaluator of a run: the parameters are scored where they are.

    config.evals.harness = dict(type="evaluators.lm_eval.LmEval", tasks=("arc_easy", "hellaswag"), limit=200,
                                eval_percent=25.0)
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from evaluators import common
from input_pipeline.examples.prompts import Prompter
from input_pipeline.tokenizer.tokenizer import begins_with
from trainer.errors import ConfigError
from trainer.generate.command import Loaded
from trainer.lm_eval import command as lm_eval

# Of `cfg`, what is handed to lm_eval's simple_evaluate.
OPTIONS = ("num_fewshot", "limit", "apply_chat_template", "system_instruction", "fewshot_as_multiturn", "gen_kwargs")


class LmEval:
  """Yields `<task>/<metric>` for each task, and `<task>/<metric>_<filter>` where lm_eval filters answers.

  cfg: tasks (names of tasks, groups or tags), include_path (a folder with further tasks), max_length (default:
  seq_len), batch_size (default: that of a micro-batch), and OPTIONS, as the arguments of `simple_evaluate`.
  """

  def __init__(self, name: str, cfg: Any, setup: common.Setup):
    lm_eval.require()
    from trainer.lm_eval.harness import Harness  # imports lm_eval
    tasks = cfg.get("tasks")
    if not tasks or isinstance(tasks, str):
      raise ConfigError(f'evals.{name}.tasks is {tasks!r}; it must be a list of names, as in tasks=("arc_easy",).')
    config = setup.config
    self._include_path, self._options = cfg.get("include_path"), {
        key: cfg[key] for key in OPTIONS if cfg.get(key) is not None}
    self._tasks = lm_eval.known(list(tasks), self._include_path, f"evals.{name}.tasks")
    loaded = Loaded(setup.model, None, setup.tokenizer, Prompter(config, setup.tokenizer), str(setup.workdir))
    self._lm = Harness(
        loaded, setup.mesh, head=begins_with(config.tokenizer, setup.tokenizer),
        max_length=cfg.get("max_length") or config.seq_len,
        batch_size=cfg.batch_size or config.batch_size // config.grad_accum_steps)

  def run(self, params: Any, step: int) -> Iterator[tuple[str, float]]:
    self._lm.params = params
    with _same_randomness():
      results = lm_eval.evaluate(self._lm, self._tasks, include_path=self._include_path, bootstrap_iters=0,
                                 **self._options)
    self._lm.params = None  # the state is donated to the next step
    for task, values in results["results"].items():
      for key, value in values.items():
        metric, _, kind = key.partition(",")
        if kind and isinstance(value, (int, float)) and not metric.endswith("_stderr"):
          yield f"{task}/{metric}{'' if kind == 'none' else f'_{kind}'}", float(value)


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
  """lm_eval seeds the generators of the whole process; they are put back."""
  before, before_np = random.getstate(), np.random.get_state()
  try:
    yield
  finally:
    random.setstate(before)
    np.random.set_state(before_np)
