"""Which checkpoints stay, of values alone; on disk: test_checkpoint.py."""

import types

import pytest

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
