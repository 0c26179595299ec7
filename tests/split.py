"""A tiny SmolVLM whose images are cut into squares, and conversations about images, that tests share.

The folder and what transformers makes of the conversations: tests/input_pipeline/references/make_split_references.py.
"""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "input_pipeline" / "references" / "split"
SPECIALS = json.loads((FOLDER / "tokenizer.json").read_text())["added_tokens"]
IDS = {token["content"]: token["id"] for token in SPECIALS}
IMAGE, WHOLE, END = IDS["<image>"], IDS["<global-img>"], IDS["<end_of_utterance>"]
# Rows and columns of squares of each conversation's images.
GRIDS = [[(2, 3)], [(3, 2), (3, 3)], [(1, 3)], [(3, 1)], [(3, 3)], [(3, 3)]]


def reference() -> dict[str, np.ndarray]:
  with np.load(FOLDER / "reference.npz") as opened:
    return dict(opened)


def rows(path: Path, only: int | None = None) -> Path:
  """The conversations as a JSONL file, or one of them, with their images beside it."""
  from input_pipeline.sources.made import png

  held, lines = reference(), []
  path.mkdir(parents=True, exist_ok=True)
  for i in range(len(GRIDS)) if only is None else [only]:
    names = iter(f"image{i}_{j}" for j in range(len(GRIDS[i])))
    asked = json.loads(str(held[f"asked{i}"]))
    for part in asked:
      if part["type"] == "image":
        part["image"] = f"{next(names)}.png"
        (path / part["image"]).write_bytes(png(held[part["image"][:-4]]))
    answer = [dict(type="text", text=str(held[f"answer{i}"]))]
    lines.append(dict(messages=[dict(role="user", content=asked), dict(role="assistant", content=answer)]))
  file = path / "rows.jsonl"
  file.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return file


def config(path: Path, only: int | None = None, **changed):
  """SFT of that model on these conversations; `changed`: other sections and keys, nested."""
  from trainer.config import defaults, source

  c = defaults()
  c.strategy.name, c.model.hf = "sft", str(FOLDER)
  c.input.sources.rows = source(type="jsonl", path=str(rows(path, only)))
  c.update(seq_len=256, batch_size=4, total_steps=2, log_steps=1)
  c.update(changed)
  return c
