"""What is typed wins over what the file says by another key; both in the file, or both typed, stay an error."""

import json
import runpy

import pytest

from tests import tiny
from trainer.config import defaults, durations, evaluator, source
from trainer.config import typed as config_typed
from trainer.errors import ConfigError
from trainer.sweep import command as sweep

# As a user's recipe: each length in a unit that is not the default's.
FILE = """
from trainer.config import defaults, evaluator, source

def get_config(arg=None):
  c = defaults()
  c.input.sources.main = source(type="text", path=arg or "texts", split="train", validation_fraction=0.3)
  c.total_epochs = 3.0
  c.log_examples = 64
  c.ckpt_epochs = 0.5
  c.keep_tokens = 4096
  c.schedule.warmup_examples = 80
  c.evals.val = evaluator(type="loss", eval_epochs=1.0)
  c.chat.train_on = "all"
  return c
"""
RUN = durations.RunLengths(total_steps=None, batch_size=8, seq_len=32, rows_per_epoch=100)


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "recipe.py"
  path.write_text(FILE)
  return path


@pytest.mark.parametrize("typed, section, prefix, steps", [
    ("total_steps=12", "", "total", 12),
    ("total_examples=160", "", "total", 20),  # 160 rows, 8 a step
    ("total_tokens=2560", "", "total", 10),  # rows of 32 tokens
    ("log_steps=5", "", "log", 5),
    ("ckpt_steps=0", "", "ckpt", 0),  # never
    ("keep_epochs=2", "", "keep", 25),
    ("schedule.warmup_steps=4", "schedule", "warmup", 4),
    ("evals.val.eval_steps=7", "evals.val", "eval", 7),
])
def test_a_typed_length_wins_over_the_file_s_in_another_unit(file, typed, section, prefix, steps):
  config = sweep.config_of(str(file), [f"--config.{typed}"])
  for part in section.split(".") if section else ():
    config = config[part]
  assert durations.steps(config, prefix, RUN) == steps


def test_what_gives_way_is_said_and_defaults_give_way_in_silence(file):
  config = defaults()
  config.total_epochs, config.total_steps = 3.0, 12
  config.ckpt_steps = 5  # beside the default's 20 percent
  chosen, notes = config_typed.prefer(config, {"total_steps": 12, "ckpt_steps": 5})
  assert notes == ["total_epochs = 3.0 of the config file gives way to --config.total_steps=12"]
  assert (chosen.total_steps, chosen.total_epochs, chosen.ckpt_steps, chosen.ckpt_percent) == (12, -1, 5, -1)
  assert config.total_epochs == 3.0  # a copy


def test_both_in_the_file_both_typed_or_typed_as_unset_stay(file):
  config = defaults()
  config.total_epochs, config.total_examples, config.total_steps = 3.0, 160, -1
  for unset in (-1, "None"):
    both, notes = config_typed.prefer(config, {"seed": 1, "total_tokens": unset})
    assert not notes and (both.total_epochs, both.total_examples) == (3.0, 160)
  with pytest.raises(ConfigError, match="total_examples = 160 and total_epochs = 3 are both set"):
    durations.steps(both, "total", RUN)
  typed = sweep.config_of(str(file), ["--config.total_steps=12", "--config.total_examples=160"])
  with pytest.raises(ConfigError, match="total_steps = 12 and total_examples = 160 are both set"):
    durations.steps(typed, "total", RUN)


def test_other_keys_that_exclude_each_other():
  config = defaults()
  config.init_from.hf, config.chat.train_on = "/models/base", "all"
  config.evals.val = evaluator(type="classify", options=("a", "b"))
  config.init_from.path, config.chat.roles, config.evals.val.options_key = "runs/one", ("tool",), "choices"
  chosen, notes = config_typed.prefer(
      config, {"init_from.path": "runs/one", "chat.roles": ("tool",), "evals.val.options_key": "choices"})
  assert len(notes) == 3 and "model.hf is that folder now" in notes[0]
  assert (chosen.init_from.hf, chosen.model.hf, chosen.init_from.path) == (None, "/models/base", "runs/one")
  assert (chosen.chat.train_on, chosen.evals.val.options) == ("auto", ())
  config.init_from.path = None
  config.init_from.fresh = True
  fresh, _ = config_typed.prefer(config, {"init_from.fresh": True})
  assert (fresh.init_from.hf, fresh.model.hf) == (None, "/models/base")
  not_fresh, notes = config_typed.prefer(config, {"init_from.fresh": False})
  assert not_fresh.init_from.hf == "/models/base" and not notes
  config.model.hf = "/models/other"  # which says what the model is already
  other, notes = config_typed.prefer(config, {"init_from.fresh": True})
  assert (other.init_from.hf, other.model.hf) == (None, "/models/other")
  assert notes == ["init_from.hf = '/models/base' of the config file gives way to --config.init_from.fresh=True"]


def test_keys_that_share_a_reference_do_not_change_together():
  config = defaults()
  config.total_epochs = 2.0
  config.ckpt_epochs = config.get_ref("total_epochs")
  chosen, _ = config_typed.prefer(config, {"total_steps": 12})
  assert (chosen.total_epochs, chosen.ckpt_epochs) == (-1, 2.0)


