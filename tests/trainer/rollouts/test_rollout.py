"""What rollouts are made of: pairs, turns of an environment, responses from files, references; and what is refused."""

import json
import math
import re
import statistics

import numpy as np
import pytest

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
