"""Score with lm-evaluation-harness: python -m trainer.lm_eval --workdir=DIR [--step=N] | --hf=DIR --tasks=a,b […]

A checkpoint of a run, or a Hugging Face folder, on the devices that are here, without an export and without PyTorch.
Tasks are those of lm_eval, and of a folder of yours with --include_path. Prints lm_eval's table; --out=FILE has all it
found as JSON. `pip install 'weft[lm-eval]'`; docs/evaluation.md.
"""

import difflib
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from input_pipeline.tokenizer.tokenizer import begins_with
from models.hf import files
from trainer import startup
from trainer.config import checks as config_checks
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.generate import command as generate

# Of a model whose config does not say how long texts may be.
MAX_LENGTH = 2048


def require() -> Any:
  """The package lm_eval.

  Raises:
    ConfigError: it cannot be imported, or is too old.
  """
  try:
    import lm_eval
    from lm_eval.api.model import TemplateLM  # noqa: F401
    return lm_eval
  except ImportError as e:
    raise ConfigError(f"lm-evaluation-harness cannot be imported ({e}). Install it: pip install "
                      "'weft[lm-eval]'.") from e


def from_run(workdir: str | Path, *, step: int | None = None, template: str | None = None,
             max_length: int | None = None, batch_size: int = 16, tensor: int = 1) -> Any:
  """A checkpoint of a run as an LM of lm_eval.

  Args:
    workdir, step, template: see `generate.load_run`.
    max_length: default: the run's seq_len.
    batch_size: texts at a time.
    tensor: devices that each matrix is split over.

  Raises:
    ConfigError: no such checkpoint; sizes that cannot be.
  """
  require()
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=-1, tensor=tensor))
  loaded = generate.load_run(workdir, mesh, step=step, template=template)
  config = config_checks.resolve(files.read_json(Path(workdir).expanduser().absolute() / "config.json"))
  return _harness(loaded, mesh, begins_with(config.tokenizer, loaded.tokenizer), max_length, config.seq_len, batch_size)


def from_folder(folder: str | Path, *, template: str | None = None, max_length: int | None = None, batch_size: int = 16,
                tensor: int = 1) -> Any:
  """A Hugging Face folder as an LM of lm_eval; `max_length` defaults to its max_position_embeddings, 2048 at most."""
  require()
  mesh = mesh_lib.make_mesh(dict(data=1, fsdp=-1, tensor=tensor))
  loaded = generate.load_folder(folder, mesh, template=template)
  said = files.read_json(Path(folder).expanduser().absolute() / "config.json")
  said = said.get("text_config") or said
  longest = said.get("max_position_embeddings") or said.get("n_positions") or MAX_LENGTH
  bos = loaded.tokenizer.bos_id
  return _harness(loaded, mesh, () if bos is None else (bos,), max_length, min(int(longest), MAX_LENGTH), batch_size)


