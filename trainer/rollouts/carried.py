"""Groups of completions that go on across rollouts (`rollout.carry_over`), so that no row waits for the longest text.

A rollout begins more prompts than it needs, in the rows that get free, and is over as soon as enough groups are whole;
what has begun by then goes on in the next rollout, by the policy of then, behind the tokens that are there (partial
rollouts: Kimi k1.5, arXiv 2501.12599; APRIL, arXiv 2509.18521). Each token keeps the log-prob that it was sampled with.
Nothing is dropped for being long: a rollout is over only when the groups that remain can all be trained on, in order,
before their oldest token is more than `rollout.max_staleness` updates old.

P groups of a rollout, G completions of each, n tokens of a completion.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.generate.completion import Completion

# Names of its arrays in checkpoints.
ARRAYS = ("ids", "logprobs", "versions")


class Text(NamedTuple):
  """A completion as far as it goes.

  Attributes:
    ids, logprobs, versions: [n] each: log-probs under the policies that sampled, and the updates that these had had.
    finish_reason, stop_reason: as of a `Completion`; "" while it goes on.
  """

  ids: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: str = ""
  stop_reason: str | None = None

  def more(self, part: Completion, version: int) -> "Text":
    """With what the policy of that version has added."""
    ids, logprobs, versions = (np.concatenate(pair) for pair in (
        (self.ids, part.ids), (self.logprobs, part.full_logprobs),
        (self.versions, np.full(len(part.ids), version, np.int32))))
    return Text(ids, logprobs, versions, part.finish_reason, part.stop_reason)

  def completion(self, sample: int) -> Completion:
    return Completion(0, sample, self.ids, self.logprobs, self.logprobs, self.finish_reason, self.stop_reason)


NO_TEXT = Text(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


class Group(NamedTuple):
  """The completions of a prompt.

  Attributes:
    number: of the prompt in its stream.
    seed: of the draws.
    texts: G.
  """

  number: int
  seed: str
  texts: list[Text]

  @property
  def whole(self) -> bool:
    return all(text.finish_reason for text in self.texts)

  @property
  def oldest(self) -> int | None:
    """Updates that the policy had had that sampled its first tokens; None: nothing is begun."""
    return min((int(text.versions[0]) for text in self.texts if len(text.versions)), default=None)


def fresh(number: int, seed: str, group_size: int) -> Group:
  """A group that has not begun."""
  return Group(number, seed, [NO_TEXT] * group_size)


class Ages(NamedTuple):
  """How long groups may wait for their training.

  Attributes:
    version: of the policy that samples first.
    first_step, steps: the updates done when the training of this rollout begins, and those of a rollout.
    size: P.
    max_staleness: updates.
  """

  version: int
  first_step: int
  steps: int
  size: int
  max_staleness: int

  def wait(self, group: Group | None = None) -> int:
    """After how many more rollouts a group, or one that begins now, may still be trained on; below 0: it is too old."""
    oldest = None if group is None else group.oldest
    return (self.max_staleness - self.first_step + (self.version if oldest is None else oldest)) // self.steps

  def in_time(self, rest: Sequence[Group]) -> bool:
    """Whether all these are that have begun, after this rollout, P at a time in their order."""
    return all(group.oldest is None or self.wait(group) > number // self.size for number, group in enumerate(rest))

  def begun_anew(self, groups: Sequence[Group], seed: str) -> list[Group]:
    """These, of which those that cannot be trained on in time, the config being another now, begin again."""
    return [group if group.oldest is None or self.wait(group) >= number // self.size else
            fresh(group.number, seed, len(group.texts)) for number, group in enumerate(groups)]

  def most(self, need: int, rows: int) -> int:
    """Groups to have at a time where `need` are to become whole: so many that no row is without a text, and no more
    than can be trained on in time."""
    return need + min(rows, max(self.wait(), 0) * self.size)


def taken(groups: Sequence[Group], need: int, ages: Ages) -> tuple[list[Group], list[Group]] | None:
  """(the first `need` whole groups, the others); None: there are not as many, or an other one would become too old."""
  whole = [group for group in groups if group.whole][:need]
  chosen = {group.number for group in whole}
  rest = [group for group in groups if group.number not in chosen]
  return (whole, rest) if len(whole) == min(need, len(groups)) and ages.in_time(rest) else None


def go_on(groups: Sequence[Group], need: int, ages: Ages, prompts: Sequence[np.ndarray], limits: Sequence[int],
          stream: Callable[..., Iterator[tuple[Completion, int]]], stopped: Callable[[], bool]
          ) -> tuple[list[Group], list[Group]] | None:
  """Samples until enough groups are whole.

  Args:
    groups: the oldest first; they are left as they are.
    need: groups that are to become whole.
    prompts, limits: of each group, its ids and the most tokens of a completion.
    stream: `stream(prompts, their places among the groups, samples=…, …)`, with more attributes of a `Request`, gives
      parts of completions, as `trainer.generate.sampler.Sampler.stream` does, each with the version of its policy.
    stopped: whether to leave off.

  Returns:
    (the groups that are trained on, the others), each in their order; None: it was left off.
  """
  groups = [group._replace(texts=list(group.texts)) for group in groups]
  if (found := taken(groups, need, ages)) is not None:
    return found
  # Prompts as the sampler has them: that of a group for completions that have not begun, and one for each that has.
  asked: list[tuple[int, list[int]]] = []
  for number, group in enumerate(groups):
    left = [sample for sample, text in enumerate(group.texts) if not text.finish_reason]
    asked += [(number, [sample]) for sample in left if len(group.texts[sample].ids)]
    new = [sample for sample in left if not len(group.texts[sample].ids)]
    asked += [(number, new)] if new else []
  begun = [groups[number].texts[samples[0]].ids for number, samples in asked]
  parts = stream([np.concatenate([prompts[number], ids]) for (number, _), ids in zip(asked, begun, strict=True)],
                 [number for number, _ in asked], samples=[samples for _, samples in asked],
                 max_new_tokens=[limits[number] for number, _ in asked], begun=[len(ids) for ids in begun],
                 seed=[groups[number].seed for number, _ in asked], in_order=True,
                 until=lambda: taken(groups, need, ages) is not None)
  for part, version in parts:
    if stopped():
      return None
    texts = groups[asked[part.prompt][0]].texts
    texts[part.sample] = texts[part.sample].more(part, version)
  found = taken(groups, need, ages)
  assert found is not None, "every group is whole, and yet they cannot be trained on in time"
  return found


def metrics(groups: Sequence[Group], rest: Sequence[Group], ages: Ages) -> dict[str, float]:
  """Of the tokens that are trained on, and of what goes on."""
  versions = np.concatenate([text.versions for group in groups for text in group.texts] or [np.zeros(0, np.int32)])
  stale = (ages.first_step - versions).astype(np.float64)
  found = {"rollout/carried_groups": float(len(rest))}
  if len(stale):
    found |= {"rollout/carried_ratio": float(np.mean(versions < ages.version)),
              "rollout/token_staleness": float(stale.mean()), "rollout/max_token_staleness": float(stale.max())}
  return found


def saved(groups: Sequence[Group], name: str) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
  """(JSON-able, {name of an array, which begins with `name`: it}), from which `restored` makes them again."""
  meta = [{"number": group.number, "seed": group.seed, "texts": [
      [len(text.ids), text.finish_reason, text.stop_reason] for text in group.texts]} for group in groups]
  texts = [text for group in groups for text in group.texts if len(text.ids)]
  # Checkpoints cannot hold empty arrays.
  return meta, {f"{name}{key}": np.concatenate([getattr(text, key) for text in texts]) for key in ARRAYS if texts}


def restored(meta: Iterable[Mapping[str, Any]], arrays: dict[str, np.ndarray], name: str) -> list[Group]:
  """The groups, whose arrays are taken out of `arrays`."""
  whole = {key: np.asarray(arrays.pop(f"{name}{key}")) for key in ARRAYS if f"{name}{key}" in arrays}
  begin, groups = 0, []
  for group in meta:
    texts = []
    for count, reason, string in group["texts"]:
      parts = {key: whole[key][begin:begin + count] for key in ARRAYS if count}
      texts.append(NO_TEXT._replace(**parts, finish_reason=reason, stop_reason=string))
      begin += count
    groups.append(Group(group["number"], group["seed"], texts))
  return groups
