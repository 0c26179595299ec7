"""The place in the data after other batch sizes: every row once an epoch, by the texts that real runs were given."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests import tiny
from tests.trainer import rollout_runs
from trainer import position, train
from trainer.callbacks import Callback
from trainer.checkpoints import checkpoint, checksums
from trainer.config import defaults, source
from trainer.errors import CheckpointError, ConfigError
from trainer.modes.replay import replay
from trainer.telemetry.writers import read_rows

SEEN = "tests.trainer.test_position.Seen"


class Seen(Callback):
  """Notes the texts of each update's rows."""

  def __init__(self, file):
    self._file = Path(file)

  def on_step_end(self, run, step, metrics):
    tokens, segments = (np.asarray(run.batch[key]) for key in ("tokens", "segment_ids"))
    texts = [run.tokenizer.decode(row[s > 0]).strip() for row, s in zip(tokens, segments, strict=True)]
    with open(self._file, "a") as file:
      file.write(json.dumps([step, texts]) + "\n")


def seen(file):
  """The texts of each update, in order; no update is taken twice."""
  rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
  assert [step for step, _ in rows] == list(range(1, len(rows) + 1))
  return [texts for _, texts in rows]


def write_documents(folder, name, count):
  """Files of one short text each, which is a row of its own."""
  (folder / name).mkdir()
  for number in range(count):
    (folder / name / f"{number:02d}.txt").write_text(f"{name} {number:02d}")
  return {f"{name} {number:02d}" for number in range(count)}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
  folder = tmp_path_factory.mktemp("documents")
  return folder, {name: write_documents(folder, name, count) for name, count in (("a", 24), ("b", 15))}


def config(documents, file, batch_size, steps, grad_accum_steps=1, names=("a",), **changed):
  c = tiny.config(documents[0] / "a", batch_size=batch_size, grad_accum_steps=grad_accum_steps, total_steps=steps,
                  ckpt_steps=100, allow_config_changes=True, **changed)
  c.input.sources = {name: source(type="text", path=str(documents[0] / name)) for name in names}
  c.input.packing = "none"
  c.evals = {}
  if jax.device_count() == 8:
    c.mesh.update(data=2, tensor=4)
  c.callbacks.seen = dict(type=SEEN, file=str(file))
  return c


