"""An episode, while it is played and when it is over: its tokens, whose each is, and what was said in them.

Free of JAX.
"""

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from input_pipeline.chat.image_parts import IMAGE_KIND, KINDS, PART_TYPES
from input_pipeline.images.images import KEYS
from input_pipeline.prompt_data import PromptItem
from trainer.rollouts.environment_calls import Calls
from trainer.rollouts.experience import Trajectory


@dataclass(frozen=True)
class Turn:
  """An environment's answer to a completion.

  Attributes:
    observation: what the policy is to answer next: a text (in a conversation, what the user says), or messages, whose
      contents may have parts that are images (docs/rewards.md). None ends the episode.
    reward: added up over the episode; None: this turn has none.
    done: ends the episode; the observation is not shown any more.
  """

  observation: str | list[dict] | None = None
  reward: float | None = None
  done: bool = False


@dataclass(frozen=True)
class Conversation:
  """What `reset` may return: a conversation that the policy is asked in place of the record's prompt.

  Attributes:
    messages: of it, which end with what the policy is to answer.
    tools: the schemas that its prompt shows.
  """

  messages: list[dict]
  tools: list[dict] | None = None


@dataclass(frozen=True)
class Episode:
  """A completion of a prompt, or a conversation of several.

  Attributes:
    trajectory: its tokens. `finish_reason` is "length" where a completion or the room for the next one ended without an
      end, "timeout" where the environment took too long, else "stop".
    completion: for reward functions, all that follows the record's prompt: a text, or messages.
    text: the same for people.
    reward: the sum of the environment's; None: it gave none; NaN: it failed.
    failed: the environment raised, or answered what cannot be, or took too long and no reward is set for that; there is
      a message in the log.
    turns: completions.
  """

  trajectory: Trajectory
  completion: str | list[dict]
  text: str
  reward: float | None
  failed: bool
  turns: int

  @property
  def completion_ids(self) -> np.ndarray:
    """All that follows what the policy was first asked, int32 [n]."""
    return self.trajectory.ids[self.trajectory.prompt_length:]


