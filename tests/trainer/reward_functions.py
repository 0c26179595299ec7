"""Reward functions for the tests of the pool, most of which misbehave where a completion asks for it."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path


def length(prompts, completions, completion_ids, **columns):
  return [float(len(completion)) for completion in completions]


def echo(prompts, completions, completion_ids, number, factor=1, **columns):
  """`number` times `factor` for every completion, after a wait that is longer for small numbers."""
  time.sleep(0.05 / (1 + number[0]))
  return [n * factor for n in number]


def obey(completions, **columns):
  """Does what the first completion says; else 1 for each."""
  match completions[0]:
    case "raise":
      raise ValueError(f"no score for {len(completions)}")
    case "exit":
      sys.exit(5)
    case "die":
      os._exit(3)
    case "fork":
      if os.fork() == 0:
        time.sleep(600)
      os._exit(6)
    case "hang":
      time.sleep(600)
    case "short":
      return [1.0]
    case "text":
      return "ab"
    case "strings":
      return ["1", "2"]
    case "nothing":
      return None
    case "nan":
      return [1.0, float("nan")]
    case "infinite":
      return [1.0, -float("inf")]
    case "abstain":
      return [None, 2]
    case "mixed":
      return (True, None)
    case "jax":
      return [float("jax" in sys.modules), float(os.environ["JAX_PLATFORMS"] == "cpu")]
    case "process":
      return [os.getpid(), os.getppid()]
    case "interrupt":
      os.kill(os.getpid(), 2)
      os.kill(os.getpid(), 15)
      time.sleep(0.01)
      return [3.0, 4.0]
  return [1.0] * len(completions)


def numpy_scores(completions, **columns):
  import numpy as np
  return np.arange(len(completions), dtype=np.float32)


def only_named(completions, answer):
  return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def only_position(completions, /, **columns):
  return [0.0] * len(completions)


def change(prompts, completions, **columns):
  prompts[0].append({"role": "user", "content": "more"})
  return [float(len(prompts[0]))] * len(completions)


async def wait(completions, log, seconds=0.2, **columns):
  """Notes when it begins and ends. One that says "block" holds up all others, "die" ends the process."""
  with Path(log[0]).open("a") as file:
    file.write(f"begin {completions[0]}\n")
  match completions[0]:
    case "block":
      time.sleep(600)
    case "die":
      os._exit(4)
    case "late":
      await asyncio.sleep(600)
    case "stubborn":
      with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(600)
      await asyncio.sleep(600)
    case "raise":
      raise TimeoutError("of its own")
  await asyncio.sleep(seconds)
  with Path(log[0]).open("a") as file:
    file.write(f"end {completions[0]}\n")
  return [7.0] * len(completions)


_LOOPS = set()


async def loops(completions, **columns):
  """How many event loops this process has had."""
  _LOOPS.add(asyncio.get_running_loop())
  return [float(len(_LOOPS))] * len(completions)


def leave_a_child(completions, pids, **columns):
  """Starts a program, notes its number and its own, and hangs."""
  child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
  Path(pids[0]).write_text(f"{os.getpid()} {child.pid}")
  time.sleep(600)


class Judge:
  pass


class Scale:
  """A callable object."""

  def __call__(self, completions, **columns):
    return [5.0] * len(completions)


scale = Scale()
not_callable = 3
