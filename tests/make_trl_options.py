"""Writes trl_options.json: the options of TRL's trainers, which docs/coming_from.md has all of.

    python -m tests.make_trl_options

in an environment with trl; run with trl 1.16 and transformers 5.24.
"""

import dataclasses
import json
from pathlib import Path

FILE = Path(__file__).with_name("trl_options.json")
TRAINERS = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig", "ModelConfig")


def main() -> None:
  import transformers
  import trl

  def names(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}

  of_all = names(transformers.TrainingArguments)
  found = {"TrainingArguments": of_all} | {name: names(getattr(trl, name)) - of_all for name in TRAINERS}
  FILE.write_text(json.dumps({name: sorted(options) for name, options in found.items()}, indent=0) + "\n",
                  encoding="utf-8")


if __name__ == "__main__":
  main()
