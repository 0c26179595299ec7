"""Rewarded responses: their tokens, their advantages, what a batch has of them, and every row that is refused."""

import json
import re

import numpy as np
import pytest

from input_pipeline import loader
from input_pipeline.examples.base import NOTHING_TO_TRAIN
from input_pipeline.examples.registry import make_encoder
from input_pipeline.examples.roles import ABSENT, COMPLETION
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from tests.tiny import ROOT
from trainer.config import defaults, source, strategy
from trainer.errors import ConfigError, DataError

TINY = load_tokenizer(ROOT / "tests" / "input_pipeline" / "references" / "tiny")
USER = {"role": "user", "content": "Hi"}
CHAT = "<|begin|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def configured(template="chatml", baseline="group", scale="none", combine=None, prompt_key=None, **chat):
  config = defaults()
  config.strategy = strategy("grpo", baseline=baseline, scale=scale, combine=combine)
  config.rollout.prompt_key = prompt_key
  config.chat.update({"template": template, **chat})
  return config


def encode(row, tokenizer=TINY, **options):
  return make_encoder(configured(**options), tokenizer, learns="rollouts").encode([Record("a.jsonl", "a.jsonl:7", row)])


def parts(document, tokenizer=TINY):
  """(untrained text, trained text); chatml writes a newline behind a turn, which is not trained."""
  return tuple(tokenizer.decode(document.ids[document.weights == w], skip_special=False) for w in (0, 1))


def advantages(found):
  assert all(document.roles == (COMPLETION,) for document in found)
  return [advantage for document in found for advantage in document.advantages]


@pytest.mark.parametrize("response", ["Hello", [{"role": "assistant", "content": "Hello"}]], ids=["string", "messages"])
def test_messages_are_answered_as_fine_tuning_writes_it(response):
  found = encode({"prompt": [USER], "responses": [response, "Go"], "rewards": [1, 0]})
  assert [parts(d) for d in found] == [(CHAT + "\n", "Hello<|im_end|>"), (CHAT + "\n", "Go<|im_end|>")]
  assert [d.parts for d in found] == [(len(d.ids),) for d in found] and advantages(found) == [0.5, -0.5]
  config = configured()
  config.strategy = strategy("sft")
  row = {"prompt": [USER], "completion": [{"role": "assistant", "content": "Hello"}]}
  (tuned,) = make_encoder(config, TINY, learns="conversations").encode([Record("a", "a", row)])
  assert found[0].ids.tolist() == tuned.ids.tolist() and found[0].weights.tolist() == tuned.weights.tolist()


def test_strings_are_joined_as_they_stand():
  found = encode({"prompts": "Q:", "responses": [" a", " <|im_end|>"], "rewards": [0.5, 2.5]}, BytesTokenizer(),
                 template=None)
  assert found[0].ids.tolist() == [256, *b"Q: a", 257] and found[1].ids.tolist() == [256, *b"Q: <|im_end|>", 257]
  assert found[0].weights.tolist() == [0, 0, 0, 1, 1, 1] and advantages(found) == [-1.0, 1.0]


def test_a_column_that_the_user_says():
  row = {"question": "Hi", "responses": ["Hello"], "rewards": [1], "answer": "x"}
  (found,) = encode(row, prompt_key="question")
  assert parts(found) == (CHAT + "\n", "Hello<|im_end|>")


def test_turns_of_a_tool_are_not_trained():
  answer = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "four"}]
  (found,) = encode({"prompt": [USER], "responses": [answer], "rewards": [1]})
  assert parts(found)[1] == "call<|im_end|>four<|im_end|>"
  assert parts(found)[0] == CHAT + "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n\n"


def test_each_column_may_have_another_name():
  row = {"q": [5], "said": [[7, 8]], "scores": [1], "of": [True], "lp": [[-1.0, -0.1]]}
  (found,) = encode(row, fields=(("prompt", "q"), ("responses", "said"), ("rewards", "scores"), ("masks", "of"),
                                 ("logprobs", "lp")))
  assert found.ids.tolist() == [5, 7, 8] and found.logprobs.tolist()[1:] == [-1, np.float32(-0.1)]


@pytest.mark.parametrize("baseline, scale, expected", [
    ("group", "none", [-1.0, 2.0, -1.0]),
    # The sample deviation of 0, 3, 0 is sqrt((1 + 4 + 1) / 2).
    ("group", "group", [-1 / (3**0.5 + 1e-4), 2 / (3**0.5 + 1e-4), -1 / (3**0.5 + 1e-4)]),
    ("leave_one_out", "none", [-1.5, 3.0, -1.5]),
    ("none", "none", [0.0, 3.0, 0.0]),
])
def test_advantages_by_hand(baseline, scale, expected):
  row = {"prompt": [USER], "responses": ["a", "b", "c", "d"], "rewards": [0, 3, 0, None]}
  found = encode(row, baseline=baseline, scale=scale)
  assert found.pop() == "a response without a reward"  # and it is in no mean
  assert advantages(found) == pytest.approx(expected, rel=1e-6)


