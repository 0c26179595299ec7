"""Which checkpoints stay, of values alone; on disk: test_checkpoint.py."""

import types

import pytest
from orbax.checkpoint.checkpoint_managers import preservation_policy

from trainer.checkpoints import retention

NAN = float("nan")


@pytest.mark.parametrize("mode, values, best", [
    ("min", {2: 1.0, 4: 3.0, 6: 1.0}, 6), ("max", {2: 1.0, 4: 3.0, 6: 3.0}, 6),  # of equal ones the newest
    ("min", {2: NAN, 4: 3.0, 6: NAN}, 4), ("max", {2: NAN, 4: 3.0, 6: NAN}, 4), ("min", {2: NAN}, None),
    ("max", {}, None), ("max", {3: 9.0, 4: 1.0}, 4)])  # 3 is not there any more
def test_the_best_is_the_newest_of_the_best_values_that_are_numbers(mode, values, best):
  there = [types.SimpleNamespace(step=step) for step in (2, 4, 6)]
  kept = retention._Best(values, mode).should_preserve(there, context=None)
  assert [info.step for info, stays in zip(there, kept, strict=True) if stays] == ([] if best is None else [best])


@pytest.mark.parametrize("last, every, values, stay", [
    (1, 0, None, [9]), (2, 0, None, [8, 9]), (1, 4, None, [4, 8, 9]), (1, 4, {6: 1.0, 8: 2.0}, [4, 6, 8, 9]),
    (1, 0, {}, [9])])
def test_one_reason_to_stay_is_enough(last, every, values, stay):
  there = [types.SimpleNamespace(step=step) for step in (2, 4, 6, 8, 9)]
  kept = retention.policy(last, every, values, "min").should_preserve(
      there, context=preservation_policy.PreservationContext())
  assert [info.step for info, stays in zip(there, kept, strict=True) if stays] == stay
