"""Rollouts about images: what is trained has the images it was sampled with, also after a restart."""

import json

import jax
import numpy as np
import pytest

from input_pipeline.examples.roles import COMPLETION
from tests.evaluators import digits
from tests.trainer.report.test_pages import pictures
from tests.trainer.rollouts.test_agents import post, said
from trainer import train
from trainer.callbacks import Callback
from trainer.checkpoints import checkpoint
from trainer.config import reward, strategy
from trainer.errors import ConfigError
from trainer.rollouts import rollout
from trainer.rollouts.environment import Turn

ROWS = [dict(image=digits.encoded(digits.picture(n)), prefix="what?", answer="ab"[n % 2]) for n in range(6)]


def config(folder, **changed):
  """Two steps a rollout, so that a stop after the third is in the middle of one, with a group of the one before."""
  folder.mkdir(exist_ok=True)
  c = digits.config(folder, ROWS, **(dict(batch_size=8, total_steps=4, ckpt_steps=1) | changed))
  c.strategy = strategy("grpo", correction="token_truncate")
  c.rollout.update(num_prompts=2, group_size=2, updates=2, max_new_tokens=4, replay_groups=1)
  c.rollout.rewards.a = reward(type="regex", pattern="[a-m]")
  return c


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  seen = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rollout.Rollouts, "take", spied(rollout.Rollouts.take, seen))
    run = train(config(folder), folder / "w")
  return folder, run, seen


class StopAfterThree(Callback):
  def on_optimizer_step(self, run):
    if run.step == 3:
      run.stop_requested = "test"


def spied(take, seen):
  def spy(self, run):
    batch = take(self, run)
    seen.append(batch)
    return batch
  return spy


def parameters(workdir):
  path = checkpoint.find(str(workdir))
  return checkpoint.restore_params(path, {
      key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in checkpoint.param_shapes(path).items()})