def test_a_command_line_runs_as_typed(file, tmp_path):
  corpus = tiny.write_corpus(tmp_path / "texts")
  small = ("--config.model.num_layers=1", "--config.model.hidden_size=16", "--config.model.num_heads=2",
           "--config.seq_len=32", "--config.report=False",
           "--config.schedule.warmup_steps=1", "--config.chat.train_on=auto")
  done = tiny.run(tiny.command(file, corpus, tmp_path / "run", "--config.total_steps=2", *small))
  assert done.returncode == 0, done.stderr
  assert "total_epochs = 3.0 of the config file gives way to --config.total_steps=2\n" in done.stdout
  saved = json.loads((tmp_path / "run" / "config.json").read_text())
  assert (saved["total_steps"], saved["total_epochs"]) == (2, -1)
  assert max(json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()) == 2


def test_a_share_for_validation_means_nothing_where_all_is_trained_on(file):
  config = runpy.run_path(str(file))["get_config"]()
  assert config.input.sources.main.validation_fraction == 0.3
  config.input.sources.main.split = "all"
  changed, notes = config_typed.prefer(config, {"input.sources.main.split": "all"})
  assert changed.input.sources.main.validation_fraction == source().validation_fraction and len(notes) == 1
  assert "validation_fraction = 0.3 of the config file means nothing with --config.input.sources.main.split" in notes[0]
  typed = {"input.sources.main.split": "all", "input.sources.main.validation_fraction": 0.3}
  assert config_typed.prefer(config, typed)[0].input.sources.main.validation_fraction == 0.3  # refused by the audit


def test_explain_override_names_the_nearest_key(tmp_path):
  file = tmp_path / "c.py"
  file.write_text("from trainer.config import defaults\ndef get_config(arg=None):\n  assert arg in (None, 'large')\n"
                  "  return defaults()\n")
  for argument in ("", ":large"):  # of two files the last counts
    argv = ["x", "--config=other.py", f"--config={file}{argument}", "--config.optimizer.learning_rat=1"]
    message = config_typed.explain_override(argv, KeyError("x"))
    assert message == "unknown key config.optimizer.learning_rat; did you mean config.optimizer.learning_rate?"
  message = config_typed.explain_override(["x", f"--config={file}:small"], KeyError("x"))
  assert message == f"{file}:small cannot be read: AssertionError: "


@pytest.mark.parametrize("given, said", [
    (["--config=FOLDER/recipies.py"], "FOLDER/recipies.py: no such file; did you mean FOLDER/recipe.py?"),
    (["-config", "FOLDER/x.py:arg", "--config.log_steps=1"],
     "FOLDER/x.py: no such file; in FOLDER there are recipe.py."),
    (["--config=FOLDER/recipe.py", "--config=FOLDER/y/x.py"],
     "FOLDER/y/x.py: no such file; in FOLDER/y there is no config file."),
])
def test_a_config_file_that_is_not_there_is_told_with_those_that_are(given, said, file):
  given = [word.replace("FOLDER", str(file.parent)) for word in given]
  file.with_name("_parts.py").write_text("")  # which is no config
  with pytest.raises(SystemExit) as ended:
    config_typed.parse_flags(["x", *given])
  assert str(ended.value) == "ConfigError: --config=" + said.replace("FOLDER", str(file.parent))


def test_a_key_of_a_few_other_sections_is_told_with_them_and_one_of_many_is_not():
  assert config_typed.did_you_mean("hidden_size", ["other"], "optimizer.") == (
      "; did you mean config.model.hidden_size or config.model.vision.hidden_size?")
  assert config_typed.did_you_mean("name", ["names", "other"], "x.") == "; did you mean config.x.names?"  # 4 have it
  assert config_typed.did_you_mean("zzz", ["b", "a"], "x.") == "; known keys of config.x: a, b"
  assert config_typed.did_you_mean("zzz", ["b", "a"]) == "; known keys: a, b"


def test_a_file_without_a_config_is_told(file):
  file.write_text("def config(): pass\n")
  message = config_typed.explain_override(["x", f"--config={file}"], AttributeError("get_config"))
  assert message == f"{file} has no function get_config(), which is to return the config"


def test_a_key_that_ends_like_a_unit_is_no_length():
  """tokenizer.new_tokens takes texts."""
  config = defaults()
  config.tokenizer.new_tokens = ("<a>",)
  assert config_typed.prefer(config, {"tokenizer.new_tokens": ("<a>",)})[1] == []


@pytest.mark.parametrize("key", ["init_from.path", "init_from.made_by", "input.sources.main.path"])
def test_none_unsets_what_the_file_says(key, tmp_path):
  """Also a text, which flags would set to the word."""
  path = tmp_path / "recipe.py"
  set_too = '  c.init_from.path, c.init_from.made_by = "runs/base", "configs.base"\n  return c'
  path.write_text(FILE.replace("  return c", set_too))
  *parts, last = key.split(".")

  def found(flags):
    section = sweep.config_of(str(path), flags)
    for part in parts:
      section = section[part]
    return section[last]

  assert found([]) is not None
  assert found([f"--config.{key}=None"]) is None
