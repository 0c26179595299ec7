"""What rollouts are made of: pairs, turns of an environment, responses from files, references; and what is refused."""

import contextlib
import dataclasses
import json
import math
import re
import statistics
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from input_pipeline.steps import PROMPTS, Past, Piece
from input_pipeline.tokenizer.tokenizer import load_tokenizer
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
from trainer import program as program_lib
from trainer import train, tree
from trainer.config import defaults, reward, strategy
from trainer.errors import ConfigError, DataError
from trainer.modes import inspect
from trainer.rollouts import rollout, schedule
from trainer.rollouts.carried import fresh
from trainer.rollouts.experience import Trajectory, collect
from trainer.rollouts.groups import NoSignal
from trainer.rollouts.producer import Policy, Rollout
from trainer.strategies.record import OF_CRITIC


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts"))


def stopped_at(c, *steps):
  """The same config, to be stopped after each of these steps, and then not."""
  for step in (*steps, None):
    c.callbacks = {} if step is None else {"stop": dict(type=STOP, step=step)}
    yield c


# ----------------------------------------------------------------------------------------------
# Other things to learn from than sampled completions with advantages.


def test_preferences_among_what_was_sampled(prompts, tmp_path):
  """Online DPO: the best and the worst of each group, none of a group without; I7 and I5."""
  def make():
    c = config(prompts, "two_kinds", total_steps=3, seq_len=96)
    c.strategy = strategy("dpo")
    return c

  run, rows = train(make(), tmp_path / "w"), rows_of(tmp_path / "w")
  lines = table(tmp_path / "w", 1)
  groups = [lines[i:i + 4] for i in range(0, 16, 4)]
  ties = [group for group in groups if len({line["reward"] for line in group}) == 1]
  assert rows[1]["rollout/ties"] == len(ties) and 0 < len(ties) < 4
  assert rows[1]["loss"] == pytest.approx(math.log(2), rel=1e-6)
  for group in groups:
    marks = {line["advantage"]: line["reward"] for line in group if line["advantage"] is not None}
    rewards = [line["reward"] for line in group]
    assert marks == ({} if group in ties else {1.0: max(rewards), -1.0: min(rewards)})
  for c in stopped_at(make(), 1):
    again = train(c, tmp_path / "halves")
  assert_same_state(again.state, run.state)
  assert rows_of(tmp_path / "halves") == rows


def test_preferences_among_what_ended_by_itself(prompts, tmp_path):
  """With mask_truncated the best and the worst of those that were not cut off; the others are counted."""
  c = config(prompts, total_steps=1, seq_len=96, rollout=dict(mask_truncated=True, updates=1))
  c.strategy = strategy("dpo")
  with stops_often():
    train(c, tmp_path / "w")
  row, lines, paired = rows_of(tmp_path / "w")[1], table(tmp_path / "w", 1), 0
  for group in (lines[i:i + 4] for i in range(0, 16, 4)):
    rewards = [line["reward"] for line in group if line["finish_reason"] == "stop"]
    marks = {line["advantage"]: line["reward"] for line in group if line["advantage"] is not None}
    assert marks == ({1.0: max(rewards), -1.0: min(rewards)} if len(set(rewards)) > 1 else {})
    paired += bool(marks)
  cut = sum(line["finish_reason"] == "length" for line in lines)
  assert row["completions/masked"] == cut > 0 and 0 < paired == 4 - row["rollout/unpaired"] - row["rollout/ties"]


