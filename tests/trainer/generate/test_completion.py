"""Completions as they are put together from parts."""

import numpy as np
import pytest

from trainer.generate.completion import Completion, collect


def part(prompt, sample, *ids, reason="", experts=False, **more):
  numbers = np.array(ids, np.float32)
  return Completion(prompt, sample, np.array(ids, np.int32), -numbers, -2 * numbers, reason,
                    experts=np.array(ids, np.int16)[:, None, None] if experts else None, **more)


def test_parts_are_put_together_in_the_order_of_prompts_and_samples_whichever_ended_first():
  found = collect([part(1, 0, 4, experts=True), part(0, 1, 5, 6, reason="length"), part(0, 0, 7),
                   part(1, 0, 8, 9, reason="stop", experts=True, reused=3, stop_reason="!"), part(0, 0, reason="stop")])
  assert [(c.prompt, c.sample, c.ids.tolist(), c.finish_reason) for c in found] == [
      (0, 0, [7], "stop"), (0, 1, [5, 6], "length"), (1, 0, [4, 8, 9], "stop")]
  last = found[2]
  assert last.logprobs.tolist() == [-4, -8, -9] and last.full_logprobs.tolist() == [-8, -16, -18]
  assert last.experts.ravel().tolist() == [4, 8, 9] and (last.reused, last.stop_reason) == (3, "!")
  assert found[0].experts is None


@pytest.mark.parametrize("reason, stop_reason, expected", [
    ("stop", None, [1, 2]), ("length", None, [1, 2, 3]), ("stop", "ab", [1, 2, 3]), ("", None, [1, 2, 3])])
def test_the_stop_token_is_no_text_and_what_completes_a_stop_string_may_be(reason, stop_reason, expected):
  assert part(0, 0, 1, 2, 3, reason=reason, stop_reason=stop_reason).text_ids.tolist() == expected
