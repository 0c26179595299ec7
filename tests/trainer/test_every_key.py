"""Every key of a config changes what it says it changes: the program, the data, the schedule or the run.

What each key matters for stands in every_key_table.py, and for sections of several kinds in every_key_sections.py. What
is seen of a key that chooses a state, a step or a file stands in every_key_expected.py.
"""

import copy
import inspect

import jax
import pytest

from evaluators import common as evaluators_lib
from input_pipeline.sources.readers import READERS
from tests.trainer import every_key
from tests.trainer import every_key_expected as by_hand
from tests.trainer import every_key_runs as runs
from tests.trainer import every_key_sections as sections
from tests.trainer import every_key_table as table
from tests.trainer.every_key import Made
from tests.trainer.every_key_bases import Files
from tests.trainer.every_key_table import Row
from trainer.config import checks as config_checks
from trainer.config import defaults, evaluator, reward, source
from trainer.rollouts import rewards
from trainer.strategies import STRATEGIES, preference, presets

ROWS = table.ROWS | sections.SECTIONS
ADD = ("config key {key} has no row in tests/trainer/{file}: say with which other keys it matters, another value of it "
       'and what it changes, e.g.  "{key}": program(VALUE, {{"other.key": VALUE}}),')


def of_defaults():
  """Every leaf of the defaults and every section that is empty there; strategies have theirs, see `of_sections`."""
  found = [*config_checks.flatten(defaults()), "evals", "callbacks", "loggers", "input.sources", "rollout.rewards"]
  return [key for key in found if not key.startswith("strategy.") or key == "strategy.name"]


def of_sections():
  """Every key of what a config may have several or one of several kinds of."""
  for name, made in (("source", source()), ("evaluator", evaluator()), ("reward", reward())):
    yield from (f"{name}.{key}" for key in made)
  for name, record in STRATEGIES.items():
    options = record.options
    for key in options:
      # What a dictionary or a preset stands for are keys of their own.
      values = [f"loss.{loss}" for loss in preference.LOSSES] if (name, key) == ("dpo", "loss") else [key]
      if key == "preset":
        values = [f"preset={preset}" for preset in presets.PRESETS if preset != options[key]]
      yield from (f"strategy({name}).{value}" for value in values)


def rows_of(key):
  found = ROWS.get(key, [])
  return found if isinstance(found, list) else [found]


# What is seen of where things are on several devices.
OF_SEVERAL = (every_key.layout, runs.planned, runs.plan_text, runs.sampling_devices)


def keys():
  """Every key; marked, if a mesh of one device would not tell."""
  for key in (*of_defaults(), *of_sections()):
    several = any(row.see in OF_SEVERAL for row in rows_of(key))
    yield pytest.param(key, marks=pytest.mark.devices(8) if several else ())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  # Programs that run are small, run once, and many of them are those of several rows.
  changed = dict(jax_persistent_cache_min_compile_time_secs=0, jax_disable_most_optimizations=True)
  usual = {name: jax.config.values[name] for name in changed}
  for name, value in changed.items():
    jax.config.update(name, value)
  with every_key.made_once(tmp_path_factory.mktemp("library")):
    yield Files(tmp_path_factory.mktemp("files"))
  for name, value in usual.items():
    jax.config.update(name, value)
  _MADE.clear()


_MADE: dict[tuple[str, str, int], Made] = {}


def fresh(files: Files, row: Row, changed: dict) -> Made:
  """The row's base with its other keys and `changed`."""
  config = row.base(files)
  for path, value in {**row.given, **changed}.items():
    *parents, leaf = path.split(".")
    node = config
    for parent in parents:
      node = node[parent]
    # A copy, for configs are changed in place.
    node[leaf] = value(files) if callable(value) else copy.deepcopy(value)
  return Made(config, files)


