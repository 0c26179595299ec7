"""What no key may be: each bound from both sides."""

import functools
import math
import operator

import pytest

from trainer.config import checks, defaults, source
from trainer.config.values import INT64, invalid, invalid_name
from trainer.errors import ConfigError

MOST = 2_147_483_647  # of an int32
BELOW_1 = 1 - 2**-53
# (keys, the values at the bounds and beyond, how the bounds are told).
BOUNDS = [
    ("batch_size seq_len total_steps model.hidden_size model.intermediate_size model.num_heads model.vocab_size "
     "model.vocab_multiple model.vocab_chunk model.head_dim model.moe.num_experts model.moe.expert_size "
     "model.vision.image_size model.vision.hidden_size tokenizer.vocab_size rollout.max_new_tokens rollout.num_prompts "
     "rollout.batch_size", (MOST,), (MOST + 1, -MOST - 1), "at most 2,147,483,647"),
    ("model.num_layers model.vision.num_layers", (10_000,), (10_001,), "at most 10,000"),
    ("input.prefetch input.workers input.images.workers rollout.reward_workers rollout.environment_workers",
     (1024,), (1025,), "at most 1,024"),
    ("optimizer.b1 optimizer.b2 optimizer.momentum", (0.0, BELOW_1), (-1e-9, 1.0), "from 0 on and below 1"),
    ("optimizer.eps optimizer.weight_decay optimizer.decay_exponent model.norm_eps model.vision.norm_eps",
     (0.0, 1e300), (-1e-300,), "from 0 on"),
    ("model.init_std model.attention_scale model.embedding_scale model.residual_scale model.logit_scale "
     "tokenizer.train_megabytes", (5e-324, 1e300), (0.0, -1.0), "above 0"),
    ("schedule.timescale", (1,), (0, -1), "above 0"),
    ("optimizer.muon_steps optimizer.min_dim_size_to_factor", (1, MOST), (0, MOST + 1), "1 to 2,147,483,647"),
    ("input.prefetch input.workers optimizer.max_nonfinite_steps keep_last", (1,), (0,), "between 1 and inf"),
    ("optimizer.clip_norm optimizer.learning_rate", (0.0, 1e300), (-1e-9,), "between 0.0 and inf"),
    ("schedule.floor optimizer.ema_decay model.dropout input.max_over_long input.max_bad_rows",
     (0.0, 1.0), (-1e-9, 1.0 + 1e-9), "between 0.0 and 1.0"),
]


@pytest.fixture(scope="module")
def config():
  found = defaults()
  found.input.sources.main = source(type="python_stdlib")
  return checks.resolve(found)


@pytest.mark.parametrize("key, within, beyond, said", [
    (key, *bounds) for keys, *bounds in BOUNDS for key in keys.split()])
def test_numbers_are_allowed_up_to_their_bounds(config, key, within, beyond, said):
  *sections, leaf = key.split(".")
  node = functools.reduce(operator.getitem, sections, config)
  before = node[leaf]
  try:
    for value in within:
      node[leaf] = value
      checks.validate(config)
    for value in beyond:
      node[leaf] = value
      with pytest.raises(ConfigError) as refusal:
        checks.validate(config)
      assert str(refusal.value).startswith(f"{key} is {value}; ") and str(refusal.value).endswith(f" {said}.")
  finally:
    node[leaf] = before


@pytest.mark.parametrize("value, must_be", [
    (INT64, None), (-INT64, None), (INT64 + 1, "a number of at most 64 bits"), (True, None), (None, None), (1.5, None),
    (math.inf, "a finite number"), (-math.nan, "a finite number"), ("a", None),
    ("a\0", "a string without NUL characters"), ([1, ("a", 2)], None), ({"a": [1, {"b": 2.0}]}, None),
    ((1, [2.0, math.nan]), "a finite number throughout"), ({"a": {"b": "\0"}},
    "a string without NUL characters throughout")])
def test_no_key_has_numbers_that_are_none_or_texts_that_no_file_can_hold(value, must_be):
  assert invalid(value) == must_be


def test_names_are_words_of_at_most_64_characters():
  allowed = "letters, digits, _ and -, at most 64 of them"
  assert [invalid_name(name) for name in ("a", "x" * 64, "val-2_b", "x" * 65, "-a", "a b", "", "a.b", 7)] == (
      [None] * 3 + [allowed] * 6)
