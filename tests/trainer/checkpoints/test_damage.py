"""What sets a checkpoint aside: proven damage alone. Whatever may pass stops the run and touches nothing."""

import errno
import io
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests import tiny
from tests.trainer.checkpoints.test_checkpoint import same, state, target
from trainer import train
from trainer.checkpoints import checkpoint, damage
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.errors import CheckpointError, Damaged
from trainer.export.command import StoredLeaves


@pytest.fixture
def saved(tmp_path):
  """Two checkpoints, with arrays beside the state."""
  checkpoints = Checkpoints(tmp_path / "w" / "checkpoints", keep_last=2)
  for step in (1, 2):
    checkpoints.save(step, state(step, float(step)), {"step": step}, arrays={"left": np.arange(5)})
  checkpoints.close()
  return tmp_path / "w" / "checkpoints"


def away(patch, place):
  """Makes opening any file there fail for Python, as where a file system is gone for a moment."""
  real = io.open

  def opens(file, *args, **kwargs):
    if isinstance(file, (str, bytes, os.PathLike)) and place in os.fsdecode(file):
      raise OSError(errno.EIO, "Input/output error", os.fsdecode(file))
    return real(file, *args, **kwargs)

  patch.setattr(io, "open", opens)
  patch.setattr("builtins.open", opens)


def stat_fails(patch, place):
  real = os.stat

  def stats(path, *args, **kwargs):
    if isinstance(path, (str, os.PathLike)) and place in os.fspath(path):
      raise OSError(errno.ESTALE, "Stale file handle", os.fspath(path))
    return real(path, *args, **kwargs)

  patch.setattr(os, "stat", stats)


def raises(error):
  def make(patch, place):
    def restore(*args, **kwargs):
      raise error
    patch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
    patch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
  return make


PASSING = {
    "meta away": lambda patch: away(patch, "/meta/metadata"),
    "state away": lambda patch: away(patch, "/state/_METADATA"),
    "further arrays away": lambda patch: away(patch, "/arrays/_METADATA"),
    "stale": lambda patch: stat_fails(patch, "/2/meta"),
    "a full table of files": lambda patch: raises(OSError(errno.EMFILE, "Too many open files"))(patch, ""),
    "memory": lambda patch: raises(MemoryError("no room"))(patch, ""),
    "a bug": lambda patch: raises(TypeError("'NoneType' object is not subscriptable"))(patch, ""),
    "a device": lambda patch: raises(jax.errors.JaxRuntimeError("INTERNAL: the device is gone"))(patch, ""),
}


@pytest.mark.parametrize("name", PASSING)
def test_what_may_pass_stops_and_touches_nothing(saved, monkeypatch, name):
  names = sorted(saved.iterdir())
  checkpoints = Checkpoints(saved, keep_last=2)
  with monkeypatch.context() as patch:
    PASSING[name](patch)
    with pytest.raises(Exception) as error:
      checkpoints.restore_newest(target())
  assert not isinstance(error.value, Damaged) and sorted(saved.iterdir()) == names
  if isinstance(error.value, CheckpointError):
    assert "NoneType" not in str(error.value)
    assert f"{saved}/2 could not be read" in str(error.value) and "no proof of damage" in str(error.value)
  assert same(checkpoints.restore_newest(target()).state, state(2, 2.0))
  checkpoints.close()


@pytest.mark.parametrize("pattern", ["2/state/d/*", "2/state/manifest.ocdbt", "2/arrays/manifest.ocdbt"])
def test_an_error_of_the_system_within_the_reader_of_arrays_is_no_damage(saved, pattern):
  """Such as TensorStore meets, which opens files itself: here a link that leads to itself, in the place of a file."""
  file = next(saved.glob(pattern))
  file.rename(saved.parent / "kept")
  file.symlink_to(file)
  checkpoints = Checkpoints(saved, keep_last=2)
  with pytest.raises(CheckpointError, match="no proof of damage") as error:
    checkpoints.restore_newest(target())
  assert "symbolic links" in str(error.value)
  assert sorted(path.name for path in saved.iterdir()) == ["1", "2"]
  file.unlink()
  (saved.parent / "kept").rename(file)
  assert same(checkpoints.restore_newest(target()).state, state(2, 2.0))
  checkpoints.close()


