"""Episodes: whose each token is, what an environment adds, and where an episode ends."""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from input_pipeline.prompt_data import make_prompt_data
from input_pipeline.tokenizer.tokenizer import BytesTokenizer, load_tokenizer
from models import api
from tests.evaluators.digits import VISION, encoded, picture
from tests.models.initial import initial
from tests.tiny import ROOT
from trainer.config import defaults, source, strategy
from trainer.errors import ConfigError
from trainer.generate import sampler as sampler_lib
from trainer.generate.completion import Completion
from trainer.rollouts.agents import Agents
from trainer.rollouts.environment import Episodes, Turn

TINY = load_tokenizer(ROOT / "tests" / "input_pipeline" / "references" / "tiny")
HERE = "tests.trainer.rollouts.test_environment"


class Guess:
  """The number is in the record; two kinds of answers, and a reward for each turn that comes nearer."""

  def reset(self, prompt, /, **columns):
    self.wanted, self.left = columns["number"], 3

  def step(self, completion):
    self.left -= 1
    digits = "".join(c for c in completion if c.isdigit())
    if digits == str(self.wanted):
      return Turn("never shown", 1.0, done=True)
    return Turn(f"not {digits}", 0.25 if self.left else None)


class Calculator:
  """Answers [TOOL_CALLS]a+b in the role of a tool; anything else is the answer."""

  def reset(self, prompt, /, answer):
    self.answer = answer

  def step(self, completion):
    if completion.startswith("[TOOL_CALLS]"):
      a, b = completion.removeprefix("[TOOL_CALLS]").split("+")
      return Turn([{"role": "tool", "content": str(int(a) + int(b))}])
    return Turn(reward=completion == self.answer)


# What `Opening` may raise in a step: an error, what sys.exit() raises, what an asynchronous client's request does.
ENDS = {"step": RuntimeError("no step"), "exit": SystemExit("no more"), "cancel": asyncio.CancelledError("cut")}


class Opening:
  """Begins with what a column says, and always goes on with another."""

  def reset(self, prompt, /, opening=None, says="more", fails=None):
    self.says, self.fails = says, fails
    if fails == "reset":
      raise RuntimeError("no begin")
    return opening

  def step(self, completion):
    if str(self.fails) in ENDS:
      raise ENDS[self.fails]
    if self.fails and self.fails[0] == "returns":
      return self.fails[1]
    if self.fails and self.fails[0] == "turn":
      return Turn(*self.fails[1:])
    return Turn(self.says, 0.5)


class Truncated(Opening):
  """Says how it was told of the end."""

  told: list = []

  def truncate(self, completion, finish_reason):
    self.told.append((completion, finish_reason))
    return None if completion == "silent" else 3.0


class Shows:
  """Answers with a picture, in each of the forms that it may have."""

  def reset(self, prompt, /, opens=False, broken=False, **columns):
    self.turn, self.broken = 0, broken
    return [{"role": "user", "content": [{"type": "image", "image": picture(9)}]}] if opens else None

  def step(self, completion):
    self.turn += 1
    if self.broken:
      return Turn([{"role": "user", "content": [{"type": "image", "image": "no_such_file.png"}]}])
    pixels = picture(self.turn)
    image = [pixels, Image.fromarray(pixels), base64.b64decode(encoded(pixels))][self.turn - 1]
    return Turn([{"role": "user", "content": [{"type": "text", "text": "Look:"}, {"type": "image", "image": image}]}])


class Told:
  """Says what it was told."""

  def reset(self, prompt, /, **columns):
    pass

  def step(self, completion):
    return Turn(f"told {completion}!")


class Sampler:
  """Says what `replies` has for (sample, turn), and keeps what it was asked. Log-probs tell sample, turn and place."""

  def __init__(self, tokenizer, replies, stop=None):
    self.tokenizer, self.replies, self.asked = tokenizer, replies, []
    self.stop = tokenizer.eos_id if stop is None else stop

  def __call__(self, prompts, *, samples, max_new_tokens, stop_ids, seed):
    self.asked.append((prompts, samples, max_new_tokens, stop_ids, seed))
    turn, found = len(self.asked), []
    for p, limit in enumerate(max_new_tokens):
      for sample in sorted(samples[p]):
        reply = self.replies(sample, turn)
        ids = self.tokenizer.encode_rendered(reply).tolist() + [self.stop]
        reason = "stop" if len(ids) <= limit else "length"
        logprobs = -(sample + turn / 10 + np.arange(len(ids)) / 1000)[:limit].astype(np.float32)
        found.append(Completion(p, sample, np.array(ids[:limit], np.int32), logprobs - 100, logprobs, reason))
    return found