def epochs_of(texts, documents):
  """Whole epochs one after another, each with every document once."""
  size = len(documents)
  for first in range(0, len(texts) - size + 1, size):
    assert set(texts[first:first + size]) == documents, first
  assert len(set(texts[len(texts) // size * size:])) == len(texts) % size
  return len(texts) / size


@pytest.fixture(scope="module")
def straight(documents, tmp_path_factory):
  folder = tmp_path_factory.mktemp("straight")
  train(config(documents, folder / "seen", 8, 7), folder / "w")
  return seen(folder / "seen")


@pytest.mark.parametrize("starts", [[(8, 2), (4, 10)], [(8, 2), (16, 4)], [(8, 1), (6, 8)], [(8, 1), (4, 3), (6, 8)]],
                         ids=["8-4", "8-16", "8-6", "8-4-6"])
def test_every_row_once_an_epoch_whatever_the_batch_sizes_were(documents, straight, tmp_path, starts):
  sizes = []
  for size, steps in starts:
    sizes += [size] * (steps - len(sizes))
    c = config(documents, tmp_path / "seen", size, steps)
    c.update(ckpt_steps=1, keep_last=9)  # of all checkpoints the newest says where the data are
    train(c, tmp_path / "w")
  texts = seen(tmp_path / "seen")
  assert [len(rows) for rows in texts] == sizes
  flat = sum(texts, [])
  assert epochs_of(flat, documents[1]["a"]) >= 1.9
  assert flat[:48] == sum(straight, [])[:len(flat)][:48]  # in the order that other sizes have
  logged = [row for row in read_rows(tmp_path / "w" / "metrics.jsonl") if "loss" in row]
  taken = np.cumsum(sizes)
  assert [row["tokens_seen"] for row in logged] == (32 * taken).tolist()
  assert [row["epoch"] for row in logged] == (taken / 24).tolist()
  meta = checkpoint.read_meta(checkpoint.find(str(tmp_path / "w")))
  assert meta["rows_seen"] == taken[-1] and meta["data"]["a"]["rows"] == taken[-1]
  # Updates of the past are found by what they took.
  for step in (1, len(sizes) - 1):
    now = config(documents, tmp_path / "no", starts[-1][0], starts[-1][1])
    out = replay(now, tmp_path / "w", step)
    shown = [json.loads(line)["text"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert [text.replace("<|bos|>", "").replace("<|eos|>", "").strip() for text in shown] == texts[step - 1]


def test_a_restart_with_another_size_is_the_run_with_a_stage_there(documents, tmp_path):
  """Bitwise, where micro-batches are the same; in epochs, too, of which the last one ends where the rows do."""
  stages = config(documents, tmp_path / "stages.seen", 8, -1, 2, total_epochs=2.0, schedule=tiny.COSINE)
  stages.input.batch_size_stages = ((2, 4),)
  expected = train(stages, tmp_path / "stages")
  assert expected.step == 10
  first = config(documents, tmp_path / "seen", 8, -1, 2, total_epochs=2.0, schedule=tiny.COSINE)
  first.callbacks.stop = dict(type=rollout_runs.STOP, step=2)
  first.input.batch_size_stages = ((2, 4),)  # the same length of the run, hence the same learning rates
  assert train(first, tmp_path / "w").step == 2
  second = config(documents, tmp_path / "seen", 4, -1, 1, total_epochs=2.0, schedule=tiny.COSINE)
  run = train(second, tmp_path / "w")
  assert run.step == 10 and run.total_steps == 10
  rollout_runs.assert_same_state(run.state, expected.state)
  assert seen(tmp_path / "seen") == seen(tmp_path / "stages.seen")


def test_each_source_of_a_mixture_goes_on_where_it_was_and_resume_does_too(documents, tmp_path):
  """With weights that change, before and after; another run that resumes this one needs no permission for its size."""
  def mixed(size, steps, **changed):
    c = config(documents, tmp_path / "seen", size, steps, names=("a", "b"), **changed)
    c.input.weight_stages = ((1, {"b": 3.0}), (5, {"b": 0.5}))
    return c

  train(mixed(8, 3), tmp_path / "w")
  resumed = mixed(6, 16, resume=str(tmp_path / "w"))
  resumed.allow_config_changes = False
  train(resumed, tmp_path / "other")
  flat = sum(seen(tmp_path / "seen"), [])
  assert len(flat) == 3 * 8 + 13 * 6
  of_b = [text for text in flat if text.startswith("b")]
  assert epochs_of([text for text in flat if text.startswith("a")], documents[1]["a"]) > 1
  assert epochs_of(of_b, documents[1]["b"]) > 2
  # By hand: a half of the first 8 rows, three quarters until step 5, then a third; each to within a row.
  shares = [sum(text.startswith("b") for text in flat[first:end]) for first, end in ((0, 8), (8, 36), (36, 102))]
  assert np.abs(np.array(shares) - [4, 21, 22]).max() <= 1
  last = [row for row in read_rows(tmp_path / "other" / "metrics.jsonl") if "loss" in row][-1]
  assert last["data/b/rows"] == len(of_b) and last["data/a/rows"] == len(flat) - len(of_b)


@pytest.mark.devices(8)
def test_a_checkpoint_from_before_the_number_goes_on_by_its_config(documents, straight, tmp_path):
  train(config(documents, tmp_path / "seen", 8, 2), tmp_path / "w")
  file = tmp_path / "w" / "checkpoints" / "2" / "meta" / "metadata"
  meta = json.loads(file.read_text())
  del meta["taken"], meta["seal"]
  file.write_text(json.dumps(meta | {"seal": checksums._digest(meta)}))
  train(config(documents, tmp_path / "seen", 4, 4), tmp_path / "w")
  assert sum(seen(tmp_path / "seen"), []) == sum(straight, [])[:24]


def test_a_rollout_is_trained_on_as_it_was_begun_and_each_prompt_is_drawn_once(tmp_path):
  """4 prompts for two updates each, stopped after three; then 3 prompts for one update each."""
  prompts = rollout_runs.write_prompts(tmp_path)[:1]

  def run(workdir, steps, **rollout):
    c = rollout_runs.config(prompts, total_steps=steps, rollout=rollout, allow_config_changes=True)
    c.callbacks.seen = dict(type=SEEN, file=str(tmp_path / f"{workdir}.seen"))
    return train(c, tmp_path / workdir)

  run("straight", 4)
  run("w", 3)
  ended = run("w", 8, num_prompts=3, updates=1)
  texts = seen(tmp_path / "w.seen")
  assert texts[:4] == seen(tmp_path / "straight.seen")  # the second half of the rollout, none of it twice
  tables = {step: rollout_runs.table(tmp_path / "w", step) for step in (1, 3, 5, 6, 7, 8)}
  drawn = [list(dict.fromkeys(row["prompt"] for row in table)) for table in tables.values()]
  assert [len(group) for group in drawn] == [4, 4, 3, 3, 3, 3]
  assert len(set(sum(drawn, []))) == 20
  assert ended.data.epoch(8) == 20 / 40
  assert ended.data.batch_range(8) == (20, 3)  # of which the length of a run in epochs is made
  epochs = [row["epoch"] for row in read_rows(tmp_path / "w" / "metrics.jsonl") if "epoch" in row]
  assert epochs == [4 / 40, 4 / 40, 8 / 40, 8 / 40, 11 / 40, 14 / 40, 17 / 40, 20 / 40]


@pytest.mark.parametrize("taken, told", [(8, None), (4, "that of step 6 is before a change of the batch size")])
def test_a_state_from_before_another_size_is_refused(taken, told):
  """A checkpoint of batches of 8, where the data are those of a past with batches of `taken`."""
  c = defaults()
  c.batch_size, c.seq_len = 8, 16
  past = {size: dict(of="rows", pieces=[[0, 0, size, 1, 1, 0, 16]], tokens=6 * 16 * size) for size in (4, 8)}
  meta = dict(step=6, config={}, data_fingerprint="a", taken=past[8])
  restored = []
  data = SimpleNamespace(taken=position.steps_of(c, position.past_of(meta | dict(taken=past[taken]))),
                         past_fingerprint="a", restore=lambda step, *_: restored.append(step))
  with pytest.raises(CheckpointError, match=told) if told else contextlib.nullcontext():
    position.go_on(c, data, SimpleNamespace(step=6, meta=meta, arrays=None), True)
  assert restored == ([] if told else [6])


@pytest.mark.parametrize("meta, now, allowed, told", [
    (None, "b", False, False), ("a", "a", False, False), ("a", "b", True, False), ("a", "b", False, True)])
def test_other_data_are_refused_unless_that_is_allowed(meta, now, allowed, told):
  meta, restored = {} if meta is None else dict(data_fingerprint=meta), []
  data = SimpleNamespace(past_fingerprint=now, restore=lambda *args: restored.append(args))
  c = SimpleNamespace(allow_config_changes=allowed)
  with pytest.raises(ConfigError, match="the training data, the tokenizer or their order changed") if told else (
      contextlib.nullcontext()):
    position.go_on(c, data, SimpleNamespace(step=6, meta=meta, arrays="arrays"), False)
  assert restored == ([] if told else [(6, None, "arrays")])


@pytest.mark.parametrize("rest, begin", [
    (None, 6), (dict(first_step=4, steps=6, updates=3, done=False), 10),
    (dict(first_step=0, steps=6, updates=3, done=True), 6),
    (dict(first_step=4, steps=6, updates=3, done=False, ahead=[
        dict(first_step=10, steps=4, updates=2), dict(first_step=14, steps=6, updates=3)]), 20),
    (dict(first_step=4, updates=3, done=False), 10)])
def test_new_sizes_begin_where_the_last_rollout_that_was_made_ends(rest, begin):
  """After 6 updates: that of the last rollout, begun after 4 with two passes of 3, or of the last that waits. What
  an old checkpoint does not say follows from its config."""
  meta = dict(step=6, taken=dict(of="prompts", pieces=[[0, 0, 4, 6, 3, 0, 0]], tokens=96), rest_of_rollout=rest,
              config=dict(rollout=dict(updates=3, epochs=2)))
  past = position.past_of(meta)
  assert (past.step, past.begin, past.tokens) == (6, begin, 96) and past.pieces[0].parts == 3


@pytest.mark.parametrize("changed, rest, expected", [
    (dict(), None, (5, 5, "rows", 256)),  # 2 steps of 4 rows and 3 of 8
    (dict(step=1), None, (1, 1, "rows", 32)),
    (dict(prompts=6), dict(first_step=1, steps=6, done=False, tokens=77), (5, 7, "prompts", 77)),
    (dict(prompts=6), dict(first_step=1, steps=6, done=True, tokens=77), (5, 5, "prompts", 77)),
    (dict(prompts=6), {}, (5, 5, "prompts", 0))])
def test_a_checkpoint_that_does_not_say_what_was_taken_has_it_of_its_config(changed, rest, expected):
  """Rows of 8 places, 4 of them in two micro-batches, and 8 from step 2 on; or rollouts for two passes of 3 updates."""
  rollout = dict(num_prompts=changed.get("prompts", 0), updates=3, epochs=2)
  meta = dict(step=changed.get("step", 5), rest_of_rollout=rest, config=dict(
      batch_size=4, grad_accum_steps=2, seq_len=8, input=dict(batch_size_stages=[[2, 8]]), rollout=rollout))
  past = position.past_of(meta)
  assert (past.step, past.begin, past.of, past.tokens) == expected
  assert [(piece.step, piece.size) for piece in past.pieces] == ([(0, 6)] if "prompts" in changed else [(0, 4), (2, 8)])


def test_a_checkpoint_of_its_own_that_is_damaged_is_passed_over_and_another_run_s_is_not(tmp_path, monkeypatch):
  """The newest is damaged: the one before says where the data stand. Of one that is resumed there is none before."""
  def read_meta(found):
    if found.name == "9":
      raise position.Damaged("bits")
    return f"meta of {found.name}"

  steps = [5, 9]
  monkeypatch.setattr(position.checkpoint, "listed", lambda folder: steps)
  monkeypatch.setattr(position.checkpoint, "find", lambda resume: tmp_path / "other" / "checkpoints" / "9")
  monkeypatch.setattr(position.checkpoint, "read_meta", read_meta)
  monkeypatch.setattr(position, "_needed", lambda meta: meta)
  assert position._meta(tmp_path, "other") == "meta of 5"
  steps[:] = [9]
  assert position._meta(tmp_path, None) is None
  steps.clear()
  assert position._meta(tmp_path, None) is None
  with pytest.raises(position.Damaged):
    position._meta(tmp_path, "other")
