"""Checkpoints: round trips, other meshes, retention, unreadable ones, full disks."""

import contextlib
import json
import logging as std_logging
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.errors import CheckpointError, ConfigError


def state(step=0, value=0.0, rows=8):
  return {"step": jnp.int32(step), "params": {"a": {"kernel": jnp.full((rows, 2), value)}, "b": jnp.arange(3.0)},
          "opt": (jnp.int32(7), {"mu": {"a": {"kernel": jnp.full((rows, 2), value + 1)}}})}


REPLICATED = P()


def target(spec=REPLICATED):
  sharding = NamedSharding(jax.make_mesh((8,), ("data",)), spec)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding if x.ndim == 2 else NamedSharding(sharding.mesh, P())), state())


def same(a, b):
  return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_round_trip_keeps_structure_and_metadata(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  assert checkpoints.restore_newest(target()) is None
  assert checkpoints.save(5, state(5, 1.5), {"step": 5, "seconds": {"train": 1.0}})
  assert not checkpoints.save(5, state(5, 9.9), {})
  checkpoints.wait()
  restored = checkpoints.restore_newest(target())
  assert same(restored.state, state(5, 1.5)) and restored.meta["seconds"] == {"train": 1.0}
  assert isinstance(restored.state["opt"], tuple)
  checkpoints.close()


def test_restores_onto_another_mesh(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  split = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), state(1, 2.0), target(P("data")))
  checkpoints.save(1, split, {})
  checkpoints.wait()
  restored = checkpoints.restore_newest(target(P(None))).state
  assert same(restored, state(1, 2.0)) and restored["params"]["a"]["kernel"].sharding.is_fully_replicated
  checkpoints.close()


def test_what_is_saved_does_not_change_when_the_state_is_donated(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  live = {"step": jnp.int32(0), "x": jnp.zeros(200_000)}
  for number in range(1, 6):
    live = step(live)
    checkpoints.save(number, live, {})
    for _ in range(3):  # overwrites the buffers while the save is under way
      live = step(live)
    checkpoints.wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), live)
    saved = checkpoints.restore_newest(like).state
    assert int(saved["step"]) == 4 * (number - 1) + 1 and np.unique(saved["x"]) == float(saved["step"])
  checkpoints.close()


def test_what_is_saved_is_copied_by_one_program(tmp_path, monkeypatch):
  traced, copy = [], jnp.copy
  monkeypatch.setattr(jnp, "copy", lambda x: traced.append(x.shape) or copy(x))
  checkpoints = Checkpoints(tmp_path)
  for step in (1, 2, 3):
    checkpoints.save(step, state(step, rows=5), {})
    checkpoints.wait()
  checkpoints.close()
  assert traced.count((5, 2)) == 2  # one of parameters and one of the optimizer


def test_what_is_saved_of_the_run_does_not_change_while_it_goes_on(tmp_path, monkeypatch):
  """Orbax writes `meta` in a thread: what callbacks remember may have changed by then."""
  go_on, dump = threading.Event(), ocp.JsonCheckpointHandler._save_fn

  async def late(self, *args):
    go_on.wait(30)
    await dump(self, *args)

  monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", late)
  checkpoints, remembered = Checkpoints(tmp_path), {"spikes": {"recent": [1.0]}}
  checkpoints.save(1, state(), {"remembered": remembered})
  remembered["spikes"]["recent"].append(2.0)
  go_on.set()
  checkpoints.close()
  assert checkpoint.read_meta(tmp_path / "1")["remembered"] == {"spikes": {"recent": [1.0]}}


def test_layers_are_chunks_of_their_own_and_the_rows_of_a_table_are_not(tmp_path):
  tree = {"table": jnp.zeros((5000, 8)), "scale": jnp.zeros((6, 8)), "kernel": jnp.zeros((6, 8, 4))}
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, {"step": jnp.int32(1), "params": tree}, {})
  checkpoints.close()
  with ocp.PyTreeCheckpointer() as reader:
    saved = reader.metadata(tmp_path / "1" / "state").item_metadata.tree["params"]
  chunks = {name: tuple(leaf.storage.chunk_shape) for name, leaf in saved.items()}
  assert chunks == {"table": (5000, 8), "scale": (6, 8), "kernel": (1, 8, 4)}


def test_retention_last_every_and_best(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep_last=1, keep_steps=4, keep_best="eval/val/loss", best_mode="min")
  for step, loss in [(1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0), (5, 2.0), (6, 2.5)]:
    checkpoints.save(step, state(step), {}, {"eval/val/loss": loss, "other": 0.0})
  checkpoints.wait()
  assert checkpoints.steps() == [2, 4, 6]
  checkpoints.close()


