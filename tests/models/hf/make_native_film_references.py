"""Makes films.npz in those folders of tests/models/hf/native_references that are of Qwen's.

    python tests/models/hf/make_native_film_references.py [CASE …]

needs what make_native_references.py beside it needs, which made the folders, and torchvision. It has what reference.npz
has, of films, without texts: images [2, N, S, S, 6]; row 0 has an image and a film of three patches of two frames, row
1 a film of two. In Qwen2.5-VL a patch of the first lasts 1.3 s, of the second 0.4 s; in Qwen3-VL and 3.5 each patch
stands by itself, behind a text.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from make_native_references import CASES, END, FOLDER, IMAGE, PATCH, START, TILE, VIDEO, inputs, load, of_names
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

# Patches of two frames in time, rows and columns of tiles of each film, and how long a patch lasts.
FILMS, SECONDS = ((3, 2, 2), (2, 3, 2)), (1.3, 0.4)


def films_batch(name: str, tokens_per_second: float) -> tuple[dict[str, np.ndarray], list[np.ndarray], np.ndarray]:
  """The arrays, the films [frames, H, W, 3], and the image of row 0."""
  # Of another draw gradients of Qwen3.5 in float32 are 1e-5 and more from those in float64.
  rng, timed = np.random.default_rng(6), name.startswith("qwen3")
  picture = rng.integers(0, 256, (2 * TILE, 3 * TILE, 3)).astype(np.uint8)
  films = [rng.integers(0, 256, (2 * t, r * TILE, c * TILE, 3)).astype(np.uint8) for t, r, c in FILMS]
  rows, cut, prefix = [], [], []
  for i, ((t, r, c), film) in enumerate(zip(FILMS, films, strict=True)):
    seen = [] if i else [(np.concatenate([picture] * 2, axis=-1)[None], [0])]
    times = np.float32(np.arange(t)) * np.float32(np.float32(tokens_per_second) * np.float32(SECONDS[i]))
    pairs = film.reshape(t, 2, *film.shape[1:]).transpose(0, 2, 3, 1, 4).reshape(t, r * TILE, c * TILE, 6)
    times = times.astype(int) if name == "qwen2_5_vl" else np.arange(t)
    seen += [(pairs[j:j + 1], [0]) for j in range(t)] if timed else [(pairs, times)]
    ids, parts = [*rng.integers(3, START, 2)], []
    for number, (frames, when) in enumerate(seen, 1):
      places = [(j, y, x) for j in range(len(frames)) for y in range(frames.shape[1] // TILE)
                for x in range(frames.shape[2] // TILE)]
      held = IMAGE if not i and number == 1 else VIDEO
      ids += [*rng.integers(3, START, 2), START, *[held] * len(places), END]
      parts += [(frames[j, y * TILE:(y + 1) * TILE, x * TILE:(x + 1) * TILE],
                 (number, y, x, frames.shape[1] // TILE, frames.shape[2] // TILE, when[j])) for j, y, x in places]
    prefix.append(len(ids))
    rows.append(np.array([*ids, *rng.integers(3, START, 6 - i)]))
    cut.append(parts)
  most, lengths = max(map(len, cut)), [len(row) for row in rows]
  images, grid = np.zeros((2, most, TILE, TILE, 6), np.uint8), np.zeros((2, most, 6), np.int32)
  for i, parts in enumerate(cut):
    for n, (tile, entry) in enumerate(parts):
      images[i, n], grid[i, n] = tile, entry
  tokens = np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows]).astype(np.int32)
  return dict(images=images, grid=grid, tokens=tokens, lengths=np.array(lengths),
              prefix=np.array(prefix)), films, picture


def films_inputs(name: str, data: dict[str, np.ndarray], films: list[np.ndarray], picture: np.ndarray,
                 rows: slice = slice(None)) -> dict:
  """What transformers' forward takes for some of the rows."""
  given = inputs(name, data, [[picture], []], rows) if rows.start in (None, 0) else {
      key: value for key, value in inputs(name, data, [[], [picture]], rows).items() if "image" not in key and (
          key != "pixel_values")}
  own = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3) if name.startswith("qwen3") else {}
  processor = Qwen2VLVideoProcessor(do_resize=False, do_sample_frames=False, patch_size=PATCH, **own)
  found = [processor([film], return_tensors="pt") for film in films[rows]]
  given |= {key: torch.cat([one[key] for one in found]) for key in ("pixel_values_videos", "video_grid_thw")}
  given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).int() + 2 * (given["input_ids"] == VIDEO).int()
  return given | (dict(second_per_grid_ts=torch.tensor(SECONDS[rows])) if name == "qwen2_5_vl" else {})


def make_films(name: str, folder: Path) -> None:
  """films.npz of a folder that has its model."""
  model = load(folder)
  data, films, picture = films_batch(name, getattr(model.config.vision_config, "tokens_per_second", 0.0))
  given = films_inputs(name, data, films, picture)
  out = model(**given)
  out.loss.backward()
  real = np.arange(data["tokens"].shape[1]) < data["lengths"][:, None]
  logits = out.logits.detach().numpy() * real[..., None]
  kept = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "mm_token_type_ids", "attention_mask")
  positions, _ = model.model.get_rope_index(given["input_ids"], **{k: given[k] for k in kept if k in given})
  data["positions"] = positions.permute(1, 2, 0).numpy().astype(np.int32) * real[..., None]
  gradients = of_names(model)
  with torch.no_grad():
    for row in range(2):  # padding and the other row do not matter
      alone = model(**films_inputs(name, data, films, picture, slice(row, row + 1))).logits[0, :data["lengths"][row]]
      np.testing.assert_allclose(alone, logits[row, :data["lengths"][row]], rtol=0, atol=1e-5)
    turned = [film.reshape(-1, 2, *film.shape[1:])[:, ::-1].reshape(film.shape) for film in films]
    moved = np.abs(model(**films_inputs(name, data, turned, picture)).logits.numpy() - logits)
    assert all(moved[row, data["prefix"][row]:data["lengths"][row]].max() > 1e-2 for row in range(2)), "their order"
  np.savez_compressed(folder / "films.npz", **data, logits=logits, loss=out.loss.item(),
                      gradient_names=["model." + k for k in gradients],
                      **{f"gradient_{i}": g for i, g in enumerate(gradients.values())})
  print(f"{name} films: |logits| up to {np.abs(logits).max():.2f}, loss {out.loss.item():.3f}, positions up to "
        f"{data['positions'].max()}")


if __name__ == "__main__":
  transformers.utils.logging.disable_progress_bar()
  transformers.utils.logging.set_verbosity_error()
  for case_name in sys.argv[1:] or [name for name in CASES if name.startswith("qwen")]:
    make_films(case_name, FOLDER / case_name)