def test_equal_rewards_are_kept_with_an_advantage_of_zero():
  found = encode({"prompt": [USER], "responses": ["a", "b"], "rewards": [0.1, 0.1]}, scale="group")
  assert advantages(found) == [0.0] * 2


def test_a_masked_response_is_not_trained_but_compared_with():
  row = {"prompt": [USER], "responses": ["a", "b", "c"], "rewards": [0, 3, 0], "masks": [True, False, 1]}
  first, second, third = encode(row)
  assert second == "a response masked" and advantages([first, third]) == [-1.0, -1.0]


def test_token_ids_are_taken_as_they_are():
  row = {"prompt": [5, 6], "responses": [[7, 8, 9], [7, 7], [8]], "rewards": [1, 0, 0],
         "masks": [[1, 0, 1], True, [0]]}
  first, second, third = encode(row)
  assert first.ids.tolist() == [5, 6, 7, 8, 9] and first.weights.tolist() == [0, 0, 1, 0, 1]
  assert second.ids.tolist() == [5, 6, 7, 7] and second.weights.tolist() == [0, 0, 1, 1]
  assert third == NOTHING_TO_TRAIN
  assert advantages([first, second]) == pytest.approx([2 / 3, -1 / 3])
  (found,) = encode({"prompt": [USER], "responses": [[7, 8]], "rewards": [1]})  # behind a prompt that is rendered
  assert parts(found)[0] == CHAT and found.ids[-2:].tolist() == [7, 8]


@pytest.mark.parametrize("changed, message", [
    (dict(responses=None), r"no 'responses' \(or null\); its columns are 'prompt', 'responses', 'rewards'"),
    (dict(rewards=None), r"no 'rewards' \(or null\)"),
    (dict(responses="a"), r"responses is 'a' \(str\); expected a list"),
    (dict(responses=[]), r"responses is \[\] \(list\)"),
    (dict(rewards=[1]), "rewards has 1 entries for 2 responses"),
    (dict(rewards=[1, "x"]), r"rewards\[1\] is 'x' \(str\); expected a finite number, or null"),
    (dict(rewards=[1, float("nan")]), r"rewards\[1\] is nan"),
    (dict(masks=[True]), "masks has 1 entries for 2 responses"),
    (dict(masks=[True, "no"]), r"masks\[1\] is 'no'; expected true"),
    (dict(masks=[True, None]), r"masks\[1\] is None; expected true"),
    (dict(masks=[True, [1]]), r"masks\[1\] is \[1\]; .*goes with responses of token ids"),
    (dict(logprobs=[[-1.0], [-2.0]]), r"logprobs\[0\] goes with responses of token ids, and responses\[0\] is text"),
    (dict(logprobs=[[-1.0]]), r"logprobs has 1 entries for 2 responses"),
    (dict(prompt=[1], responses=[[2], [3]], logprobs=[None, [-1, -2]]), r"logprobs\[1\] has 2 entries for a response"),
    (dict(prompt=[1], responses=[[2], [3]], logprobs=[-1.0, [-2]]), r"logprobs\[0\] is -1.0 for a response of 1 "),
    (dict(prompt=[1], responses=[[2], [3]], logprobs=[[0.5], [-2]]), r"logprobs\[0\] has 0.5 for token 0; .*at most 0"),
    (dict(prompt=[1], responses=[[2], [3, 4]], logprobs=[[0], [-2, None]]), r"logprobs\[1\] has None for token 1"),
    (dict(responses=["a", {"role": "assistant", "content": "b"}]), r"responses\[1\] is .*expected a list of "),
    (dict(responses=["a", 3]), r"responses\[1\] is 3 \(int\); expected a list of messages"),
    (dict(responses=["a", ""]), r"messages\[1\].content is empty"),
    (dict(responses=["a", [USER]]), r"responses\[1\] begins or ends with what the user says"),
    (dict(prompt="Q", responses=["a", [USER]]), r"responses\[1\] is a list, but the prompt is a string"),
    (dict(prompt=[1, 2]), r"responses\[0\] is a str, but the prompt is a list of token ids"),
    (dict(prompt=[1], responses=[[2], [99999]]), "the id 99999 is not in the tokenizer's vocabulary"),
    (dict(prompt=[USER, {"role": "assistant", "content": "x"}]), "prompt ends with what the assistant says"),
    (dict(prompt=[1], responses=[[2], []]), r"responses\[1\] is empty. Remove it, with its reward"),
    (dict(prompt=None), "no prompt; its columns are"),
    (dict(messages=[USER]), "prompt and messages may each be the prompt; .*--config.rollout.prompt_key=prompt"),
    (dict(prompt=[1], responses=[[2], [3]], masks=[[1, 1], [1]]), r"masks\[0\] has 2 entries for a response of 1 "),
    (dict(prompt=[1], responses=[[2, 4], [3]], masks=[[1, 2], [1]]), r"masks\[0\] has 2 entries for a response of 2 "),
    (dict(masks=[True, 2]), r"masks\[1\] is 2; expected true"),
    (dict(responses=["a", [{"role": "assistant", "content": "b", "weight": 0.5}]]), "has the weight 0.5"),
])
def test_rows_that_are_refused(changed, message):
  row = {"prompt": [USER], "responses": ["a", "b"], "rewards": [1, 0]} | changed
  with pytest.raises(DataError, match=r"^a\.jsonl:7: .*" + message):
    encode(row)