def test_an_unreadable_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, caplog):
  checkpoints = Checkpoints(tmp_path, keep_last=3)
  for step in (1, 2):
    checkpoints.save(step, state(step, float(step)), {"step": step})
  checkpoints.close()
  for file in (tmp_path / "2" / "state").rglob("*"):
    if file.is_file():
      file.write_bytes(file.read_bytes()[:10])
  checkpoints = Checkpoints(tmp_path, keep_last=3)
  restored = checkpoints.restore_newest(target())
  assert int(restored.state["step"]) == 1 and "2.unreadable" in caplog.text
  assert (tmp_path / "2.unreadable").exists() and checkpoints.steps() == [1]
  assert checkpoints.save(2, state(2, 2.0), {})  # the step is free again
  checkpoints.close()
  assert same(Checkpoints(tmp_path).restore_newest(target()).state, state(2, 2.0))


def test_a_checkpoint_of_another_model_or_optimizer_is_not_taken_for_a_damaged_one(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state(1), {})
  checkpoints.wait()
  other = target()
  other["opt"][1]["nu"] = other["opt"][1]["mu"]
  other["params"]["b"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=other["params"]["b"].sharding)
  for restore in (checkpoints.restore_newest, lambda t: checkpoint.restore_from(str(tmp_path), t)):
    with pytest.raises(ConfigError) as error:
      restore(other)
    assert "- opt/1/nu/a/kernel (8, 2): not in the checkpoint" in str(error.value)
    assert "! params/b: here (4,), in the checkpoint (3,)" in str(error.value)
  assert checkpoints.steps() == [1]
  checkpoints.close()


def test_nothing_readable_is_an_error_not_a_fresh_start(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state(1), {})
  checkpoints.close()
  (tmp_path / "1" / "meta" / "metadata").write_text("{")
  with pytest.raises(CheckpointError, match="no checkpoint of this workdir can be read"):
    Checkpoints(tmp_path).restore_newest(target())


def test_other_values_than_those_saved_are_seen_and_named(tmp_path, caplog):
  """A disk or a copy that changes what it holds, and reads without an error."""
  for folder, value in (("right", 1.0), ("wrong", 2.0)):
    checkpoints = Checkpoints(tmp_path / folder, keep_last=2)
    checkpoints.save(1, state(1, value), {})
    checkpoints.save(2, state(2, 1.0) | {"params": state(2, value)["params"]}, {})
    checkpoints.close()
  shutil.rmtree(tmp_path / "right" / "2" / "state")
  shutil.copytree(tmp_path / "wrong" / "2" / "state", tmp_path / "right" / "2" / "state")
  with pytest.raises(CheckpointError, match="1 of 2 arrays in .*right/2 are not what was saved: params/a/kernel"):
    checkpoint.restore_params(tmp_path / "right" / "2", {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in (("a/kernel", (8, 2)), ("b", (3,)))})
  with pytest.raises(CheckpointError, match="1 of 5 arrays in"):
    checkpoint.restore_from(str(tmp_path / "right"), target())
  restored = Checkpoints(tmp_path / "right").restore_newest(target())
  assert same(restored.state, state(1, 1.0))
  assert "arrays in" in caplog.text and "params/a/kernel" in caplog.text and "2.unreadable" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # readers that end with an error
def test_a_changed_byte_anywhere_is_seen_or_changes_nothing(tmp_path):
  arrays = {"left": np.arange(1000)}
  checkpoints = Checkpoints(tmp_path / "saved")
  # Random numbers, which no compression makes shorter.
  saved = state(1) | {"params": {"a": {"kernel": jax.random.normal(jax.random.key(0), (64, 32))}, "b": jnp.arange(3.0)}}
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved)
  checkpoints.save(1, saved, {"step": 1, "text": "x" * 100}, arrays=arrays)
  checkpoints.close()
  files = sorted(file for file in (tmp_path / "saved").rglob("*") if file.is_file() and file.stat().st_size)
  rng, seen = np.random.default_rng(0), 0
  for number in range(30):
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "saved", copy)
    file = copy / files[number % len(files)].relative_to(tmp_path / "saved")
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    file.write_bytes(content)
    try:
      restored = checkpoint.restore_from(str(copy), like)
    except (CheckpointError, ConfigError):
      seen += 1
    else:
      assert same(restored.state, saved) and restored.meta["text"] == "x" * 100, file
      np.testing.assert_array_equal(restored.arrays["left"], arrays["left"])
    shutil.rmtree(copy)
  assert seen > 10


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_never_saved(tmp_path, value):
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state(1), {})
  broken = state(2)
  broken["params"]["a"]["kernel"] = broken["params"]["a"]["kernel"].at[3, 1].set(value)
  with pytest.raises(CheckpointError, match=r"after step 2 are not all finite: a/kernel \(1\)..* of step 1; a lower"):
    checkpoints.save(2, broken, {})
  checkpoints.close()
  assert Checkpoints(tmp_path).steps() == [1]


