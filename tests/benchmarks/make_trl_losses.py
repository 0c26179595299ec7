"""Writes trl_losses.json: what TRL computes in each step of the tiny runs of benchmarks/parity.

    python -m benchmarks.parity sft dpo kto lora grpo reward --tiny --steps=8 --peer peers/bin/python --out runs/parity
    python -m tests.benchmarks.make_trl_losses runs/parity
"""

import json
import sys
from pathlib import Path

PARTS = ("sft", "dpo", "kto", "lora", "grpo", "reward")
FILE, STEPS = Path(__file__).with_name("trl_losses.json"), 8


def main() -> None:
  out, found = Path(sys.argv[1]), {}
  for part in PARTS:
    peer = json.loads((out / part / "peer.json").read_text())
    assert len(peer["steps"]) == STEPS
    found["versions"] = peer["versions"]
    if part == "grpo":
      found[part] = dict(steps=peer["steps"], advantages=peer["advantages"])
    else:
      found[part] = dict(steps=peer["steps"], order=json.loads((out / part / "order.json").read_text()))
  FILE.write_text("{\n" + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in found.items()) + "\n}\n")


if __name__ == "__main__":
  main()
