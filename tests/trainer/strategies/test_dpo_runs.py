"""DPO end to end: the reference stays what it is, and nothing depends on micro-batches, devices or restarts."""

import json
import random

import jax
import numpy as np
import pytest

from tests import programs, tiny
from tests.trainer.export.test_hugging_face import StopAt  # noqa: F401 (named in a config below)
from trainer import train, tree
from trainer.config import evaluator, strategy
from trainer.errors import ConfigError, DataError
from trainer.telemetry.writers import read_rows


def write_pairs(file, count=40, seed=0):
  rng = random.Random(seed)
  rows = []
  for _ in range(count):
    words = " ".join(rng.choice(tiny.WORDS) for _ in range(rng.randint(1, 5)))
    rows.append({"prompt": f"{words}: ", "chosen": words.upper(), "rejected": words[::-1] + "?"})
  file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
  return file


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
  return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def config(file, **changed):
  options = changed.pop("strategy", {})
  c = tiny.config(file, **{"seq_len": 192, "total_steps": 4, "evals": {}} | changed)
  c.strategy = strategy("dpo", **options)
  c.input.sources.main.update(type="jsonl", path=str(file))
  return c


def rows_of(workdir, key):
  return {row["step"]: row[key] for row in read_rows(workdir / "metrics.jsonl") if key in row}


@pytest.fixture(scope="module")
def straight(pairs, tmp_path_factory):
  """(run, workdir) of four steps at once, on two devices."""
  workdir = tmp_path_factory.mktemp("straight")
  return train(config(pairs), workdir), workdir


@pytest.mark.devices(2)
def test_at_the_first_step_policy_and_reference_are_one(straight):
  """I7: the loss is ln 2, margins are 0 and no pair is won or lost."""
  _, workdir = straight
  # Policy and reference are rounded in programs of their own, and otherwise on each kind of processor: 1.6e-7 on one.
  assert rows_of(workdir, "loss")[1] == pytest.approx(np.log(2), rel=3e-7)
  assert abs(rows_of(workdir, "rewards/margins")[1]) < 1e-5
  assert rows_of(workdir, "rewards/accuracies")[1] == 0.5


def sgd(c, rate=0.1):
  c.optimizer.update(name="sgd", learning_rate=rate, momentum=0.0, nesterov=False, weight_decay=0.0)
  return c


