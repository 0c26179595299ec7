"""python -m trainer, in this process: which mode is given what, what is told of flags and errors, and how it ends."""

import functools
import sys
from types import SimpleNamespace

import jax
import pytest
from absl import app, flags

from trainer.errors import ConfigError, DataError

MODES = {"train": "trainer.main", "inspect": "trainer.modes.inspect", "plan": "trainer.planning.plan",
         "verify": "trainer.modes.verify", "replay": "trainer.modes.replay"}


@pytest.fixture(scope="module")
def command():
  """The module, whose flags are its own."""
  import importlib
  before = flags.FLAGS
  values = flags.FlagValues()
  patched = pytest.MonkeyPatch()
  for module in (flags, app.flags):
    patched.setattr(module, "FLAGS", values)
  from ml_collections import config_flags
  for name in ("DEFINE_string", "DEFINE_enum", "DEFINE_integer", "mark_flags_as_required"):
    patched.setattr(flags, name, functools.partial(getattr(flags, name), flag_values=values))
  define = functools.partial(config_flags.DEFINE_config_file, flag_values=values)
  patched.setattr(config_flags, "DEFINE_config_file", define)
  try:
    yield importlib.import_module("trainer.__main__")
  finally:
    patched.undo()
    assert flags.FLAGS is before


@pytest.fixture
def run(command, monkeypatch, capsys):
  """`run(mode, …)`: (what was called in what order, what was printed, what was said of errors, the exit code)."""
  def of(mode="train", step=None, argv=(), code=0, raises=None, topology=None, compiling=False, **config):
    called = []
    values = {"precision": "p", **config}
    given = SimpleNamespace(plan=SimpleNamespace(topology=topology), get=values.get)

    def does(name):
      def mode(config, workdir, **more):
        called.append((name, config is given, workdir, *more.items()))
        if raises:
          raise raises
      return mode

    for name, where in MODES.items():
      module = sys.modules.get(where) or __import__(where, fromlist=["x"])
      monkeypatch.setattr(module, name, does(name))
    from trainer import bases
    from trainer.compiler import compiled
    from trainer.planning import plan
    monkeypatch.setattr(bases, "make", lambda *given: called.append(("make", *given[1:])) or code)
    monkeypatch.setattr(bases, "check", lambda config, *given, of_tokenizer: called.append(
        ("check", *given, of_tokenizer)))
    monkeypatch.setattr(plan, "out_of_memory", lambda config, workdir, error: f"no room in {workdir}: {error}")
    monkeypatch.setattr(compiled, "in_progress", lambda: compiling)
    for name in ("look_for_garbage", "errors_of_savers_in_short", "keep_compiled_programs"):
      monkeypatch.setattr(command.startup, name, lambda name=name: called.append(name))
    monkeypatch.setattr(command.startup, "set_environment", lambda *given, untimed: called.append((*given, untimed)))
    monkeypatch.setattr(command.config_typed, "of_flag", lambda flag: (given, ["a note"]))
    monkeypatch.setattr(command.flags, "FLAGS", {"config": "flag"})
    monkeypatch.setattr(command, "_MODE", SimpleNamespace(value=mode))
    monkeypatch.setattr(command, "_STEP", SimpleNamespace(value=step))
    monkeypatch.setattr(command, "_WORKDIR", SimpleNamespace(value="w"))
    monkeypatch.setattr(command.sys, "argv", ["prog", "--typed=1"])
    monkeypatch.setattr(jax.config, "update", lambda *given: called.append(given))

    def leave(code):
      raise SystemExit(f"at once {code}")

    monkeypatch.setattr(command.os, "_exit", leave)
    ended = None
    try:
      command.main(["prog", *argv])
    except SystemExit as e:
      ended = e.code
    said = capsys.readouterr()
    return called, said.out, said.err, ended
  return of


BEGINNING = ["look_for_garbage", "errors_of_savers_in_short", "keep_compiled_programs"]


@pytest.mark.parametrize("mode, calls", [
    ("train", [("make", "w", ["--typed=1"]), ("train", True, "w")]), ("verify", [("verify", True, "w")]),
    ("inspect", [("check", "w", True), ("inspect", True, "w")]), ("plan", [("check", "w", True), ("plan", True, "w")]),
    ("replay", [("replay", True, "w", ("step", 3))])])
def test_each_mode_is_given_the_config_and_the_workdir(run, mode, calls):
  called, out, err, ended = run(mode, step=3 if mode == "replay" else None, deterministic=False)
  assert called == [("p", mode == "verify"), *BEGINNING, *calls] and (out, err, ended) == ("a note\n", "", None)
  assert run(mode, step=3 if mode == "replay" else None)[0][0] == ("p", True)  # programs that are repeatable


def test_a_plan_for_other_devices_leaves_those_that_are_here_alone(run):
  assert ("jax_platforms", "cpu") in run("plan", topology="v5e:2x2")[0]
  assert ("jax_platforms", "cpu") not in run("train", topology="v5e:2x2")[0]


def test_a_base_that_cannot_be_trained_ends_it(run):
  called, _, _, ended = run(code=7)
  assert ended == 7 and called[-1][0] == "make"


@pytest.mark.parametrize("more, message", [
    (dict(argv=["config.x=1"]), r"^unexpected arguments \['config.x=1'\]; overrides are written --config.key=value$"),
    (dict(mode="inspect", step=4), "^--step=4 is for --mode=replay, but the mode is inspect.$")])
def test_flags_that_cannot_be(run, more, message):
  with pytest.raises(app.UsageError, match=message):
    run(**more)


@pytest.mark.parametrize("error, said, code", [
    (ConfigError("no key"), "\nConfigError: no key\n", 1), (DataError("row 3"), "\nDataError: row 3\n", 1),
    (FileNotFoundError("x"), "\nFileNotFoundError: x\n", 1),
    (FloatingPointError("nan"), "\nFloatingPointError: nan\n", 1),
    (KeyboardInterrupt(), "\nInterrupted while setting up: no step was taken, nothing is lost.\n", 130),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 5 GB"), "\nno room in w: RESOURCE_EXHAUSTED: 5 GB\n", 1)], ids=str)
def test_what_a_user_can_act_on_is_one_message(run, error, said, code):
  _, _, err, ended = run(raises=error)
  assert (err, ended) == (said, code)
  assert run(raises=error, compiling=True)[2:] == (said, f"at once {code}")


@pytest.mark.parametrize("error", [ValueError("ours"), jax.errors.JaxRuntimeError("INTERNAL")], ids=str)
def test_other_errors_have_their_traceback(run, error):
  with pytest.raises(type(error), match=str(error)):
    run(raises=error)