def setup(tmp_path, rows, *, tokenizer=TINY, template="chatml", env=None, seq_len=128, vision=None, **rollout):
  """(items in the order of the rows, Episodes)."""
  config = defaults()
  config.model.vision.update(vision or {})
  config.strategy = strategy("grpo")
  config.update(seq_len=seq_len)
  config.chat.template = template
  config.rollout.update(dict(num_prompts=1, max_new_tokens=32, prompt_key="q") | rollout)
  config.rollout.environment = env and (env if "." in env else f"{HERE}.{env}")
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  config.input.sources.a = source(type="jsonl", path=str(tmp_path / "a.jsonl"))
  prompts = make_prompt_data(config, tokenizer)
  items = {item.prompt.where: item for item in (prompts.item(i) for i in range(len(prompts)))}
  return [items[key] for key in sorted(items)], Episodes(config, tokenizer, prompts)


def marked(episode, tokenizer=TINY):
  """The episode's text, in which what was sampled stands between « and »."""
  text, before = "", 0.0
  for i, weight in zip(episode.trajectory.ids.tolist(), episode.trajectory.weights.tolist(), strict=True):
    text += {(0, 1): "«", (1, 0): "»"}.get((before, weight), "") + tokenizer.decode([i], skip_special=False)
    before = weight
  return text + "»" * (before == 1)


def rendered(episodes, item, messages):
  """Ids of a whole conversation, as one rendering."""
  text = episodes._prompter.template.render_spans(item.content + messages, tools=item.tools,
                                                  inert_tokens=TINY.special_tokens)
  return TINY.encode_rendered(text.text, text.inert).tolist()


CHAT = "<|begin|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>{}\n{}<|im_end|>\n<|im_start|>assistant\n"


SEES = dict(VISION, image_token=TINY.vocab_size)


class Seeing(Sampler):
  """Keeps the images and the beginnings that it was given, too."""

  def __call__(self, prompts, *, images, prefixes, sampled, **options):
    self.seen = [*getattr(self, "seen", ()), (images, prefixes)]
    self.sampled = sampled
    return super().__call__(prompts, **options)


# ---------------------------------------------------------------------------------------------- one turn


def test_without_an_environment_there_is_one_turn(tmp_path):
  items, episodes = setup(tmp_path, [{"q": "Hi", "n": 1}, {"q": "Ho", "n": 2}])
  sampler = Sampler(TINY, lambda sample, turn: f"yes {sample}")
  groups = episodes.run(items, 3, sampler, "5/1")
  (prompts, samples, limits, stop_ids, seed), = sampler.asked
  assert [p.tolist() for p in prompts] == [item.prompt.ids.tolist() for item in items]
  assert samples == [[0, 1, 2]] * 2 and limits == [32, 32] and seed == "5/1" and TINY.eos_id in stop_ids
  assert [[marked(e) for e in group] for group in groups] == [
      [CHAT.replace("Hi", who) + f"«yes {i}<|im_end|>»" for i in range(3)] for who in ("Hi", "Ho")]
  e = groups[1][2]
  n = len(items[1].prompt.ids)
  assert e.trajectory.prompt_length == n and e.trajectory.finish_reason == "stop" and e.turns == 1
  assert e.trajectory.ids.dtype == np.int32 and e.trajectory.weights.dtype == e.trajectory.logprobs.dtype == np.float32
  assert e.completion_ids.tolist() == e.trajectory.ids[n:].tolist() == [*TINY.encode_batch(["yes 2"])[0], TINY.eos_id]
  # The log-probs of the whole distribution, not those of a truncated one.
  np.testing.assert_allclose(e.trajectory.logprobs, [0] * n + [-2.1 - k / 1000 for k in range(len(e.completion_ids))],
                             rtol=1e-6)
  assert e.completion == [{"role": "assistant", "content": "yes 2"}] and e.text == "yes 2"
  assert e.reward is None and not e.failed


def test_a_text_is_continued(tmp_path):
  tokenizer = BytesTokenizer()
  items, episodes = setup(tmp_path, [{"q": "ab"}], tokenizer=tokenizer, template=None, max_new_tokens=3)
  sampler = Sampler(tokenizer, lambda sample, turn: "cd" if sample else "cde")
  (cut, ended), = episodes.run(items, 2, sampler, 0)
  assert cut.trajectory.ids.tolist() == [256, *b"abcde"] and cut.trajectory.finish_reason == "length"
  assert ended.trajectory.ids.tolist() == [256, *b"abcd", 257] and ended.trajectory.finish_reason == "stop"
  assert (cut.completion, ended.completion, ended.text) == ("cde", "cd", "cd")
  assert ended.trajectory.weights.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("sees", [False, True])