def test_a_path_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
  checkpoints = Checkpoints(tmp_path, keep_last=2)
  for step in (1, 2):
    checkpoints.save(step, state(step), {})
  checkpoints.wait()

  def full(*args, **kwargs):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(checkpoints._manager, "save", full)
  with pytest.raises(CheckpointError) as error:
    checkpoints.save(3, state(3), {})
  assert "No space left on device" in str(error.value) and "newest complete checkpoint there is step 2" in str(
      error.value)


def test_what_is_forgotten_is_later_than_the_step(tmp_path):
  """Its own checkpoint stays, with its value; of the later ones neither is known any more."""
  checkpoints = Checkpoints(tmp_path, keep_last=9, keep_best="eval/val/loss")
  for step in (2, 4, 6, 7):
    checkpoints.save(step, state(step), {}, {"eval/val/loss": float(step)})
  checkpoints.wait()
  checkpoints.forget_after(4)
  assert checkpoints.steps() == [2, 4] and sorted(checkpoints._values) == [2, 4]
  assert checkpoints.save(6, state(6), {}) and not checkpoints.save(4, state(4), {})
  checkpoints.close()


def test_the_best_is_remembered_when_the_workdir_is_opened_again(tmp_path):
  for steps in ((1, 1.0), (2, 5.0)), ((3, 4.0), (4, 3.0)):
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best="eval/val/loss", best_mode="min")
    for step, loss in steps:
      checkpoints.save(step, state(step), {}, {"eval/val/loss": loss})
    checkpoints.close()
  assert Checkpoints(tmp_path).steps() == [1, 4]


def test_arrays_beside_the_state_come_back_and_parts_that_are_left_out_are_put_in_again(tmp_path):
  checkpoints = Checkpoints(tmp_path, leave_out={"params": ["b/kernel"], "reference": ["c"]})
  whole = {"step": jnp.int32(3), "params": {"a": jnp.ones(2), "b": {"kernel": jnp.full(2, 2.0)}},
           "reference": {"c": jnp.full(2, 3.0)}}
  stored, left_out = checkpoints.split(whole)
  assert sorted(stored) == ["params", "step"] and list(stored["params"]) == ["a"]
  assert left_out == {"params": {"b": whole["params"]["b"]}, "reference": whole["reference"]}
  assert checkpoints.merge(stored, left_out) == whole
  rest = np.arange(3)
  checkpoints.save(3, whole, {}, arrays={"rest": rest})
  rest[:] = 7  # while it is written
  checkpoints.close()
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), stored)
  restored = Checkpoints(tmp_path).restore_newest(like)
  assert list(restored.state["params"]) == ["a"]
  np.testing.assert_array_equal(restored.arrays["rest"], [0, 1, 2])


@pytest.mark.parametrize("strategy, kept", [
    (None, {"a", "critic/a"}), ({"name": "sft"}, {"a", "critic/a"}), ({"name": "ppo", "critic": {}}, {"a"})])
def test_others_begin_from_a_policy_without_the_critic_that_its_strategy_has(tmp_path, strategy, kept):
  if strategy is not None:
    (tmp_path / "config.json").write_text(json.dumps({"strategy": strategy}))
  leaves = {"a": 1, "critic/a": 2}
  assert checkpoint.policy_leaves(tmp_path / "checkpoints" / "4", leaves).keys() == kept


def test_each_checkpoint_that_is_set_aside_keeps_a_name_of_its_own(tmp_path):
  checkpoints = Checkpoints(tmp_path)
  for number in range(3):
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / str(number)).touch()
    checkpoints._set_aside(4)
  checkpoints.close()
  assert {folder.name: [file.name for file in folder.iterdir()] for folder in tmp_path.iterdir()} == {
      "4.unreadable": ["0"], "4.unreadable~": ["1"], "4.unreadable~~": ["2"]}


@pytest.mark.parametrize("fails", [False, True])
def test_warnings_are_left_out_only_while_orbax_reads(fails, monkeypatch):
  logger = checkpoint.logging.get_absl_logger()
  monkeypatch.setattr(logger, "level", std_logging.INFO)
  with contextlib.suppress(KeyError), checkpoint.quietly():
    assert logger.level == std_logging.ERROR
    if fails:
      raise KeyError("x")
  assert logger.level == std_logging.INFO
