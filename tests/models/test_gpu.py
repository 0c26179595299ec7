"""Whether kernels of GPUs are taken, on GPUs that are not there; and how far results are off."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from models import gpu


@pytest.mark.parametrize("capability, dtype, reason", [
    ("8.0", jnp.bfloat16, None), ("9.0", jnp.float16, None), ("10.0", jnp.bfloat16, None),
    ("7.5", jnp.bfloat16, "Chip, whose compute capability is 7.5; they need 8.0 or above"),
    ("", jnp.bfloat16, "Chip, whose compute capability is ; they need"), ("gfx90a", jnp.bfloat16, "Chip, whose comput"),
    ("9.0", jnp.float32, "float32; with precision.compute=bfloat16, and products in that, they are taken")])
def test_which_gpus_run_kernels(capability, dtype, reason):
  found = gpu.unsuitable(SimpleNamespace(compute_capability=capability, device_kind="Chip"), dtype)
  assert found is None if reason is None else found.startswith(reason)


def test_a_gpu_is_here_if_the_first_one_is_of_its_kind(monkeypatch):
  for platform, kind, here in (("gpu", "A", True), ("gpu", "B", False), ("cpu", "A", False)):
    first = SimpleNamespace(platform=platform, device_kind=kind)
    monkeypatch.setattr(gpu.jax, "local_devices", lambda first=first: [first, None])
    assert gpu.is_here(SimpleNamespace(device_kind="A")) == here


def fails():
  raise RuntimeError("no such kernel\nat length")


@pytest.mark.parametrize("error, reason", [
    (lambda: gpu.MOST_OFF, None), (lambda: 0.5, "this GPU, where their results are off by 0.5 of the largest number"),
    (lambda: math.inf, "this GPU, where their results are off by inf of the largest number"),
    (fails, "this GPU, where they fail: RuntimeError: no such kernel")])
def test_kernels_are_tried_before_they_are_trusted(error, reason):
  assert gpu.tried(error) == reason


def test_the_worst_of_all_results_counts_in_units_of_its_largest():
  exact = [np.array([1.0, -4.0]), np.array([10.0])]
  assert gpu.off([np.array([1.0, -3.0]), np.array([11.0])], exact) == 0.25
  assert gpu.off([np.array([1.0, -4.0]), np.array([12.0])], exact) == pytest.approx(0.2)
  assert gpu.off([jnp.array([1.0, jnp.nan]), np.array([10.0])], exact) == math.inf


def test_each_reason_is_told_once(caplog):
  for reason in ("that size", "that size", "that dtype"):
    gpu.warn("a test", reason)
  assert [record.getMessage() for record in caplog.records] == [
      f"a test: blocked, since the GPU kernels do not take {reason}" for reason in ("that size", "that dtype")]
