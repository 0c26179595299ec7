"""Rotary positions and their scalings, against numpy and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.rope import Rope, RopeScaling, apply_rope, rope_table, temperature
from models.sharding import logical_axes

DIMS, THETA = 16, 10_000.0
PAIRS = DIMS // 2
PLAIN = THETA ** (-np.arange(PAIRS) / PAIRS)


def frequencies(scaling, positions=None, segments=None):
  """The angle per position of each pair, recovered from a table at position 1 (and the magnitude of its rotation)."""
  positions = np.array([[1]]) if positions is None else positions
  segments = np.ones_like(positions) if segments is None else segments
  cos, sin = (np.asarray(x, np.float64) for x in rope_table(Rope(THETA, DIMS, scaling), positions, segments))
  return np.arctan2(sin, cos)[..., 0, :], np.hypot(sin, cos)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dims", [16, 8])
def test_rope_equals_complex_rotation(dims, platform, monkeypatch):
  """As written for CPU, and for all others."""
  monkeypatch.setattr(logical_axes, "platform", lambda: platform)
  K, theta = 16, 100.0
  x = np.random.default_rng(0).normal(size=(2, 6, 3, K)).astype(np.float32)
  positions = np.array([[0, 1, 2, 3, 4, 5], [7, 0, 1, 1000, 2, 3]])
  out = apply_rope(x, rope_table(Rope(theta, dims), positions, np.ones_like(positions)))
  P = dims // 2
  turned = (x[..., :P] + 1j * x[..., P : 2 * P]) * np.exp(
      1j * positions[:, :, None, None] * theta ** (-np.arange(P) / P)
  )
  np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag, x[..., 2 * P :]], -1), atol=2e-4)


def test_rope_makes_scores_depend_on_distance_only():
  q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 32))

  def score(i, j):
    one = np.ones((1, 1), np.int32)
    rotate = lambda x, p: apply_rope(x, rope_table(Rope(1e4, 32), p * one, one))  # noqa: E731
    return (rotate(q, i) * rotate(k, j)).sum()

  np.testing.assert_allclose(score(9, 4), score(105, 100), rtol=1e-4)
  assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_linear_scaling_divides_every_position():
  angles, size = frequencies(RopeScaling("linear", 4.0))
  np.testing.assert_allclose(angles[0, 0], PLAIN / 4, rtol=1e-6)
  np.testing.assert_allclose(size, 1, rtol=1e-6)


def test_llama3_keeps_fast_pairs_stretches_slow_ones_and_blends_between():
  """Llama 3.1: by the number of turns within the original length, against low and high."""
  scaling = RopeScaling("llama3", 8.0, 100, low_frequency_factor=1.0, high_frequency_factor=4.0)
  angles, _ = frequencies(scaling)
  turns = 100 * PLAIN / (2 * np.pi)
  kept, stretched = turns > 4, turns < 1
  assert kept.any() and stretched.any() and not (kept | stretched).all()
  np.testing.assert_allclose(angles[0, 0][kept], PLAIN[kept], rtol=1e-6)
  np.testing.assert_allclose(angles[0, 0][stretched], PLAIN[stretched] / 8, rtol=1e-6)
  between = ~(kept | stretched)
  share = (turns[between] - 1) / 3
  np.testing.assert_allclose(angles[0, 0][between], PLAIN[between] * (share + (1 - share) / 8), rtol=1e-5)


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_scales_the_rotation():
  """arXiv 2309.00071, section 3.2 and eq. 22: both ends are exact, between them the frequencies fall faster."""
  scaling = RopeScaling("yarn", 8.0, 100, beta_fast=4.0, beta_slow=0.5, attention_factor=1.2)
  angles, size = frequencies(scaling)
  np.testing.assert_allclose(size, 1.2, rtol=1e-6)
  share = angles[0, 0] / PLAIN
  assert share[0] == pytest.approx(1.0) and share[-1] == pytest.approx(1 / 8)
  assert np.all(np.diff(share) <= 1e-6) and len(np.unique(share.round(4))) > 2


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_stretches_between_the_pairs_that_turn_as_often_as_its_bounds_say(truncate):
  """Pair p turns L θ^(-p / P) / 2π times within the original length L; the bounds are whole pairs unless config.json
  says `truncate: false`, as in transformers' find_correction_range."""
  scaling = RopeScaling("yarn", 8.0, 100, beta_fast=4.0, beta_slow=0.5, truncate=truncate)
  low, high = (PAIRS * np.log(100 / (2 * np.pi * times)) / np.log(THETA) for times in (4.0, 0.5))
  if truncate:
    low, high = np.floor(low), np.ceil(high)
  ramp = np.clip((np.arange(PAIRS) - low) / (high - low), 0, 1)
  np.testing.assert_allclose(frequencies(scaling)[0][0, 0] / PLAIN, ramp / 8 + 1 - ramp, rtol=1e-5)