def test_a_completion_that_may_go_on_is_asked_for_and_read_as_one_that_does_not(tmp_path, sees):
  """By `asked` and `alone`, of prompts of which the longer leaves room for five tokens."""
  rows = [dict(q=text) | (dict(image=encoded(picture(n))) if sees else {}) for n, text in enumerate(("Hi", "Ho, ho"))]
  items, episodes = setup(tmp_path, rows, vision=SEES if sees else None, stop=("zz",))
  sizes = [len(item.prompt.ids) for item in items]
  episodes._seq_len = sizes[1] + 5
  limits, options = episodes.asked(items)
  assert limits == [sizes[1] + 5 - sizes[0], 5] and sizes[0] < sizes[1]
  episodes._seq_len = 128
  assert episodes.asked(items)[0] == [32, 32]
  assert options.keys() == {"stop_ids", "stop"} | ({"images", "prefixes"} if sees else set())
  assert TINY.eos_id in options["stop_ids"] and options["stop"].strings == ("zz",)
  if sees:
    assert options["prefixes"] == sizes
    for found, expected in zip(options["images"], (picture(0), picture(1)), strict=True):
      np.testing.assert_array_equal(np.stack(found), expected[None])
  ids = np.array([*TINY.encode_rendered("yes"), TINY.eos_id], np.int32)
  made = Completion(0, 3, ids, np.zeros(len(ids), np.float32), np.float32(-1 - np.arange(len(ids))), "stop")
  one = episodes.alone(items[1], made)
  (other,), = episodes.run([items[1]], 1, lambda prompts, **_: [dataclasses.replace(made, sample=0)], 0)
  for name in ("ids", "weights", "logprobs", "prompt_length", "finish_reason", "number", "stop_reason"):
    np.testing.assert_array_equal(getattr(one.trajectory, name), getattr(other.trajectory, name), err_msg=name)
  assert one.completion == other.completion == [{"role": "assistant", "content": "yes"}]
  assert (one.text, one.reward, one.failed, one.turns) == ("yes", None, False, 1)
  assert one.completion_ids.tolist() == ids.tolist()


# ---------------------------------------------------------------------------------------------- several turns


def test_a_guessing_game(tmp_path):
  """Ids are those of the whole conversation; what is sampled, and only that, is trained."""
  items, episodes = setup(tmp_path, [{"q": "Hi", "number": 7}], env="Guess", max_turns=4)
  sampler = Sampler(TINY, lambda sample, turn: "7" if turn > sample else f"is it {turn}")
  (at_once, second, never), = episodes.run(items, 3, sampler, 0)[0:1]
  assert marked(at_once) == CHAT + "«7<|im_end|>»" and (at_once.reward, at_once.turns) == (1.0, 1)
  assert marked(second) == CHAT + "«is it 1<|im_end|>»" + NEXT.format("user", "not 1") + "«7<|im_end|>»"
  assert (second.reward, second.turns, second.trajectory.finish_reason) == (1.25, 2, "stop")
  assert never.turns == 3 and never.reward == 1.5
  for e in (at_once, second, never):
    whole = rendered(episodes, items[0], e.completion)
    assert e.trajectory.ids.tolist() == whole[:len(e.trajectory.ids)]
    assert TINY.decode(whole[len(e.trajectory.ids):], skip_special=False) == "\n"
    assert (e.trajectory.logprobs != 0).tolist() == (e.trajectory.weights == 1).tolist()
  assert second.completion == [{"role": "assistant", "content": "is it 1"}, {"role": "user", "content": "not 1"},
                         {"role": "assistant", "content": "7"}]
  assert second.text == "is it 1\n[user] not 1\n[assistant] 7"


def test_each_turn_is_one_call_with_the_numbers_of_its_samples(tmp_path):
  items, episodes = setup(tmp_path, [{"q": "Hi", "number": 7}, {"q": "Ho", "number": 8}], env="Guess", max_turns=2)
  sampler = Sampler(TINY, lambda sample, turn: f"{sample % 2 + 7}")
  groups = episodes.run(items, 4, sampler, "s")
  (_, first, limits, _, _), (prompts, second, left, _, seed) = sampler.asked
  assert first == [[0, 1, 2, 3]] * 2 and limits == [32, 32] and seed == "s"
  # Those that said the same have the same text before them, and other numbers: they are drawn apart.
  assert sorted(second) == [[0, 2], [1, 3]] and left == [30, 30]  # a digit and the end of the turn are gone
  for ids, samples in zip(prompts, second, strict=True):
    item = samples == [0, 2]  # of the second prompt, whose number is 8
    for sample in samples:
      assert groups[item][sample].trajectory.ids[:len(ids)].tolist() == ids.tolist()
  assert [[e.turns for e in group] for group in groups] == [[1, 2, 1, 2], [2, 1, 2, 1]]


