"""What a sampler is asked for, and what it gives: completions, in parts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainer.generate.beginnings import Beginnings
from trainer.generate.kept import Held, Kept
from trainer.generate.stop_strings import StopStrings


@dataclass(frozen=True)
class Completion:
  """What was generated after a prompt.

  Attributes:
    prompt: the prompt's place in the list.
    sample: number of the sample, from 0.
    ids: int32 [n], the stop token included.
    logprobs: float32 [n], log-probs of the ids in the distribution they were drawn from: softmax(logits / temperature)
      over what truncation leaves. With temperature 0, where the most likely id is taken, of softmax(logits).
    full_logprobs: the same without truncation, over the whole vocabulary; equal to `logprobs` if there is none.
    finish_reason: "stop" (the last id is one of stop_ids, or completes a stop string) or "length".
    stop_reason: the stop string that it completes; else None.
    experts: int16 [prompt + n, L, k], those that each token of the prompt and of the ids went through; -1: none, as the
      last one, which nothing follows. In parts the prompt's come with the first one. None: not recorded.
    reused: tokens of the prompt that were not run, since they were kept.
  """

  prompt: int
  sample: int
  ids: np.ndarray
  logprobs: np.ndarray
  full_logprobs: np.ndarray
  finish_reason: str
  stop_reason: str | None = None
  experts: np.ndarray | None = None
  reused: int = 0

  @property
  def text_ids(self) -> np.ndarray:
    """The ids without the stop token; of a stop string `StopStrings.text` knows what it leaves of them."""
    return self.ids[:-1] if self.finish_reason == "stop" and self.stop_reason is None else self.ids


@dataclass(frozen=True, kw_only=True)
class Request:
  """How prompts are completed.

  Attributes:
    max_new_tokens: of each completion, the stop token included; or those of each prompt's.
    num_samples: completions for each prompt.
    samples: the numbers of the samples of each prompt, in place of 0 to num_samples - 1; they decide what is drawn.
    images: of each prompt, uint8 [S, S, 3] each, as many as its placeholders are for; None: none.
    prefixes: how many tokens each prompt began with, where more have followed (what the model said and what was
      answered): only these may see one another in both directions. None: all are the beginning.
    sampled: of each prompt, which of its tokens the model has said, bool [n]: none of these is a placeholder. None: all
      behind its prefix.
    temperature, top_k, top_p, min_p: see `Options`.
    stop_ids: a completion ends with the first of these.
    stop: … or with the token that completes the first of these strings.
    seed: of the random draws; or that of each prompt.
    begun: how many of each prompt's last tokens are the beginning of its completions, whose draws go on behind it as if
      they had not been left off; they count in max_new_tokens. None: nothing is.
    in_order: completions begin in the order of the prompts, not with those of the longest.
    until: asked when all rows' parts of a chunk are given; where it says so, the others are left off.
    kept: texts that prompts may go on from, without being run again, and to which those are added that end; all of the
      same parameters. None: nothing is kept.
    keep: whether those of each prompt are added. None: all are.
    held: rows that were left off by `until`, whose texts go on in place if this request has them, and where those are
      put that it leaves off. None: a text that goes on is run from its beginning.
    beginnings: what prompts have in common is run once for those that come first, and counted here; not for those that
      come later, so that which prompts share does not depend on when. None: each prompt is run by itself.
    more: asked before each chunk, whether or not any text is left (`idle`), for prompts that come only now. None: there
      are none.
    stopped: asked again and again by what waits for a server; where it says so, no more parts come.
    newer: asked before each chunk for parameters with which all goes on that is not run yet; None: those that there
      are. Keys and values of what has been run stay as they were computed.
  """

  max_new_tokens: int | Sequence[int]
  num_samples: int = 1
  samples: Sequence[Sequence[int]] | None = None
  images: Sequence[Sequence[np.ndarray]] | None = None
  prefixes: Sequence[int] | None = None
  sampled: Sequence[np.ndarray] | None = None
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  stop_ids: Iterable[int] = ()
  stop: StopStrings | None = None
  seed: int | str | Sequence[int | str] = 0
  begun: Sequence[int] | None = None
  in_order: bool = False
  until: Callable[[], bool] = lambda: False
  kept: Kept | None = None
  keep: Sequence[bool] | None = None
  held: Held | None = None
  beginnings: Beginnings | None = None
  more: "Callable[[bool], More] | None" = None
  stopped: Callable[[], bool] = lambda: False
  newer: Callable[[], Any] = lambda: None


class More(NamedTuple):
  """Prompts that come while others are completed; their places go on behind those.

  Attributes:
    prompts: their ids.
    options: `max_new_tokens`, `samples`, `images`, `prefixes`, `sampled` and `keep` of a `Request`, as far as they
      are needed, for each of them.
    coming: completions for which rows should be kept: those of prompts that come later. While it is above 0 the stream
      does not end.
  """

  prompts: Sequence[np.ndarray] = ()
  options: Mapping[str, Any] = {}
  coming: int = 0


def collect(parts: Iterable[Completion]) -> list[Completion]:
  """The completions that `Sampler.stream` gave these parts of, those of a prompt one after another."""
  of: dict[tuple[int, int], list[Completion]] = {}
  for part in parts:
    of.setdefault((part.prompt, part.sample), []).append(part)
  return [joined(of[key]) for key in sorted(of)]


def joined(parts: list[Completion]) -> Completion:
  """One completion of its parts, as far as they go."""
  ids, logprobs, full = (np.concatenate([getattr(part, name) for part in parts])
                         for name in ("ids", "logprobs", "full_logprobs"))
  last = parts[-1]
  experts = None if last.experts is None else np.concatenate([part.experts for part in parts])
  return Completion(last.prompt, last.sample, ids, logprobs, full, last.finish_reason, last.stop_reason, experts,
                    last.reused)
