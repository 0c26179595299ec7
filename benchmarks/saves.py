"""What a checkpoint leaves in the process's memory: saves one after another, and nothing else.

    python -m benchmarks.saves --saves 400

`live` is what has been allocated and not freed, `free` what the C library keeps of what was; their sum and Python's own
heap are the process's anonymous memory. `metrics` is what TensorStore keeps for each time that its metrics are asked
for, which Orbax does several times in each save.
"""

import argparse
import ctypes
import gc
import os
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")


class _Mallinfo(ctypes.Structure):
  """`struct mallinfo2` of glibc."""

  _fields_ = [(name, ctypes.c_size_t) for name in (
      "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def resident() -> float:
  """MB of this process."""
  return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--saves", type=int, default=400)
  parser.add_argument("--floats", type=int, default=250_000, help="in each of the state's 40 arrays")
  args = parser.parse_args()

  import jax.numpy as jnp
  import tensorstore
  from absl import logging

  from trainer.checkpoints.checkpoint import Checkpoints
  logging.set_verbosity(logging.ERROR)
  libc = ctypes.CDLL("libc.so.6")
  libc.mallinfo2.restype = _Mallinfo
  state = {part: {f"layer{i}": jnp.full(args.floats, float(i)) for i in range(20)} for part in ("params", "opt_state")}
  print("| saves | MB resident | MB live | MB free |\n|---|---|---|---|")
  with tempfile.TemporaryDirectory() as folder:
    checkpoints = Checkpoints(Path(folder, "checkpoints"), keep_last=2)
    for step in range(1, args.saves + 1):
      checkpoints.save(step, state, {"step": step})
      checkpoints.wait()
      if step % max(args.saves // 8, 1) == 0:
        gc.collect()
        found = libc.mallinfo2()
        live = found.uordblks + found.hblkhd
        print(f"| {step} | {resident():.1f} | {live / 1e6:.1f} | {found.fordblks / 1e6:.1f} |", flush=True)
    checkpoints.close()
  before, calls = resident(), 2000
  for _ in range(calls):
    tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/")
  print(f"\nmetrics: {(resident() - before) / calls * 1000:.1f} KB a call")


if __name__ == "__main__":
  main()
