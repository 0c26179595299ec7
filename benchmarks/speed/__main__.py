"""Steps of Weft beside those of its peers, in turns, so that whatever else the machine does is shared.

    python -m venv peers && peers/bin/pip install torch transformers trl datasets
    python -m venv tunix && tunix/bin/pip install google-tunix
    python -m benchmarks.speed --peer peers/bin/python --tunix tunix/bin/python [--cases seq sft …] [--rounds 3]

On a GPU, with PyTorch for it and `pip install -e '.[cuda]'`: `--size 1b`, or 8b; on a CPU with AMX `small_mixed`
(benchmarks/speed/sizes.py has them).

Weft's side is the whole of `python -m trainer`: its loader, logging and metrics are part of the step; in the cases
`generate` (as many tokens for each prompt) and `rollouts` (groups of completions that end by themselves) it is the
sampler that rollouts use. Of each program the first steps, which compile, are left out
(benchmarks/speed/sizes.py says how many).

Of seq and sft, the limit is the device's FLOP/s: those of a step's products, 6 N + 12 H K · (mean number of visible
keys) a token and layer (Transformer.flops_per_token), at the dense peak of the data sheet; on CPU, at the rate of a
large product, measured. Of generate it is the GPU's memory bandwidth: parameters and cache are read once for each token
of all texts.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from benchmarks.speed import sizes

PEERS = {"seq": ("hf", "hf_compile"), "sft": ("trl_sft", "tunix"), "dpo": ("trl_dpo",), "grpo": ("trl_grpo",),
         "generate": ("hf_generate",), "rollouts": ("hf_rollouts",)}
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def run(command: list[str]) -> str:
  """What it prints; ends this program with its last lines where it fails."""
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    sys.exit("\n".join([" ".join(command), *(done.stdout + done.stderr).splitlines()[-30:]]))
  return done.stdout


def run_weft(case: str, data: Path, flags: list[str]) -> dict:
  """Trains that case in a folder of its own, or generates."""
  if case in ("generate", "rollouts"):
    *more, result = run([sys.executable, "-m", "benchmarks.speed.weft_generate", case]).splitlines()
    print(*(f"    {line}" for line in more), sep="\n" if more else "", end="\n" if more else "", flush=True)
    return json.loads(result)
  with tempfile.TemporaryDirectory() as workdir:
    run([sys.executable, "-m", "trainer", f"--config=benchmarks/speed/weft_config.py:{case},{data}",
         f"--workdir={workdir}/w", *flags])
  return json.loads((data / "clock.json").read_text())


def run_peer(python: str, case: str) -> dict:
  """Runs one case of benchmarks/speed/torch_peer.py, or benchmarks/speed/tunix_peer.py."""
  command = [str(HERE / "tunix_peer.py")] if case == "tunix" else [str(HERE / "torch_peer.py"), case]
  return json.loads(run([python, *command]).splitlines()[-1])


def tokens_a_second(size: sizes.Size, case: str, result: dict) -> list[float]:
  """Of each step that is timed; where completions end by themselves each has another number of tokens."""
  seconds = result["step_seconds"]
  tokens = result.get("tokens") or [size.tokens(case)] * len(seconds)
  return [n / x for n, x in zip(tokens, seconds, strict=True)][sizes.WARMUP:]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--peer", help="the Python with torch, transformers, trl, datasets; else Weft alone")
  parser.add_argument("--peers", nargs="+", help="of those that --peer has; default: all of each case")
  parser.add_argument("--tunix", help="the Python with google-tunix")
  parser.add_argument("--size", default="small", choices=list(sizes.SIZES))
  parser.add_argument("--cases", nargs="+", default=list(PEERS), choices=list(PEERS))
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("weft_flags", nargs="*", help="after --: for Weft, e.g. --config.model.attention_block=64")
  args = parser.parse_args()
  os.environ["WEFT_SPEED_SIZE"], size = args.size, sizes.SIZES[args.size]
  pythons = dict.fromkeys(set(sum(PEERS.values(), ())), args.peer)
  pythons["tunix"] = args.tunix if size.precision == "float32" else None
  about: dict[str, str] = {}
  print("| case | program | steps of s, best | median | tokens/s, median | Weft is so many times as fast | "
        "share of the limit | peak MB | parameters | loss, first and last |")
  print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
  with tempfile.TemporaryDirectory() as folder:
    run([sys.executable, "-m", "benchmarks.speed.weft_config", folder])
    for case in args.cases:
      programs: dict[str, Callable[[], dict]] = {
          "weft": functools.partial(run_weft, case, Path(folder), args.weft_flags)}
      programs |= {peer: functools.partial(run_peer, pythons[peer], peer) for peer in PEERS[case] if pythons[peer]
                   and (args.peers is None or peer in args.peers)}
      results: dict[str, list[dict]] = {name: [] for name in programs}
      for _ in tqdm(range(args.rounds), desc=case, leave=False):
        for name, start in programs.items():
          results[name].append(start())
          if args.rounds == 1:  # nothing is still to come
            print(row(size, case, name, results[name], results["weft"]), flush=True)
      for name, rounds in results.items():
        if args.rounds > 1:
          print(row(size, case, name, rounds, results["weft"]), flush=True)
        about |= rounds[-1]["versions"] | ({"on": rounds[-1]["device"]} if "device" in rounds[-1] else {})
  print(", ".join(f"{name} {version}" for name, version in about.items()))


def row(size: sizes.Size, case: str, name: str, rounds: list[dict], weft: list[dict]) -> str:
  """What one program did, beside Weft, as a line of the table."""
  def rate(rounds: list[dict]) -> float:
    return statistics.median(rate for r in rounds for rate in tokens_a_second(size, case, r))

  steps, last = [x for r in rounds for x in r["step_seconds"][sizes.WARMUP:]], rounds[-1]
  median, peak = statistics.median(steps), max(r["peak_mb"] for r in rounds)
  limit = weft[-1].get("limit_seconds") if case in ("seq", "sft", "generate") else None
  parts = last.get("micro_batches", 1)
  cells = (case, f"{name}, {parts} micro-batches" if parts > 1 else name, f"{min(steps):.3f}", f"{median:.3f}",
           f"{rate(rounds):,.0f}", "" if name == "weft" else f"{rate(weft) / rate(rounds):.2f}",
           f"{limit / median:.1%}" if limit else "", f"{peak:,}", f"{last['parameters']:,}",
           f"{last['losses'][0]:.3f}, {last['losses'][-1]:.3f}" if last["losses"] else "")
  return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
  main()
