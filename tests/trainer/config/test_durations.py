"""Durations: each unit in steps, against numbers worked out by hand."""

import pytest
from ml_collections import ConfigDict

from trainer.config import duration, durations
from trainer.errors import ConfigError

RUN = durations.RunLengths(total_steps=1000, batch_size=8, seq_len=256, rows_per_epoch=500)


def growing(step: int) -> int:
  """Rows before a step: 8 a step for 100 steps, then 32 a step."""
  return 8 * step if step <= 100 else 800 + 32 * (step - 100)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, None),
        ({"steps": -1, "tokens": -1, "percent": -1.0}, None),
        ({"steps": 7}, 7),
        ({"steps": 0}, 0),
        ({"examples": 80}, 10),
        ({"examples": 84}, 11),  # 10.5: half a step counts as one
        ({"examples": 1}, 1),  # at least one
        ({"tokens": 8 * 256 * 30}, 30),
        ({"tokens": 0}, 0),
        ({"epochs": 2.0}, 125),
        ({"epochs": 0.001}, 1),
        ({"percent": 20.0}, 200),
        ({"percent": 0.0}, 0),
        ({"percent": 100.0}, 1000),
        ({"percent": 0.25}, 3),  # 2.5
    ],
)
def test_each_unit(given, expected):
  assert durations.steps(ConfigDict(duration("x", **given)), "x", RUN) == expected


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"examples": 400}, 50),
        ({"examples": 800}, 100),
        ({"examples": 832}, 101),
        ({"examples": 847}, 101),  # 101.47
        ({"examples": 848}, 102),  # 101.5
        ({"tokens": 256 * (800 + 320)}, 110),
        ({"epochs": 1.0}, 110),  # an epoch has 1120 rows
        ({"epochs": 2.0}, 145),  # 2240 = 800 + 32 × 45
        ({"percent": 10.0}, 100),
    ],
)
def test_growing_batches_are_converted_exactly(given, expected):
  run = RUN._replace(batch_size=growing, rows_per_epoch=1120)
  assert durations.steps(ConfigDict(duration("x", **given)), "x", run) == expected


def test_growing_batches_equal_constant_ones_where_they_do_not_grow():
  for examples in range(1, 50):
    cfg = ConfigDict(duration("x", examples=examples))
    constant = durations.steps(cfg, "x", RUN)
    assert constant == durations.steps(cfg, "x", RUN._replace(batch_size=lambda step: 8 * step))


def test_a_fractional_epoch_of_growing_batches_is_interpolated():
  run = RUN._replace(batch_size=growing, rows_per_epoch=816)
  assert durations.steps(ConfigDict(duration("x", epochs=2.0)), "x", run) == 126  # 1632 = 800 + 32 × 26


def test_two_units_are_an_error_that_says_how_to_unset_one():
  cfg = ConfigDict(duration("total", steps=10, tokens=4096))
  with pytest.raises(ConfigError) as error:
    durations.steps(cfg, "total", RUN._replace(total_steps=None))
  message = str(error.value)
  assert "total_steps = 10" in message and "total_tokens = 4096" in message
  assert "--config.total_tokens=-1" in message and "--config.total_steps=-1" in message
  with pytest.raises(ConfigError, match=r"--config\.schedule\.total_tokens=-1"):
    durations.steps(cfg, "total", RUN, where="schedule")


@pytest.mark.parametrize(
    "given, changed, message",
    [
        ({"percent": 101.0}, {}, "between 0 and 100"),
        ({"percent": float("nan")}, {}, "finite"),
        ({"epochs": float("inf")}, {}, "finite"),
        ({"percent": 5.0}, {"total_steps": None}, "length of the run"),
        ({"epochs": 1.0}, {"rows_per_epoch": None}, "epoch is not known"),
        ({"steps": 2**31}, {}, r"x_steps = 2\.14748e\+09, which is 2.* steps; there are 2,147,483,\d+ at most"),
        ({"examples": 8 * 2**31}, {}, r"x_examples = 1\.71799e\+10, which is 2\.14748e\+09 steps; there are 2,14"),
        ({"tokens": 10**17}, {"batch_size": growing}, r"x_tokens = 1e\+17, which is 1\.2207e\+13 steps; there are"),
        ({"tokens": 512}, {"seq_len": None}, "x_tokens = 512, but how many tokens rollouts give is not known"),
        ({"steps": -3}, {}, "x_steps = -3; it must be 0 or more, or -1 .*not given"),
    ],
)
def test_impossible_durations(given, changed, message):
  with pytest.raises(ConfigError, match=message):
    durations.steps(ConfigDict(duration("x", **given)), "x", RUN._replace(**changed))


def test_default_only_where_nothing_is_given():
  assert durations.steps(ConfigDict(duration("x")), "x", RUN, default=5) == 5
  assert durations.steps(ConfigDict(duration("x", steps=0)), "x", RUN, default=5) == 0
  assert str(durations.resolve(ConfigDict(duration("x")), "x", RUN, default=5)) == "5 steps (default)"


@pytest.mark.parametrize(
    "given, words",
    [
        ({"percent": 20.0}, "200 steps (20% of 1,000)"),
        ({"steps": 1}, "1 step"),
        ({"tokens": 4096}, "2 steps (4,096 tokens, 8 rows a step of 256 tokens)"),
        ({"epochs": 2.0}, "125 steps (2 epochs of 500 rows)"),
        ({}, "unset"),
    ],
)
def test_explain(given, words):
  assert str(durations.resolve(ConfigDict(duration("x", **given)), "x", RUN)) == words


def test_explain_says_when_batches_grow():
  run = RUN._replace(batch_size=growing)
  words = str(durations.resolve(ConfigDict(duration("x", examples=832)), "x", run))
  assert words == "101 steps (832 examples, 8 to 32 rows a step)"
  for examples, words in ((0, "0 steps (0 examples, 8 rows a step)"), (80, "10 steps (80 examples, 8 rows a step)"),
                          (800, "100 steps (800 examples, 8 rows a step)")):  # the next would have 32
    assert str(durations.resolve(ConfigDict(duration("x", examples=examples)), "x", run)) == words