def test_no_reader_takes_what_may_pass_for_damage(saved, monkeypatch):
  wanted = {"b": jax.ShapeDtypeStruct((3,), np.float32)}
  readers = [lambda: checkpoint.read_meta(saved / "2"), lambda: checkpoint.param_shapes(saved / "2"),
             lambda: checkpoint.restore_params(saved / "2", wanted), lambda: StoredLeaves(saved / "2"),
             lambda: checkpoint.restore_from(str(saved), target()), lambda: Checkpoints(saved, keep_best="x")]
  for read in readers:
    read()
    with monkeypatch.context() as patch:
      away(patch, "/meta/metadata")
      with pytest.raises(CheckpointError, match=r"/[12] could not be read: OSError: .*Input/output error") as error:
        read()
      assert not isinstance(error.value, Damaged)


def test_the_arrays_of_an_export_that_cannot_be_read_now(saved):
  """TensorStore's own files go away between opening and reading."""
  leaves = StoredLeaves(saved / "2")
  assert leaves.read("b", ()).tolist() == [0, 1, 2]
  for file in [p for p in (saved / "2" / "state").rglob("d/*") if p.is_file()]:
    file.unlink()
    file.symlink_to(file)
  with pytest.raises(CheckpointError, match=r"no proof of damage(.|\n)*--step") as error:
    StoredLeaves(saved / "2").read("a/kernel", ())
  assert not isinstance(error.value, Damaged)


def test_damage_that_is_not_found_again_is_none(saved, monkeypatch):
  """A file that is read short once, as networks do."""
  real, calls = io.open, []

  def opens(file, *args, **kwargs):
    if isinstance(file, os.PathLike) and os.fspath(file).endswith("2/meta/metadata"):
      calls.append(file)
      if len(calls) == 1:
        return io.BytesIO(b'{"step"')
    return real(file, *args, **kwargs)

  checkpoints = Checkpoints(saved, keep_last=2)
  monkeypatch.setattr(io, "open", opens)
  assert same(checkpoints.restore_newest(target()).state, state(2, 2.0)) and len(calls) > 1
  assert sorted(path.name for path in saved.iterdir()) == ["1", "2"]
  checkpoints.close()


def test_an_error_behind_a_damaged_one_stops_too(saved, monkeypatch):
  """The newest is damaged, the one before it cannot be read now: it is neither set aside nor passed over."""
  (saved / "2" / "meta" / "metadata").write_text("{")
  checkpoints = Checkpoints(saved, keep_last=2)
  with monkeypatch.context() as patch:
    away(patch, "/1/state/_METADATA")
    with pytest.raises(CheckpointError, match="1 could not be read"):
      checkpoints.restore_newest(target())
  assert sorted(path.name for path in saved.iterdir()) == ["1", "2.unreadable"]
  assert same(checkpoints.restore_newest(target()).state, state(1, 1.0))
  checkpoints.close()


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(saved, monkeypatch):
  checkpoints = Checkpoints(saved, keep_last=2)

  def listdir(path):
    raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(path))

  monkeypatch.setattr(os, "listdir", listdir)
  with pytest.raises(OSError, match="not connected"):
    checkpoints.restore_newest(target())


def test_the_best_is_looked_for_beside_a_damaged_one(saved):
  """Which is set aside when it is read, as without keep_best."""
  meta = saved / "2" / "meta" / "metadata"
  meta.write_bytes(meta.read_bytes()[:-3])
  checkpoints = Checkpoints(saved, keep_best="eval/val/loss")
  assert same(checkpoints.restore_newest(target()).state, state(1, 1.0))
  checkpoints.close()
  assert sorted(path.name for path in saved.iterdir()) == ["1", "2.unreadable"]


