"""Makes films.npz: what video processors of transformers (Qwen2-VL, Qwen3-VL) make of small films.

    python tests/input_pipeline/references/make_film_references.py

Needs `pip install transformers torch torchvision pillow`; it was run with transformers 5.24 and torchvision 0.29. The
tests read the file alone. Of each case i of `cases` (JSON: the processor, its settings, how many frames a second the
film says it has) there are

    film{i}     uint8 [frames, H, W, 3]
    taken{i}    which frames are taken
    values{i}   uint8 [T, 2, rows, columns, 3], pixels before they are normalised
    text{i}     what stands in place of <|video_pad|>; of Qwen2-VL "" for so many of these
    seconds{i}  of Qwen2.5-VL: how long a place in time lasts

and beside them of each entry j of `asked` (a processor and its settings) taken{j}_FRAMES_FPS, which of so many frames
are taken; none: it refuses; and `sizes` [n, 5]: frames, width and height, and the width and height that Qwen3-VL's has.
"""

import json
import types
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl import processing_qwen3_vl
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

KINDS = {"qwen2_vl": Qwen2VLVideoProcessor, "qwen3_vl": Qwen3VLVideoProcessor}
SMALL = dict(patch_size=4, merge_size=2, temporal_patch_size=2)
ALL = dict(do_sample_frames=False)
# The processor, its settings, frames a second (None: it says nothing), and frames, height and width.
CASES = (
    ("qwen2_vl", ALL, None, (4, 20, 30)), ("qwen2_vl", ALL, 3.0, (5, 37, 18)),
    ("qwen2_vl", dict(do_sample_frames=True, fps=2, min_frames=2), 10.0, (25, 16, 24)),
    ("qwen2_vl", dict(do_sample_frames=True, num_frames=6), None, (13, 9, 50)),
    ("qwen3_vl", dict(fps=2, min_frames=2), 10.0, (25, 21, 33)),
    ("qwen3_vl", dict(fps=None, num_frames=5), 4.0, (9, 24, 16)),
    ("qwen3_vl", ALL, None, (4, 50, 12)), ("qwen3_vl", dict(fps=2, min_frames=4), 24.0, (7, 7, 40)),
)
ASKED = (("qwen2_vl", dict(fps=2.0)), ("qwen2_vl", dict(fps=1.5, max_frames=9)), ("qwen2_vl", dict(num_frames=7)),
         ("qwen3_vl", dict(fps=2.0)), ("qwen3_vl", dict(fps=0.7, max_frames=9)),
         ("qwen3_vl", dict(num_frames=7, fps=None)))


def size_of(kind: str) -> dict:
  each = dict(shortest_edge=2 * 64, longest_edge=6 * 64)
  return each if kind == "qwen2_vl" else {key: 4 * value for key, value in each.items()}


def metadata(frames: int, fps: float | None) -> VideoMetadata:
  return VideoMetadata(total_num_frames=frames, fps=fps, frames_indices=list(range(frames)))


def text_of(processor, grid: torch.Tensor, told: VideoMetadata) -> str:
  names = types.SimpleNamespace(
      video_processor=processor, video_token="<|video_pad|>", vision_start_token="<|vision_start|>",
      vision_end_token="<|vision_end|>", _calculate_timestamps=lambda *given: (
          processing_qwen3_vl.Qwen3VLProcessor._calculate_timestamps(None, *given)))
  return processing_qwen3_vl.Qwen3VLProcessor.replace_video_token(
      names, {"video_grid_thw": grid, "video_metadata": [told]}, 0)


def main():
  rng, arrays = np.random.default_rng(0), {}
  for i, (kind, settings, fps, shape) in enumerate(CASES):
    coarse = rng.integers(0, 256, (shape[0], -(-shape[1] // 3), -(-shape[2] // 3), 3))
    film = np.repeat(np.repeat(coarse, 3, axis=1), 3, axis=2)[:, :shape[1], :shape[2]] // 2
    arrays[f"film{i}"] = (film + rng.integers(0, 128, (*shape, 3))).astype(np.uint8)
    processor = KINDS[kind](**SMALL, **settings, size=size_of(kind), do_normalize=False, do_rescale=False,
                            cap_pixels_per_frame=False)
    made = processor([arrays[f"film{i}"]], video_metadata=[metadata(shape[0], fps)], return_metadata=True,
                     return_tensors="pt")
    told, (t, rows, columns) = made["video_metadata"][0], made["video_grid_thw"][0].tolist()
    patches = made["pixel_values_videos"].numpy().reshape(t, rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)
    arrays[f"values{i}"] = np.einsum("tyxmnchpq->thympxnqc", patches).reshape(t, 2, rows * 4, columns * 4, 3)
    assert arrays[f"values{i}"].dtype == np.uint8
    arrays[f"taken{i}"] = np.asarray(told.frames_indices)
    arrays[f"seconds{i}"] = np.array(2 / told.sampled_fps)
    arrays[f"text{i}"] = np.array(text_of(processor, made["video_grid_thw"], told) if kind == "qwen3_vl" else "")
  counted = []
  for number, (kind, settings) in enumerate(ASKED):
    processor = KINDS[kind](**SMALL, **settings, size=size_of(kind))
    for frames in (7, 8, 30, 61, 500, 3001):
      for fps in (1.0, 12.5, 24.0, 29.97):
        given = {key: getattr(processor, key, None) for key in (
            "temporal_patch_size", "min_frames", "max_frames", "num_frames", "fps")}
        try:
          found = np.array(processor.sample_frames(metadata(frames, fps), **given))
        except ValueError:
          found = np.zeros(0, int)
        arrays[f"taken{number}_{frames}_{fps}"] = found
        counted.append(len(found))
  sizes = [(t, w, h) for t in (2, 5, 16, 100) for w, h in (
      (20, 33), (640, 480), (480, 640), (1920, 800), (33, 5000), (70, 64))]
  arrays["sizes"] = np.array([
      (t, w, h, *smart_resize(t, h, w, 2, 32, 128 * 1024, 768 * 1024)[::-1]) for t, w, h in sizes])
  assert len({*counted}) > 5
  told = [dict(kind=kind, settings=settings, fps=fps) for kind, settings, fps, _ in CASES]
  arrays |= dict(cases=np.array(json.dumps(told)), asked=np.array(json.dumps(ASKED)))
  np.savez_compressed(Path(__file__).parent / "films.npz", **arrays)


if __name__ == "__main__":
  main()