def test_dynamic_scaling_starts_beyond_the_original_length_and_depends_on_the_document_alone():
  """Two documents in a row: the short one is as without scaling; the long one has its own base, padding none."""
  scaling = RopeScaling("dynamic", 2.0, original_positions=6)
  segments = np.array([[1] * 4 + [2] * 10 + [0] * 2])
  positions = np.concatenate([np.arange(4), np.arange(10), np.arange(2)])[None]
  angles, _ = frequencies(scaling, positions, segments)
  np.testing.assert_allclose(angles[0, 1], PLAIN, rtol=1e-6)
  base = THETA * (2 * 10 / 6 - 1) ** (DIMS / (DIMS - 2))
  np.testing.assert_allclose(angles[0, 4 + 1], base ** (-np.arange(PAIRS) / PAIRS), rtol=1e-5)
  alone, _ = frequencies(scaling, np.arange(10)[None])
  np.testing.assert_array_equal(angles[0, 4:14], alone[0])


def test_longrope_divides_by_the_factors_of_short_documents_or_of_long_ones():
  """By the document's own length, not the row's; the rotation is larger in both."""
  short, long = 1 + np.arange(PAIRS) / 10, 2.0 + np.arange(PAIRS)
  scaling = RopeScaling("longrope", 4.0, 6, attention_factor=1.2, short_factors=tuple(short), long_factors=tuple(long))
  segments = np.array([[1] * 6 + [2] * 7 + [0] * 2])
  positions = np.concatenate([np.arange(6), np.arange(7), np.arange(2)])[None]
  angles, size = frequencies(scaling, positions, segments)
  np.testing.assert_allclose(size, 1.2, rtol=1e-6)
  np.testing.assert_allclose(angles[0, 1], PLAIN / short, rtol=1e-5)
  np.testing.assert_allclose(angles[0, 6 + 1], PLAIN / long, rtol=1e-5)


def test_llama3_without_pairs_between_keeps_them_or_stretches_them():
  """Scout's low and high are both 1: pairs that turn once within the original length, or more often, are kept."""
  scaling = RopeScaling("llama3", 16.0, 100, low_frequency_factor=1.0, high_frequency_factor=1.0)
  angles, _ = frequencies(scaling)
  kept = PLAIN * 100 / (2 * np.pi) > 1
  assert 0 < kept.sum() < PAIRS
  np.testing.assert_allclose(angles[0, 0], np.where(kept, PLAIN, PLAIN / 16), rtol=1e-6)


def test_temperature_grows_with_the_logarithm_of_whole_stretches():
  positions = np.array([[0, 3, 4, 7, 8, 0, 8_388_608]])
  expected = 1 + 0.1 * np.log(1 + np.array([0, 0, 1, 1, 2, 0, 2_097_152]))
  np.testing.assert_allclose(temperature(0.1, 4, jnp.asarray(positions))[0, :, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_a_factor_of_one_changes_nothing_within_the_original_length(kind):
  x = np.random.default_rng(0).normal(size=(1, 8, 2, DIMS)).astype(np.float32)
  positions, segments = np.arange(8)[None], np.ones((1, 8), np.int32)
  plain = apply_rope(jnp.asarray(x), rope_table(Rope(THETA, DIMS), positions, segments))
  scaled = apply_rope(jnp.asarray(x), rope_table(Rope(THETA, DIMS, RopeScaling(kind, 1.0, 64)), positions, segments))
  np.testing.assert_allclose(plain, scaled, atol=1e-6)