def test_the_best_stays_the_best_after_a_restart(tmp_path):
  for losses in ({1: 5.0, 2: 1.0, 3: 4.0}, {4: 3.0}, {5: 0.5, 6: 2.0}, {7: 9.0}):
    checkpoints = Checkpoints(tmp_path, keep_best="eval/val/loss", best_mode="min")
    for step, loss in losses.items():
      checkpoints.save(step, state(step), {}, {"eval/val/loss": loss, "eval/val/other": 0.0})
    checkpoints.close()
  assert checkpoint.listed(tmp_path) == [5, 7]


def test_a_workdir_whose_checkpoints_are_all_set_aside_does_not_begin_anew(tmp_path):
  corpus = tiny.write_corpus(tmp_path / "corpus")
  config, workdir = tiny.config(corpus, total_steps=2), tmp_path / "w"
  config.evals = {}
  reference = train(config, workdir)
  folder = workdir / "checkpoints"
  meta = (folder / "2" / "meta" / "metadata").read_bytes()
  (folder / "2" / "meta" / "metadata").write_bytes(meta[:-3])
  for damaged in (f"{folder}/2 is damaged: ", "all were set aside before"):
    with pytest.raises(CheckpointError, match="no checkpoint of this workdir can be read") as error:
      train(config, workdir)
    assert damaged.split()[0] in str(error.value) and "2.unreadable" in str(error.value)
    assert "use another --workdir, or move them away" in str(error.value)
    assert [path.name for path in folder.iterdir()] == ["2.unreadable"]
  with pytest.raises(Exception, match="but those that were set aside as damaged"):
    checkpoint.find(str(workdir))
  # It has its name back, and is whole after all.
  (folder / "2.unreadable").rename(folder / "2")
  (folder / "2" / "meta" / "metadata").write_bytes(meta)
  run = train(config, workdir)
  assert run.step == 2 and same(run.state["params"], reference.state["params"])
  # Moved away: the user wants to begin anew.
  shutil.move(folder / "2", tmp_path / "elsewhere")
  assert train(config, workdir).step == 2


def test_what_proves_damage(tmp_path):
  """Of contents, and of a file that is not there; not what came of an error of the system, nor a file that is back."""
  (tmp_path / "there").write_bytes(b"1")
  of_contents = ValueError("DATA_LOSS: checksum verification failed")
  assert "checksum verification failed" in damage._proof(tmp_path, of_contents)
  of_contents.__cause__ = OSError(errno.EIO, "Input/output error")
  assert damage._proof(tmp_path, of_contents) == ""
  for name, proven in (("there", False), ("gone", True)):
    assert bool(damage._proof(tmp_path, ValueError(f'NOT_FOUND: local file "{tmp_path / name}"'))) == proven


@pytest.mark.parametrize("mine, theirs, raised, says", [
    (None, "", None, ""),
    (None, damage.DAMAGED, Damaged, "is damaged as it is read by process 1"),
    (None, damage.UNREAD, CheckpointError, "was not read by process 1"),
    (Damaged("proof"), "", Damaged, "proof"),
    (Damaged("proof"), damage.UNREAD, CheckpointError, "was not read by process 1"),  # it may be whole there
    (CheckpointError("away"), damage.DAMAGED, CheckpointError, "away"),
])
def test_of_several_processes_the_worst_news_are_those_of_all(tmp_path, monkeypatch, mine, theirs, raised, says):
  monkeypatch.setattr(damage.processes, "said_by_all", lambda kind: [kind, theirs, ""])

  def read():
    with damage.together(tmp_path):
      if mine is not None:
        raise mine

  if raised is None:
    read()
  else:
    with pytest.raises(CheckpointError, match=says) as found:
      read()
    assert type(found.value) is raised