@pytest.mark.parametrize("options, message", [
    (dict(scale="batch"), "strategy.scale is 'batch', but the responses are in the data"),
    (dict(baseline="batch"), "strategy.baseline is 'batch'"),
    (dict(combine="normalize_then_sum"), "strategy.combine is 'normalize_then_sum', but the responses are in the data"),
    (dict(baseline="none", scale="group"), "scale is 'group' with baseline 'none'"),
    (dict(train_on="all"), "strategy 'grpo' trains completions"),
])
def test_options_that_cannot_be(options, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    encode({"prompt": [USER], "responses": ["a", "b"], "rewards": [1, 0]}, **options)


def test_what_decides_the_documents_decides_the_cache():
  first = make_encoder(configured(), TINY, learns="rollouts").fingerprint
  assert first == make_encoder(configured(), TINY, learns="rollouts").fingerprint
  for options in (dict(scale="group"), dict(baseline="none"), dict(prompt_key="q"), dict(template="llama3")):
    assert make_encoder(configured(**options), TINY, learns="rollouts").fingerprint != first


def test_texts_of_rows_and_of_prompts_alone():
  encoder = make_encoder(configured(), None, learns="rollouts")

  def texts(row):
    return list(encoder.texts(Record("a", "a", row)))

  assert texts({"prompt": [USER], "responses": ["a", [{"role": "assistant", "content": "b"}]], "rewards": [1, 0]}) == [
      "Hi", "a", "b"]
  assert texts({"prompt": "Q", "answer": "4"}) == ["Q"]
  assert texts({"prompt": [1], "responses": [[2]], "rewards": [1]}) == []


def test_log_probs_of_a_sampler_stand_at_its_tokens(tmp_path):
  """Each token's is that of its id, so that a token anywhere says which it must have; of another source none is known,
  and what the environment said has none."""
  def value(token):
    return -token / 256

  rng, rows = np.random.default_rng(0), []
  for _ in range(40):
    ids = [rng.integers(1, 256, rng.integers(1, 9)).tolist() for _ in range(3)]
    masks = [True, [1, *rng.integers(0, 2, len(ids[1]) - 1).tolist()], True]
    known = [[value(token) for token in response] for response in ids]
    known[1] = [of if mask else None for of, mask in zip(known[1], masks[1], strict=True)]
    rows.append(dict(prompt=rng.integers(1, 256, 3).tolist(), responses=ids, rewards=[0, 1, 2], masks=masks,
                     logprobs=[*known[:2], None]))
  config = configured(template=None)
  config.update(seq_len=10, batch_size=4)
  config.input.max_over_long = 0.9
  for name, of in (("known", rows), ("unknown", [{**row, "logprobs": None} for row in rows])):
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    config.input.sources[name] = source(type="jsonl", path=str(tmp_path / f"{name}.jsonl"))
  data = loader.make_train_data(config, BytesTokenizer(), learns="rollouts", workdir=tmp_path)
  (tmp_path / "known.jsonl").write_text("")  # the arrays come from the cache now
  seen, missing = dict.fromkeys(data.source_names, 0), dict.fromkeys(data.source_names, 0)
  for step in range(40):
    batch = data.batch(step)
    found, trained = batch["behavior_logprobs"], batch["loss_weights"] > 0
    assert found.dtype == np.float32 and not found[~trained].any()
    for row, number in enumerate(batch["source_ids"]):
      there = trained[row] & ~np.isnan(found[row])
      np.testing.assert_array_equal(found[row, there], np.float32(value(batch["tokens"][row, there])))
      seen[data.source_names[number]] += there.sum()
      missing[data.source_names[number]] += (trained[row] & ~there).sum()
  assert seen["known"] > 50 and missing["known"] > 50  # the third responses have none
  assert seen["unknown"] == 0 and missing["unknown"] > 100
  only = configured(template=None)
  only.update(seq_len=10, batch_size=4)
  only.input.sources.unknown = config.input.sources.unknown
  only.input.max_over_long = 0.9
  plain = loader.make_train_data(only, BytesTokenizer(), learns="rollouts", workdir=tmp_path)
  assert "behavior_logprobs" not in plain.batch(0)
  only.strategy.correction = "token_mask"
  with pytest.raises(ConfigError, match="strategy.correction is 'token_mask', .* but no row of the data has them"):
    loader.make_train_data(only, BytesTokenizer(), learns="rollouts", workdir=tmp_path)


def test_a_batch_has_sequences_and_advantages(tmp_path):
  """Of each segment, what its row of the data says; an advantage of 0.5 is no mismatched completion, 0 is no gap."""
  rows = [{"prompt": "ab", "responses": ["c", "de"], "rewards": [1, 0]},  # 0.5 and -0.5
          {"prompt": "x", "responses": ["y", "z", "w"], "rewards": [2, 2, None]}]  # 0 and 0
  path = tmp_path / "a.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = configured(template=None)
  config.update(seq_len=16, batch_size=3)
  config.input.sources.main = source(type="jsonl", path=str(path))
  data = loader.make_train_data(config, BytesTokenizer(), learns="rollouts", workdir=tmp_path)
  expected = {"abc": 0.5, "abde": -0.5, "xy": 0.0, "xz": 0.0}
  found = {}
  batch = data.batch(0)
  assert batch["advantages"].shape == batch["segment_roles"].shape and batch["advantages"].dtype == np.float32
  for row in range(3):
    for s, role in enumerate(batch["segment_roles"][row]):
      inside, there = batch["segment_ids"][row] == s + 1, role == COMPLETION
      assert there or role == ABSENT
      assert there == inside.any() and (there or batch["advantages"][row, s] == 0)
      if there:
        ids = batch["tokens"][row, inside]
        assert ids[0] == 256 and ids[-1] == 257
        text = bytes(ids[1:-1].tolist()).decode()
        found.setdefault(text, []).append(float(batch["advantages"][row, s]))
        assert batch["loss_weights"][row, inside].tolist() == [0] * (3 if text[0] == "a" else 2) + [1] * (
            len(ids) - (3 if text[0] == "a" else 2))
  assert found.keys() <= expected.keys() and all(set(v) == {expected[k]} for k, v in found.items())
  everything = [data.batch(step) for step in range(4)]
  assert sum((b["segment_roles"] == COMPLETION).sum() for b in everything) >= 4 and found
  (stats,) = data.stats()
  assert stats["documents"] == 4 and stats["dropped: a response without a reward"] == 1
  assert stats["records"] == "2 responses of strings"


def test_a_response_that_is_too_long_is_cut_and_counted(tmp_path):
  path = tmp_path / "a.jsonl"
  row = {"prompt": "abc", "responses": ["d" * 20, "e", "f"], "rewards": [1, 0, 0]}
  path.write_text(json.dumps(row) + "\n")
  config = configured(template=None)
  config.update(seq_len=8, batch_size=3)
  config.input.max_over_long = 0.5
  config.input.sources.main = source(type="jsonl", path=str(path))
  data = loader.make_train_data(config, BytesTokenizer(), learns="rollouts", workdir=tmp_path)
  assert data.stats()[0]["truncated"] == 1
  config.input.over_long = "split"
  with pytest.raises(ConfigError, match="input.over_long is 'split', which strategy 'grpo' cannot do"):
    loader.make_train_data(config, BytesTokenizer(), learns="rollouts", workdir=tmp_path)


def test_log_probs_of_a_reference_are_kept_for_trained_tokens(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text(json.dumps({"prompt": "ab", "responses": ["c", "de"], "rewards": [1, 0]}) + "\n")
  config = configured(template=None)
  config.update(seq_len=16, batch_size=1)
  config.input.sources.main = source(type="jsonl", path=str(path))
  data = loader.make_train_data(config, BytesTokenizer(), learns="rollouts", workdir=tmp_path)
  logprobs = data.reference("f", tmp_path)
  for batch in logprobs.batches(2):
    assert set(batch.arrays["advantages"].flat) == {0.5, -0.5, 0.0}
    logprobs.store(batch, -batch.arrays["tokens"].astype(np.float32))
  logprobs.finish()
  data.use(logprobs)
  batch = data.batch(0)
  np.testing.assert_array_equal(batch["ref_logprobs"], -batch["tokens"] * (batch["loss_weights"] > 0))
  assert batch["loss_weights"].sum() == 2 + 3
