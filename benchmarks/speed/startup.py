"""Seconds from a command to its first optimizer step, with empty caches of compiled programs and again with full ones.

    python -m benchmarks.speed.startup --peer peers/bin/python --tunix tunix/bin/python

The programs, the model and the data of `python -m benchmarks.speed`; imports are part of it. Without the peers' Pythons
it is Weft alone.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from benchmarks.speed import weft_config
from benchmarks.speed.__main__ import run_peer, run_weft

PROGRAMS = ("weft", "hf", "hf_compile", "trl_sft", "tunix")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--peer", help="the Python with torch, transformers, trl, datasets; else none of them is run")
  parser.add_argument("--tunix", help="the Python with google-tunix; else it is not run")
  args = parser.parse_args()
  print("| program | first run | second run |")
  print("|---|---|---|")
  with tempfile.TemporaryDirectory() as folder:
    data = Path(folder) / "data"
    data.mkdir()
    weft_config.write_data(data)
    pythons = {"weft": sys.executable, "tunix": args.tunix}
    for program in PROGRAMS:
      python = pythons.get(program, args.peer)
      if python is None:
        continue
      # Where each of them keeps compiled programs, if it does.
      caches = dict.fromkeys(("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"), f"{folder}/{program}")
      seconds = []
      with mock.patch.dict(os.environ, caches):
        for _ in ("first", "second"):
          start = time.time()
          if program == "weft":
            done = run_weft("sft", data, [])
          else:
            done = run_peer(python, program)
          seconds.append(done["first_step_at"] - start)
      print(f"| {program} | {seconds[0]:.1f} s | {seconds[1]:.1f} s |", flush=True)


if __name__ == "__main__":
  main()