def _harness(loaded: generate.Loaded, mesh: Any, head: Sequence[int], max_length: int | None, usual: int,
             batch_size: int) -> Any:
  from trainer.lm_eval.harness import Harness  # imports lm_eval
  bound = loaded.model.max_length
  length = min(usual, bound or usual) if max_length is None else max_length
  if length < 2 or bound is not None and length > bound:
    raise ConfigError(f"max_length is {length}; allowed: 2 to {bound or 'any'}.")
  sys.stderr.write(f"{loaded.origin}, texts of up to {length} tokens\n")
  shards = mesh_lib.batch_shards(mesh)
  return Harness(loaded, mesh, head=head, max_length=length, batch_size=-(-batch_size // shards) * shards)


def evaluate(lm: Any, tasks: Sequence[str], *, include_path: str | None = None, **options: Any) -> dict[str, Any]:
  """What lm_eval's `simple_evaluate` finds, without samples unless asked for.

  Args:
    tasks: names of tasks, groups or tags.
    include_path: a folder with further tasks.
    options: of `simple_evaluate`: num_fewshot, limit, apply_chat_template, gen_kwargs, …

  Raises:
    ConfigError: no such task, with those whose names are like it.
  """
  lm_eval = require()
  return lm_eval.simple_evaluate(model=lm, tasks=known(tasks, include_path), task_manager=_manager(include_path),
                                 **(dict(log_samples=False) | options))


def known(tasks: Sequence[str], include_path: str | None, where: str = "--tasks") -> list[str]:
  """The tasks, with patterns (`mmlu_*`) as the names that they stand for.

  Raises:
    ConfigError: one that lm_eval does not know.
  """
  manager = _manager(include_path)
  if missing := [task for task in tasks if not manager.match_tasks([task])]:
    alike = difflib.get_close_matches(missing[0], manager.all_tasks, n=5)
    near = f"; near it: {', '.join(alike)}" if alike else ""
    raise ConfigError(f"{where} has {missing[0]!r}, which lm_eval does not know{near}. It knows "
                      f"{len(manager.all_tasks)}; your own are found by include_path, a folder.")
  return manager.match_tasks(list(tasks))


@functools.cache
def _manager(include_path: str | None) -> Any:
  from lm_eval.tasks import TaskManager  # reads thousands of files, which takes seconds
  return TaskManager(include_path=include_path)


def _define_flags() -> None:
  startup.define_model_flags()
  flags.DEFINE_list("tasks", None, "Tasks, groups or tags of lm_eval, separated by commas.")
  flags.DEFINE_integer("num_fewshot", None, "Examples before each question. Default: the task's.")
  flags.DEFINE_float("limit", None, "Questions of each task at most; below 1: that share of them.")
  flags.DEFINE_string("include_path", None, "A folder with tasks of yours.")
  flags.DEFINE_integer("batch_size", 16, "Texts at a time.", lower_bound=1)
  flags.DEFINE_integer("max_length", None, "Tokens that the model sees. Default: seq_len, or what the folder says.")
  flags.DEFINE_bool("apply_chat_template", False, "Put questions into the chat template.")
  flags.DEFINE_string("system_instruction", None, "System message of the chat template.")
  flags.DEFINE_bool("fewshot_as_multiturn", False, "With the chat template, examples are turns of the conversation.")
  flags.DEFINE_string("gen_kwargs", None, "Of generation, over the tasks': max_gen_toks=64,temperature=0.5.")
  flags.DEFINE_bool("log_samples", False, "Keep every question with its scores in --out.")
  flags.DEFINE_string("out", None, "A file for all results, as JSON.")


def _run(given: Any) -> None:
  generate.check_given(given)
  if not given.tasks:
    raise ConfigError("give --tasks, e.g. --tasks=arc_easy,hellaswag; `lm-eval ls tasks` lists them.")
  if given.out is not None and Path(given.out).is_dir():
    raise ConfigError(f"--out {given.out} is a folder; give a file, e.g. {Path(given.out) / 'results.json'}.")
  if given.include_path is not None and not Path(given.include_path).is_dir():
    raise ConfigError(f"--include_path {given.include_path} is no folder.")
  require()
  sizes = dict(template=given.template, max_length=given.max_length, batch_size=given.batch_size, tensor=given.tensor)
  lm = from_folder(given.hf, **sizes) if given.hf else from_run(given.workdir, step=given.step, **sizes)
  limit = given.limit if given.limit is None or given.limit < 1 else int(given.limit)
  results = evaluate(
      lm, given.tasks, include_path=given.include_path, num_fewshot=given.num_fewshot, limit=limit,
      batch_size=given.batch_size, apply_chat_template=given.apply_chat_template, log_samples=given.log_samples,
      system_instruction=given.system_instruction, gen_kwargs=given.gen_kwargs,
      fewshot_as_multiturn=given.fewshot_as_multiturn and given.apply_chat_template)
  from lm_eval.utils import handle_non_serializable, make_table
  print(make_table(results))
  if results.get("groups"):
    print(make_table(results, "groups"))
  if given.out is not None:
    Path(given.out).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results | {"model_source": "weft", "model_name": lm.name}, indent=1, ensure_ascii=False,
                      default=handle_non_serializable)
    Path(given.out).write_text(text + "\n", encoding="utf-8")
    print(given.out)


def main(argv: list[str]) -> None:
  startup.run_given(argv, _run, "tasks are written --tasks=a,b")