def test_responses_from_a_file(tmp_path):
  """Offline GRPO: at the first step the ratio is 1 and the loss is a mean of advantages; I5."""
  said = [("ab: ", ["x", "yyy", "zz"], [1.0, 0.0, 0.25]), ("c: ", ["long answer", "s"], [2.0, 5.0]),
          ("d: ", ["aa", "bbbb", "c"], [0.0, 0.0, 1.0])]
  file = tmp_path / "said.jsonl"
  file.write_text("".join(json.dumps(dict(zip(("prompt", "responses", "rewards"), row, strict=True))) + "\n"
                          for row in said), encoding="utf-8")

  def make():
    c = config([file], None, total_steps=4, strategy=dict(aggregate="token", temperature=0.7))
    c.input.packing = "none"
    c.rollout = defaults().rollout
    return c

  run, rows = train(make(), tmp_path / "w"), rows_of(tmp_path / "w")
  total, tokens = 0.0, 0
  for _, responses, rewards in said:
    for response, value in zip(responses, rewards, strict=True):
      advantage = (value - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
      total, tokens = total + advantage * (len(response) + 1), tokens + len(response) + 1  # with EOS
  assert rows[1]["loss"] == pytest.approx(-total / tokens, rel=1e-5)
  assert rows[1]["policy/ratio_mean"] == 1 and rows[1]["grad_norm"] > 0
  for c in stopped_at(make(), 2):
    again = train(c, tmp_path / "halves")
  assert_same_state(again.state, run.state)
  assert rows_of(tmp_path / "halves") == rows


def test_an_environment_answers_and_is_not_trained_on(prompts, tmp_path):
  """Three turns: each token is compared with itself when it was sampled, and what was answered has no weight."""
  c = config(prompts, None, total_steps=1, rollout=dict(environment=f"{TOYS}.Echo", updates=1))
  with stops_often():
    run = train(c, tmp_path / "w")
  row, lines = rows_of(tmp_path / "w")[1], table(tmp_path / "w", 1)
  assert row["sampling/sampling_logp_difference/max"] < 1e-5 and row["rewards/environment/failed"] == 0
  assert row["reward"] == row["rewards/environment/mean"] == pytest.approx(
      np.mean([line["reward"] for line in lines]), abs=1e-5)
  experience, begin, turns = run.data._now.experience, 0, 0
  assert int(experience.weights.sum()) == sum(line["tokens"] for line in lines)
  for size, line in zip(experience.lengths.tolist(), lines, strict=True):
    here = slice(begin, begin + size)
    begin += size
    ids, sampled = experience.tokens[here], experience.weights[here] > 0
    assert np.array_equal(experience.logprobs[here] != 0, sampled)
    text = run.tokenizer.decode(ids[~sampled])
    answers = re.findall(r" \[\d+\] ", line["completion"])
    assert text == line["prompt"] + "".join(answers)
    turns += len(answers)
  assert turns > 4


def test_a_tokenizer_is_trained_on_prompts_and_answers(tmp_path):
  """As it would be for training, which the inspection shows without a program compiled."""
  file = tmp_path / "a.jsonl"
  file.write_text("".join(json.dumps({"prompt": f"{n} apples or", "judge": {"says": [f"{n} bananas"]}}) + "\n"
                          for n in range(30)), encoding="utf-8")
  c = config([file])
  c.tokenizer.update(type="bpe", vocab_size=275)
  inspect.inspect(c, tmp_path / "w")
  tokenizer = load_tokenizer(tmp_path / "w" / "tokenizer.json")
  assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch([" apples bananas"])[0][:, None]] == [
      " apples", " bananas"]


# ----------------------------------------------------------------------------------------------
# References.


def test_astrai_moves_its_reference_to_the_policy_now_and_then(prompts, tmp_path):
  """Until the second step it is where the run began, and holds the policy there."""
  made = config(prompts, total_steps=3, strategy=dict(preset="astrai", reference_ema_steps=2))
  runs = []
  for c in stopped_at(made, 1, 2):
    runs.append(train(c, tmp_path / "w"))
  assert_same_state(runs[0].state["reference"], start_of(runs[0]))
  assert_same_state(runs[1].state["reference"], runs[1].state["params"])
  assert_same_state(runs[2].state["reference"], runs[1].state["params"])
  rows = rows_of(tmp_path / "w")
  assert rows[1]["kl"] < 1e-12 < 1e-6 < rows[2]["kl"] and rows[3]["kl"] < 1e-12
  assert rows[1]["loss"] == pytest.approx(rows[1]["policy_loss"], abs=1e-7)
  assert rows[2]["loss"] > rows[2]["policy_loss"]