def test_a_tool(tmp_path):
  items, episodes = setup(tmp_path, [{"q": "Hi", "answer": "5"}], env="Calculator")
  sampler = Sampler(TINY, lambda sample, turn: "[TOOL_CALLS]2+3" if turn == 1 else f"{5 + sample}")
  right, wrong = episodes.run(items, 2, sampler, 0)[0]
  assert marked(right) == CHAT + "«[TOOL_CALLS]2+3<|im_end|>»" + NEXT.format("tool", "5") + "«5<|im_end|>»"
  assert (right.reward, wrong.reward) == (1.0, 0.0)
  # Rewards are told what was said without special tokens, which the environment sees.
  assert right.completion == [{"role": "assistant", "content": "2+3"}, {"role": "tool", "content": "5"},
                        {"role": "assistant", "content": "5"}]


def test_special_tokens_of_an_environment_stay_text(tmp_path):
  says = "ok<|im_end|>\n<|im_start|>assistant\nI win<|im_end|>"
  items, episodes = setup(tmp_path, [{"q": "Hi", "says": says}], env="Opening", max_turns=2)
  ids = episodes.run(items, 1, Sampler(TINY, lambda *_: "a"), 0)[0][0].trajectory.ids.tolist()
  text = TINY.decode(ids, skip_special=False)
  assert text == CHAT + "a<|im_end|>" + NEXT.format("user", says) + "a<|im_end|>"
  # Ended: the user twice, the assistant twice.
  assert ids.count(TINY.eos_id) == 4 and text.count("<|im_end|>") == 6
  assert ids.count(TINY.encode_rendered("<|im_start|>")[0]) == 4


def test_a_text_goes_on_as_it_is(tmp_path):
  tokenizer = BytesTokenizer()
  items, episodes = setup(tmp_path, [{"q": "ab", "says": " <|eos|>", "opening": "?"}], tokenizer=tokenizer,
                          template=None, env="Opening", max_turns=2)
  (e,), = episodes.run(items, 1, Sampler(tokenizer, lambda *_: "c"), 0)
  assert e.trajectory.ids.tolist() == [256, *b"ab?c", 257, *b" <|eos|>", *b"c", 257]
  assert e.trajectory.weights.tolist() == [0] * 4 + [1, 1] + [0] * 8 + [1, 1] and e.trajectory.prompt_length == 4
  assert e.completion == e.text == "?c <|eos|>c" and e.reward == 1.0


def test_an_opening_belongs_to_the_prompt(tmp_path):
  rows = [{"q": "Hi", "opening": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}]
  items, episodes = setup(tmp_path, rows, env="Opening", max_turns=2)
  (e,), = episodes.run(items, 1, Sampler(TINY, lambda *_: "a"), 0)
  opened = CHAT + "x<|im_end|>" + NEXT.format("user", "y")
  assert marked(e) == opened + "«a<|im_end|>»" + NEXT.format("user", "more") + "«a<|im_end|>»"
  assert TINY.decode(e.trajectory.ids[:e.trajectory.prompt_length], skip_special=False) == opened
  assert [m["content"] for m in e.completion] == ["x", "y", "a", "more", "a"]


def test_a_question_is_asked_about_its_own_images_in_every_turn(tmp_path):
  """Equal texts about other pictures are other prompts, and what follows the prompt is no part of its beginning."""
  pictures = [picture(n) for n in range(2)]
  opening = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
  rows = [dict(q="Hi", image=encoded(part), opening=opening) for part in pictures]
  items, episodes = setup(tmp_path, rows, env="Opening", max_turns=2, vision=SEES)
  assert items[0].prompt.ids.tolist() == items[1].prompt.ids.tolist() and "image" not in items[0].columns
  sampler = Seeing(TINY, lambda *_: "a")
  groups = episodes.run(items, 2, sampler, 0)
  assert len(sampler.asked) == len(sampler.seen) == 2
  for turn, (images, prefixes) in enumerate(sampler.seen):
    for found, expected in zip(images, pictures, strict=True):
      np.testing.assert_array_equal(np.stack(found), expected[None])
    sequence = groups[0][0].trajectory
    assert prefixes == [sequence.prompt_length] * 2 and (sampler.asked[turn][0][0][:prefixes[0]] == sequence.ids[
        :prefixes[0]]).all() and (len(sampler.asked[turn][0][0]) == prefixes[0]) == (turn == 0)
  assert [e.trajectory.number for group in groups for e in group] == [item.number for item in items for _ in range(2)]
  held = groups[0][0].trajectory.ids == SEES["image_token"]
  assert held.sum() == 4 and held[:groups[0][0].trajectory.prompt_length].sum() == 4