def test_each_file_that_says_what_there_is_must_say_so(saved):
  step = saved / "2"
  files = [step / "meta" / "metadata", *(found for part in ("state", "arrays") for found in (
      step / part / "_METADATA", *(step / part / "array_metadatas").glob("*")))]
  assert len(files) == 4
  damage.look(step)
  with pytest.raises(FileNotFoundError):  # no damage: its disk may be away
    damage.look(saved / "3")
  for file in files:
    content = file.read_bytes()
    for spoilt, says in ((content[:-2], "is not JSON"), (b"[]", "is not a JSON object"),
                         (b"{}" if file.name == "_METADATA" else None, "does not list arrays")):
      if spoilt is not None:
        file.write_bytes(spoilt)
        with pytest.raises(Damaged, match=f"{step} is damaged: {file} {says}"):
          damage.look(step)
    file.unlink()
    if file.parent.name != "array_metadatas":
      with pytest.raises(Damaged, match=f"{file} is missing"):
        damage.look(step)
    file.mkdir()
    with pytest.raises(Damaged, match=f"{file} is not a file"):
      damage.look(step)
    file.rmdir()
    file.write_bytes(content)
  for part in ("state", "arrays"):  # what their chunks are found by
    manifest = step / part / "manifest.ocdbt"
    manifest.rename(step / "away")
    with pytest.raises(Damaged, match=f"{step} is damaged: {manifest} is missing"):
      damage.look(step)
    (step / "away").rename(manifest)
  listed = step / "state" / "_METADATA"
  content = json.loads(listed.read_text())
  del content["tree_metadata"][next(key for key in content["tree_metadata"] if "kernel" in key)]
  listed.write_text(json.dumps(content))
  with pytest.raises(Damaged, match=r"_METADATA lacks 1 of \d+ arrays: \S*kernel$"):
    damage.look(step)


@pytest.mark.parametrize("size, said, proof", [
    (100, "OUT_OF_RANGE: Error reading local file \"{}\": Requested byte range [0, 120)", "has 100 bytes of 120"),
    (120, "OUT_OF_RANGE: Error reading local file \"{}\": Requested byte range [0, 120)", ""),
    (100, "OUT_OF_RANGE: Error reading local file \"{}\"", ""),
    (120, "NOT_FOUND: Error opening local file \"{}\"", ""),
    (None, "NOT_FOUND: Error opening local file \"{}\"", "is missing"),
    (120, "DATA_LOSS: Error decoding local file \"{}\": Digest mismatch", "Digest mismatch"),
    (120, "PERMISSION_DENIED: Error opening local file \"{}\"", ""),
    (120, "DATA_LOSS: Error reading local file \"{}\" [os_error_code='5']", "")])
def test_what_is_said_of_a_file_is_proof_only_where_the_file_bears_it_out(tmp_path, size, said, proof):
  file = tmp_path / "d" / "chunk"
  file.parent.mkdir()
  if size is not None:
    file.write_bytes(bytes(size))
  found = damage._proof(tmp_path, ValueError(said.format(file)))
  assert proof in found and bool(found) == bool(proof)


def test_an_error_of_the_system_is_no_proof_whatever_it_led_to():
  try:
    try:
      raise OSError("too many open files")
    except OSError as cause:
      raise ValueError("DATA_LOSS: Error decoding") from cause
  except ValueError as error:
    assert damage._proof(Path("checkpoint"), error) == ""
  assert damage._proof(Path("checkpoint"), ValueError("DATA_LOSS: Error decoding")) != ""


@pytest.mark.parametrize("said, expected", [
    ("", "OSError"), ("\n", "OSError"), (" the first\nthe second", "the first"),
    ("no file [tensorstore_spec='{...}']", "no file"), ("[tensorstore_spec='{...}']", "OSError"),
    ("a" * 150 + "b" * 150, "a" * 150 + "b" * 150), ("a" * 151 + "b" * 150, "a" * 140 + " … " + "b" * 140)])
def test_an_error_in_short_is_its_first_line_or_its_kind(said, expected):
  assert damage.in_short(OSError(said)) == expected
