"""GRPO end to end: on-policy at first, and unmoved by restarts, micro-batches, devices, and what has no reward."""

import contextlib
import io

import numpy as np
import pytest

from tests import programs
from tests.trainer.rollout_runs import (
  STOP,
  TOYS,
  assert_same_state,
  config,
  rows_of,
  start_of,
  stops_often,
  table,
  write_prompts,
)
from trainer import train, tree
from trainer.config import reward
from trainer.errors import DataError
from trainer.rollouts.schedule import Policies


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


# ----------------------------------------------------------------------------------------------
# I9, I2, I1: one rollout, sampled and trained on in one program or another.


@pytest.fixture(scope="module")
def first(prompts, tmp_path_factory):
  """(run, workdir) of one rollout in two updates."""
  workdir = tmp_path_factory.mktemp("first")
  return train(config(prompts), workdir), workdir


def test_what_is_trained_is_what_was_sampled(first):
  """I9: ragged prompts of two sources; the log-probs of the loss are those of the sampler."""
  row = rows_of(first[1])[1]
  assert row["sampling/sampling_logp_difference/max"] < 1e-5
  assert row["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
  assert row["clip_ratio/region_mean"] == 0
  prompts = {line["prompt"] for line in table(first[1], 1)}
  assert len(prompts) == 4 and len({len(prompt) for prompt in prompts}) > 1
  assert 0 < row["data/other/prompts"] < 4 == row["data/other/prompts"] + row["data/main/prompts"]


@pytest.fixture(scope="module")
def micro(prompts, tmp_path_factory):
  """(run, workdir, stderr) of the same in micro-batches, whose stderr is no terminal."""
  workdir, stderr = tmp_path_factory.mktemp("micro"), io.StringIO()
  with contextlib.redirect_stderr(stderr):
    run = train(config(prompts, grad_accum_steps=4), workdir)
  return run, workdir, stderr.getvalue()


def assert_close_params(a, b):
  a, b = tree.flatten(a), tree.flatten(b)
  assert a.keys() == b.keys()
  for path, leaf in a.items():
    np.testing.assert_allclose(leaf, b[path], atol=1e-6, err_msg=path)


def assert_like(workdir, first):
  """The same completions and advantages, and to rounding the same two updates."""
  ours, theirs = table(workdir, 1), table(first, 1)
  assert ours == theirs and len(ours) == 16
  for step in (1, 2):
    for key in ("loss", "grad_norm", "entropy", "reward"):
      assert rows_of(workdir)[step][key] == pytest.approx(rows_of(first)[step][key], rel=1e-5, abs=1e-7), (step, key)


@pytest.mark.parametrize("mesh", [{}, dict(data=1, fsdp=2, context=2, tensor=2)], ids=["data", "mixed"])
def test_one_device_and_eight_do_the_same(first, prompts, tmp_path, mesh):
  """I2: one, eight for data, and a mixed mesh."""
  with programs.devices(8):
    run = train(config(prompts, mesh=mesh), tmp_path / "w")
  assert run.mesh.devices.size == 8
  assert_like(tmp_path / "w", first[1])
  assert_close_params(run.state["params"], first[0].state["params"])


def test_micro_batches_do_not_change_an_update(first, micro):
  """I1: four of two rows, which also pad a step to another number of rows, and one of eight."""
  assert_like(micro[1], first[1])
  assert rows_of(micro[1])[2]["tokens_seen"] < rows_of(first[1])[2]["tokens_seen"]
  assert_close_params(micro[0].state["params"], first[0].state["params"])


def test_a_log_file_gets_no_bars(micro):
  assert "\r" not in micro[2] and "it/s" not in micro[2] and "tokenizing" not in micro[2]


# ----------------------------------------------------------------------------------------------
# I5: three rollouts of two updates and two epochs, 12 steps.


def of_three_rollouts(prompts, stop=None, **changed):
  c = config(prompts, total_steps=12, rollout=dict(epochs=2), **{"ckpt_steps": 5} | changed)
  if stop is not None:
    c.callbacks.stop = dict(type=STOP, step=stop)
  return c


@pytest.fixture(scope="module")
def straight(prompts, tmp_path_factory):
  """(run, workdir) of 12 steps, of which the checkpoints of steps 5, 10 and 12 are kept."""
  workdir = tmp_path_factory.mktemp("straight")
  return train(of_three_rollouts(prompts, keep_last=9), workdir), workdir


def test_stopped_anywhere_it_becomes_the_same_run(prompts, straight, tmp_path):
  """Within an epoch of a rollout, between epochs, between rollouts: state and every number of every row, bitwise."""
  for step in (1, 2, 4, 6, None):
    run = train(of_three_rollouts(prompts, stop=step, ckpt_steps=1000), tmp_path / "w")
    assert run.step == (step or 12)
  assert_same_state(run.state, straight[0].state)
  assert rows_of(tmp_path / "w") == rows_of(straight[1])
  names = {path.name for path in (straight[1] / "samples").iterdir()}
  assert names == {f"rollout-{step:08d}.{kind}" for step in (1, 5, 9) for kind in ("jsonl", "html")}
  for name in names:
    assert (tmp_path / "w" / "samples" / name).read_text() == (straight[1] / "samples" / name).read_text()


def test_of_a_rollout_that_is_stopped_nothing_is_kept(prompts, straight, tmp_path):
  for step, rollouts in ((0, 0), (4, 1)):
    stopping = of_three_rollouts(prompts, ckpt_steps=1000)
    stopping.callbacks.stop = dict(type=f"{TOYS}.StopInRollout", step=step)
    assert train(stopping, tmp_path / "w").step == step
    assert len(list((tmp_path / "w").glob("samples/*.jsonl"))) == rollouts
  run = train(of_three_rollouts(prompts), tmp_path / "w")
  assert_same_state(run.state, straight[0].state)
  assert rows_of(tmp_path / "w") == rows_of(straight[1])


def test_the_rest_of_a_rollout_is_trained_on_elsewhere(prompts, straight, tmp_path):
  """One device goes on after the first of a rollout's four steps on eight: the same batches, in the same order."""
  with programs.devices(8):
    assert train(of_three_rollouts(prompts, stop=5), tmp_path).mesh.devices.size == 8
  assert train(of_three_rollouts(prompts, stop=8), tmp_path).mesh.devices.size == 1
  ours, theirs = rows_of(tmp_path), rows_of(straight[1])
  assert list(ours) == list(range(1, 9))
  for step, row in ours.items():
    for key in ("loss", "grad_norm", "policy/ratio_mean", "tokens_seen", "reward", "epoch"):
      assert row[key] == pytest.approx(theirs[step][key], rel=1e-4, abs=1e-6), (step, key)
  assert len({row["loss"] for row in ours.values()}) == 8


# ----------------------------------------------------------------------------------------------
# I10: what has no reward, or nothing to compare with.


def test_equal_rewards_teach_nothing(prompts, tmp_path):
  run = train(config(prompts, "same"), tmp_path / "w")
  for row in rows_of(tmp_path / "w").values():
    assert row["grad_norm"] == 0 and row["frac_reward_zero_std"] == 1 and row["advantage/abs_mean"] == 0
    assert row["reward"] == 0.5 and row["loss"] == 0
  assert_same_state(run.state["params"], start_of(run))


def test_completions_without_a_reward_are_in_no_denominator(prompts, tmp_path):
  """Some abstain, some prompts fail: the loss, at a ratio of 1, is the mean of the others' advantages."""
  run = train(config(prompts, "some", total_steps=1, strategy=dict(baseline="none", scale="none"),
                     rollout=dict(updates=1)), tmp_path / "w")
  row, lines = rows_of(tmp_path / "w")[1], table(tmp_path / "w", 1)
  failed = [int(line["where"].rpartition(":")[2]) % 2 == 1 for line in lines]  # lines count from 1, prompts from 0
  assert 0 < sum(failed) < 16
  for line, lost in zip(lines, failed, strict=True):
    assert (line["reward"] is None) == (line["advantage"] is None) == (lost or line["sample"] % 2 == 1)
  kept = [line for line in lines if line["reward"] is not None]
  assert row["loss"] == pytest.approx(-np.mean([line["advantage"] for line in kept]), rel=1e-5)
  assert row["reward"] == pytest.approx(np.mean([line["reward"] for line in kept]), abs=1e-6) != 0
  assert row["rewards/some/failed"] == sum(failed) / 16
  assert row["rewards/some/abstained"] == (16 - sum(failed)) / 2 / 16
  assert row["completions/without_reward"] == 16 - len(kept)
  assert run.data._now.experience.num_units == len(kept)


def test_a_run_goes_on_where_every_reward_fails(prompts, tmp_path, caplog):
  """Also from a checkpoint within a rollout of which nothing is left to train on."""
  stopping = config(prompts, "never")
  stopping.callbacks.stop = dict(type=STOP, step=1)
  train(stopping, tmp_path / "w")
  run = train(config(prompts, "never"), tmp_path / "w")
  assert run.step == 2
  assert_same_state(run.state["params"], start_of(run))
  for row in rows_of(tmp_path / "w").values():
    assert row["rewards/never/failed"] == 1 and row["grad_norm"] == 0 and row["nonfinite_steps"] == 0
    assert "reward" not in row and "loss" not in row and row["frac_without_reward"] == 1
  assert "out of order" in caplog.text and "before step 1 teaches nothing: none of its 16 completions" in caplog.text


def test_a_run_ends_after_so_many_rollouts_without_a_lesson(prompts, tmp_path):
  """Stopped in between it counts on; the parameters that it began with are untouched, by weight decay too."""
  def make(score="never", **changed):
    return config(prompts, score, total_steps=9, rollout=dict(updates=1, max_without_lesson=3) | changed)

  stopping = make()
  stopping.callbacks.stop = dict(type=STOP, step=2)
  stopping.optimizer.weight_decay = 0.5
  run = train(stopping, tmp_path / "w")
  assert_same_state(run.state["params"], start_of(run))
  stopping.callbacks = {}
  with pytest.raises(DataError, match=r"3 rollouts in a row taught nothing, from step 1 to 3, and nothing has been "
                     r"learned since the run began\. .*never failed for 100%"):
    train(stopping, tmp_path / "w")
  assert len(table(tmp_path / "w", 3)) == 16
  with pytest.raises(DataError, match=r"its 16 rewards do not differ \(0\.5\)"):
    train(make("same"), tmp_path / "same")
  assert train(make("same", max_without_lesson=0), tmp_path / "same").step == 9


def test_rewards_that_become_equal_are_no_error(prompts, tmp_path):
  """A policy that has learned may have mastered its prompts; rewards that fail end it all the same."""
  def make(how):
    c = config(prompts, None, total_steps=6, rollout=dict(updates=1, max_without_lesson=2))
    c.rollout.rewards.toy = reward(type=f"{TOYS}.from_prompt_8_on", how=how)
    return c

  assert train(make("equal"), tmp_path / "equal").step == 6
  shares = [row["frac_reward_zero_std"] for row in rows_of(tmp_path / "equal").values()]
  assert max(shares[:2]) < 1 == min(shares[2:])
  with pytest.raises(DataError, match=r"2 rollouts in a row taught nothing, from step 3 to 4\. Of the last: none of"):
    train(make("fail"), tmp_path / "fail")


# ----------------------------------------------------------------------------------------------
# Groups that are replaced, completions that are masked, and what the metrics count.


def numbers(workdir, step):
  """The prompts' numbers in a rollout, in order."""
  return [int(line["where"].rpartition(":")[2]) - 1 for line in table(workdir, step) if line["sample"] == 0]


def replacing(prompts, **changed):
  """14 prompts, of which those with even numbers are replaced, twice at most."""
  c = config(prompts, "two_kinds", total_steps=100, rollout=dict(resample=2), **changed)
  c.input.sources.main.max_documents = c.input.sources.other.max_documents = 7
  c.input.stop = "first"
  return c


def test_groups_without_spread_are_replaced_by_the_next_prompts(prompts, tmp_path):
  """Against the stream of prompts; the run ends with the prompts, and stopped anywhere it is the same."""
  run = train(replacing(prompts), tmp_path / "w")
  stream = [run.data._prompts.item(i).columns["number"] for i in range(run.data._prompts.num_items)]
  rows, drawn, step, replaced = rows_of(tmp_path / "w"), 0, 0, []
  while drawn < len(stream):
    kept, spare = [], []
    for attempt in range(3):
      new = stream[drawn:drawn + 4 - len(kept)]
      drawn += len(new)
      kept += [n for n in new if n % 2 or attempt == 2]
      spare += [n for n in new if not (n % 2 or attempt == 2)]
    again = spare[:4 - len(kept)]
    replaced.append(len(spare) - len(again))
    assert numbers(tmp_path / "w", step + 1) == kept + again
    for row in (rows[step + 1], rows[step + 2]):
      assert row["rollout/groups_replaced"] == replaced[-1] and row["epoch"] == drawn / 14
      assert row["data/main/prompts"] + row["data/other/prompts"] == drawn
    step += 2
  assert run.step == run.total_steps == step == max(rows) and any(replaced) and len(stream) > 12

  for stop in (1, None):
    stopping = replacing(prompts)
    if stop is not None:
      stopping.callbacks.stop = dict(type=STOP, step=stop)
    again = train(stopping, tmp_path / "halves")
  assert_same_state(again.state, run.state)
  assert rows_of(tmp_path / "halves") == rows and again.total_steps == step
  assert train(replacing(prompts), tmp_path / "halves").step == step


def test_the_last_rollout_takes_the_prompts_that_are_left(prompts, tmp_path):
  c = config(prompts, total_steps=100)
  c.input.sources.main.max_documents = c.input.sources.other.max_documents = 3
  c.input.stop = "all"
  run = train(c, tmp_path / "w")
  assert run.step == run.total_steps == 4
  assert sorted(numbers(tmp_path / "w", 1) + numbers(tmp_path / "w", 3)) == sorted(
      item.columns["number"] for item in run.data._prompts.every_item())
  assert len(table(tmp_path / "w", 3)) == 8


@pytest.fixture(scope="module")
def stopping_early(prompts, tmp_path_factory):
  """(run, workdir) of completions of which some end by themselves, with those that are cut off masked; two rewards."""
  workdir = tmp_path_factory.mktemp("stopping")
  c = config(prompts, total_steps=1, rollout=dict(mask_truncated=True, updates=1))
  c.rollout.rewards.long = reward(type="length", max_length=8, cache_length=7, weight=0.5)
  with stops_often():
    return train(c, workdir), workdir


def test_completions_that_were_cut_off_are_compared_but_not_trained_on(stopping_early):
  run, workdir = stopping_early
  row, lines = rows_of(workdir)[1], table(workdir, 1)
  trained = [line for line in lines if line["finish_reason"] == "stop"]
  assert 3 < len(trained) < 16 and row["completions/masked"] == 16 - len(trained)
  assert row["loss"] == pytest.approx(-np.mean([line["advantage"] for line in trained]), rel=1e-4) != 0
  assert int(run.data._now.experience.weights.sum()) == sum(line["tokens"] for line in trained)
  for group in np.array_split(np.array([line["advantage"] for line in lines]), 4):
    assert sum(group) == pytest.approx(0, abs=1e-5) and np.std(group, ddof=1) == pytest.approx(1, rel=1e-2)


def test_rewards_that_are_compared_apart(prompts, tmp_path):
  """GDPO, by loops over the rewards of the table; the loss is of these advantages."""
  c = config(prompts, total_steps=1, strategy=dict(preset="gdpo"), rollout=dict(updates=1))
  c.rollout.rewards.long = reward(type="length", max_length=8, cache_length=7, weight=0.5)
  with stops_often():
    train(c, tmp_path)
  row, lines, worth = rows_of(tmp_path)[1], table(tmp_path, 1), []
  for group in np.array_split(lines, 4):
    own = {name: np.array([line["rewards"][name] for line in group]) for name in ("low", "long")}
    apart = {name: (x - x.mean()) / (x.std(ddof=1) + 1e-4) for name, x in own.items()}
    worth += (apart["low"] + 0.5 * apart["long"]).tolist()
  expected = (np.array(worth) - np.mean(worth)) / (np.std(worth, ddof=1) + 1e-4)
  found = [line["advantage"] for line in lines]
  np.testing.assert_allclose(found, expected, atol=2e-4)
  assert row["loss"] == pytest.approx(-np.mean(found), abs=1e-5) and np.std(expected) > 0.5


def test_metrics_and_table_agree(stopping_early):
  run, workdir = stopping_early
  row, lines = rows_of(workdir)[1], table(workdir, 1)
  lengths, ended = np.array([line["tokens"] for line in lines]), [line["finish_reason"] == "stop" for line in lines]
  assert row["completions/clipped_ratio"] == 1 - np.mean(ended)
  for name, some in (("length", lengths), ("terminated_length", lengths[ended])):
    for how in ("mean", "min", "max"):
      assert row[f"completions/{how}_{name}"] == pytest.approx(getattr(some, how)()), (how, name)
  for name in ("low", "long"):
    values = [line["rewards"][name] for line in lines]
    assert row[f"rewards/{name}/mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert row[f"rewards/{name}/std"] == pytest.approx(np.std(values, ddof=1), abs=1e-5)
  totals = [line["rewards"]["low"] + 0.5 * line["rewards"]["long"] for line in lines]
  assert [line["reward"] for line in lines] == pytest.approx(totals, abs=2e-6)
  assert row["reward"] == pytest.approx(np.mean(totals), abs=1e-5)
  assert row["reward_std"] == pytest.approx(np.mean([np.std(g, ddof=1) for g in np.array_split(totals, 4)]), abs=1e-5)
  assert [line["rewards"]["long"] for line in lines] == pytest.approx([-max(n - 1, 0) / 7 for n in lengths], abs=1e-6)
  decoded = run.tokenizer.decode(run.data._now.experience.tokens[:int(run.data._now.experience.lengths[0])])
  assert any(decoded.startswith(line["prompt"] + line["completion"]) for line in lines)


def test_each_epoch_of_a_rollout_has_every_completion_once_in_an_order_of_its_own(straight, monkeypatch):
  """Of the last rollout, 16 completions in two updates: which of its tokens each of the four batches holds."""
  data = straight[0].data
  starts = np.cumsum([0, *data._now.experience.lengths[:-1]])

  def units(nth):
    places = data._batch(nth, ("places",))["places"]
    return {int(np.searchsorted(starts, place, side="right")) for place in places[places >= 0]}

  steps = [units(nth) for nth in range(4)]
  assert [len(step) for step in steps] == [8] * 4
  for epoch in (steps[:2], steps[2:]):
    assert epoch[0] | epoch[1] == set(range(1, 17))
  assert steps[0] not in steps[2:]
  monkeypatch.setattr(data, "_now", data._now._replace(number=data._now.number + 1))
  assert units(0) not in steps


def test_each_rollout_draws_anew(straight):
  """The same prompts and the same policy, in two rollouts and in the first once more."""
  run = straight[0]
  texts = [[line["completion"] for line in run.data.producer.roll(
      Policies(run.state["params"], 0), number, None, 0, run.data.taken.pieces[0], lambda: False).table]
      for number in (0, 1, 0)]
  assert texts[0] == texts[2]
  assert sum(ours == theirs for ours, theirs in zip(*texts[:2], strict=True)) < 8
