"""What is left of a run: checkpoints where `ckpt` is never, only at the end, or now and then; and its last words."""

import json
import re
from types import SimpleNamespace

import pytest

from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests import tiny
from trainer import train, workdir
from trainer.callbacks import Callback
from trainer.config import checks as config_checks
from trainer.errors import ConfigError
from trainer.telemetry.writers import read_rows

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
  # The last step's metrics are written, too, though nothing follows it.
  assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if "loss" in row] == [*range(1, run.step + 1)]


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


def words(folder, step, exported=None, total=700):
  said = []
  run = SimpleNamespace(workdir=folder, step=step, total_steps=total, stop_requested="SIGTERM", saves_last=True,
                        say=said.append, chrono=SimpleNamespace(goodput=lambda: 0.5), last_eval=(-1, {}))
  workdir.say_where_everything_is(run, 3.0, exported)
  return "\n".join(said)


def test_numbers_and_samples_name_their_steps(tmp_path):
  rows = [{"step": 0, "eval/val/loss": 6.9, "eval/other/loss": 5.0}, {"step": 100, "eval/val/loss": 2.5, "loss": 1.0},
          {"step": 170, "loss": 0.9}, {"step": 350, "eval/val/loss": "nan"}]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (tmp_path / "samples").mkdir()
  for name in ("b_00000000", "a_00000100", "a_00000350"):  # the newest, not the last by name, nor of what was undone
    (tmp_path / "samples" / f"{name}.txt").write_text(f"text of {name}\n")
  said = words(tmp_path, 179)
  assert "stopped by SIGTERM after step 179 of 700" in said
  assert re.search(r"eval/val/loss +2\.5000  at step 100, 79 steps before the last\n", said)
  assert re.search(r"eval/other/loss +5\.0000  at step 0, 179 steps before the last\n", said)
  assert "\nSamples of step 100, 79 steps before the last:\ntext of a_00000100\n" in said
  said = words(tmp_path, 350, total=350)
  assert re.search(r"eval/val/loss +nan  at step 350\n", said) and "Samples of step 350:\ntext of a_00000350" in said


@pytest.mark.parametrize("own", [True, False])
def test_templates_with_other_names_stay_beside_the_tokenizers_own_alone(tmp_path, own):
  base, run = tmp_path / "base", tmp_path / "w"
  BytesTokenizer().save(base / "tokenizer.json")
  listed = [dict(name="default", template="{{ messages[0].content }}<|eos|>"), dict(name="rag", template="RAG")]
  file = base / "tokenizer_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | dict(chat_template=listed)))
  tokenizer = load_tokenizer(base)
  tokenizer.save(run / "tokenizer.json")
  config = tiny.config(tmp_path / "corpus", tokenizer=dict(type="bytes"), strategy=dict(name="sft"),
                       chat=dict(template=None if own else "plain"))
  workdir.save_config(config_checks.resolve(config), run, tokenizer)
  found = json.loads((run / "tokenizer_config.json").read_text())["chat_template"]
  assert found == listed if own else "RAG" not in found
  assert (run / "additional_chat_templates" / "rag.jinja").exists() == own


def test_the_folder_of_the_export_is_named(tmp_path):
  (tmp_path / "hf-export").mkdir()
  assert f"  export       {tmp_path / 'hf-export'}" in words(tmp_path, 1, tmp_path / "hf-export")
  assert "export" not in words(tmp_path, 1, tmp_path / "none")


def test_a_stopped_run_names_the_step_of_its_evaluation(corpus, tmp_path, capsys):
  c = tiny.config(corpus, total_steps=9)
  c.callbacks.stop = dict(type=f"{__name__}.Stop", step=3)
  c.evals.val.eval_steps = 100
  train(c, tmp_path)
  said = capsys.readouterr().out
  assert "stopped by SIGTERM after step 3 of 9" in said
  assert re.search(r"eval/val/loss +\d\.\d{4}  at step 0, 3 steps before the last\n", said)


def test_a_folder_that_cannot_be_is_told_before_anything_runs(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match=f"^--workdir {tmp_path}/file is a file; give a folder, which is made if it is"):
    workdir.prepare(None, tmp_path / "file")
  with pytest.raises(ConfigError, match="^--workdir .*/file/below cannot be made: Not a directory. Give a folder that"):
    workdir.prepare(None, tmp_path / "file" / "below")
  monkeypatch.setattr(workdir.os, "access", lambda path, mode: False)
  with pytest.raises(ConfigError, match=f"^--workdir {tmp_path}/new cannot be written to .it is read-only, or another"):
    workdir.prepare(None, tmp_path / "new")


@pytest.mark.parametrize("allowed, begun, refused", [
    (False, True, True), (True, True, False), (False, False, False)])
def test_another_config_is_refused_unless_allowed_or_nothing_is_saved(tmp_path, monkeypatch, allowed, begun, refused):
  monkeypatch.setattr(workdir.config_checks, "differences", lambda saved, config: [f"seed: {saved['seed']} -> 4"])
  (tmp_path / "config.json").write_text('{"seed": 3}')
  if begun:
    (tmp_path / "checkpoints").mkdir()
  config = SimpleNamespace(allow_config_changes=allowed)
  if refused:
    with pytest.raises(ConfigError, match=f"^{tmp_path} was begun with another config:\n  seed: 3 -> 4\nUse another -"):
      workdir.prepare(config, tmp_path)
  else:
    workdir.prepare(config, tmp_path)
