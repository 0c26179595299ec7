"""Steps of Weft beside those of its peers, in turns, so that whatever else the machine does is shared.

    python -m venv peers && peers/bin/pip install torch transformers trl datasets
    python -m venv tunix && tunix/bin/pip install google-tunix
    python -m benchmarks.speed --peer peers/bin/python --tunix tunix/bin/python [--cases seq sft …] [--rounds 3]

Weft's side is the whole of `python -m trainer`: its loader, logging and metrics are part of the step; in the cases
`generate` (as many tokens for each prompt) and `rollouts` (groups of completions that end by themselves) it is the
sampler that rollouts use. Of each program the first steps, which compile, are left out
(benchmarks/speed/sizes.py says how many).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from benchmarks.speed import sizes, weft_config

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
    return json.loads(run([sys.executable, "-m", "benchmarks.speed.weft_generate", case]).splitlines()[-1])
  with tempfile.TemporaryDirectory() as workdir:
    run([sys.executable, "-m", "trainer", f"--config=benchmarks/speed/weft_config.py:{case},{data}",
         f"--workdir={workdir}/w", *flags])
  return json.loads((data / "clock.json").read_text())


def run_peer(python: str, case: str) -> dict:
  """Runs one case of benchmarks/speed/torch_peer.py, or benchmarks/speed/tunix_peer.py."""
  command = [str(HERE / "tunix_peer.py")] if case == "tunix" else [str(HERE / "torch_peer.py"), case]
  return json.loads(run([python, *command]).splitlines()[-1])


def tokens_a_second(case: str, result: dict) -> list[float]:
  """Of each step that is timed; where completions end by themselves each has another number of tokens."""
  seconds = result["step_seconds"]
  tokens = result.get("tokens") or [sizes.TOKENS[case]] * len(seconds)
  return [n / x for n, x in zip(tokens, seconds, strict=True)][sizes.WARMUP:]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--peer", help="the Python with torch, transformers, trl, datasets; else Weft alone")
  parser.add_argument("--tunix", help="the Python with google-tunix")
  parser.add_argument("--cases", nargs="+", default=list(PEERS), choices=list(PEERS))
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("weft_flags", nargs="*", help="after --: for Weft, e.g. --config.model.attention_block=64")
  args = parser.parse_args()
  versions: dict[str, str] = {}
  print("| case | program | steps of s, best | median | tokens/s, median | Weft is so many times as fast | "
        "peak MB | parameters | loss, first and last |")
  print("|---|---|---|---|---|---|---|---|---|")
  with tempfile.TemporaryDirectory() as folder:
    weft_config.write_data(Path(folder))
    for case in args.cases:
      programs = {"weft": lambda case=case: run_weft(case, Path(folder), args.weft_flags)}
      pythons = {peer: args.tunix if peer == "tunix" else args.peer for peer in PEERS[case]}
      programs |= {peer: lambda peer=peer, python=python: run_peer(python, peer)
                   for peer, python in pythons.items() if python}
      results: dict[str, list[dict]] = {name: [] for name in programs}
      for _ in tqdm(range(args.rounds), desc=case, leave=False):
        for name, start in programs.items():
          results[name].append(start())
      steps = {name: [x for r in rounds for x in r["step_seconds"][sizes.WARMUP:]] for name, rounds in results.items()}
      rates = {name: statistics.median(rate for r in rounds for rate in tokens_a_second(case, r))
               for name, rounds in results.items()}
      for name, rounds in results.items():
        last = rounds[-1]
        versions |= last["versions"]
        losses = f"{last['losses'][0]:.3f}, {last['losses'][-1]:.3f}" if last["losses"] else ""
        ratio = "" if name == "weft" else f"{rates['weft'] / rates[name]:.2f}"
        median, peak = statistics.median(steps[name]), max(r["peak_rss_mb"] for r in rounds)
        print(f"| {case} | {name} | {min(steps[name]):.3f} | {median:.3f} | {rates[name]:,.0f} | {ratio} | {peak:,} "
              f"| {last['parameters']:,} | {losses} |", flush=True)
  print(", ".join(f"{name} {version}" for name, version in versions.items()))


if __name__ == "__main__":
  main()