@pytest.mark.parametrize("row, first", [(dict(image=encoded(picture(7))), [7]), (dict(), []), (dict(opens=True), [9]),
                                        (dict(image=encoded(picture(7)), opens=True), [7, 9])])
def test_an_environment_shows_images(tmp_path, row, first):
  items, episodes = setup(tmp_path, [dict(q="Hi") | row], env="Shows", max_turns=4, vision=SEES, seq_len=256)
  sampler = Seeing(TINY, lambda *_: "a")
  ((e, other),) = episodes.run(items, 2, sampler, 0)
  for turn, (images, _) in enumerate(sampler.seen):
    for found in images:
      np.testing.assert_array_equal(np.stack([np.zeros((4, 4, 3), np.uint8), *found]), np.stack(
          [np.zeros((4, 4, 3), np.uint8), *map(picture, [*first, *range(1, turn + 1)])]))
  sequence = e.trajectory
  np.testing.assert_array_equal(sampler.sampled[0], sequence.weights[:len(sampler.sampled[0])] > 0)
  assert sum(sampler.sampled[0]) == 6 and e.turns == 4  # three times "a" with its end
  # What the data do not have is kept with the trajectory: not the picture of the record.
  assert len(sequence.images) == len(first) - ("image" in row) + 3
  for data, n in zip(sequence.images[-3:], (1, 2, 3), strict=True):
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(data))), picture(n))
  # All tokens are those of the same conversation as a prompt.
  said = [{"role": "assistant", "content": "a"}]
  shown = [{"role": "user", "content": [{"type": "text", "text": "Look:"},
                                        {"type": "image", "image": encoded(picture(1))}]}]
  opening = [{"role": "user", "content": [{"type": "image", "image": encoded(picture(9))}]}] if "opens" in row else []
  whole = episodes._prompter.messages([*items[0].content, *opening, *said, *shown, *said, *shown, *said, *shown], None,
                                      "here", [row["image"]] if "image" in row else ())
  n = len(whole.ids)
  np.testing.assert_array_equal(sequence.ids[:n], whole.ids)
  assert (whole.ids == SEES["image_token"]).sum() == 4 * (len(first) + 3) and len(sequence.ids) == n + 2
  assert other.trajectory.images == sequence.images and "<image>" in e.text


def test_an_image_that_cannot_be_used_costs_its_episode(tmp_path, caplog):
  for vision, message in ((SEES, "no_such_file.png"), (None, "the model sees no images")):
    items, episodes = setup(tmp_path, [dict(q="Hi", broken=True)], env="Shows", vision=vision)
    sampler = Sampler if vision is None else Seeing
    ((e,),) = episodes.run(items, 1, sampler(TINY, lambda *_: "a"), 0)
    assert e.failed and message in caplog.text


@pytest.mark.parametrize("template", ["llama3", "gemma", "plain", "qwen3", "mistral"])
def test_every_template_goes_on_as_it_writes_conversations(tmp_path, template):
  """Between two turns stands what the template writes there, whatever was said before."""
  items, episodes = setup(tmp_path, [{"q": "Hi", "says": "more"}], template=template, env="Opening", max_turns=2)
  stop = episodes._prompter.stop_ids[-1]
  reply = " aha" if template in ("plain", "mistral") else "aha"  # what the model writes begins with a space there
  (e,), = episodes.run(items, 1, Sampler(TINY, lambda *_: reply, stop), 0)
  assert not e.failed and e.turns == 2
  whole = TINY.decode(e.trajectory.ids, skip_special=False)
  text = episodes._prompter.template.render([*items[0].content, *e.completion])
  if template == "qwen3":  # which shows an empty thought in the last turn alone
    whole, text = (t.replace("<think>\n\n</think>\n\n", "") for t in (whole, text))
  assert text.startswith(whole) and whole.count("aha") == 2 and not text[len(whole):].strip()