def test_what_is_trained_is_what_was_sampled_about_its_own_picture(whole):
  folder, run, seen = whole
  batches = [batch for batch in seen if batch is not None]
  assert len(batches) == 4
  known = {digits.picture(n).tobytes(): n for n in range(6)}
  for batch in batches:
    # Every image that a token points to is one of the data; image tokens and the question are one block.
    for row, index in enumerate(batch["image_index"]):
      used = np.unique((index[index > 0] - 1) // 4)
      assert all(batch["images"][row, slot].tobytes() in known for slot in used)
      assert (batch["segment_roles"][row] == COMPLETION).sum() == len(used) == batch["segment_ids"][row].max()
      np.testing.assert_array_equal(batch["tokens"][row][index > 0], 258)
      assert not batch["loss_weights"][row][batch["block_ids"][row] > 0].any()
  # On the first step the policy is the one that sampled: its ratios are 1 only if it sees the same images.
  rows = [json.loads(line) for line in (folder / "w" / "metrics.jsonl").read_text().splitlines()]
  first = next(row for row in rows if row.get("step") == 1 and "policy/ratio_mean" in row)
  assert first["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
  page = (folder / "w" / "samples" / "rollout-00000001.html").read_text()
  assert len(pictures(page)) == 4 and all(p.tobytes() in known for p in pictures(page))


def test_a_run_that_stops_within_a_rollout_goes_on_bitwise(whole, tmp_path):
  """The checkpoint holds no image; they are had again from the data."""
  stopping = config(tmp_path)
  stopping.callbacks.stop = dict(type=f"{__name__}.StopAfterThree")
  run = train(stopping, tmp_path / "w")
  assert run.step == 3 and not any(part.nbytes > 4096 for part in run.data.saved(3)[1].values())
  again = train(config(tmp_path), tmp_path / "w")
  assert again.step == 4
  expected, found = parameters(whole[0] / "w"), parameters(tmp_path / "w")
  for path, leaf in expected.items():
    np.testing.assert_array_equal(found[path], leaf, err_msg=path)


class Shows:
  """Answers with another picture, which follows from what was said."""

  def reset(self, prompt, /, **columns):
    pass

  def step(self, completion):
    data = digits.encoded(digits.picture(100 + sum(map(ord, completion)) % 1000))
    return Turn([{"role": "user", "content": [{"type": "image", "image": data}]}], reward=float("e" in completion))


def shows(prompt, endpoint, /, **columns):
  """An agent that does the same."""
  answer = post(endpoint, prompt)
  completion = said(answer)
  data = digits.encoded(digits.picture(100 + sum(map(ord, completion)) % 1000))
  picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
  post(endpoint, [*prompt, answer["choices"][0]["message"], {"role": "user", "content": [picture]}])
  return float("e" in completion)


def hides(prompt, endpoint, /, **columns):
  """An agent with a picture before that of the prompt, which would be taken for it when a checkpoint is read."""
  url = f"data:image/png;base64,{digits.encoded(digits.picture(100))}"
  picture = {"role": "system", "content": [{"type": "image_url", "image_url": {"url": url}}]}
  post(endpoint, [picture, *prompt])


def test_pictures_before_those_of_the_prompt_are_refused(tmp_path, caplog):
  c = config(tmp_path, total_steps=1)
  digits.write(tmp_path / "data.jsonl", [dict(image=row["image"], q="what?") for row in ROWS])
  c.chat.template = "plain"
  c.rollout.update(prompt_key="q", environment=f"{__name__}.hides", updates=1)
  c.rollout.rewards = {}
  train(c, tmp_path / "w")
  assert "failed in 4 of 4 episodes: what stands before the prompt's own images has another image" in caplog.text


@pytest.mark.parametrize("environment", ["Shows", "shows"])
def test_what_an_environment_showed_is_trained_on_and_kept_in_checkpoints(tmp_path, environment):
  def talks(folder, **changed):
    c = config(folder, **changed)
    digits.write(folder / "data.jsonl", [dict(image=row["image"], q="what?") for row in ROWS])
    c.chat.template = "plain"
    c.rollout.update(prompt_key="q", environment=f"{__name__}.{environment}", max_turns=2, max_new_tokens=16,
                     kept_texts=2, stop=tuple(map(chr, range(33, 120))))
    c.rollout.rewards = {}
    return c

  seen: list = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rollout.Rollouts, "take", spied(rollout.Rollouts.take, seen))
    train(talks(tmp_path / "a"), tmp_path / "a" / "w")
  batch = seen[0]
  per_row = [len(np.unique((index[index > 0] - 1) // 4)) for index in batch["image_index"]]
  assert sum(per_row) > (batch["segment_roles"] == COMPLETION).sum()  # more than the records have
  known = {digits.picture(n).tobytes() for n in range(6)}
  assert any(image.tobytes() not in known and image.any() for row in batch["images"] for image in row)
  rows = [json.loads(line) for line in (tmp_path / "a" / "w" / "metrics.jsonl").read_text().splitlines()]
  first = next(row for row in rows if row.get("step") == 1 and "policy/ratio_mean" in row)
  assert first["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)

  stopping = talks(tmp_path / "b")
  stopping.callbacks.stop = dict(type=f"{__name__}.StopAfterThree")
  assert train(stopping, tmp_path / "b" / "w").step == 3
  again = train(talks(tmp_path / "b"), tmp_path / "b" / "w")
  assert again.step == 4
  expected, found = parameters(tmp_path / "a" / "w"), parameters(tmp_path / "b" / "w")
  for path, leaf in expected.items():
    np.testing.assert_array_equal(found[path], leaf, err_msg=path)


def test_other_data_cannot_finish_a_rollout_about_images(whole):
  _, run, _ = whole
  meta, arrays = run.data.saved(3)
  assert meta["data"] == run.data.fingerprint
  if arrays is None:
    arrays = run.data._now.experience.arrays()
  run.data.restore(3, meta, arrays)
  with pytest.raises(ConfigError, match="the data are no longer those of rollout 1, which is trained on until step 4"):
    run.data.restore(3, meta | {"data": "other"}, arrays)
