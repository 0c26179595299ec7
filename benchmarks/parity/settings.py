"""What is trained by both sides of benchmarks/parity, and with which settings: a folder for each part.

AdamW with a cosine schedule to 0 without warm-up (transformers begins one at a rate of 0, Weft does not), decay of all
matrices and embeddings, clipping, float32, no dropout.
"""

import json
from pathlib import Path

from benchmarks.parity import rows

PARTS = ("sft", "dpo", "kto", "lora", "bf16", "grpo", "reward", "seq")
# Of parts that are run with several, which draw the order of rows; the others with 0 alone.
SEEDS = {"bf16": 5}
SHARED = dict(steps=50, compute="float32", b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0, seed=0)
TINY = dict.fromkeys(PARTS, dict(batch_size=4, seq_len=256, learning_rate=1e-3))
TINY["bf16"] = TINY["sft"] | dict(compute="bfloat16")
# On the same responses again and again, whose gradient is soon a small difference of large numbers.
TINY["grpo"] = dict(steps=8, batch_size=16, seq_len=128, learning_rate=1e-3)
TINY["seq"] = dict(steps=200, batch_size=4, seq_len=128, learning_rate=1e-3)
# Rows are shorter than that; a row of Weft's holds both sides of a pair, or an example and the completion of another.
REAL = {"sft": dict(batch_size=4, seq_len=208, learning_rate=2e-5),
        "grpo": dict(batch_size=16, seq_len=192, learning_rate=5e-6),
        "lora": dict(batch_size=4, seq_len=208, learning_rate=2e-4),
        "dpo": dict(batch_size=2, seq_len=296, learning_rate=5e-6),
        "reward": dict(batch_size=2, seq_len=296, learning_rate=5e-6),
        "kto": dict(batch_size=4, seq_len=336, learning_rate=5e-6),
        "seq": dict(batch_size=4, seq_len=192, learning_rate=2e-5)}
REAL["bf16"] = REAL["sft"] | dict(compute="bfloat16")


def write(folder: Path, part: str, model: Path | None, data: Path | None, **changed) -> None:
  """Writes settings.json and rows.jsonl, and for `model=None` the tiny model beside the folder.

  Raises:
    ValueError: the folder holds results of other settings.
  """
  folder.mkdir(parents=True, exist_ok=True)
  if model is None:
    model_folder = folder.parents[part in SEEDS] / "model"
    rows.write_tiny_model(model_folder)
  settings = dict(part=part, model=str((model or model_folder).resolve()), data=str(data or ""), **SHARED)
  settings |= (REAL if model else TINY)[part] | ({"beta": 0.1} if part in ("dpo", "kto") else {}) | changed
  if part == "reward":
    settings |= dict(center=0.01, model=str(rows.write_scorer(Path(settings["model"]), folder.parent / "scorer")))
  if part == "lora":
    rows.write_adapter(Path(settings["model"]), folder / "adapter")
  file = folder / "settings.json"
  if file.exists() and json.loads(file.read_text()) != settings:
    raise ValueError(f"{folder} holds results of other settings than these; remove it, or choose another --out.")
  if part == "grpo":  # every step trains them all
    made = rows.rollouts(rows.questions(data, settings["batch_size"] // rows.GROUP), Path(settings["model"]))
  else:
    made = rows.rows(part, rows.questions(data, settings["steps"] * settings["batch_size"]))
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), "utf-8")
  file.write_text(json.dumps(settings, indent=1))
