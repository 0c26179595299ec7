"""A tiny SmolVLM and a tiny Gemma 4, and conversations about videos, that tests share.

The folders and what transformers makes of the conversations: tests/input_pipeline/references/make_frame_references.py.
"""

import json
from pathlib import Path

import numpy as np

from input_pipeline.sources.made import png
from trainer.config import defaults, source

FOLDER = Path(__file__).parent / "input_pipeline" / "references" / "frames"
NAMES = ("smolvlm", "gemma4")


def reference(name: str) -> dict[str, np.ndarray]:
  with np.load(FOLDER / name / "reference.npz") as opened:
    return dict(opened)


def conversations(name: str) -> list[list[dict]]:
  """The messages of each, with their images and frames as bytes."""
  held = reference(name)
  found = []
  for i, (asked, answer) in enumerate(json.loads(str(held["cases"]))):
    shown, parts = iter(held[f"shown{i}_{j}"] for j in range(len(asked))if f"shown{i}_{j}" in held), []
    for part in asked:
      if part == "image":
        parts.append({"type": "image", "image": png(next(shown))})
      elif isinstance(part, str):
        parts.append({"type": "text", "text": part})
      else:
        parts.append({"type": "video", "frames": [png(frame) for frame in next(shown)], "fps": part})
    said = [{"type": "text", "text": answer}]
    found.append([{"role": "user", "content": parts}, {"role": "assistant", "content": said}])
  return found


def rows(name: str, path: Path) -> Path:
  """The conversations as a JSONL file, with their images and frames beside it."""
  def written(value: bytes) -> str:
    file = path / f"{len([*path.iterdir()])}.png"
    file.write_bytes(value)
    return file.name

  path.mkdir(parents=True, exist_ok=True)
  talks = conversations(name)
  for part in (part for talk in talks for message in talk for part in message["content"]):
    if part["type"] == "image":
      part["image"] = written(part["image"])
    elif part["type"] == "video":
      part["frames"] = [written(frame) for frame in part["frames"]]
  (path / "rows.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
  return path / "rows.jsonl"


def config(name: str, path: Path, **changed):
  """SFT of that model on these conversations; `changed`: other sections and keys, nested."""
  c = defaults()
  c.strategy.name, c.model.hf = "sft", str(FOLDER / name)
  c.input.sources.rows = source(type="jsonl", path=str(rows(name, path)))
  c.update(seq_len=1000, batch_size=2, total_steps=2, log_steps=1)
  c.update(changed)
  return c