class Playing:
  """An episode that is not over yet."""

  def __init__(self, item: PromptItem, sample: int, calls: Calls):
    self.item, self.sample, self.calls = item, sample, calls
    self.environment: Any = None  # an `environment.Environment`
    self.over, self.failed = False, False
    self.message: str | None = None
    self.reward: float | None = None
    self.turns, self.sampled, self.finish_reason, self.stop_reason = 0, 0, "stop", None
    # What the policy said last, with special tokens but without what ended it.
    self.last_completion = ""
    # What follows the record's prompt.
    self.messages: list[dict] = []
    self.text = ""
    self.begin(item.prompt.ids, None)

  def begin(self, ids: np.ndarray, opening: str | list[dict] | None) -> None:
    """Starts with these ids, which end with `opening`."""
    self.ids, self.prompt_length = ids, len(ids)
    self.images: Any = self.item.prompt.images
    self.weights, self.logprobs = (np.zeros(len(ids), np.float32) for _ in range(2))
    self.experts: np.ndarray | None = None  # of `ids`, as `Trajectory` has them
    self._append(opening)

  def add_completion(self, completion: Any, text: str, with_special: str) -> None:
    self.last_completion, self.finish_reason = with_special, completion.finish_reason
    self.stop_reason = completion.stop_reason
    # Those of the distribution that training has, too, in which nothing is truncated.
    self._add(completion.ids, np.ones(len(completion.ids), np.float32), completion.full_logprobs)
    if completion.experts is not None:
      # What the policy said stays as it was sampled; the rest was run as a part of this prompt.
      self.experts, before = completion.experts.copy(), self.experts
      if before is not None:
        known = before[:, 0, 0] >= 0
        self.experts[:len(before)][known] = before[known]
    self.turns, self.sampled = self.turns + 1, self.sampled + len(completion.ids)
    self._append(text if isinstance(self.item.content, str) else [{"role": "assistant", "content": text}])

  def add_observation(self, ids: np.ndarray, observation: str | list[dict], images: Any = ()) -> None:
    """`images`: `input_pipeline.images.images.Images` in it; (): none."""
    zeros = np.zeros(len(ids), np.float32)
    self._add(ids, zeros, zeros)
    self._append(observation)
    if len(images):
      self.images = self.images + images if len(self.images) else images

  def as_added(self, said: str | list[dict]) -> str | list[dict]:
    """What an environment says, as a text where the prompt is one, else as messages.

    Raises:
      TypeError: it is neither; ValueError: an image in it is none.
    """
    if isinstance(said, str):
      return said if isinstance(self.item.content, str) else [{"role": "user", "content": said}]
    if isinstance(self.item.content, str):
      raise TypeError(f"the environment says a {type(said).__name__}, but the prompt is a text; expected a string")
    if not isinstance(said, list) or not said or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str | list)
        for m in said):
      raise TypeError(f"the environment says {said!r:.60}; expected a string, or a list of messages with role and "
                      "content")
    return [m if isinstance(m["content"], str) else {**m, "content": [_told(part) for part in m["content"]]}
            for m in said]

  def fail(self, message: str, late: bool = False, late_reward: float | None = None) -> None:
    """Ends it without a reward; where it took too long, with the one so far and `late_reward`, unless that is None."""
    self.over, self.message = True, message
    if late:
      self.finish_reason, self.stop_reason = "timeout", None
    if late and late_reward is not None:
      self.reward = (self.reward or 0.0) + late_reward
    else:
      self.failed, self.reward = True, math.nan

  def result(self) -> Episode:
    shown = getattr(self.images, "encoded", ())[len(self.item.prompt.images):]
    trajectory = Trajectory(self.ids.astype(np.int32), self.weights, self.logprobs, self.prompt_length,
                            self.finish_reason, self.item.number, self.stop_reason, self._experts(), shown)
    completion = self.text if isinstance(self.item.content, str) else self.messages
    return Episode(trajectory, completion, self.text, self.reward, self.failed, self.turns)

  def _experts(self) -> np.ndarray | None:
    """Those of all ids: what an environment said last was never run."""
    if self.experts is None:
      return None
    more = len(self.ids) - len(self.experts)
    return np.pad(self.experts, ((0, more), (0, 0), (0, 0)), constant_values=-1)

  def _add(self, ids: np.ndarray, weights: np.ndarray, logprobs: np.ndarray) -> None:
    self.ids = np.concatenate([self.ids, ids]).astype(np.int32)
    self.weights = np.concatenate([self.weights, weights])
    self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32)

  def _append(self, said: str | list[dict] | None) -> None:
    if isinstance(said, str):
      self.text += said
    elif said is not None:
      # What is shown stands in `images`; its place is kept.
      said = [m if isinstance(m["content"], str) else {**m, "content": [
          {"type": part["type"]} if part["type"] in KINDS else part for part in m["content"]]} for m in said]
      alone = not self.messages and len(said) == 1 and said[0]["role"] == "assistant"
      self.text += said[0]["content"] if alone else "".join(f"\n[{m['role']}] {_text(m['content'])}" for m in said)
      self.messages = self.messages + said


def _told(part: Any) -> dict:
  """A part of a message as JSON has it: an image of Pillow or NumPy, or the bytes of a file, as a data URL."""
  if not isinstance(part, dict) or PART_TYPES.get(str(part.get("type"))) != IMAGE_KIND:
    return part
  value = next((part[key] for key in KEYS if part.get(key) is not None), None)
  if isinstance(value, np.ndarray):
    value = Image.fromarray(value)
  if isinstance(value, Image.Image):
    file = io.BytesIO()
    value.save(file, "PNG")
    value = file.getvalue()
  if isinstance(value, bytes):
    value = f"data:image/png;base64,{base64.b64encode(value).decode()}"
  return {"type": "image", "image": str(value) if isinstance(value, Path) else value}


def _text(content: str | list[dict]) -> str:
  """A content for people."""
  return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)