def test_under_adapters_the_reference_is_the_base(prompts, tmp_path):
  c = config(prompts, total_steps=2, strategy=dict(kl_coef=0.1, reference="base"))
  c.model.lora.update(rank=2)
  run = train(c, tmp_path / "w")
  assert {path.rpartition("/")[2] for path in tree.flatten(run.state["reference"])} == {"lora_a", "lora_b"}
  rows = rows_of(tmp_path / "w")
  assert rows[1]["kl"] < 1e-12 < 1e-9 < rows[2]["kl"]
  assert rows[1]["sampling/sampling_logp_difference/max"] < 1e-5


# ----------------------------------------------------------------------------------------------
# Refused, before anything is compiled.


def sft(c):
  c.strategy = strategy("sft")


def unknown_reward(c):
  c.rollout.rewards.other = reward(type="numerik")


def unused_key(c):
  c.rollout.rewards.right = reward(type="exact_match", max_length=3)


def twice(c):
  c.rollout.rewards.environment = reward(type=f"{TOYS}.low")
  c.rollout.environment = f"{TOYS}.Echo"


def tokens(c):
  c.total_steps = -1
  c.total_tokens = 1000


def absent(c):
  c.rollout.rewards.right = reward(type="exact_match", answer_key="solution")


def windows(c):
  c.model.layer_pattern, c.model.window = ("local", "global"), 8
  c.input.share_prompts = "always"


@pytest.mark.parametrize("change, said", [
    (sft, "strategy 'sft' does not learn from completions that are sampled. Use strategy dpo or grpo"),
    (dict(top_k=5), "top_k=5, top_p=1.0, min_p=0.0: what is sampled would come from a truncated distribution"),
    (dict(rewards={}), "rollout.rewards is empty and there is no rollout.environment"),
    (dict(temperature=0.0), "rollout.temperature is 0: all completions of a prompt would be the same"),
    (dict(group_size=1), "rollout.group_size is 1; it must be at least 2"),
    (dict(resample=-1), "rollout.resample is -1; it must be at least 0"),
    (dict(reward_timeout_seconds=0.0), "rollout.reward_timeout_seconds is 0.0; it must be above 0"),
    (unknown_reward, "did you mean 'numeric'"),
    (unused_key, "max_length"),
    (twice, "rollout.rewards.environment has the name of what rollout.environment gives"),
    (tokens, "how many tokens rollouts give is not known before"),
    (dict(max_turns=3), "config.rollout.max_turns = 3"),
    (windows, "which Transformer cannot do: the window of its local layers counts places of the row. Use --config"),
    (dict(max_new_tokens=64), "with seq_len=64 it must be from 1 to 63"),
    (dict(environment=f"{TOYS}.Echo", tools=("a.b",)), "answered by an environment of their own"),
    (dict(turn_share=0.0), "rollout.turn_share is 0.0; it must be above 0, and 1 at most"),
    (dict(kept_texts=2), "rollout.kept_texts is 2, but nothing answers completions"),
])
def test_what_cannot_be_is_refused_with_what_to_do(prompts, tmp_path, change, said):
  c = config(prompts)
  if callable(change):
    change(c)
  else:
    if "rewards" in change:
      c.rollout.rewards = {}
    c.rollout.update(change)
  with pytest.raises(ConfigError, match=re.escape(said)):
    train(c, tmp_path / "w")
  assert not (tmp_path / "w" / "checkpoints").exists() or not list((tmp_path / "w" / "checkpoints").iterdir())


def test_an_environment_may_be_all_that_says_what_is_good(prompts):
  c = config(prompts)
  c.rollout.rewards, c.rollout.environment = {}, f"{TOYS}.Echo"
  assert program_lib.resolve(c)[0].rollout.environment
  c.rollout.environment = None
  with pytest.raises(ConfigError, match="nothing says what is good"):
    program_lib.resolve(c)