class Stopping(Sampler):
  """Ends what it says with the first of the strings."""

  def __call__(self, prompts, *, stop, **options):
    found = []
    for c in super().__call__(prompts, **options):
      ids = self.tokenizer.encode_rendered(self.replies(c.sample, len(self.asked)) + stop.strings[0]).tolist()
      logprobs = np.full(len(ids), -1.0, np.float32)
      found.append(Completion(c.prompt, c.sample, np.array(ids, np.int32), logprobs, logprobs, "stop", stop.strings[0]))
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("template", ["chatml", "llama3", None])
def test_what_a_string_ends_goes_on_as_if_its_turn_had_ended(tmp_path, template, keep):
  """What was sampled is trained whole; the token that would have ended the turn stands behind it, and is not."""
  tokenizer = TINY if template else BytesTokenizer()
  items, episodes = setup(tmp_path, [{"q": "Hi"}], tokenizer=tokenizer, template=template, env="Told", max_turns=2,
                          stop=("</t>",), keep_stop=keep)
  (e,), = episodes.run(items, 1, Stopping(tokenizer, lambda *_: "go"), 0)
  said = "go</t>" if keep else "go"
  assert not e.failed and e.turns == 2 and (e.trajectory.finish_reason, e.trajectory.stop_reason) == ("stop", "</t>")
  if template is None:
    assert e.completion == e.text == f"{said}told {said}!{said}"
    assert marked(e, tokenizer) == f"<|bos|>Hi«go</t>»told {said}!«go</t>»"
    return
  assert [m["content"] for m in e.completion] == [said, f"told {said}!", said]
  # The same conversation with all that was sampled as its texts, as one rendering.
  whole = rendered(episodes, items[0], [
      m | {"content": "go</t>"} if m["role"] == "assistant" else m for m in e.completion])
  assert e.trajectory.ids.tolist() == whole[:len(e.trajectory.ids)]
  assert marked(e).count("«go</t>»") == 2 and marked(e).count("«") == 2
  assert episodes.metrics([e, e]) == {"completions/stop_string_ratio": 1.0}


# ---------------------------------------------------------------------------------------------- ends


def test_a_completion_that_is_cut_ends_its_episode_with_a_reward(tmp_path):
  items, episodes = setup(tmp_path, [{"q": "Hi"}], env="Opening", max_new_tokens=5)
  sampler = Sampler(TINY, lambda sample, turn: "a" if turn == 1 else "a b c d e f")
  (e,), = episodes.run(items, 1, sampler, 0)
  assert [asked[2] for asked in sampler.asked] == [[5], [3]]  # of the whole episode
  assert (e.turns, e.reward, e.trajectory.finish_reason) == (2, 1.0, "length") and e.trajectory.weights.sum() == 5


def test_the_most_turns(tmp_path):
  items, episodes = setup(tmp_path, [{"q": "Hi"}], env="Opening", max_turns=3)
  (e,), = episodes.run(items, 1, Sampler(TINY, lambda *_: "a"), 0)
  assert (e.turns, e.reward, e.trajectory.finish_reason) == (3, 1.5, "stop")
  assert marked(e).endswith("«a<|im_end|>»")  # nothing stands behind the last turn


def test_the_room_of_a_row(tmp_path):
  """What is added must leave a place for an answer; else the episode is over, and was not ended by the policy."""
  first = setup(tmp_path, [{"q": "Hi"}], env="Opening")[1].run
  items, _ = setup(tmp_path, [{"q": "Hi"}], env="Opening")
  (e,), = first(items, 1, Sampler(TINY, lambda *_: "a"), 0)
  turn = int(np.flatnonzero(np.diff(e.trajectory.weights) == 1)[1])  # the last place before the second answer
  for seq_len, turns in ((turn + 1, 1), (turn + 2, 2), (turn + 3, 2)):
    items, episodes = setup(tmp_path, [{"q": "Hi"}], env="Opening", max_new_tokens=4, max_turns=2, seq_len=seq_len)
    sampler = Sampler(TINY, lambda *_: "a")
    (e,), = episodes.run(items, 1, sampler, 0)
    assert e.turns == turns and len(e.trajectory.ids) <= seq_len
    assert sampler.asked[-1][2] == ([4] if turns == 1 else [min(2, seq_len - turn - 1)])
    assert e.trajectory.finish_reason == ("stop" if seq_len == turn + 3 else "length")
    assert e.trajectory.weights[-1] == 1


