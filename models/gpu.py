"""What kernels of our own for GPUs have in common: which GPUs can run them, and that they are tried before they are
trusted."""

import concurrent.futures
import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

# On a GPU that is here, results may be off by so much of the largest number; bfloat16 rounds each by up to 0.002.
MOST_OFF = 0.02


def unsuitable(device: Any, dtype: Any) -> str | None:
  """Why this GPU does not run kernels on numbers of `dtype`; None: it does."""
  generation = getattr(device, "compute_capability", "unknown")
  if not re.fullmatch(r"\d+\.\d+", generation) or float(generation) < 8:
    return f"{device.device_kind}, whose compute capability is {generation}; they need 8.0 or above"
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f"{np.dtype(dtype).name}; with precision.compute=bfloat16, and products in that, they are taken"
  return None


@functools.cache
def warn(what: str, reason: str) -> None:
  """Says once, for each reason, that something is computed without its kernels."""
  logging.warning("%s: blocked, since the GPU kernels do not take %s", what, reason)


def is_here(device: Any) -> bool:
  """Whether this process has such a GPU. Each then tries kernels on one of its own, also where `device` is another
  process's, so that all agree."""
  here = jax.local_devices()[0]
  return (here.platform, here.device_kind) == ("gpu", device.device_kind)


def tried(error: Callable[[], float]) -> str | None:
  """Why kernels are not to be trusted on the GPU that is here; None: their `error` is what rounding explains.

  Runs in a thread of its own, which knows nothing of what is being traced in this one.
  """
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    try:
      off = thread.submit(error).result()
    except Exception as e:  # whatever a compiler or a driver may say
      return f"this GPU, where they fail: {type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
  return None if off <= MOST_OFF else f"this GPU, where their results are off by {off:.2g} of the largest number"


def off(ours: Iterable[jax.Array], exact: Iterable[jax.Array]) -> float:
  """The largest difference as a part of the largest number, over pairs of arrays."""
  # By numpy, which does not lose what is not a number: XLA's largest number on CPU does.
  found = [np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max() for a, b in zip(
      ours, map(np.asarray, exact), strict=True)]
  return math.inf if np.isnan(found).any() else float(max(found))
