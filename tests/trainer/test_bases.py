"""The run that another begins from is trained first where it is not there, once, and never where other things lie."""

import json

import pytest

from configs import quickstart_dpo, quickstart_grpo, quickstart_sft
from trainer import bases
from trainer.config import defaults
from trainer.errors import ConfigError
from trainer.speedrun import command as speedrun


def config(path, made_by="configs.quickstart"):
  c = defaults()
  c.init_from.update(path=str(path), made_by=made_by)
  return c


def begun(path, how=None):
  """A run's folder as a run leaves it."""
  path.mkdir(parents=True, exist_ok=True)
  (path / "started").write_text("2026-01-01T00:00:00+00:00\n")
  (path / "run.json").write_text(json.dumps({"starts": [{"end": how and {"how": how}}]}))


def test_when_it_is_trained_first(tmp_path):
  workdir = tmp_path / "workdir"
  assert bases.pending(defaults(), workdir) is None
  assert bases.pending(config(tmp_path / "a", made_by=None), workdir) is None
  assert bases.pending(config(tmp_path / "a"), workdir) == tmp_path / "a"  # nothing there
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / bases.LOCK).touch()
  assert bases.pending(config(tmp_path / "a"), workdir) == tmp_path / "a"
  for how, first in ((None, True), ("stopped", True), ("error", True), ("finished", False)):
    begun(tmp_path / "a", how)
    assert (bases.pending(config(tmp_path / "a"), workdir) is not None) == first
  (tmp_path / "4000" / "state").mkdir(parents=True)  # a checkpoint alone
  assert bases.pending(config(tmp_path / "4000"), workdir) is None
  (workdir / "checkpoints" / "5").mkdir(parents=True)  # goes on from its own
  assert bases.pending(config(tmp_path / "b"), workdir) is None


@pytest.fixture
def calls(monkeypatch, tmp_path):
  """Commands, each of which ends as `calls.how` says."""
  class Calls(list):
    how, code = "finished", 0
  calls = Calls()

  def call(command):
    calls.append(command[1:])
    begun(tmp_path / "base", calls.how)
    return calls.code

  monkeypatch.setattr(speedrun, "call", call)
  monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
  return calls


def test_one_command_trains_both(calls, tmp_path, capsys):
  c, typed = config(tmp_path / "base"), ["--config=x.py", "--config.model.num_layers=2", "--config.total_steps=3"]
  assert bases.make(c, tmp_path / "w", typed) == 0
  expected = ["-m", "trainer", "--config=configs/quickstart.py", f"--workdir={tmp_path / 'base'}",
              "--config.model.num_layers=2"]
  assert calls == [expected] and "python " + " ".join(expected) in capsys.readouterr().out
  assert bases.make(c, tmp_path / "w", typed) == 0 and len(calls) == 1  # once


@pytest.mark.parametrize("how, code, expected", [("stopped", 0, 1), ("error", 3, 3), ("finished", 0, 0)])
def test_what_has_not_ended_is_not_begun_from(calls, tmp_path, how, code, expected, capsys):
  calls.how, calls.code = how, code
  assert bases.make(config(tmp_path / "base"), tmp_path / "w", []) == expected
  assert ("does not begin" in capsys.readouterr().err) == bool(expected)


def test_what_another_run_has_trained_meanwhile_is_not_trained_again(calls, tmp_path, monkeypatch):
  """It had the lock, and the run is finished when this one gets it."""
  monkeypatch.setattr(bases.fcntl, "flock", lambda file, how: begun(tmp_path / "base", "finished"))
  assert bases.make(config(tmp_path / "base"), tmp_path / "w", []) == 0 and not calls


def test_a_path_that_is_typed_is_never_trained_into(calls, tmp_path):
  assert bases.make(config(tmp_path / "base"), tmp_path / "w", [f"--config.init_from.path={tmp_path / 'base'}"]) == 0
  assert not calls and not (tmp_path / "base").exists()


def test_where_nothing_is_trained_the_command_is_told(calls, tmp_path, monkeypatch):
  c = config(tmp_path / "base")
  said = "no run has ended yet.*Train it first:\n  python -m trainer --config=configs/quickstart.py --workdir="
  with pytest.raises(ConfigError, match=f"(?s){said}"):
    bases.check(c, tmp_path / "w")
  bases.check(c, tmp_path / "w", of_tokenizer=True)
  c.tokenizer.path = str(tmp_path / "base" / "tokenizer.json")
  with pytest.raises(ConfigError, match="Train it first"):
    bases.check(c, tmp_path / "w", of_tokenizer=True)
  monkeypatch.setenv("JAX_NUM_PROCESSES", "2")  # each would train it
  with pytest.raises(ConfigError, match="Train it first"):
    bases.make(c, tmp_path / "w", [])
  with pytest.raises(ConfigError, match="'configs.nothing', which cannot be imported"):
    bases.command(config("a", "configs.nothing"), tmp_path)


def test_the_quickstarts_alone_name_what_they_begin_from():
  for module, path, name in ((quickstart_sft, "runs/quickstart", "configs.quickstart"),
                             (quickstart_dpo, "runs/quickstart_sft", "configs.quickstart_sft"),
                             (quickstart_grpo, "runs/quickstart_arithmetic", "configs.quickstart_arithmetic")):
    alone, given = module.get_config().init_from, module.get_config("some/run").init_from
    assert (alone.path, alone.made_by, given.path, given.made_by) == (path, name, "some/run", None)
