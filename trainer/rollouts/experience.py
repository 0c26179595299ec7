"""The trajectories of a rollout, and how they become batches.

A trajectory is a prompt and all that followed, with a mark for each token that the policy sampled. A unit is a group of
trajectories that must share a row: one, or the two of a preference. `Experience` keeps all of them as flat arrays, so
that a checkpoint can hold it and batches are index arithmetic. Of a prompt's images it keeps its number alone; what an
environment showed it keeps as files.

Completions of one prompt in one row may share it, so that it is computed once for all of them: the prompt but for its
last token is a segment of its own, which each of them sees besides its own (`prompt_ids`), and each begins with a copy
of that last token, from which its first one is predicted. Each token sees what it would see in a text of its own, at
the same positions; so log-probs and gradients are the same, to rounding.

N trajectories, n tokens of all of them, U units; B rows, T places of a row, S segments of a row; L layers with experts,
of which each token goes through k.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from input_pipeline.batches import Arrays, empty_batch
from input_pipeline.examples.roles import CHOSEN, COMPLETION, REJECTED
from input_pipeline.examples.routed import INDEX, NOBODY
from input_pipeline.images.video_file import Shown
from input_pipeline.packing import best_fit_decreasing
from trainer.generate import image_tokens
from trainer.generate.buckets import bucket, power

# {size of a unit: the roles of its trajectories}.
ROLES = {1: (COMPLETION,), 2: (CHOSEN, REJECTED)}
# The fewest segments that a row of a batch has places for.
MIN_SEGMENTS = 8


@dataclass(frozen=True)
class Trajectory:
  """A prompt and what followed it, token in and token out.

  Attributes:
    ids: int32 [n], the prompt included.
    weights: float32 [n], 1 where the token was sampled; 0 in the prompt and in what an environment said.
    logprobs: float32 [n], log-probs of sampled tokens when they were sampled, else 0.
    prompt_length: tokens before the first sampled one.
    finish_reason: "stop", "length" if the last completion did not end by itself, or "timeout" if an environment did
      not answer in time.
    number: of the prompt in its stream.
    stop_reason: the stop string that ended the last completion, or None.
    experts: int16 [n, L, k], those that tokens went through when they were sampled or read, -1: none; None: unknown.
    images: the contents of the files of those that an environment showed, behind the prompt's.
  """

  ids: np.ndarray
  weights: np.ndarray
  logprobs: np.ndarray
  prompt_length: int
  finish_reason: str
  number: int = -1
  stop_reason: str | None = None
  experts: np.ndarray | None = None
  images: tuple[bytes, ...] = ()


class Experience(NamedTuple):
  """Trajectories in units, as flat arrays."""

  tokens: np.ndarray  # int32 [n]
  weights: np.ndarray  # float32 [n]
  logprobs: np.ndarray  # float32 [n]
  lengths: np.ndarray  # int64 [N]
  units: np.ndarray  # int64 [N], not decreasing
  advantages: np.ndarray  # float32 [N]
  sources: np.ndarray  # int32 [N]
  prompt_lengths: np.ndarray  # int64 [N]
  numbers: np.ndarray  # int64 [N], of the prompts
  experts: np.ndarray | None = None  # int16 [n, L, k], -1: none
  # Images that environments showed: their files end to end, uint8; the size of each, and its trajectory, int64.
  image_bytes: np.ndarray | None = None
  image_sizes: np.ndarray | None = None
  image_owners: np.ndarray | None = None

  @property
  def images(self) -> list[tuple[int, bytes]]:
    """(trajectory, content of a file) of each image that an environment showed."""
    if self.image_bytes is None:
      return []
    ends = np.cumsum(self.image_sizes)
    return [(int(owner), self.image_bytes[end - size:end].tobytes())
            for owner, size, end in zip(self.image_owners, self.image_sizes, ends, strict=True)]

  @property
  def num_units(self) -> int:
    return int(self.units[-1]) + 1 if len(self.units) else 0

  def arrays(self) -> dict[str, np.ndarray]:
    """Those that there are, by name; none if there is no unit, since checkpoints cannot hold empty arrays."""
    return {name: part for name, part in self._asdict().items() if part is not None} if self.num_units else {}


def collect(units: Iterable[Sequence[tuple[Trajectory, float, int]]]) -> Experience:
  """The experience of these units, lists of (trajectory, advantage, number of its source)."""
  units = list(units)
  flat = [(unit, *member) for unit, members in enumerate(units) for member in members]

  def joined(name: str, dtype: type) -> np.ndarray:
    parts = [getattr(sequence, name) for _, sequence, _, _ in flat]
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)

  def column(index: int, dtype: type) -> np.ndarray:
    return np.array([row[index] for row in flat], dtype)

  known = bool(flat) and all(sequence.experts is not None for _, sequence, _, _ in flat)
  experts = np.concatenate([sequence.experts for _, sequence, _, _ in flat]) if known else None
  return Experience(joined("ids", np.int32), joined("weights", np.float32), joined("logprobs", np.float32),
                    np.array([len(row[1].ids) for row in flat], np.int64), column(0, np.int64), column(2, np.float32),
                    column(3, np.int32), np.array([row[1].prompt_length for row in flat], np.int64),
                    np.array([row[1].number for row in flat], np.int64), experts, *_files(flat))


def _files(flat: list[tuple]) -> tuple[np.ndarray, ...]:
  """The arrays of the images that environments showed, if there are any."""
  found = [(owner, image) for owner, row in enumerate(flat) for image in row[1].images]
  if not found:
    return ()
  return (np.frombuffer(b"".join(image for _, image in found), np.uint8),
          np.array([len(image) for _, image in found], np.int64), np.array([owner for owner, _ in found], np.int64))


@dataclass(frozen=True)
class RowFormat:
  """The format of rows.

  Attributes:
    seq_len: T.
    pad_id: the token of empty places.
    row_multiple: B is a multiple of it by 1, 2, 3, 4, 6, 8, 12, …, and S is 8, 16, 32, …, so that few shapes occur.
    layout: how the model takes images; None: it does not.
    share_prompts: whether the completions of a prompt in a row share it. Not with a layout.
    by_source: whether all sequences of a row are of one source.
    routing: L and k of the model; None: it has no experts, or they are not recorded.
    replay: whether a batch's experts are to be gone through again, and not only compared with.
  """

  seq_len: int
  pad_id: int
  row_multiple: int
  layout: image_tokens.Layout | None = None
  share_prompts: bool = False
  by_source: bool = False
  routing: tuple[int, int] | None = None
  replay: bool = False

  @property
  def experts(self) -> str:
    """What a batch calls them (models/experts/moe.py)."""
    return "replayed_experts" if self.replay else "sampled_experts"


def make_batch(experience: Experience, units: np.ndarray, form: RowFormat, *, keys: Sequence[str] = (),
               images: Mapping[int, Sequence[Shown]] | None = None,
               added: Mapping[int, Sequence[Shown]] | None = None,
               of_tokens: Mapping[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
  """A batch of some of the units, packed into as few rows as best fit finds, each unit within one row.

  Args:
    units: their numbers. The order decides only where in the batch each stands.
    keys: which of `advantages` [B, S], `behavior_logprobs`, `places` and names in `of_tokens` [B, T] to add; `places`:
      where each token stands in the experience, -1 for none.
    images: {number of a prompt: its images, uint8 [P, P, 3] each}; other prompts have none.
    added: {trajectory: those that its environment showed}, likewise.
    of_tokens: {name: float32 [n], or int32 of `teacher_index`}, see `trainer.rollouts.old_policy` and
      `trainer.rollouts.returns`; of a key without one NaN is written, or -1.

  Returns:
    tokens, positions, segment_ids, loss_weights [B, T], source_ids [B] (of a row's first sequence), segment_roles
    [B, S]; with a layout, what `trainer.generate.image_tokens` adds; with `share_prompts`, prompt_ids [B, T]: of tokens
    that share a prompt, its segment, which has a number above S; with `routing`, the tokens' experts int16
    [B, T, L, k].

  Raises:
    ValueError: a unit is longer than a row.
  """
  seq_len, layout = form.seq_len, form.layout
  members = [np.flatnonzero(experience.units == unit).tolist() for unit in units]
  roles = {i: role for of_unit in members
           for i, role in zip(of_unit, ROLES[len(of_unit)], strict=True)}
  starts = np.cumsum(experience.lengths) - experience.lengths
  # The prompts, without their last token, that stand in a row once for all of their completions.
  prompts = [experience.tokens[start:start + length - 1].tobytes() if form.share_prompts and length > 1 else b""
             for start, length in zip(starts.tolist(), experience.prompt_lengths.tolist(), strict=True)]
  sources = [int(experience.sources[of_unit[0]]) if form.by_source else 0 for of_unit in members]
  rows = []
  for source in sorted(set(sources)):
    mine = [of_unit for of_unit, its in zip(members, sources, strict=True) if its == source]
    of_source = _whole_rows(experience, mine, seq_len)
    if form.share_prompts:
      of_source = min(_shared_rows(experience, mine, prompts, seq_len), of_source, key=len)
    rows += of_source
  most = max(map(len, rows), default=1)
  batch = empty_batch(bucket(max(len(rows), 1), form.row_multiple), seq_len, form.pad_id,
                      Arrays(power(most, MIN_SEGMENTS), prompts=form.share_prompts))
  zeros_BxT = np.zeros_like(batch["loss_weights"])
  extra = {"advantages": np.zeros(batch["segment_roles"].shape, np.float32), "behavior_logprobs": zeros_BxT,
           "places": np.full(zeros_BxT.shape, -1), INDEX: np.full(zeros_BxT.shape, NOBODY, np.int32)}
  batch |= {key: extra.get(key, zeros_BxT + np.nan) for key in keys}
  shown = _shown(experience, rows, layout, images or {}, added or {})
  most = max((sum(len(shown[i].images) for i in sequences) for sequences in rows), default=0)
  frames = max((part.frames for part in shown.values()), default=1)
  batch |= image_tokens.empty(layout, *batch["tokens"].shape, image_tokens.slots(most), frames)
  if form.routing is not None:
    batch[form.experts] = np.full((*zeros_BxT.shape, *form.routing), -1, np.int16)
  of_tokens = {"tokens": experience.tokens, "loss_weights": experience.weights, form.experts: experience.experts,
               "behavior_logprobs": experience.logprobs, "places": np.arange(len(experience.tokens)),
               **(of_tokens or {})}
  of_tokens = {name: values_n for name, values_n in of_tokens.items() if name in batch and values_n is not None}
  for row, sequences in enumerate(rows):
    batch["source_ids"][row] = experience.sources[sequences[0]]
    shared, begin = _put_prompts(batch, row, [prompts[sequence] for sequence in sequences])
    if form.experts in of_tokens and shared:
      first_of = {prompts[sequence]: int(starts[sequence]) for sequence in reversed(sequences)}
      of_prompts = [experience.experts[first_of[prompt]:][:len(prompt) // experience.tokens.itemsize]
                    for prompt in shared]
      batch[form.experts][row, :begin] = np.concatenate(of_prompts)
    first_image = 0
    for segment, sequence in enumerate(sequences):
      first = len(prompts[sequence]) // experience.tokens.itemsize if prompts[sequence] in shared else 0
      size, start = int(experience.lengths[sequence]) - first, int(starts[sequence]) + first
      place, taken = slice(begin, begin + size), slice(start, start + size)
      for name, values_n in of_tokens.items():
        batch[name][row, place] = values_n[taken]
      batch["positions"][row, place] = first + np.arange(size)
      batch["segment_ids"][row, place] = segment + 1
      if first:
        batch["prompt_ids"][row, place] = shared[prompts[sequence]]
      batch["segment_roles"][row, segment] = roles[sequence]
      if "advantages" in keys:
        batch["advantages"][row, segment] = experience.advantages[sequence]
      image_tokens.put(layout, batch, shown[sequence], row, begin, first_image)
      begin, first_image = begin + size, first_image + len(shown[sequence].images)
  return batch


def _put_prompts(batch: dict[str, np.ndarray], row: int, prompts: list[bytes]) -> tuple[dict[bytes, int], int]:
  """Begins a row with the prompts that several of its sequences have; `prompts`: of each, without its last token.

  Returns:
    ({prompt: the number of its segment}, the places taken).
  """
  count, begin = Counter(prompts), 0
  shared = [prompt for prompt in count if prompt and count[prompt] > 1]
  numbers = {prompt: batch["segment_roles"].shape[1] + n for n, prompt in enumerate(shared, 1)}
  for prompt, number in numbers.items():
    ids = np.frombuffer(prompt, batch["tokens"].dtype)
    place = slice(begin, begin + len(ids))
    batch["tokens"][row, place], batch["segment_ids"][row, place] = ids, number
    batch["positions"][row, place] = np.arange(len(ids))
    begin += len(ids)
  return numbers, begin


def _whole_rows(experience: Experience, members: list[list[int]], seq_len: int) -> list[list[int]]:
  """The sequences of each row, each with its prompt; `members`: of each unit."""
  sizes = np.array([int(experience.lengths[of_unit].sum()) for of_unit in members], np.int64)
  if not len(sizes):
    return []
  if sizes.max() > seq_len:
    raise ValueError(f"a unit of {sizes.max()} tokens does not fit into a row of {seq_len}")
  order = np.argsort(-sizes, kind="stable")
  row_of = best_fit_decreasing(np.bincount(sizes, minlength=seq_len + 1), seq_len)
  rows: list[list[int]] = [[] for _ in range(int(row_of.max()) + 1)]
  for row, unit in zip(row_of.tolist(), order.tolist(), strict=True):
    rows[row] += members[unit]
  return rows


def _shared_rows(experience: Experience, members: list[list[int]], prompts: list[bytes], seq_len: int
                 ) -> list[list[int]]:
  """As `_whole_rows`, where a row holds each prompt once. Prompts with most tokens come first; each unit goes into the
  row where it takes the fewest places, and among several of these into the fullest."""
  lengths, itemsize = experience.lengths.tolist(), experience.tokens.itemsize
  own = [length - len(prompt) // itemsize for length, prompt in zip(lengths, prompts, strict=True)]
  size_of = [sum(own[i] for i in of_unit) for of_unit in members]
  of_prompt: Counter[bytes] = Counter()
  for unit, of_unit in enumerate(members):
    of_prompt[prompts[of_unit[0]]] += size_of[unit]
  order = sorted(range(len(members)), key=lambda unit: (
      -of_prompt[prompts[members[unit][0]]], prompts[members[unit][0]], -size_of[unit]))
  rows: list[list[int]] = []
  rooms: list[int] = []
  there: list[set[bytes]] = []
  for unit in order:
    needed = {prompts[i] for i in members[unit]}
    # In each row, and in a new one.
    places = [size_of[unit] + sum(map(len, needed - present)) // itemsize for present in (*there, set())]
    fitting = [(places[row], room, row) for row, room in enumerate(rooms) if places[row] <= room]
    if not fitting:
      fitting = [(places[-1], seq_len, len(rows))]
      rows.append([])
      rooms.append(seq_len)
      there.append(set())
    taken, _, row = min(fitting)
    rooms[row] -= taken
    rows[row] += members[unit]
    there[row] |= needed
  return rows


def _shown(experience: Experience, rows: list[list[int]], layout: image_tokens.Layout | None,
           images: Mapping[int, Sequence[Shown]], added: Mapping[int, Sequence[Shown]]
           ) -> dict[int, image_tokens.PromptImages]:
  """The images of each trajectory in the rows."""
  chosen = sorted(sequence for sequences in rows for sequence in sequences)
  numbers = {int(number) for number in experience.numbers[chosen]} if chosen else set()
  # Once for all the completions of a prompt.
  of_prompt = {number: images.get(number, ()) for number in sorted(numbers)}
  ends = np.cumsum(experience.lengths)
  place = {sequence: slice(ends[sequence] - experience.lengths[sequence], ends[sequence]) for sequence in chosen}
  return {sequence: image_tokens.of_text(
      layout, experience.tokens[place[sequence]],
      [*of_prompt[int(experience.numbers[sequence])], *added.get(sequence, ())],
      int(experience.prompt_lengths[sequence]), f"sequence {sequence}", experience.weights[place[sequence]] > 0)
          for sequence in chosen}