def test_precomputed_references_and_stages_are_refused(prompts, tmp_path):
  with pytest.raises(ConfigError, match="completions of rollouts are not known before"):
    train(config(prompts, strategy=dict(kl_coef=0.1, precompute=True)), tmp_path / "a")
  with pytest.raises(ConfigError, match=r"input.batch_size_stages has no effect on rollouts"):
    train(config(prompts, input=dict(batch_size_stages=((4, 16),))), tmp_path / "b")


def test_a_record_without_a_column_is_named_before_the_first_rollout(prompts, tmp_path):
  """It would be drawn late, if at all."""
  file = tmp_path / "late.jsonl"
  rows = [json.loads(line) for line in prompts[0].read_text(encoding="utf-8").splitlines()]
  del rows[33]["answer"]
  file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
  c = config([file], None)
  c.rollout.rewards.right = reward(type="exact_match")
  with pytest.raises(DataError, match=f"{file}:34.*'answer'"):
    train(c, tmp_path / "w")
  assert not (tmp_path / "w" / "samples").exists()


def test_a_pair_that_fits_no_row_is_refused_with_the_length_to_set(tmp_path, prompts):
  c = config(prompts, total_steps=1, seq_len=48)
  c.strategy = strategy("dpo")
  with pytest.raises(ConfigError, match=r"[ab].jsonl:\d+: the best and the worst completion with their prompts have"):
    train(c, tmp_path / "w")


# ----------------------------------------------------------------------------------------------
# Which step of which rollout is trained when: of rollouts that are scripted, nothing is sampled.


class Scripted:
  """Stands for what makes rollouts: number n serves steps 4n to 4n + 3, two passes of two updates over four
  trajectories of tokens 10n + 1, 10n + 2, …, each behind a prompt of one token."""

  made = None

  def __init__(self, first=0):
    self.ready, self.first, self.popped, self.went_on = deque(), first, [], None

  def rollout(self, number):
    units = [[(Trajectory(np.array([5, 10 * number + n, 10 * number + n], np.int32), np.array([0, 1, 1], np.float32),
                          np.array([0, -1, -1], np.float32), 1, "stop", 4 * number + n), float(n), 0)]
             for n in range(1, 5)]
    return Rollout(number, 4 * number, 4 * number + self.first, 4, 2, 2 * number + 2, [], collect(units),
                   {"reward": float(number)}, None, [], changes=((1, number),), kept=number)

  def fill(self, run, due):
    return True

  def pop(self):
    if not self.ready:
      self.ready.append(self.rollout(len(self.popped)))
    self.popped.append(self.ready.popleft())
    return self.popped[-1], {"rollout/staleness": 1.0}

  def restore(self, step, last, ready):
    self.went_on = step, last, list(ready)
    self.popped = [] if last is None else [last] * (last.number + 1)


@pytest.fixture
def scripted(monkeypatch, tmp_path):
  """Makes `Rollouts` whose rollouts `Scripted` makes."""
  def make(first=0, past=None, **changed):
    # Read when the policy is not there: what makes rollouts is.
    monkeypatch.setattr(rollout, "Producer", lambda *_: SimpleNamespace(
        models=SimpleNamespace(saved=dict, restore=lambda saved: None),
        curriculum=SimpleNamespace(restored=lambda arrays, data: (None, arrays))))
    monkeypatch.setattr(rollout, "make_ahead", lambda *_: Scripted(first))
    prompts = SimpleNamespace(num_items=None, source_names=["main"], num_prompts=40, fingerprint="f",
                              epoch=lambda drawn: drawn / 40, counters=lambda drawn: {"main": {"rows": drawn}})
    policy = Policy(SimpleNamespace(), SimpleNamespace(pad_id=0), None)
    c = config(["a.jsonl"], "low", rollout=dict(num_prompts=2, updates=2, epochs=2) | changed.pop("rollout", {}),
               **changed)
    resolved = program_lib.resolve(c)[0]
    made = rollout.Rollouts(resolved, prompts, policy, share_prompts=False, workdir=tmp_path, past=past)
    return made, made._ahead

  return make


