"""The teachers of a run: one, `strategy.teacher`, or several, `strategy.teachers`, and what each has to say where.

The loss of a token is the sum of its divergences from each teacher of its row, by weights that add up to 1. A teacher
of some sources is heard in their rows alone. With `strategy.teacher_key` rows name their teacher in a column, and are
taught by that one alone (input_pipeline/examples/routed.py). For the forward KL
such a sum has the gradient of the divergence from the weighted mean of the distributions, Σ w KL(q_i ‖ p) = KL(q̄ ‖ p) +
a constant, and for the reverse KL that from their normalised geometric mean.

With `strategy.teacher` ROWS there is no teacher: rows bring what one has said (input_pipeline/examples/top_k.py).

S sources of the data, K teachers, M the most teachers that a source has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from input_pipeline.batches import Kept
from input_pipeline.examples import routed
from input_pipeline.examples.top_k import ROWS
from input_pipeline.loader import used_sources
from input_pipeline.reference import of_teachers
from input_pipeline.tokenizer.tokenizer import Tokenizer
from trainer.distributed import mesh as mesh_lib
from trainer.errors import ConfigError
from trainer.metrics import Mean
from trainer.strategies import teacher

KEY = "strategy.teachers"
# The keys of a teacher among several, with their defaults and types.
OPTIONS: dict[str, tuple[Any, tuple[type, ...]]] = {
    "path": (None, (str,)), "weight": (1.0, (int, float)), "sources": ((), (tuple, list)), "keys": ((), (tuple, list))}


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
  column = cfg.get("teacher_key")
  if not cfg.get("teachers"):  # which a strategy of the user's own need not have
    if column:
      raise ConfigError(f"strategy.teacher_key is {column!r}, but {KEY} is empty. Name those that rows choose from.")
    if in_rows(cfg):
      return {}
    teacher.find(cfg.teacher)
    return {"": Teacher(cfg.teacher, teacher.KEY)}
  if cfg.teacher is not None:
    raise ConfigError(f"strategy.teacher is {cfg.teacher!r}, and {KEY} has {', '.join(cfg.teachers)}. Give one teacher "
                      "or several: move the first to the others.")
  found = {name: _given(name, given, column) for name, given in cfg.teachers.items()}
  if column:
    routed.values(cfg.teachers)
  return found


def _given(name: str, given: Any, column: str | None) -> Teacher:
  """A teacher among several as the config has it; `column`: in which rows name theirs."""
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
  if column and (values["sources"] or values["weight"] != 1):
    raise ConfigError(f"{KEY}.{name} has {'sources' if values['sources'] else 'a weight'}, and strategy.teacher_key is "
                      f"{column!r}: a row learns from the one teacher that it names. Leave out one of the two.")
  if values["keys"] and not column:
    raise ConfigError(f"{KEY}.{name}.keys is {tuple(values['keys'])!r:.80}, but strategy.teacher_key is not set. Name "
                      "the column that has these values.")
  one = Teacher(values["path"], f"{KEY}.{name}.path", float(values["weight"]), tuple(values["sources"]))
  teacher.find(one.path, one.key)
  return one


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
  """Refuses teachers of other tokens, or sources without one. Raises ConfigError, before any device work."""
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
  """`loss_fn(params, batch, …)`, whose batch gets for each row, by its source, `teacher_weights` and whose they are,
  `teacher_numbers`: [B, K]; where the batch has what teachers say [B, M], those of the row's own teachers first.
  Unchanged where there is one teacher, or rows name theirs."""
  if len(of(cfg)) <= 1 or cfg.get("teacher_key"):
    return loss_fn
  w_SxK = weights(cfg, source_names)
  first_SxK = np.argsort(w_SxK == 0, axis=1, kind="stable").astype(np.int32)

  def with_weights(params, batch, *rest):
    numbers = first_SxK[:, :batch["teacher_ids"].shape[2]] if "teacher_ids" in batch else np.sort(first_SxK, axis=1)
    chosen = np.take_along_axis(w_SxK, numbers, 1)
    return loss_fn(params, batch | {name: jnp.asarray(of_source)[batch["source_ids"]] for name, of_source in (
        ("teacher_weights", chosen), ("teacher_numbers", numbers))}, *rest)

  return with_weights


def shares(batch: Mapping[str, jax.Array], count: int) -> list[tuple[jax.Array, jax.Array]]:
  """Of each of `count` teachers' divergences at what a place predicts: (the teacher's number, the weight with which it
  is heard), of shapes that broadcast to [B, T]. None: there is one teacher, heard everywhere."""
  if routed.INDEX in batch:
    index_BxT = jnp.roll(batch[routed.INDEX], -1, axis=1)
    return [(jnp.full((1, 1), n), (index_BxT == n).astype(jnp.float32)) for n in range(count)]
  if "teacher_weights" in batch:
    return [(batch["teacher_numbers"][:, n, None], batch["teacher_weights"][:, n, None]) for n in range(count)]
  return []


def metrics(names: Sequence[str], losses: Sequence[jax.Array], heard_as: Sequence[tuple[jax.Array, jax.Array]],
            weights_BxT: jax.Array) -> dict[str, Any]:
  """Of each teacher, `teachers/NAME/loss`: its mean divergence where it is heard, and `teachers/NAME/tokens`: the sum
  of the loss weights there.

  Args:
    names: of all. losses: divergences, [B, T] each. heard_as: see `shares`. weights_BxT: of the loss.
  """
  found: dict[str, Any] = {}
  for number, name in enumerate(names):
    mine = [jnp.where((whose == number) & (share > 0), weights_BxT, 0.0) for whose, share in heard_as]
    tokens = sum(jnp.sum(own_BxT) for own_BxT in mine)
    total = sum(jnp.sum(own_BxT * loss_BxT) for own_BxT, loss_BxT in zip(mine, losses, strict=True))
    found |= {f"teachers/{name}/loss": Mean(total, tokens), f"teachers/{name}/tokens": tokens}
  return found