@pytest.mark.devices(8)
def test_micro_batches_devices_and_packing_do_not_change_the_parameters(pairs, tmp_path):
  """I1, I2: plain SGD in one or two micro-batches, on three meshes."""
  reference = tree.flatten(train(sgd(config(pairs)), tmp_path / "a").state["params"])
  others = {
      "micro": dict(grad_accum_steps=4, mesh=dict(data=2, fsdp=1, tensor=4)),
      "fsdp": dict(mesh=dict(data=1, fsdp=8, tensor=1)),
      "mixed": dict(mesh=dict(data=1, fsdp=2, context=2, tensor=2)),
  }
  for name, changed in others.items():
    params = tree.flatten(train(sgd(config(pairs, **changed)), tmp_path / name).state["params"])
    for path, leaf in reference.items():
      np.testing.assert_allclose(leaf, params[path], atol=2e-6, err_msg=f"{name} {path}")


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_prompt_that_both_share_changes_nothing_but_the_time(pairs, tmp_path, name, precompute):
  """I3: a pair a row, so that steps have the same ones; with plain SGD, which gradients show in."""
  found = {}
  for share in ("never", "auto"):
    c = sgd(config(pairs, seq_len=128, total_steps=3, input=dict(packing="none", share_prompts=share)))
    if name == "kto":
      rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
      rows = [dict(prompt=r["prompt"], completion=" " + r["chosen"], label=i % 2 == 0) for i, r in enumerate(rows)]
      (tmp_path / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
      c.input.sources.main.path = str(tmp_path / "kto.jsonl")
    c.strategy = strategy(name, precompute=precompute)
    run = train(c, tmp_path / share)
    assert run.data.batch(0).get("prompt_ids", np.zeros(1)).any() == (share == "auto")
    found[share] = tree.flatten(run.state["params"]), rows_of(tmp_path / share, "loss")
  for path, leaf in found["never"][0].items():
    np.testing.assert_allclose(leaf, found["auto"][0][path], atol=2e-6, err_msg=path)
  for step, loss in found["never"][1].items():
    assert found["auto"][1][step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.devices(2)
@pytest.mark.parametrize("strategy", [{}, {"reference_ema": 0.5, "reference_ema_steps": 2}], ids=["fixed", "moving"])
def test_a_stopped_run_goes_on_with_the_reference_it_had(pairs, straight, tmp_path, strategy):
  """I5: parameters, optimizer, reference and every logged value bitwise."""
  run, workdir = straight
  if strategy:
    run, workdir = train(config(pairs, strategy=strategy), tmp_path / "straight"), tmp_path / "straight"
  stopping = config(pairs, strategy=strategy)
  stopping.callbacks.stop = dict(type="tests.trainer.strategies.test_dpo_runs.StopAt", step=2)
  train(stopping, tmp_path / "halves")
  continued = train(config(pairs, strategy=strategy), tmp_path / "halves")
  assert continued.step == 4
  for path, leaf in tree.flatten(continued.state).items():
    np.testing.assert_array_equal(leaf, tree.flatten(run.state)[path], err_msg=path)
  for key in ("loss", "rewards/margins", "logps/chosen"):
    assert rows_of(workdir, key) == rows_of(tmp_path / "halves", key)


@pytest.mark.devices(2)
def test_the_reference_is_what_the_run_began_with_and_does_not_move(straight):
  run, _ = straight
  start = jax.jit(run.model.init)(jax.random.key(0))
  for path, leaf in tree.flatten(start).items():
    np.testing.assert_array_equal(leaf, tree.flatten(run.state["reference"])[path], err_msg=path)
    assert not np.array_equal(leaf, tree.flatten(run.state["params"])[path]) or "scale" in path


def test_a_moving_reference_follows_the_policy(pairs, tmp_path):
  """TR-DPO: after the second of two updates it has moved half of the way."""
  run = train(config(pairs, total_steps=2, strategy=dict(reference_ema=0.5, reference_ema_steps=2)), tmp_path / "w")
  start = tree.flatten(jax.jit(run.model.init)(jax.random.key(0)))
  for path, leaf in tree.flatten(run.state["reference"]).items():
    policy = tree.flatten(run.state["params"])[path]
    np.testing.assert_allclose(leaf, (start[path] + policy) / 2, atol=1e-7, err_msg=path)


def test_another_run_can_be_the_reference_and_must_stay_the_same(pairs, tmp_path):
  other = train(config(pairs, total_steps=2, seed=5), tmp_path / "other")
  mine = config(pairs, strategy=dict(reference=str(tmp_path / "other")), total_steps=2)
  run = train(mine, tmp_path / "mine")
  for path, leaf in tree.flatten(other.state["params"]).items():
    np.testing.assert_array_equal(leaf, tree.flatten(run.state["reference"])[path], err_msg=path)
  train(config(pairs, total_steps=3, seed=5, allow_config_changes=True), tmp_path / "other")
  mine.total_steps = 3
  mine.allow_config_changes = True
  with pytest.raises(ConfigError, match="another reference"):
    train(mine, tmp_path / "mine")


def test_under_adapters_the_reference_is_the_model_with_the_adapter_off(pairs, tmp_path):
  c = config(pairs, strategy=dict(reference="base"))
  c.model.lora.update(rank=2)
  run = train(c, tmp_path / "w")
  reference = tree.flatten(run.state["reference"])
  assert set(reference) == {p for p in tree.flatten(run.state["params"]) if "lora_" in p}
  assert not any(np.any(leaf) for path, leaf in reference.items() if path.endswith("lora_b"))
  assert any(np.any(leaf) for path, leaf in tree.flatten(run.state["params"]).items() if path.endswith("lora_b"))
  with pytest.raises(ConfigError, match="no adapters"):
    train(config(pairs, strategy=dict(reference="base")), tmp_path / "x")


def test_precomputed_and_live_references_give_the_same_losses(pairs, tmp_path):
  """Bitwise in the rows of the first epoch; the second time nothing is computed, and a resumed run goes on the same.

  As users' programs are made: made quickly, a step with a reference in it rounds gradients otherwise than one without.
  """
  evals = {"pairs": evaluator(type="preference", eval_steps=2, batch_size=8)}
  # The first epoch alone: its rows are the ones that the log-probs were computed in.
  def make(**strategy):
    return config(pairs, total_steps=2, evals=evals, strategy=strategy, input=dict(packing="none"))

  with programs.as_users():
    train(make(), tmp_path / "live")
    ahead = train(make(precompute=True), tmp_path / "ahead")
  assert "reference" not in ahead.state
  for key in ("loss", "rewards/margins", "rewards/chosen", "grad_norm", "eval/pairs/rewards/margins"):
    assert rows_of(tmp_path / "live", key) == rows_of(tmp_path / "ahead", key) != {}, key

  stopping = make(precompute=True)
  stopping.callbacks.stop = dict(type="tests.trainer.strategies.test_dpo_runs.StopAt", step=1)
  stopping.input.cache_dir = str(tmp_path / "ahead" / "cache")
  with programs.as_users():
    train(stopping, tmp_path / "halves")
  folders = sorted((tmp_path / "ahead" / "cache").glob("*-reference-*"))
  again = make(precompute=True)
  again.input.cache_dir = str(tmp_path / "ahead" / "cache")
  with programs.as_users():
    continued = train(again, tmp_path / "halves")
  assert sorted((tmp_path / "ahead" / "cache").glob("*-reference-*")) == folders and len(folders) == 2
  for path, leaf in tree.flatten(continued.state).items():
    np.testing.assert_array_equal(leaf, tree.flatten(ahead.state)[path], err_msg=path)


def test_preferring_capitals(pairs, tmp_path):
  c = config(pairs, total_steps=30)
  c.optimizer.learning_rate = 1e-2
  train(c, tmp_path / "w")
  accuracy, loss = rows_of(tmp_path / "w", "rewards/accuracies"), rows_of(tmp_path / "w", "loss")
  assert accuracy[30] > 0.9 and loss[30] < 0.5 * loss[1]


@pytest.mark.parametrize("row, message", [
    ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal|same"),
    ({"prompt": "a", "chosen": "b"}, "rejected"),
    ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen"),
])
def test_a_malformed_pair_is_named_with_file_line_and_key(pairs, tmp_path, row, message):
  file = tmp_path / "bad.jsonl"
  file.write_text(pairs.read_text(encoding="utf-8") + json.dumps(row) + "\n", encoding="utf-8")
  with pytest.raises(DataError, match=message) as error:
    train(config(file, total_steps=1), tmp_path / "w")
  assert f"{file}:41" in str(error.value)


def test_options_of_a_loss_that_is_not_used_are_refused(pairs, tmp_path):
  with pytest.raises(ConfigError, match="did you mean 'sigmoid'"):
    train(config(pairs, strategy=dict(loss={"sigmoyd": 1.0})), tmp_path / "a")
  with pytest.raises(ConfigError, match="discopop_tau"):
    train(config(pairs, strategy=dict(discopop_tau=0.1)), tmp_path / "b")


def test_kto_tells_the_desirable_from_the_undesirable(pairs, tmp_path):
  """The same completions, each judged on its own."""
  rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
  judged = [{"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in rows for side in ("chosen", "rejected")]
  file = tmp_path / "judged.jsonl"
  file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in judged), encoding="utf-8")
  c = config(file, total_steps=30)
  c.strategy = strategy("kto")
  c.optimizer.learning_rate = 1e-2
  train(c, tmp_path / "w")
  loss = rows_of(tmp_path / "w", "loss")
  assert loss[1] == pytest.approx(0.5, abs=1e-6) and loss[30] < 0.4
  assert rows_of(tmp_path / "w", "rewards/chosen")[30] > rows_of(tmp_path / "w", "rewards/rejected")[30] + 1