class ScriptedRun:
  """Of a run what rollouts ask for; the policy's log-prob of a token is -(100 · updates + token / 1000)."""

  log_steps, reference = 0, None

  def __init__(self):
    self.step, self.state, self.scored, self.written = 0, {"params": None}, [], []
    self.chrono = SimpleNamespace(pause=lambda kind: contextlib.nullcontext())
    self.program = SimpleNamespace(place=lambda batch: batch, score_fn=self._score)
    self.writer = SimpleNamespace(write_texts=lambda step, texts: self.written.append(step))

  def _score(self, params, batch, step, reference, whole):
    self.scored.append((int(step), batch["tokens"]))
    return {"old_logprobs": -(100.0 * self.step + batch["tokens"] / 1000.0)}

  def take(self, data, steps):
    """The batches of so many steps."""
    batches = []
    for _ in range(steps):
      batches.append(data.take(self))
      self.step += 1
    return batches


def trained(batch):
  """The trajectories of a batch, by their tokens."""
  return sorted(set(batch["tokens"][batch["loss_weights"] > 0].tolist()))


def test_a_rollout_serves_its_steps_each_pass_whole_in_an_order_of_its_own(scripted):
  data, ahead = scripted()
  batches = ScriptedRun().take(data, 12)
  assert [made.number for made in ahead.popped] == [0, 1, 2]
  halves = [trained(batch) for batch in batches]
  for first in range(0, 12, 2):  # two updates have all four of their rollout, half each
    begin = 10 * (first // 4)
    assert sorted(halves[first] + halves[first + 1]) == [begin + n for n in range(1, 5)]
    assert len(halves[first]) == 2
  orders = {tuple(token - 10 * (first // 4) for token in halves[first]) for first in range(0, 12, 2)}
  assert len(orders) > 1  # of six passes, with 1 in 6 ** 5 all alike
  # By (seed, number of the rollout, pass) alone, not by when it is trained on.
  later, _ = scripted(first=5)
  run = ScriptedRun()
  run.step = 5
  assert [trained(batch) for batch in run.take(later, 12)] == halves
  other, _ = scripted(seed=1)
  assert [trained(batch) for batch in ScriptedRun().take(other, 12)] != halves


def test_what_was_taken_is_counted_with_padding_and_of_the_step_before_as_well(scripted):
  data, _ = scripted()
  run, places = ScriptedRun(), 0
  for _ in range(6):
    before, batch = places, run.take(data, 1)[0]
    places += batch["tokens"].size
    assert batch["tokens"].size > np.count_nonzero(batch["segment_ids"])
    assert (data.tokens_seen(run.step), data.tokens_seen(run.step - 1)) == (places, before)
    assert data.epoch(run.step) == (2 if run.step <= 4 else 4) / 40
  assert data.counters(5) == {"main": {"rows": 4}} and data.counters(6) == {"main": {"rows": 4}}
  assert data.metrics.keys() == {"reward", "rollout/staleness", "time/old_logprobs"} and data.metrics["reward"] == 1.0


def test_ratios_are_to_the_policy_before_the_rollout_in_each_of_its_steps(scripted):
  """Each later step's own batch is asked about, as the update will take it, before the first one."""
  data, _ = scripted()
  run = ScriptedRun()
  batches = run.take(data, 8)
  assert [step for step, _ in run.scored] == [1, 2, 3, 5, 6, 7]
  for step, tokens in run.scored:
    np.testing.assert_array_equal(tokens, batches[step]["tokens"])
  for step, batch in enumerate(batches):
    there = batch["loss_weights"] > 0
    expected = -(100.0 * 4 * (step // 4) + batch["tokens"][there] / 1000.0) if step % 4 else np.nan
    np.testing.assert_allclose(batch["old_logprobs"][there], expected, rtol=1e-6)
    assert set(batch["advantages"][batch["segment_roles"] > 0].tolist()) == {t - 10 * (step // 4)
                                                                            for t in trained(batch)}


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_what_is_left_of_a_rollout_is_gone_on_with(scripted, stop):
  straight = ScriptedRun().take(scripted()[0], 9)
  data, run = scripted()[0], ScriptedRun()
  run.take(data, stop)
  data._ahead.ready.append(data._ahead.rollout(2))  # one that waits
  meta, arrays = data.saved(stop)
  again, ahead = scripted()
  again.restore(stop, json.loads(json.dumps(meta)), arrays)
  assert meta["done"] == (stop == 4) and (meta["tokens"], meta["drawn"]) == (data.tokens_seen(stop), 2 + 2 * (stop > 4))
  went_on, last, waiting = ahead.went_on
  assert went_on == stop and last.number == (stop - 1) // 4 and [made.number for made in waiting] == [2]
  np.testing.assert_array_equal(waiting[0].experience.tokens, data._ahead.ready[0].experience.tokens)
  for found, wanted in zip(run_from(stop).take(again, 9 - stop), straight[stop:], strict=True):
    assert found.keys() == wanted.keys()
    for name in found:
      np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
  assert again.tokens_seen(9) == sum(batch["tokens"].size for batch in straight)


def run_from(step):
  run = ScriptedRun()
  run.step = step
  return run


def test_prompts_end_with_the_rollout_that_took_the_last_and_those_that_finish_what_goes_on(scripted):
  """7 prompts, 2 a rollout of 4 steps: 4 rollouts; or sooner, where groups were replaced; 3 that go on take 2 more."""
  data, ahead = scripted()
  assert data.num_steps is None
  data._prompts.num_items = 7
  assert data.num_steps == 16
  for drawn, carried, steps in ((6, 0, 16), (7, 0, 8), (9, 0, 8), (7, 3, 16), (7, 2, 12)):
    ahead.made = SimpleNamespace(drawn=drawn, end=8, carried=[None] * carried, steps=4)
    assert data.num_steps == steps, (drawn, carried)


def test_a_critic_is_given_how_far_the_policy_is_from_the_reference(scripted):
  """log p - log p_ref of each token, not the other way round."""
  data, _ = scripted()
  data._returns = SimpleNamespace(penalised=True, make=lambda experience, values, log_ratios: (
      given.append((values, log_ratios)), ({}, {"about": 1.0}))[1])
  given, asked, run = [], [], ScriptedRun()
  run.reference = "the reference"
  run.program.score_fn = lambda params, batch, step, reference, whole: asked.append((int(step), reference, whole)) or {
      name: np.full(batch["tokens"].shape, value, np.float32)
      for name, value in (("old_logprobs", -2.0), ("ref_logprobs", -5.0), ("old_values", 0.25))}
  run.take(data, 1)
  (values, log_ratios), = given
  # Of two passes of two steps the first is looked at as a whole, with the reference.
  assert asked == [(0, "the reference", True), (1, "the reference", True), (2, None, False), (3, None, False)]
  trained_tokens = data._now.experience.weights > 0
  np.testing.assert_array_equal(log_ratios[trained_tokens], 3.0)
  np.testing.assert_array_equal(values[trained_tokens], 0.25)
  assert data.metrics["about"] == 1.0
  data._returns.penalised = False
  run.take(data, 4)
  assert given[1][1] is None and asked[4:] == [(4 + n, None, n < 2) for n in range(4)]  # there is no penalty


@pytest.mark.parametrize("critic", [False, True])
def test_what_a_rollout_is_trained_with_is_saved_beside_it(scripted, critic):
  """What was made of the critic's values, how often prompts were solved, whose reward models; once the rollout is
  trained on, what goes on beyond it alone."""
  told, rates = [], np.array([0.5, np.nan], np.float32)
  data, _ = scripted()
  run = ScriptedRun()
  run.take(data, 3)
  data._now = data._now._replace(rates=rates)
  data._valued = {name: np.arange(12) + place for place, name in enumerate(OF_CRITIC)} if critic else {}
  data.producer.models.saved = lambda: {"judge": "print"}
  meta, arrays = data.saved(3)
  assert meta["metrics"] == data.metrics and meta["version"] == 0
  again, ahead = scripted()
  again.producer.models.restore = told.append
  again.producer.curriculum.restored = lambda arrays, print_: told.append((arrays, print_)) or (
      arrays["pass_rates"] + 1, {name: part for name, part in arrays.items() if name != "pass_rates"})
  again.restore(3, json.loads(json.dumps(meta)), arrays)
  assert told[0] == {"judge": "print"} and told[1][1] == "f"
  np.testing.assert_array_equal(told[1][0]["pass_rates"], rates)
  np.testing.assert_array_equal(ahead.went_on[1].rates, rates + 1)
  assert again._valued.keys() == data._valued.keys() and again.metrics == data.metrics
  for name, values in data._valued.items():
    np.testing.assert_array_equal(again._valued[name], values)
  np.testing.assert_array_equal(again._old, data._old)
  meta, arrays = data.saved(4)
  assert arrays.keys() == {"pass_rates"} and meta["done"]


@pytest.mark.parametrize("done, of_others", [(False, False), (False, True), (True, True)])
def test_a_rollout_that_goes_on_has_the_images_of_its_prompts_and_environments(scripted, done, of_others):
  """Those of the prompts that it was made of; with other prompts than those of the checkpoint it is refused."""
  data, _ = scripted()
  ScriptedRun().take(data, 3)
  files = dict(image_bytes=np.arange(7, dtype=np.uint8), image_sizes=np.array([4, 3]), image_owners=np.array([2, 2]))
  data._now = data._now._replace(experience=data._now.experience._replace(**files))
  meta, arrays = data.saved(4 if done else 3)
  again, _ = scripted()
  again._rows = dataclasses.replace(again._rows, layout="a layout")
  again._prompts.item = lambda number: SimpleNamespace(prompt=SimpleNamespace(images=(f"image {number}",)))
  again._preprocess = lambda *of: of
  again.fingerprint = "of other prompts" if of_others else "f"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rollout, "to_pixels", lambda data, preprocess: (data, preprocess))
    with pytest.raises(ConfigError, match="no longer those of rollout 0, which is trained on until step 4: the images"
                       ) if of_others and not done else contextlib.nullcontext():
      again.restore(4 if done else 3, json.loads(json.dumps(meta)), arrays)
      if not done:
        assert again._images == {number: (f"image {number}",) for number in (1, 2, 3, 4)}
        assert again._added == {2: [(bytes(range(4)), again._preprocess), (bytes([4, 5, 6]), again._preprocess)]}


def test_batches_end_where_the_run_is_to_stop_and_close_what_samples(scripted):
  data, ahead = scripted()
  closed, run = [], ScriptedRun()
  ahead.close = lambda: closed.append("sampling")
  data.producer.close = lambda: closed.append("rewards")
  run.program.place = lambda batch: ("placed", batch)
  run.program.score_fn = lambda params, placed, *_: {"old_logprobs": np.zeros(placed[1]["tokens"].shape)}
  with data.batches(run) as batches:
    placed, batch = next(batches)
    assert placed == "placed" and len(trained(batch)) == 2 and batches.metrics == data.metrics and data.metrics
    ahead.fill = lambda run, due: False
    run.step = 4
    with pytest.raises(StopIteration):
      next(batches)
    assert not closed
  assert closed == ["sampling", "rewards"]


def test_samples_are_written_where_metrics_of_a_step_of_theirs_are(scripted, monkeypatch):
  """Rollouts of 4 steps, metrics every 6: of steps 6 (the second rollout), 12 (the third), not of the fourth; and the
  first."""
  written = []
  monkeypatch.setattr(rollout.groups_lib, "write", lambda path, *rest: written.append((path.name, rest[-1])))
  data, _ = scripted()
  run = ScriptedRun()
  run.log_steps = 6
  run.take(data, 20)
  assert written == [(f"rollout-{step:08d}", f"rollout before step {step}") for step in (1, 5, 9, 17)]
  assert run.written == [1, 5, 9, 17]


def test_a_schedule_says_by_which_policy_each_rollout_was_sampled_and_when_it_is_trained_on(scripted, monkeypatch):
  noted = []
  monkeypatch.setattr(rollout.schedule, "write", lambda folder, *rest: noted.append(rest))
  ScriptedRun().take(scripted()[0], 8)
  assert noted == []
  ahead_of = scripted(first=3, rollout=dict(max_staleness=4), strategy=dict(correction="token_truncate"))[0]
  run_from(3).take(ahead_of, 8)
  assert noted == [(0, schedule.Sampled(0, ((1, 0),), 0), 3), (1, schedule.Sampled(4, ((1, 1),), 1), 7)]


@pytest.mark.parametrize("learned, equal, ends_after", [(False, True, 3), (True, False, 3), (True, True, None)])
def test_rollouts_that_teach_nothing_end_a_run_unless_it_has_learned_and_all_are_as_good(
    scripted, learned, equal, ends_after):
  data, ahead = scripted(rollout=dict(max_without_lesson=3))
  run, begun = ScriptedRun(), 0
  if learned:
    run.take(data, 4)
    begun = 1
  made = ahead.rollout
  ahead.rollout = lambda number: made(number)._replace(no_signal=NoSignal("all rewards are 0", "Look.", equal))
  if ends_after is None:
    run.take(data, 40)
    return
  run.take(data, 8)
  first = 4 * begun + 1
  since = "" if learned else ", and nothing has been learned since the run began"
  with pytest.raises(DataError, match=re.escape(
      f"3 rollouts in a row taught nothing, from step {first} to {first + 8}{since}. Of the last: all rewards are 0.")):
    run.take(data, 1)


def test_a_run_that_goes_on_knows_that_it_had_learned_and_how_often_nothing_was_since(scripted):
  """Equal rewards end only a run that never learned; missing ones end it at the third, two of them before the stop."""
  for equal, ends in ((True, False), (False, True)):
    data, ahead = scripted(rollout=dict(max_without_lesson=3))
    run, made = ScriptedRun(), ahead.rollout
    run.take(data, 4)
    lost = NoSignal("there are none", "Look.", equal)
    ahead.rollout = lambda number, made=made, lost=lost: made(number)._replace(no_signal=lost)
    run.take(data, 8)
    meta, arrays = data.saved(12)
    again, ahead = scripted(rollout=dict(max_without_lesson=3))
    ahead.rollout = lambda number, made=made, lost=lost: made(number)._replace(no_signal=lost)
    again.restore(12, json.loads(json.dumps(meta)), arrays)
    with pytest.raises(DataError, match="3 rollouts in a row taught nothing, from step 5 to 13. Of the last: there are"
                       ) if ends else contextlib.nullcontext():
      run_from(12).take(again, 12)


@pytest.mark.parametrize("fingerprint, numbers", [("f", [9]), ("of other prompts", [])])
def test_groups_that_had_begun_go_on_only_with_the_prompts_that_they_are_of(scripted, fingerprint, numbers):
  data, _ = scripted()
  ScriptedRun().take(data, 4)
  data._now = data._now._replace(carried=[fresh(9, "a seed", 2)])
  meta, arrays = data.saved(4)
  again, ahead = scripted()
  again.fingerprint = fingerprint
  again.restore(4, json.loads(json.dumps(meta)), arrays)
  assert [group.number for group in ahead.went_on[1].carried] == numbers


def test_a_run_that_goes_on_with_other_sizes_knows_what_was_taken(scripted):
  """Four prompts for each of three rollouts of two steps, then two for each of four."""
  past = Past(6, 6, PROMPTS, (Piece(0, 0, 4, 2, 1),), 96)
  data, _ = scripted(past=past)
  assert [data.batch_range(step) for step in (0, 4, 6, 10)] == [(0, 2), (8, 2), (12, 0), (14, 0)]
  assert sum(data.batch_range(step)[1] for step in range(14)) == 12 + 4