@pytest.mark.parametrize("fails, message", [
    ("reset", "RuntimeError: no begin"),
    ("step", "RuntimeError: no step"),
    ("exit", "SystemExit: no more"),
    ("cancel", "CancelledError: cut"),
    (["returns", "text"], "step() returned a str; expected a trainer.rollouts.environment.Turn"),
    (["turn", 3], "the environment says 3; expected a string, or a list of messages"),
    (["turn", []], "the environment says []"),
    (["turn", [{"role": "user"}]], "the environment says [{'role': 'user'}]"),
    (["turn", "x", "good"], "the reward is 'good' (str); expected a number or None"),
    (["turn", "x", math.inf], "the reward is inf; expected a finite number"),
])
def test_an_environment_that_fails_costs_its_episode_alone(tmp_path, caplog, fails, message):
  """Also where one that takes too long would have a reward: this one is not late."""
  items, episodes = setup(tmp_path, [{"q": "Hi", "fails": fails}, {"q": "Hi", "says": "x"}], env="Opening", max_turns=2,
                          environment_timeout_seconds=60.0, environment_timeout_reward=0.25)
  bad, good = episodes.run(items, 2, Sampler(TINY, lambda *_: "a"), 0)
  assert all(e.failed and math.isnan(e.reward) and e.turns == (fails != "reset") for e in bad)
  assert [(e.failed, e.reward, e.turns) for e in good] == [(False, 1.0, 2)] * 2
  assert "rollout.environment failed in 2 of 4 episodes: " in caplog.text and message in caplog.text
  assert "environment.py:" in caplog.text  # where it was raised
  assert bad[0].trajectory.ids[:bad[0].trajectory.prompt_length].tolist() == items[0].prompt.ids.tolist()


def test_what_a_template_refuses_costs_the_episode(tmp_path, caplog):
  rows = [{"q": "Hi", "says": [{"role": "assistant", "content": "two in a row"}]}, {"q": "Hi", "says": "x"}]
  items, episodes = setup(tmp_path, rows, template="gemma", env="Opening", max_turns=2)
  stop = episodes._prompter.stop_ids[-1]
  (bad,), (good,) = episodes.run(items, 1, Sampler(TINY, lambda *_: "a", stop), 0)
  assert bad.failed and not good.failed and "the template refuses the conversation" in caplog.text


def test_a_text_is_not_answered_by_messages(tmp_path, caplog):
  rows = [{"q": "ab", "says": [{"role": "user", "content": "x"}]}]
  items, episodes = setup(tmp_path, rows, tokenizer=BytesTokenizer(), template=None, env="Opening")
  (e,), = episodes.run(items, 1, Sampler(BytesTokenizer(), lambda *_: "a"), 0)
  assert e.failed and "but the prompt is a text; expected a string" in caplog.text


def test_an_opening_without_room(tmp_path, caplog):
  items, episodes = setup(tmp_path, [{"q": "ab", "opening": "c" * 40}], tokenizer=BytesTokenizer(), template=None,
                          env="Opening", seq_len=40)
  sampler = Sampler(BytesTokenizer(), lambda *_: "a")
  (e,), = episodes.run(items, 1, sampler, 0)
  assert e.failed and not sampler.asked
  assert "reset() made a prompt of 43 tokens, after which seq_len=40 has no room" in caplog.text


def test_agents_and_calls_end_with_their_rollout_whatever_ends_it(tmp_path):
  ended = []

  class Ending(Agents):
    def __init__(self):
      pass

    def end(self):
      ended.append("agents")

  items, episodes = setup(tmp_path, [{"q": "Hi"}])
  for error in (None, KeyboardInterrupt):
    episodes._make = Ending()

    def play(everyone, generate, seed, error=error):
      for episode in everyone:
        episode.calls.close = lambda: ended.append("a call")
      if error is not None:
        raise error
      return False

    episodes._play = play
    with contextlib.nullcontext() if error is None else pytest.raises(error):
      assert episodes.run(items, 2, None, 0) is None
    assert ended == ["a call", "a call", "agents"]
    ended.clear()


def test_what_the_sampler_raises_is_raised(tmp_path):
  def stopped(*args, **options):
    raise KeyError("stop")

  items, episodes = setup(tmp_path, [{"q": "Hi"}], env="Opening")
  with pytest.raises(KeyError):
    episodes.run(items, 1, stopped, 0)


@pytest.mark.parametrize("env", ["Opening", None])
def test_where_the_sampler_was_told_to_stop_there_are_no_episodes(tmp_path, env):
  items, episodes = setup(tmp_path, [{"q": "Hi"}], env=env)
  assert episodes.run(items, 1, lambda *_, **__: None, 0) is None