def before(files: Files, row: Row) -> Made:
  """`fresh` without a change, the same object for rows with the same other keys."""
  name = row.base.__name__, repr({path: repr(value) for path, value in row.given.items()}), jax.device_count()
  if name not in _MADE:
    _MADE[name] = fresh(files, row, {})
  return _MADE[name]


@pytest.mark.parametrize("key", keys())
def test_key(key, files):
  is_of_defaults = key in of_defaults()
  assert key in ROWS, ADD.format(key=key, file="every_key_table.py" if is_of_defaults else "every_key_sections.py")
  for number, row in enumerate(rows_of(key)):
    path = key if is_of_defaults else sections.path_of(key)
    after = fresh(files, row, {path: row.value})
    assert before(files, row).seen(row.see) != after.seen(row.see), (
        f"{row.kind}: {path} = {row.value!r} changes nothing that {row.see.__name__} shows (row {number} of {key})")
    if row.kind in ("program", "data"):  # the other kinds go through `train`, which checks this itself
      assert any(read == path or read.startswith(f"{path}.") for read in after.config._read), (
          f"{path} is used, but not read from the view of the config: the audit would refuse to have it changed")
    if number == 0 and key in by_hand.EXPECTED:
      wanted = by_hand.EXPECTED[key]
      assert after.seen(by_hand.SEEN.get(key, row.see)) == (wanted(after) if callable(wanted) else wanted), (
          f"{path} = {row.value!r} changes something, but not to what every_key_expected.py says")


@pytest.mark.parametrize("see", [
    pytest.param(every_key.layout, marks=pytest.mark.devices(8)), every_key.step, every_key.descent, every_key.fresh,
    every_key.rows, every_key.scored, sections.texts, sections.scores, runs.sampled, runs.first_parameters,
    runs.evaluating_steps, runs.planned])
def test_what_is_seen_of_the_same_config_is_the_same(see, files):
  """Else a key that changes nothing would seem to change something."""
  row = next(row for key in ROWS for row in rows_of(key) if row.see is see)
  assert before(files, row).seen(see) == fresh(files, row, {}).seen(see)


def test_no_row_is_left_of_a_key_that_is_gone():
  assert ROWS.keys() == {*of_defaults(), *of_sections()}
  assert by_hand.SEEN.keys() <= by_hand.EXPECTED.keys() <= ROWS.keys()


@pytest.mark.parametrize("kind", READERS)
def test_what_a_type_of_source_reads_has_a_row(kind, files):
  view = config_checks.View(source(type=kind, path="x", dataset="name" if kind == "digits" else "chat"))
  READERS[kind](view, "main")
  for key in view._read - {"type"}:
    kinds = {before(files, row).given.input.sources.main.type for row in rows_of(f"source.{key}")}
    assert kind in kinds, f"source.{key} has no row with type={kind!r} in every_key_sections.py, which reads it"


@pytest.mark.parametrize("kind", evaluators_lib.BUILT_IN)
def test_what_a_type_of_evaluator_reads_has_a_row(kind, files):
  made = before(files, sections.ev(kind, None))
  _ = made.evaluator
  read = {path.removeprefix("evals.val.") for path in made.config._read if path.startswith("evals.val.")}
  for key in {path.partition(".")[0] for path in read} - {"type"}:
    kinds = {before(files, row).given.evals.val.type for row in rows_of(f"evaluator.{key}")}
    assert kind in kinds, f"evaluator.{key} has no row with type={kind!r} in every_key_sections.py, which reads it"


@pytest.mark.parametrize("kind", rewards.BUILT_IN)
def test_what_a_type_of_reward_takes_has_a_row(kind, files):
  parameters = inspect.signature(rewards.BUILT_IN[kind]).parameters.values()
  for key in (parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY):
    kinds = {before(files, row).given.rollout.rewards.score.type for row in rows_of(f"reward.{key}")}
    assert kind in kinds, f"reward.{key} has no row with type={kind!r} in every_key_sections.py, which takes it"
