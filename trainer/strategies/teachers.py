"""The teachers of a run: one, `strategy.teacher`, or several, `strategy.teachers`, and what each has to say where.

The loss of a token is the sum of its divergences from each teacher of its row, by weights that add up to 1. A teacher
of some sources is heard in their rows alone: a teacher for each domain is a teacher for each source. For the forward KL
such a sum has the gradient of the divergence from the weighted mean of the distributions, Σ w KL(q_i ‖ p) = KL(q̄ ‖ p) +
a constant, and for the reverse KL that from their normalised geometric mean.

With `strategy.teacher` ROWS there is no teacher: rows bring what one has said (input_pipeline/examples/top_k.py).

S sources of the data, K teachers, M the most teachers that a source has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from input_pipeline.batches import Kept
from input_pipeline.examples.top_k import ROWS
from input_pipeline.loader import used_sources
from input_pipeline.reference import of_teachers
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.strategies import teacher

KEY = "strategy.teachers"
# The keys of a teacher among several, with their defaults and types.
OPTIONS: dict[str, tuple[Any, tuple[type, ...]]] = {
    "path": (None, (str,)), "weight": (1.0, (int, float)), "sources": ((), (tuple, list))}


class Teacher(NamedTuple):
  """A model to learn from: its path, what messages call that, its weight, the sources that it teaches (none: all)."""

  path: str
  key: str
  weight: float = 1.0
  sources: tuple[str, ...] = ()


def of(cfg: Any) -> dict[str, Teacher]:
  """The teachers of `config.strategy` by name; one alone is called "". None where rows bring what one has said.

  Raises:
    ConfigError: none, or one that cannot be.
  """
  if not cfg.get("teachers"):  # which a strategy of the user's own need not have
    if in_rows(cfg):
      return {}
    teacher.find(cfg.teacher)
    return {"": Teacher(cfg.teacher, teacher.KEY)}
  if cfg.teacher is not None:
    raise ConfigError(f"strategy.teacher is {cfg.teacher!r}, and {KEY} has {', '.join(cfg.teachers)}. Give one teacher "
                      "or several: move the first to the others.")
  found = {}
  for name, given in cfg.teachers.items():
    if not name.replace("-", "_").isidentifier():
      raise ConfigError(f"{KEY} has the name {name!r:.80}; allowed: letters, digits, _ and -, a letter first.")
    if not isinstance(given, Mapping) and not hasattr(given, "items"):
      raise ConfigError(f"{KEY}.{name} is {given!r:.80}; it must be a dict such as dict(path='a/model', weight=1.0, "
                        "sources=('math',)).")
    values = {key: default for key, (default, _) in OPTIONS.items()} | dict(given.items())
    for key, value in values.items():
      if key not in OPTIONS:
        raise ConfigError(f"{KEY}.{name} has the key {key!r}; allowed: {', '.join(OPTIONS)}.")
      if not isinstance(value, OPTIONS[key][1]) or isinstance(value, bool):
        raise ConfigError(f"{KEY}.{name}.{key} is {value!r:.80}; it must be of type {OPTIONS[key][1][-1].__name__}.")
    if not 0 < values["weight"] < float("inf"):
      raise ConfigError(f"{KEY}.{name}.weight is {values['weight']}; it must be above 0.")
    found[name] = Teacher(values["path"], f"{KEY}.{name}.path", float(values["weight"]), tuple(values["sources"]))
    teacher.find(values["path"], found[name].key)
  return found


def in_rows(cfg: Any) -> bool:
  """Whether rows bring what their teacher has said."""
  return cfg.teacher == ROWS


def joined(parts: dict[str, Any]) -> Any:
  """What is kept of the teachers, by their names, as the state has it: of one alone, itself."""
  return parts[""] if "" in parts else parts


def apart(cfg: Any, whole: Any) -> dict[str, Any]:
  """The inverse of `joined`."""
  return {"": whole} if not cfg.get("teachers") else {name: whole[name] for name in cfg.teachers}


def weights(cfg: Any, source_names: Sequence[str]) -> np.ndarray:
  """Of each teacher in the rows of each source, float32 [S, K]; those of a source add up to 1."""
  w_SxK = np.array([[one.weight if not one.sources or source in one.sources else 0.0 for one in of(cfg).values()]
                    for source in source_names], np.float64).reshape(len(source_names), -1)
  return (w_SxK / w_SxK.sum(1, keepdims=True)).astype(np.float32)


def routes(cfg: Any) -> bool:
  """Whether some teacher is heard in the rows of some sources only."""
  return any(one.sources for one in of(cfg).values())


def check(config: Any, tokenizer: Tokenizer) -> None:
  """Refuses teachers of other tokens, or sources without one.

  Raises:
    ConfigError: before any device work.
  """
  cfg, used = config.strategy, used_sources(config.input)
  if in_rows(cfg):
    if cfg.cached_top_k > tokenizer.vocab_size:
      raise ConfigError(f"strategy.cached_top_k is {cfg.cached_top_k}, but there are {tokenizer.vocab_size} tokens. "
                        "Use at most as many entries as rows give of a token.")
    return
  teachers = of(cfg)
  for name, one in teachers.items():
    teacher.check(config, tokenizer, one.path, one.key)
    if unknown := [source for source in one.sources if source not in config.input.sources]:
      raise ConfigError(f"{KEY}.{name}.sources has {unknown[0]!r}; the sources are {', '.join(config.input.sources)}.")
    if one.sources and not set(one.sources) & set(used):
      raise ConfigError(f"{KEY}.{name}.sources is {one.sources}, none of which is used: their weight is 0. Leave that "
                        "teacher out.")
  for source in used:
    if all(one.sources and source not in one.sources for one in teachers.values()):
      raise ConfigError(f"input.sources.{source} has no teacher: each of {KEY} is one of other sources. Name it in the "
                        "`sources` of one, or leave these out of one for all.")
  if cfg.get("cached_top_k"):
    if streams := [source for source in used if config.input.sources[source].stream_files]:
      raise ConfigError(f"strategy.cached_top_k is {cfg.cached_top_k}, but input.sources.{streams[0]}.stream_files is "
                        f"{config.input.sources[streams[0]].stream_files}: a teacher reads all data before the first "
                        "step. Use stream_files=0, or cached_top_k=0.")
    sizes = [make_model(config, one).num_real_vocab for one in teachers.values()]
    if cfg.cached_top_k > (least := min(*sizes, tokenizer.vocab_size)):
      raise ConfigError(f"strategy.cached_top_k is {cfg.cached_top_k}, but there are {least} tokens. Use at most that, "
                        "or 0 for the teacher's whole distribution.")


def make_model(config: Any, one: Teacher) -> Any:
  """A teacher without its parameters, in the dtypes of the student."""
  return teacher.make_model(one.path, str(config.precision.params), str(config.precision.compute), one.key)


def no_prefix_sharing(cfg: Any) -> str | None:
  """Why the rows of some teacher cannot share prompts; None: all can."""
  return next((reason for one in of(cfg).values() if (reason := teacher.make_model(
      one.path, "float32", "float32", one.key).no_prefix_sharing) is not None), None)


def abstract_params(config: Any) -> Any:
  """The teachers' parameters, in the dtype of the student's."""
  return joined({name: make_model(config, one).abstract_params() for name, one in of(config.strategy).items()})


def shardings(config: Any, abstract: Any, mesh: Any) -> Any:
  """Where the parameters are."""
  return joined({name: mesh_lib.param_shardings(part, mesh, config.sharding_rules)[0]
                 for name, part in apart(config.strategy, abstract).items()})


def load(config: Any, target: Any) -> Any:
  """The parameters; `target`: ShapeDtypeStructs with shardings. Raises: see `teacher.load`."""
  parts = apart(config.strategy, target)
  return joined({name: teacher.load(config, parts[name], one.path, one.key)
                 for name, one in of(config.strategy).items()})


def kept(config: Any) -> tuple[Kept, Kept]:
  """The arrays of batches that hold what the teachers say, with `cached_top_k`."""
  if in_rows(config.strategy):
    return of_teachers(1, config.strategy.cached_top_k)
  found = weights(config.strategy, used_sources(config.input))
  return of_teachers(int((found > 0).sum(1).max()), config.strategy.cached_top_k)


def heard(loss_fn: Callable, cfg: Any, source_names: Sequence[str]) -> Callable:
  """`loss_fn(params, batch, …)`, whose batch gets `teacher_weights`: float32 [B, K], by each row's source; where the
  batch has what teachers say, [B, M], those of the row's own teachers first."""
  if len(of(cfg)) <= 1:
    return loss_fn
  w_SxK = weights(cfg, source_names)
  first_SxK = np.take_along_axis(w_SxK, np.argsort(w_SxK == 0, axis=1, kind="stable"), 1)

  def with_weights(params, batch, *rest):
    chosen = first_SxK[:, :batch["teacher_ids"].shape[2]] if "teacher_ids" in batch else w_SxK
    return loss_fn(params, batch | {"teacher_weights": jnp.asarray(chosen)[batch["source_ids"]]}, *rest)

  return with_weights