@pytest.mark.parametrize("name, message", [
    ("Nothing", "rollout.environment: found .* could not be imported"),
    ("Sampler", r"rollout.environment: .*\.Sampler has no reset\(\)"),
])
def test_a_config_that_names_no_environment(tmp_path, name, message):
  with pytest.raises(ConfigError, match=message):
    setup(tmp_path, [{"q": "Hi"}], env=name)


def test_what_is_drawn_is_the_sampler_s_whatever_the_other_episodes(tmp_path):
  """One turn is `generate` with so many samples; a later one follows from the ids before it and the sample's number."""
  cfg = defaults().model
  cfg.update(num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2)
  model = api.make_model(cfg, vocab_size=258, params_dtype="float32", compute_dtype="float32")
  params, sampler = initial(model), sampler_lib.Sampler(model, rows=4)
  rows, options = [{"q": "ab"}, {"q": "cde"}], dict(tokenizer=BytesTokenizer(), template=None)
  items, episodes = setup(tmp_path, rows, max_new_tokens=6, **options)
  groups = episodes.run(items, 3, functools.partial(sampler.generate, params), "s")
  direct = sampler.generate(params, [item.prompt.ids for item in items], num_samples=3, max_new_tokens=6,
                            stop_ids=BytesTokenizer().stop_ids, seed="s")
  assert [e.completion_ids.tolist() for group in groups for e in group] == [c.ids.tolist() for c in direct]
  assert len({c.ids.tobytes() for c in direct}) > 3

  # Bytes of the second half of the alphabet end a completion, so that there are turns.
  episodes = setup(tmp_path, rows, max_new_tokens=6, env="Opening", max_turns=2, **options)[1]
  episodes._prompter.stop_ids = tuple(range(128, 258))
  alone = episodes.run(items[1:], 2, functools.partial(sampler.generate, params), "s")[0]
  together = episodes.run(items, 3, functools.partial(sampler.generate, params), "s")[1]
  assert max(e.turns for e in together) == 2
  for a, b in zip(alone, together[:2], strict=True):
    assert a.trajectory.ids.tolist() == b.trajectory.ids.tolist() and a.turns == b.turns
    np.testing.assert_allclose(a.trajectory.logprobs, b.trajectory.logprobs, atol=1e-5)


@pytest.mark.parametrize("options, row, replies, told, reward", [
    (dict(max_turns=2), {}, ["one", "two"], ("two", "stop"), 3.5),  # the turns are used up
    (dict(max_turns=2), {}, ["one", "silent"], ("silent", "stop"), 0.5),
    (dict(max_new_tokens=3), {}, ["a very long one"], ("a v", "length"), 3.0),  # it is cut
    (dict(seq_len=60), {"says": "much " * 40}, ["one"], (None, "length"), 3.5)])  # no room for what step said
def test_an_environment_is_told_of_an_end_for_want_of_room(tmp_path, options, row, replies, told, reward):
  items, episodes = setup(tmp_path, [{"q": "Hi"} | row], env="Truncated", tokenizer=TINY, **options)
  Truncated.told.clear()
  ((e,),) = episodes.run(items, 1, Sampler(TINY, lambda sample, turn: replies[turn - 1]), 0)
  assert Truncated.told == [told] and e.reward == reward and e.turns == len(replies) and not e.failed


def test_the_page_does_what_it_says(tmp_path, monkeypatch):
  """docs/rewards.md: its environment plays, as test_rewards.py shows of its sessions."""
  page = ROOT / "docs" / "rewards.md"
  (code,) = re.findall(r"^```python\n# my_project/guess.py\n(.*?)^```", page.read_text(encoding="utf-8"),
                       re.DOTALL | re.MULTILINE)
  (tmp_path / "guess_of_the_page.py").write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  items, episodes = setup(tmp_path, [{"q": "Which number?", "number": 7}], env="Guess", max_turns=4)
  monkeypatch.setattr(episodes, "_make", importlib.import_module("guess_of_the_page").Guess)
  replies = [["5", "7"], ["well", "9", "7"], ["1", "2", "3", "4"]]
  group = episodes.run(items, 3, Sampler(TINY, lambda sample, turn: replies[sample][turn - 1]), 0)[0]
  assert [(e.turns, e.reward) for e in group] == [(2, 1.0), (3, 0.9), (4, None)]
  assert marked(group[0]) == CHAT.replace("Hi", "Which number?") + "«5<|im_end|>»" + NEXT.format(
      "user", "Higher.") + "«7<|im_end|>»"


def test_environments_can_share_a_file_with_reward_functions():
  """Those run in processes without JAX."""
  code = "import sys, trainer.rollouts.environment; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
