"""Random bits on CPU: those of Threefry-2x32, which JAX computes by itself too; without loops."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from models import layers
from models.cpu import random_bits
from tests.models import drawn


@pytest.mark.parametrize(("key", "counter", "wanted"), [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
])
def test_known_answers(key, counter, wanted):
  """Those that the authors' own tests have (Random123, kat_vectors: threefry2x32 20)."""
  words = [np.array([word], np.uint32) for word in (*key, *counter)]
  assert [int(word[0]) for word in random_bits.threefry(*words)] == list(wanted)


def test_what_is_drawn_is_what_jax_alone_draws(tmp_path):
  subprocess.run([sys.executable, drawn.__file__, tmp_path / "alone.npz"], check=True)
  alone, here = np.load(tmp_path / "alone.npz"), drawn.drawn()
  assert set(alone) == set(here)
  for name, values in here.items():
    np.testing.assert_array_equal(values, alone[name], err_msg=name)


DROPOUT = {"dropout": lambda key: layers.dropout(np.ones((9, 8), np.float32), 0.3, key)}


@pytest.mark.parametrize(("name", "draw"), (drawn.DRAWN | DROPOUT).items(), ids=drawn.DRAWN | DROPOUT)
def test_no_loop_is_compiled(name, draw):
  assert "stablehlo.while" not in jax.jit(draw).lower(jax.random.key(0)).as_text(), name
