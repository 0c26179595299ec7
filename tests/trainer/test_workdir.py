"""What is left of a run: checkpoints where `ckpt` is never, only at the end, or now and then."""

import pytest

from tests import tiny
from trainer import train
from trainer.callbacks import Callback
from trainer.config import ConfigError

NEVER = dict(ckpt_steps=0, ckpt_percent=-1.0, evals={}, report=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


class Stop(Callback):
  """As after a signal."""

  def __init__(self, step: int):
    self._step = step

  def on_optimizer_step(self, run):
    if run.step == self._step:
      run.stop_requested = "SIGTERM"


def saved(workdir):
  return sorted(int(folder.name) for folder in (workdir / "checkpoints").iterdir())


@pytest.mark.parametrize("changed, steps", [
    (dict(), []),
    (dict(callbacks=dict(stop=dict(type="tests.trainer.test_workdir.Stop", step=3))), []),
    (dict(keep_steps=2), [2, 4]),
    (dict(ckpt_steps=-1), [5]),  # unset: the last one alone
    (dict(ckpt_steps=100), [5]),
])
def test_never_is_never_also_at_the_end_and_at_a_signal(corpus, tmp_path, capsys, changed, steps):
  run = train(tiny.config(corpus, **{**NEVER, "total_steps": 5} | changed), tmp_path)
  printed = capsys.readouterr().out
  assert saved(tmp_path) == steps
  never = changed.get("ckpt_steps", 0) == 0
  assert ("ckpt: never: the last state is not saved either, nor that at a signal" in printed) is never
  assert ("The last state was not saved, since ckpt is never." in printed) is never
  assert ("  checkpoints " in printed) is bool(steps)
  assert ("the same command continues" in printed) is False
  assert run.step == (3 if "callbacks" in changed else 5)


def test_a_last_step_that_keep_saves_is_saved(corpus, tmp_path, capsys):
  train(tiny.config(corpus, **NEVER, total_steps=4, keep_steps=2), tmp_path)
  assert saved(tmp_path) == [2, 4] and "not saved, since" not in capsys.readouterr().out


@pytest.mark.parametrize("adapters", [False, True])
def test_the_export_of_a_run_that_saves_nothing_is_that_of_one_that_does(corpus, tmp_path, adapters):
  changed = dict(total_steps=3, evals={}, report=False, export=dict(path="out"))
  if adapters:
    changed["model"] = dict(hf=str(tiny.hf_folder(tmp_path / "base")), lora=dict(rank=2), vocab_multiple=128)
  else:
    changed["optimizer"] = dict(ema_decay=0.9)
  for name, more in (("saves", {}), ("never", dict(ckpt_steps=0, ckpt_percent=-1.0))):
    train(tiny.config(corpus, **changed | more), tmp_path / name)
  files = sorted(file.name for file in (tmp_path / "saves" / "out").iterdir())
  assert "model.safetensors" in files
  for name in files:
    assert (tmp_path / "never" / "out" / name).read_bytes() == (tmp_path / "saves" / "out" / name).read_bytes(), name
  assert saved(tmp_path / "saves") == [3] and saved(tmp_path / "never") == []
  assert not (tmp_path / "never" / "for_export").exists()


@pytest.mark.parametrize("changed, message", [
    (dict(keep_best="eval/val/loss"), "keep_best is 'eval/val/loss', which needs checkpoints, but ckpt is never"),
    (dict(spikes=dict(action="rollback")), "spikes.action is 'rollback', which needs checkpoints"),
])
def test_what_needs_checkpoints_is_refused_where_there_are_none(corpus, tmp_path, changed, message):
  config = tiny.config(corpus, ckpt_steps=0, ckpt_percent=-1.0, **changed)
  with pytest.raises(ConfigError, match=message):
    train(config, tmp_path)
  assert not (tmp_path / "metrics.jsonl").exists()
